// SPDX-License-Identifier: Apache-2.0

package explore

// pool numbers values: equal values have one number. 0 stands for no value.
type pool[T any] struct {
	of  map[string]int32
	all []T
}

// number returns the number of the value that key describes, which v is.
func (p *pool[T]) number(key string, v T) int32 {
	if n, known := p.of[key]; known {
		return n
	}
	if p.of == nil {
		p.of = map[string]int32{}
		p.all = make([]T, 1)
	}
	n := int32(len(p.all))
	p.of[key] = n
	p.all = append(p.all, v)
	return n
}

func (p *pool[T]) at(n int32) T { return p.all[n] }

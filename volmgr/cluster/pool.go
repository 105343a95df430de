// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

func poolResult(name string) view {
	return func(s *State) any { return s.poolView(s.pools[name]) }
}

// CreatePool names a set of drives. Result: Pool.
type CreatePool struct {
	Name     string
	Selector map[string]string
}

func (in CreatePool) apply(t *tx) (view, error) {
	if _, err := block.ParseVolumeName(in.Name); err != nil {
		return nil, invalid("name", "pool %v", strings.TrimPrefix(err.Error(), "volume "))
	}
	if err := checkLabels("selector", in.Selector); err != nil {
		return nil, err
	}
	if p := t.s.pools[in.Name]; p != nil {
		if !maps.Equal(p.Selector, in.Selector) {
			return nil, conflict("pool "+in.Name, "selector", p.Selector, in.Selector)
		}
		return poolResult(in.Name), nil
	}
	t.pools.set(in.Name, &Pool{Name: in.Name, Selector: maps.Clone(in.Selector)})
	t.event(event.Info, event.PoolCreated, "pool "+in.Name, "", "pool", in.Name)
	return poolResult(in.Name), nil
}

// DeletePool forgets a pool that no volume uses. Result: nil.
type DeletePool struct{ Name string }

func (in DeletePool) apply(t *tx) (view, error) {
	if in.Name == DefaultPool {
		return nil, refused(ReasonPoolInUse, "pool "+DefaultPool, "always exists, and cannot be deleted")
	}
	if t.s.pools[in.Name] == nil {
		return nil, nil
	}
	var users []string
	for _, v := range t.s.volumes.All() {
		if v.Pool == in.Name {
			users = append(users, string(v.Name))
		}
	}
	if slices.Sort(users); len(users) > 0 {
		return nil, refused(ReasonPoolInUse, "pool "+in.Name, "used by %s", some(users, 8))
	}
	t.pools.drop(in.Name)
	t.event(event.Info, event.PoolDeleted, "pool "+in.Name, "", "pool", in.Name)
	return nil, nil
}

// selects reports whether a drive belongs to a pool: each label of the selector
// is on the drive or else on its node.
func (p *Pool) selects(d *Drive, n *Node) bool {
	for key, want := range p.Selector {
		have, ok := d.Labels[key]
		if !ok {
			have = n.label(key)
		}
		if have != want {
			return false
		}
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0

package cluster

// Explain says why a volume is as it is, what it waits for and what an operator
// can do; the error is NotFound.
func (s *State) Explain(nameOrID string) (Explanation, error) {
	v, err := s.find(nameOrID)
	if err != nil {
		return Explanation{}, err
	}
	return Explanation{Object: v.object()}, nil
}

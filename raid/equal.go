// SPDX-License-Identifier: Apache-2.0

package raid

import "bytes"

// Equal divides copies into groups with equal data, each group in order, and the groups in the order of their
// first copies.
func Equal(copies []int, data func(copy int) []byte) (groups [][]int) {
next:
	for _, copy := range copies {
		for i, g := range groups {
			if bytes.Equal(data(g[0]), data(copy)) {
				groups[i] = append(g, copy)
				continue next
			}
		}
		groups = append(groups, []int{copy})
	}
	return groups
}

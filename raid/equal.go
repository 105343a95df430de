// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"bytes"
	"slices"
)

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

// Right returns the copy whose data is right where copies in sync differ or cannot be read, -1 if none is known. groups
// are the copies that can be read, by equal data; inSync is how many are in sync, and copies how many the volume has.
// The first of these rules decides that applies:
//
//  1. All copies in sync that can be read agree; the others have a medium error. Every copy in
//     sync was given every acknowledged write, so what they agree on is right.
//  2. In a volume of three copies, more than half of the copies in sync agree. Drives change what
//     they were given independently of one another, so the copy that stands alone is wrong.
//  3. The owner names a copy, and it can be read; -1: none.
func Right(groups [][]int, inSync, copies, named int) int {
	if len(groups) == 1 {
		return groups[0][0]
	}
	for _, g := range groups {
		if copies >= 3 && 2*len(g) > inSync {
			return g[0]
		}
	}
	for _, g := range groups {
		if slices.Contains(g, named) {
			return named
		}
	}
	return -1
}

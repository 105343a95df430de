// SPDX-License-Identifier: Apache-2.0

package raid

import "testing"

func TestWhichCopyIsRight(t *testing.T) {
	for _, c := range []struct {
		what                  string
		groups                [][]int
		inSync, copies, named int
		want                  int
	}{
		{"two copies differ", [][]int{{0}, {1}}, 2, 2, -1, -1},
		{"two copies differ, one is named", [][]int{{0}, {1}}, 2, 2, 1, 1},
		{"the named copy is not there", [][]int{{0}, {1}}, 2, 2, 2, -1},
		{"one of two cannot be read", [][]int{{1}}, 2, 2, -1, 1},
		{"one of two cannot be read, and is named", [][]int{{1}}, 2, 2, 0, 1},
		{"none can be read", nil, 2, 2, 0, -1},
		{"one of three differs", [][]int{{0, 2}, {1}}, 3, 3, -1, 0},
		{"the one that differs is named", [][]int{{0}, {1, 2}}, 3, 3, 0, 1},
		{"all three differ", [][]int{{0}, {1}, {2}}, 3, 3, -1, -1},
		{"all three differ, one is named", [][]int{{0}, {1}, {2}}, 3, 3, 2, 2},
		{"the third is not in sync", [][]int{{0}, {1}}, 2, 3, -1, -1},
		{"two differ and the third cannot be read", [][]int{{0}, {2}}, 3, 3, -1, -1},
		{"two agree and the third cannot be read", [][]int{{0, 2}}, 3, 3, -1, 0},
		// A leg that is made again elsewhere was copied from one of the others: that the two
		// agree says nothing.
		{"two copies and a new one", [][]int{{0, 2}, {1}}, 3, 2, -1, -1},
		{"three copies and a new one", [][]int{{0, 3}, {1}, {2}}, 4, 3, -1, -1},
		{"three copies and a new one, two against two", [][]int{{0, 3}, {1, 2}}, 4, 3, -1, -1},
		{"three of four agree", [][]int{{0}, {1, 2, 3}}, 4, 3, -1, 1},
	} {
		if got := Right(c.groups, c.inSync, c.copies, c.named); got != c.want {
			t.Errorf("%s: Right(%v) = %d, want %d", c.what, c.groups, got, c.want)
		}
	}
}

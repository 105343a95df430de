// SPDX-License-Identifier: Apache-2.0

package block

import "testing"

func TestAnIncarnationIsTheSameUntilWritesMayBeLost(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"2", "2", true},
		{"2", "3", false},
		{"2.41", "2.41", true},
		{"2.41", "2.42", false},
		{"2.41", "3.41", false},
		{"2", "2.41", true}, // the agent can tell the disk now
		{"2.41", "2", true}, // or not any more
		{"2", "3.41", false},
		{"2", "24.1", false},
		{"", "2", false},
	} {
		if got := SameIncarnation(c.a, c.b); got != c.same {
			t.Errorf("%q and %q are the same: %t, want %t", c.a, c.b, got, c.same)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import "testing"

// go-fuse closes a descriptor and reports that only later: meanwhile a newer descriptor may
// have its number, and must stay registered.
func TestALateForgetLeavesTheNextDescriptor(t *testing.T) {
	var d descriptors
	seven := func() ([]int, error) { return []int{7}, nil }
	must := func(_ []int, err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(d.open(seven))
	late := d.forgetter(7)
	must(d.open(seven))
	late()
	if d.fds[7] == nil {
		t.Error("the descriptor that has the number now was forgotten")
	}
	d.forgetter(7)()
	if len(d.fds) != 0 {
		t.Errorf("%v are left", d.fds)
	}
}

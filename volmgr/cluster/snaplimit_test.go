// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// A volume has as many snapshots as it may have, and no more: neither alone nor in a group, of which then
// nothing is taken. What exists can be asked for again, and each that is gone makes room for one.
func TestAVolumeHasAtMost1024Snapshots(t *testing.T) {
	w := newSnapWorld(t, 1)
	for i := range MaxSnapshots {
		in := CreateSnapshots{Seed: w.seed(), Snapshots: []NewSnapshot{{Volume: "db1", Name: fmt.Sprintf("s%d", i+1)}}}
		if _, err := w.s.Step(w.now, in); err != nil { // w.step looks at each snapshot each time
			t.Fatalf("snapshot %d = %v", i+1, err)
		}
	}
	w.goOn(6) // fewer times than settle: with so many snapshots each takes long
	if v := w.volume("db1@s1"); v.State != VolumeReady {
		t.Fatalf("the first is %s", v.State)
	}

	refuses := func(what string, of ...string) {
		t.Helper()
		var e *Error
		if err := w.take("more", of...); !errors.As(err, &e) || e.Kind != ResourceExhausted || e.Object != "volume db1" ||
			!strings.Contains(e.Text, "volume db1: it has 1024 snapshots, and can have no more") || !strings.Contains(e.Hint, "`weft snapshot list db1`") {
			t.Errorf("%s = %v, want it refused, and how to make room", what, err)
		}
		for _, name := range []string{"db1", "db2"} {
			if v := w.volume(name + "@more"); v != nil {
				t.Errorf("%s: %s is %s, want nothing begun", what, v.object(), v.State)
			}
		}
		if n := w.s.snapshots.Get(w.volume("db2").ID); n != 0 || w.s.allSnapshots != MaxSnapshots {
			t.Errorf("%s: db2 has %d snapshots, and all are %d", what, n, w.s.allSnapshots)
		}
	}
	refuses("one more", "db1")
	refuses("one more, with another volume's before it", "db2", "db1")
	refuses("one more, with another volume's after it", "db1", "db2")
	if err := w.take("s7", "db1"); err != nil {
		t.Errorf("one that there is = %v", err)
	}

	w.must(DeleteVolume{Volume: "db1@s7"})
	refuses("one more while another is being deleted", "db1")
	w.goOn(4)
	w.mustBe(w.take("more", "db1", "db2"))
	w.goOn(6)
	for _, name := range []string{"db1@more", "db2@more"} {
		if v := w.volume(name); v == nil || v.State != VolumeReady {
			t.Errorf("when one is gone %s is %+v", name, v)
		}
	}
}

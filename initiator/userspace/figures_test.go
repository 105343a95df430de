// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"testing"
	"time"

	"weft.dev/weft/proto/figures"
)

func TestTheIOOfAVolumeAndItsLegsIsCounted(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		time.Sleep(time.Second)
		was := w.keeper.Figures()
		if was == nil || was.Name != "db1" || was.Volume != w.volume || len(was.Legs) != 2 {
			t.Fatalf("figures of a volume that serves: %+v", was)
		}
		if err := <-w.write(0, 1); err != nil {
			t.Fatal(err)
		}
		w.fallSilent("t1")
		if err := <-w.write(4096, 1); err != nil {
			t.Fatal(err)
		}
		now := w.keeper.Figures()
		users, ok := now.Users.Since(&was.Users)
		if !ok || now.Key != was.Key || users[figures.Write].IOs != 2 || users[figures.Write].Bytes != 1024 {
			t.Errorf("two writes count as %+v", users[figures.Write])
		}
		if held := now.Held - was.Held; held < 600*time.Millisecond || held > time.Second {
			t.Errorf("held for %v, want the 0.7 s until t1 was given up", held)
		}
		for i, l := range now.Legs {
			if l.Column != 0 || l.Copy != i || l.Leg != legID(0, i) || l.Node != node(i) {
				t.Errorf("leg %d is %+v", i, l)
			}
		}
		a, _ := now.Legs[0].Sent.Since(&was.Legs[0].Sent)
		b, _ := now.Legs[1].Sent.Since(&was.Legs[1].Sent)
		if a[figures.Write].IOs != 2 || b[figures.Write].IOs != 2 || b[figures.Write].Errors != 1 {
			t.Errorf("legs: %+v and %+v; want two writes each, of which the second one failed one", a[figures.Write], b[figures.Write])
		}
	})
}

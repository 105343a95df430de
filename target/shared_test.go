// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

var neighbour = block.HostFromID(uid('a', 2))

// sharedBy is an export of volume n for one more host.
func (w wish) sharedBy(h block.Host, n byte, epoch uint64) wish {
	w = w.export(n, epoch, 0)
	x := w.Exports[len(w.Exports)-1]
	x.Nqn = string(block.SubsystemNQN(volumeID(n), block.Epoch(epoch), h, "t1"))
	x.Host = &pb.Host{Nqn: string(h.NQN), Id: h.ID.String()}
	return w
}

func (w wish) readOnly() wish {
	for _, x := range w.Exports {
		x.ReadOnly = true
	}
	return w
}

func TestHostsThatShareALegHaveAnExportEach(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("the first host's export", exportsReady(1))
		first := w.exported().Subsystems[0]
		w.manager.set(want().drive(1).volume(1, 1, 1).sharedBy(neighbour, 1, 1).TargetWanted)
		r := w.until("both hosts' exports", exportsReady(2))
		if s, _ := w.exported().Subsystem(first.NQN); !slices.Equal(s.Namespaces, first.Namespaces) {
			t.Errorf("the first host's export was %+v, is %+v; want it as it was", first, s)
		}
		if len(r.GetProblems()) > 0 {
			t.Errorf("problems %v, want none", r.GetProblems())
		}
		// A host of another epoch does not share.
		w.manager.set(want().drive(1).leg(1, 1, 1, 0).admit(1, 2).sharedBy(neighbour, 1, 1).TargetWanted)
		w.until("both gone, and the next epoch admitted", func(r *pb.TargetReport) bool {
			return len(r.GetExports()) == 0 && admitted(1, 2)(r)
		})
	})
}

func TestAHostThatIsTakenOutDoesNotDisturbTheOthers(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).sharedBy(neighbour, 1, 1).TargetWanted)
		w.until("both hosts' exports", exportsReady(2))
		c, leg := w.leg(1, 1, 0)
		defer c.Cut()
		other, err := w.connectAs(neighbour, 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := other.Namespace(1, block.NamespaceUUID(legID(1), 1, 0))
		if err != nil {
			t.Fatal(err)
		}
		for i, ns := range []block.Device{leg, theirs} {
			if err := block.WriteAt(ns, bytes.Repeat([]byte{byte('a' + i)}, 4096), int64(i)*4096); err != nil {
				t.Fatal(err)
			}
		}
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		gone := block.SubsystemNQN(volumeID(1), 1, neighbour, "t1")
		w.until("the neighbour's export gone", func(r *pb.TargetReport) bool {
			return exportsReady(1)(r) && !slices.ContainsFunc(r.GetExports(), func(x *pb.ExportReport) bool { return x.GetNqn() == string(gone) })
		})
		if c, err := w.connectAs(neighbour, 1, 1); err == nil {
			c.Cut()
			t.Error("the host that was taken out was let in again")
		}
		got := make([]byte, 8192)
		if err := block.ReadAt(leg, got, 0); err != nil || string(got[:1])+string(got[4096:4097]) != "ab" {
			t.Errorf("the other host reads %q and %q, %v; want what both wrote", got[:1], got[4096:4097], err)
		}
		other.Cut()
	})
}

// A host that may have one path loses its controller when it connects through another portal. A
// host that may have two keeps both.
func TestAHostHasAsManyPathsAsItsExportAllows(t *testing.T) {
	for paths, stays := range map[uint32]bool{0: false, 1: false, 2: true} {
		in(t, User, func(t *testing.T, w *world) {
			w.more = []block.Portal{{Transport: block.TCP, Address: "192.0.2.2", Port: 4420}}
			w.run()
			wish := want().drive(1).volume(1, 1, 1)
			wish.Exports[0].Paths = paths
			w.manager.set(wish.TargetWanted)
			w.until("export ready", exportsReady(1))
			time.Sleep(2 * time.Second)
			first, err := w.connectAt("192.0.2.1:4420", host, 1, 1)
			if err != nil {
				t.Fatal(err)
			}
			defer first.Cut()
			before := first.State()
			second, err := w.connectAt("192.0.2.2:4420", host, 1, 1)
			if err == nil {
				defer second.Cut()
			} else if stays {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second) // two that replace each other go on with it: either may be the one without a controller now
			if now := first.State(); (now == before) != stays {
				t.Errorf("with %d paths wanted the first controller is %+v, and was %+v; want it to stay: %v", paths, now, before, stays)
			}
		})
	}
}

func TestAHostThatIsOnlyToReadCanNotWrite(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).readOnly().TargetWanted)
		r := w.until("export ready", exportsReady(1))
		if legs := r.GetExports()[0].GetLegIds(); len(legs) != 1 || legs[0] != legID(1).String() {
			t.Errorf("the export is reported with legs %v, want the one", legs)
		}
		c, leg := w.leg(1, 1, 0)
		defer c.Cut()
		if err := block.WriteAt(leg, make([]byte, 4096), 0); !errors.Is(err, block.ErrReadOnly) {
			t.Errorf("a write = %v, want %v", err, block.ErrReadOnly)
		}
		if err := block.ReadAt(leg, make([]byte, 4096), 0); err != nil {
			t.Errorf("a read = %v", err)
		}
		w.manager.set(want().drive(1).leg(1, 1, 2, 0).admit(1, 2).export(1, 2, 0).TargetWanted)
		w.until("the next epoch's export", func(r *pb.TargetReport) bool {
			return exportsReady(1)(r) && strings.Contains(r.GetExports()[0].GetNqn(), ".2.")
		})
		c, leg = w.leg(1, 2, 0)
		defer c.Cut()
		if err := block.WriteAt(leg, make([]byte, 4096), 0); err != nil {
			t.Errorf("a write of the next epoch, which is for writing: %v", err)
		}
	})
}

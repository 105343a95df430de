// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	nvme "weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/proto/pb"
)

// connect is a host's connection to the export of a volume's epoch.
func (w *world) connect(n byte, epoch block.Epoch) (*nvme.Controller, error) {
	return w.connectAs(host, n, epoch)
}

func (w *world) connectAs(host block.Host, n byte, epoch block.Epoch) (*nvme.Controller, error) {
	if w.process {
		return w.connectAt("192.0.2.1:4422", host, n, epoch)
	}
	return w.connectAt("192.0.2.1:4420", host, n, epoch)
}

func (w *world) connectAt(portal string, host block.Host, n byte, epoch block.Epoch) (*nvme.Controller, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	return nvme.Connect(ctx, nvme.Config{
		Portals: []string{portal}, Subsystem: block.SubsystemNQN(volumeID(n), epoch, host, "t1"), Host: host,
		IOQueues: 1, Dial: w.dial,
	})
}

// leg is a volume's leg as a host sees it.
func (w *world) leg(n byte, epoch block.Epoch, revision uint64) (*nvme.Controller, *nvme.Namespace) {
	w.t.Helper()
	c, err := w.connect(n, epoch)
	if err != nil {
		w.t.Fatal(err)
	}
	ns, err := c.Namespace(1, block.NamespaceUUID(legID(n), epoch, revision))
	if err != nil {
		w.t.Fatal(err)
	}
	return c, ns
}

func TestAnAgentWithoutAManagerServesNothingNew(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		c, leg := w.leg(1, 1, 0)
		written := bytes.Repeat([]byte("x"), 4096)
		if err := block.WriteAt(leg, written, 8192); err != nil {
			t.Fatal(err)
		}
		w.stop() // as if the process was killed
		wanted := w.manager.want
		w.manager.want = nil
		w.manager.forget()
		w.run()
		time.Sleep(30 * time.Second)
		if e := w.exported(); len(e.Subsystems) > 0 || w.gate.done > 0 {
			t.Errorf("before the manager spoke %+v is exported, after %d operations", e, w.gate.done)
		}
		w.manager.set(wanted)
		w.until("export ready again", exportsReady(1))
		got := make([]byte, 4096)
		if err := block.ReadAt(leg, got, 8192); err != nil || !bytes.Equal(got, written) {
			t.Errorf("the host's connection reads %q…, %v, after the restart; want what it wrote", got[:4], err)
		}
		c.Cut()
	})
}

// A write of the old epoch hangs in a drive that does not answer. It delays the new epoch for as
// long as it takes, and has then landed before it.
func TestAFenceWaitsForTheWritesOfTheOldEpoch(t *testing.T) {
	t.Run("in user space", func(t *testing.T) {
		in(t, User, func(t *testing.T, w *world) { fenceWaits(t, w, func(w wish) wish { return w }) })
	})
	t.Run("beside the kernel", func(t *testing.T) {
		in(t, besideKernel, func(t *testing.T, w *world) { fenceWaits(t, w, func(w wish) wish { return w.checked(1) }) })
	})
}

// fenceWaits tries it with volume 1, which a wish is changed for so that this process serves it.
func fenceWaits(t *testing.T, w *world, served func(wish) wish) {
	t.Helper()
	w.run()
	w.manager.set(served(want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1)).TargetWanted)
	w.until("both exports ready", exportsReady(2))
	old, leg := w.leg(1, 1, 0)
	late := bytes.Repeat([]byte("x"), 4096)
	m, err := w.medium("/dev/d1")
	if err != nil {
		t.Fatal(err)
	}
	stuck := make(chan struct{})
	m.set(func() { m.stuck = stuck })
	free := sync.OnceFunc(func() { close(stuck) })
	defer free()
	written := make(chan error, 1)
	go func() { written <- block.WriteAt(leg, late, 0) }()
	time.Sleep(time.Second)

	w.manager.set(served(want().drive(1).drive(2).leg(1, 1, 1, 0).admit(1, 2).volume(2, 2, 2)).TargetWanted)
	w.until("the other volume at its epoch", admitted(2, 2))
	reports := w.manager.reported()
	time.Sleep(20 * time.Second)
	r := w.until("the fence is reported to wait", problemWith("fence epochs below 2"))
	if admitted(1, 2)(r) || w.record(legID(1).String()).GetAdmittedEpoch() != 1 {
		t.Error("epoch 2 is admitted while a write of epoch 1 is in the drive")
	}
	if sent := w.manager.reported() - reports; sent < 20 {
		t.Errorf("%d reports in 20s, want one a second", sent)
	}
	if c, err := w.connect(1, 1); err == nil {
		c.Cut()
		t.Error("a host of epoch 1 was let in again")
	}

	old.Cut()
	<-written // its outcome is unknown
	m.set(func() { m.stuck = nil })
	free()
	w.until("epoch 2 admitted", admitted(1, 2))
	w.manager.set(served(want().drive(1).volume(1, 1, 2)).TargetWanted)
	w.until("export of epoch 2 ready", func(r *pb.TargetReport) bool {
		return len(r.GetExports()) == 1 && r.GetExports()[0].GetReady() && strings.Contains(r.GetExports()[0].GetNqn(), volumeID(1).String())
	})
	c, leg := w.leg(1, 2, 0)
	got := make([]byte, 4096)
	if err := block.ReadAt(leg, got, 0); err != nil || !bytes.Equal(got, late) {
		t.Errorf("epoch 2 reads %q…, %v; want the late write, which landed before", got[:4], err)
	}
	c.Cut()
}

// A host sees the same as from the kernel, so an attachment survives a change of a target's data
// path.
func TestAnExportLooksLikeTheKernels(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		w.run()
		wish := want().drive(1).volume(1, 1, 1)
		wish.Exports[0].CntlidMin, wish.Exports[0].CntlidMax = 100, 199
		w.manager.set(wish.TargetWanted)
		w.until("export ready", exportsReady(1))
		c, leg := w.leg(1, 1, 0)
		defer c.Cut()
		id := block.NamespaceUUID(legID(1), 1, 0)
		if leg.UUID() != id || leg.NGUID() != id || leg.Geometry().Size != 300*block.MiB {
			t.Errorf("the leg is %v, %x, %v; want %v as both, and 300MiB", leg.UUID(), leg.NGUID(), leg.Geometry().Size, id)
		}
		if all := c.Namespaces(); len(all) != 1 || all[0].NSID != 1 {
			t.Errorf("namespaces are %+v, want number 1 alone", all)
		}
	})
}

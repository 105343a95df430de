// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/initiator/fsfreeze"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// filesystems are those of the world's machine: mounted says whether one is, from whatever device.
type filesystems struct {
	world   *world
	mounted bool
	fails   error
	frozen  bool
}

func (f *filesystems) did(what string, change func()) error {
	f.world.mu.Lock()
	defer f.world.mu.Unlock()
	f.world.did("%s", what)
	change()
	return f.fails
}

func (f *filesystems) isFrozen() bool {
	f.world.mu.Lock()
	defer f.world.mu.Unlock()
	return f.frozen
}

func (f *filesystems) Mounts() ([]fsfreeze.Mount, error) {
	if !f.mounted {
		return nil, nil
	}
	return []fsfreeze.Mount{{Device: block.DeviceNumber{Major: 1}, FSType: "ext4", Point: "/srv"}}, nil
}

func (f *filesystems) Over(block.DeviceNumber) ([]block.DeviceNumber, error) {
	return []block.DeviceNumber{{Major: 1}}, nil
}

func (f *filesystems) BlockDevice(string) (n block.DeviceNumber, ok bool) { return n, false }
func (f *filesystems) Open(fsfreeze.Mount) (fsfreeze.FileSystem, error)   { return f, nil }
func (f *filesystems) Holds(fsfreeze.FileSystem, string) (bool, error)    { return false, nil }
func (f *filesystems) Sync() error                                        { return f.did("sync", func() {}) }
func (f *filesystems) Freeze() error                                      { return f.did("freeze", func() { f.frozen = true }) }
func (f *filesystems) Thaw() error                                        { return f.did("thaw", func() { f.frozen = false }) }
func (f *filesystems) Close() error                                       { return nil }

// holdFrozen makes the manager want the file systems frozen, and the device's I/O held.
func (w *world) holdFrozen(id string, prepare bool) {
	w.change(func(all *pb.InitiatorWanted) {
		all.Attachments[0].Holds = []*pb.Hold{{Id: id, Limit: durationpb.New(5 * time.Second), Freeze: true, Prepare: prepare}}
	})
}

func mounts(w *world) { w.files.mounted = true }

func TestFileSystemsAreFrozenBeforeIOIsHeld(t *testing.T) {
	from(t, 1, 2, mounts, func(w *world) {
		w.holdFrozen("s1", true)
		time.Sleep(20 * time.Second)
		w.expect("to prepare", "sync")
		w.holdIs("prepared, for as long as that takes", pb.HoldState_HOLD_STATE_PREPARED)
		w.until(serving)
		w.holdFrozen("s1", false)
		time.Sleep(time.Second)
		w.expect("then", "freeze", "suspend top")
		w.holdIs("then", pb.HoldState_HOLD_STATE_HELD)
		if h := w.attachment().GetHolds(); len(h) != 1 || !h[0].GetFsFrozen() || h[0].GetError() != "" {
			t.Errorf("holds %v, want one that is frozen", h)
		}
		w.hold("", 0)
		w.until(serving)
		time.Sleep(time.Second)
		if w.files.isFrozen() {
			t.Error("frozen after the hold")
		}
		w.took()
	})
}

func TestAFreezeEndsAtTheLimitOfItsHold(t *testing.T) {
	from(t, 1, 2, mounts, func(w *world) {
		w.holdFrozen("s1", false)
		time.Sleep(time.Second)
		w.expect("held", "sync", "freeze", "suspend top")
		time.Sleep(5 * time.Second)
		w.until(serving)
		w.holdIs("after its limit", pb.HoldState_HOLD_STATE_ENDED)
		if h := w.attachment().GetHolds(); h[0].GetFsFrozen() || h[0].GetError() != "" || w.files.isFrozen() {
			t.Errorf("hold %v, frozen: %v", h, w.files.isFrozen())
		}
		w.took()
		time.Sleep(20 * time.Second)
		w.expect("it is wanted still")
	})
}

func TestNothingIsHeldWithoutAFileSystem(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.holdFrozen("s1", true)
		time.Sleep(time.Second)
		w.holdIs("to prepare", pb.HoldState_HOLD_STATE_ENDED)
		if h := w.attachment().GetHolds(); h[0].GetError() != fsfreeze.ErrNone.Error() {
			t.Errorf("error %q", h[0].GetError())
		}
		w.holdFrozen("s1", false)
		time.Sleep(time.Second)
		w.holdIs("to hold", pb.HoldState_HOLD_STATE_ENDED)
		w.expect("nothing is touched")
	})
}

func TestTheNextAgentThawsWhatTheLastHasFrozen(t *testing.T) {
	from(t, 1, 2, mounts, func(w *world) {
		w.files.fails = nil
		w.holdFrozen("s1", false)
		time.Sleep(time.Second)
		w.expect("held", "sync", "freeze", "suspend top")
		w.stop()
		w.start()
		time.Sleep(time.Second)
		if w.files.isFrozen() {
			t.Error("frozen after a restart")
		}
		w.holdIs("after a restart", pb.HoldState_HOLD_STATE_ENDED)
		w.until(serving)
	})
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
)

// ---- the wanted state ----

func uid(kind, n byte) block.UUID { return block.UUIDFromRandom([16]byte{kind, n}) }

func driveID(n byte) block.DriveID   { return block.DriveID{UUID: uid('d', n)} }
func legID(n byte) block.LegID       { return block.LegID{UUID: uid('1', n)} }
func volumeID(n byte) block.VolumeID { return block.VolumeID{UUID: uid('f', n)} }

var (
	cluster = block.ClusterID{UUID: uid('c', 1)}
	host    = block.HostFromID(uid('a', 1))
)

// wish is a small language for pb.TargetWanted: drive n is /dev/d<n>; volume n has leg n, on the
// drive given.
type wish struct{ *pb.TargetWanted }

func want() wish { return wish{&pb.TargetWanted{ClusterId: cluster.String()}} }

func (w wish) drive(n byte) wish {
	w.Drives = append(w.Drives, &pb.WantedDrive{DriveId: driveID(n).String(), Device: fmt.Sprintf("/dev/d%d", n), Wwid: fmt.Sprintf("w%d", n)})
	return w
}

func (w wish) leg(n, drive byte, epoch, revision uint64) wish {
	w.Legs = append(w.Legs, &pb.WantedLeg{
		LegId: legID(n).String(), DriveId: driveID(drive).String(),
		Extents: []*pb.Extent{{Start: uint32(n) * 2, Count: 2}}, SizeBytes: uint64(300 * block.MiB), Revision: revision,
		Volume: &pb.VolumeLabel{VolumeId: volumeID(n).String(), Name: fmt.Sprintf("v%d", n), Epoch: epoch, Generation: revision},
	})
	return w
}

func (w wish) admit(n byte, epoch uint64) wish {
	w.Admissions = append(w.Admissions, &pb.Admission{VolumeId: volumeID(n).String(), Epoch: epoch})
	return w
}

func (w wish) export(n byte, epoch, revision uint64) wish {
	nqn := block.SubsystemNQN(volumeID(n), block.Epoch(epoch), host, "t1")
	w.Exports = append(w.Exports, &pb.WantedExport{
		VolumeId: volumeID(n).String(), Epoch: epoch, Nqn: string(nqn), Serial: block.SerialNumber(volumeID(n)),
		Host: &pb.Host{Nqn: string(host.NQN), Id: host.ID.String()},
		Namespaces: []*pb.WantedNamespace{{
			Nsid: 1, LegId: legID(n).String(), Uuid: block.NamespaceUUID(legID(n), block.Epoch(epoch), revision).String(),
		}},
	})
	return w
}

// volume adds everything that an exported volume needs.
func (w wish) volume(n, drive byte, epoch uint64) wish {
	return w.leg(n, drive, epoch, 0).admit(n, epoch).export(n, epoch, 0)
}

// ---- what is reported ----

func exportsReady(n int) func(*pb.TargetReport) bool {
	return func(r *pb.TargetReport) bool {
		ready := 0
		for _, e := range r.GetExports() {
			if e.GetReady() && len(e.GetLegIds()) > 0 {
				ready++
			}
		}
		return ready == n && len(r.GetExports()) == n
	}
}

func admitted(n byte, epoch uint64) func(*pb.TargetReport) bool {
	return func(r *pb.TargetReport) bool {
		for _, a := range r.GetAdmissions() {
			if a.GetVolumeId() == volumeID(n).String() {
				return a.GetEpoch() == epoch
			}
		}
		return false
	}
}

func problemWith(text string) func(*pb.TargetReport) bool {
	return func(r *pb.TargetReport) bool {
		for _, p := range r.GetProblems() {
			if strings.Contains(p.GetObject()+" "+p.GetDoing()+": "+p.GetCause(), text) {
				return true
			}
		}
		return false
	}
}

func legReport(r *pb.TargetReport, n byte) *pb.LegReport {
	for _, l := range r.GetLegs() {
		if l.GetLegId() == legID(n).String() {
			return l
		}
	}
	return nil
}

// at runs a test in a world of its own for each data path, in virtual time.
func at(t *testing.T, test func(t *testing.T, w *world)) {
	for _, d := range []Datapath{Kernel, User} {
		t.Run(string(d), func(t *testing.T) { in(t, d, test) })
	}
}

func in(t *testing.T, d Datapath, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.user, w.process = d == User, d == besideKernel
		defer func() { w.stop() }()
		w.plug("/dev/d1", 4*block.GiB, "w1")
		w.plug("/dev/d2", 4*block.GiB, "w2")
		test(t, w)
	})
}

// ---- tests ----

func TestWhatIsWantedIsMadeAndReported(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1).TargetWanted)
		r := w.until("both exports ready", exportsReady(2))
		if r.GetNode() != "t1" || r.GetBootId() != "11111111-2222-4333-8444-555555555555" || r.GetKernel() != "6.1.0" ||
			r.GetClusterId() != cluster.String() || len(r.GetPortals()) != 1 || len(r.GetDevices()) != 2 || r.GetLabels()["rack"] != "r1" {
			t.Errorf("report says %v", r)
		}
		r = w.until("the generation is echoed, no problems", func(r *pb.TargetReport) bool {
			return r.GetGeneration() == 1 && len(r.GetProblems()) == 0
		})
		if l := legReport(r, 1); !l.GetReady() || l.GetZeroedBytes() != uint64(300*block.MiB) {
			t.Errorf("leg is reported as %v, want ready", l)
		}
		if !admitted(1, 1)(r) || !admitted(2, 1)(r) {
			t.Errorf("admissions are %v, want epoch 1 of both", r.GetAdmissions())
		}
		if e := w.exported(); len(e.Subsystems) != 2 || len(e.Ports) != 1 || len(e.Ports[0].Subsystems) != 2 {
			t.Errorf("nvmet exports %+v", e)
		}
		if got := len(r.GetDrives()); got != 2 || r.GetDrives()[0].GetExtents() == 0 || len(r.GetDrives()[0].GetLegs()) != 1 {
			t.Errorf("drives are reported as %v", r.GetDrives())
		}
	})
}

func TestNothingIsChangedBeforeTheManagerSpeaks(t *testing.T) {
	in(t, Kernel, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		w.stop()
		before := w.exported()
		for _, away := range []bool{true, false} {
			w.manager.away, w.manager.want = away, nil
			w.manager.forget()
			w.run()
			time.Sleep(30 * time.Second)
			w.stop()
			if diff := cmp.Diff(before, w.exported()); diff != "" {
				t.Errorf("manager away %v: exports changed (-before +after):\n%s", away, diff)
			}
			if w.gate.done > 0 {
				t.Errorf("manager away %v: %d operations were done", away, w.gate.done)
			}
		}
		if r := w.manager.last; !admitted(1, 1)(r) || len(r.GetDrives()) != 1 || len(r.GetExports()) != 1 {
			t.Errorf("report is %v, want what is there", r)
		}
	})
}

func TestAFenceIsAdmittedWhenNothingOlderIsLeft(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		// The old export is still listed: fencing removes it all the same.
		w.manager.set(want().drive(1).leg(1, 1, 1, 0).admit(1, 2).export(1, 1, 0).TargetWanted)
		r := w.until("epoch 2 admitted", admitted(1, 2)) // Send checks the kernel and the labels
		if len(r.GetExports()) != 0 {
			t.Errorf("exports are %v, want none", r.GetExports())
		}
		w.manager.set(want().drive(1).volume(1, 1, 2).TargetWanted)
		w.until("export of epoch 2 ready", exportsReady(1))
		// An outdated wanted state is not followed back.
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("old epoch refused", problemWith("epoch 1 is over"))
		if r := w.until("still admitted", admitted(1, 2)); len(r.GetExports()) != 0 {
			t.Errorf("exports are %v, want none", r.GetExports())
		}
	})
}

func TestAHangingDrainHoldsUpItsVolumeOnly(t *testing.T) {
	in(t, Kernel, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1).TargetWanted)
		w.until("both exports ready", exportsReady(2))
		gate := make(chan struct{})
		w.targets.Drain = func(subsystem string) {
			if strings.Contains(subsystem, volumeID(1).String()) {
				<-gate
			}
		}
		w.manager.set(want().drive(1).drive(2).leg(1, 1, 1, 0).admit(1, 2).volume(2, 2, 2).volume(3, 2, 1).TargetWanted)
		w.until("the other volumes at their epochs", func(r *pb.TargetReport) bool {
			return admitted(2, 2)(r) && admitted(3, 1)(r)
		})
		w.until("the other exports are ready", func(r *pb.TargetReport) bool {
			ready := 0
			for _, e := range r.GetExports() {
				if e.GetReady() {
					ready++
				}
			}
			return ready == 2
		})
		w.until("the drain is reported", problemWith("draining"))
		start, reports := time.Now(), w.manager.reported()
		time.Sleep(20 * time.Second)
		if sent := w.manager.reported() - reports; sent < 20 {
			t.Errorf("%d reports in %v, want one a second", sent, time.Since(start))
		}
		r := w.until("fence is reported", problemWith("volume "+volumeID(1).String()+" fence epochs below 2"))
		for _, p := range r.GetProblems() {
			if age := time.Since(p.GetSince().AsTime()); strings.Contains(p.GetDoing(), "fence") && age < 20*time.Second {
				t.Errorf("problem %v is %v old, want it dated from its beginning", p, age)
			}
		}
		if admitted(1, 2)(r) {
			t.Error("epoch 2 is admitted before the drain is over")
		}
		close(gate)
		w.until("epoch 2 admitted", admitted(1, 2))
	})
}

// An agent that dies after any of its operations is followed by one that reaches the same end
// state, when creating, fencing and removing.
func TestACrashAtAnyOperationIsMadeGood(t *testing.T) {
	one := want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1).TargetWanted
	two := want().drive(1).drive(2).volume(1, 1, 2).leg(2, 2, 1, 0).TargetWanted
	two.Legs[1].Remove = true
	three := want().drive(1).drive(2).leg(1, 1, 2, 0).TargetWanted
	three.Legs[0].Remove, three.Drives[1].Remove = true, true
	stages := []stage{
		{one, exportsReady(2)},
		{two, func(r *pb.TargetReport) bool {
			return exportsReady(1)(r) && admitted(1, 2)(r) && len(r.GetDrives()) == 2 && len(r.GetDrives()[1].GetLegs()) == 0
		}},
		{three, func(r *pb.TargetReport) bool {
			return len(r.GetExports()) == 0 && len(r.GetDrives()) == 1 && len(r.GetDrives()[0].GetLegs()) == 0
		}},
	}
	for _, d := range []Datapath{Kernel, User} {
		t.Run(string(d), func(t *testing.T) {
			t.Parallel()
			crashAnywhere(t, d, stages)
		})
	}
}

// stage is a wanted state and the test that it is reached.
type stage struct {
	want *pb.TargetWanted
	done func(*pb.TargetReport) bool
}

func crashAnywhere(t *testing.T, d Datapath, stages []stage) {
	for cut := 0; ; cut++ {
		crashes := 0
		in(t, d, func(t *testing.T, w *world) {
			for i, s := range stages {
				w.manager.set(s.want)
				w.manager.forget()
				w.runUntil(cut)
				w.until(fmt.Sprintf("stage %d, cut at %d", i, cut), s.done)
				if w.gate.crashed() {
					crashes++
					w.stop()
					w.manager.forget()
					w.run()
					w.until(fmt.Sprintf("stage %d again, after a cut at %d", i, cut), s.done)
				}
				w.stop()
			}
			if m, n, e := w.mappedLegs(), w.names(), w.exported(); len(m)+len(n)+len(e.Subsystems) > 0 {
				t.Errorf("cut at %d: left over: %v, %v, %+v", cut, m, n, e)
			}
		})
		if t.Failed() || crashes == 0 {
			t.Logf("longest plan: %d operations", cut)
			break
		}
		if cut > 200 {
			t.Fatal("no end of operations")
		}
	}
}

func TestForeignDataIsNotTouched(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		var super [4096]byte
		super[0x438], super[0x439] = 0x53, 0xef // ext2/3/4
		super[0x44c] = 1
		m.blocks[0] = super
		signatures, err := drive.Signatures(m, m.size)
		if err != nil || len(signatures) == 0 {
			t.Fatalf("Signatures = %v, %v; want a file system", signatures, err)
		}
		w.run()
		wish := want().drive(1).TargetWanted
		w.manager.set(wish)
		w.until("refused, naming it", problemWith(signatures[0]))
		time.Sleep(30 * time.Second)
		if len(m.blocks) != 1 || m.blocks[0] != super {
			t.Error("the device has been written to")
		}
		wish.Drives[0].ForceErase = strings.Join(signatures, ", ")
		w.manager.set(wish)
		w.until("added by force", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 1 })
	})
}

func TestADriveOfAnotherClusterIsTakenInByForce(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		other := block.ClusterID{UUID: uid('c', 2)}
		if err := drive.Format(m, other, driveID(9), ""); err != nil {
			t.Fatal(err)
		}
		w.run()
		wish := want().drive(1)
		w.manager.set(wish.TargetWanted)
		word := drive.Name(other, driveID(9))
		w.until("refused, naming it", problemWith(word))
		if l, err := drive.ReadLabel(m, m.size); err != nil || l.Drive != driveID(9) {
			t.Fatalf("the device has been written to: label %v, %v", l, err)
		}
		wish.Drives[0].ForceErase = word
		w.manager.set(wish.leg(1, 1, 1, 0).TargetWanted)
		w.until("added by force, nothing left of the old drive", func(r *pb.TargetReport) bool {
			return len(r.GetDrives()) == 1 && r.GetDrives()[0].GetDriveId() == driveID(1).String() &&
				r.GetClusterId() == cluster.String() && legReport(r, 1).GetReady()
		})
	})
}

// A blank device in the place of a drive must not be taken for the lost drive.
func TestALegThatTheDriveHasLostIsNotMadeAnew(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		wish := want().drive(1).leg(1, 1, 1, 0)
		w.manager.set(wish.TargetWanted)
		w.until("leg ready", func(r *pb.TargetReport) bool { return legReport(r, 1).GetReady() })
		w.stop()
		w.manager.forget()
		w.mapped = map[string]dm.State{} // a boot
		w.plug("/dev/d1", 4*block.GiB, "w1")
		wish = wish.admit(1, 1).export(1, 1, 0)
		wish.Legs[0].Volume.Generation = 2 // it was created, and is in use
		w.manager.set(wish.TargetWanted)
		w.run()
		r := w.until("the loss is reported", func(r *pb.TargetReport) bool {
			return strings.Contains(legReport(r, 1).GetError(), "lost")
		})
		time.Sleep(20 * time.Second)
		if l := legReport(r, 1); l.GetReady() || w.record(legID(1).String()) != nil || len(w.exported().Subsystems) > 0 {
			t.Errorf("leg is reported as %v, recorded as %v, exported %v; want it lost", l, w.record(legID(1).String()), w.exported().Subsystems)
		}
	})
}

// carvingHangs has an agent carve a leg on a drive that hangs in it. It returns the wanted state without the leg,
// and what lets the drive go on.
func (w *world) carvingHangs() (gone *pb.TargetWanted, goOn func()) {
	w.t.Helper()
	w.run()
	w.manager.set(want().drive(1).TargetWanted)
	w.until("drive in", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 1 })
	m, err := w.medium("/dev/d1")
	if err != nil {
		w.t.Fatal(err)
	}
	hang := make(chan struct{})
	m.set(func() { m.hang = hang })
	wish := want().drive(1).leg(1, 1, 1, 0)
	w.manager.set(wish.TargetWanted)
	time.Sleep(hungAfter + time.Second)
	gone = proto.CloneOf(wish.TargetWanted)
	gone.Legs[0].Remove = true
	return gone, func() {
		m.set(func() { m.hang = nil })
		close(hang)
	}
}

func TestALegIsNotGoneWhileItsDriveIsBeingWritten(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		gone, goOn := w.carvingHangs()
		w.manager.set(gone)
		r := w.until("the removal is acted on", func(r *pb.TargetReport) bool { return r.GetGeneration() == 3 })
		if lacks(r, 1) {
			t.Errorf("the report says that the leg is gone, and its record may still be written: %v", r)
		}
		goOn()
		w.until("gone", func(r *pb.TargetReport) bool { return legReport(r, 1) == nil && w.record(legID(1).String()) == nil })
	})
}

// lacks reports whether a manager takes a report for the word that a leg is gone.
func lacks(r *pb.TargetReport, n byte) bool {
	return legReport(r, n) == nil && !slices.ContainsFunc(r.GetDrives(), func(d *pb.DriveReport) bool {
		return slices.ContainsFunc(d.GetLegs(), func(l *pb.LegLabel) bool { return l.GetLegId() == legID(n).String() })
	})
}

// The write ends between the look at the labels and the plan, which then sees neither it nor the record.
func TestALegIsNotGoneWhoseRecordHasJustBeenWritten(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		gone, goOn := w.carvingHangs()
		w.mu.Lock()
		w.looking = func() {
			goOn()
			time.Sleep(100 * time.Millisecond)
			if w.record(legID(1).String()) == nil {
				t.Error("the record was not written meanwhile")
			}
			w.mu.Lock()
			w.looking = func() { time.Sleep(time.Second) } // so that the manager hears what follows from it
			w.mu.Unlock()
		}
		w.mu.Unlock()
		w.manager.mu.Lock()
		w.manager.hears = func(r *pb.TargetReport) {
			if r.GetGeneration() == 3 && lacks(r, 1) && w.record(legID(1).String()) != nil {
				t.Errorf("the report says that the leg is gone, and its record is there: %v", r)
			}
		}
		w.manager.mu.Unlock()
		w.manager.set(gone)
		w.until("gone", func(r *pb.TargetReport) bool { return legReport(r, 1) == nil && w.record(legID(1).String()) == nil })
	})
}

func TestALegThatIsNotListedStays(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).volume(2, 1, 1).TargetWanted)
		w.until("both exports ready", exportsReady(2))
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("the export is gone", exportsReady(1))
		time.Sleep(20 * time.Second)
		r := w.until("reported", func(*pb.TargetReport) bool { return true })
		if legs := r.GetDrives()[0].GetLegs(); len(legs) != 2 || w.record(legID(2).String()) == nil {
			t.Errorf("legs on the label are %v, want both", legs)
		}
	})
}

func TestAStaleLegComesBackUnderANewIdentity(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		w.manager.set(want().drive(1).leg(1, 1, 1, 1).admit(1, 1).export(1, 1, 1).TargetWanted)
		w.until("export ready again", func(r *pb.TargetReport) bool { return exportsReady(1)(r) && r.GetGeneration() == 2 })
		u := block.NamespaceUUID(legID(1), 1, 1)
		if got := w.exported().Subsystems[0].Namespaces; len(got) != 1 || got[0].UUID != u {
			t.Errorf("namespaces are %+v, want the uuid of revision 1", got)
		}
		if r := w.record(legID(1).String()); r.GetRevision() != 1 || r.GetVolume().GetGeneration() != 1 {
			t.Errorf("the label has %v, want revision 1", r)
		}
	})
}

func TestZeroingDelaysNoReportAndEndsWhenNotWanted(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		w.run()
		w.manager.set(want().drive(1).TargetWanted)
		w.until("drive in", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 1 })
		slow := make(chan struct{})
		m.mu.Lock()
		m.slow = slow
		m.mu.Unlock()
		wish := want().drive(1).volume(1, 1, 1)
		w.manager.set(wish.TargetWanted)
		w.until("carved", func(r *pb.TargetReport) bool { return len(r.GetDrives()[0].GetLegs()) == 1 })
		for range 3 {
			slow <- struct{}{}
		}
		reports := w.manager.reported()
		time.Sleep(20 * time.Second)
		if sent := w.manager.reported() - reports; sent < 20 {
			t.Errorf("%d reports in 20s, want one a second", sent)
		}
		r := w.until("progress", func(r *pb.TargetReport) bool { return legReport(r, 1).GetZeroedBytes() == uint64(192*block.MiB) })
		if legReport(r, 1).GetReady() || len(r.GetExports()) > 0 || r.GetGeneration() != 2 {
			t.Errorf("report is %v, want a leg that is not ready, no exports, and the generation", r)
		}
		gone := proto.CloneOf(wish.TargetWanted)
		gone.Legs[0].Remove, gone.Exports, gone.Admissions = true, nil, nil
		w.manager.set(gone)
		w.until("freed", func(r *pb.TargetReport) bool { return len(r.GetDrives()[0].GetLegs()) == 0 })
	})
}

func TestADriveThatGoesAwayIsReportedAndComesBack(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		m := w.pull("/dev/d1")
		r := w.until("the drive is gone", func(r *pb.TargetReport) bool {
			return len(r.GetDrives()) == 1 && strings.Contains(r.GetDrives()[0].GetError(), "gone")
		})
		if l := legReport(r, 1); l.GetReady() || l.GetError() == "" {
			t.Errorf("its leg is reported as %v, want an error", l)
		}
		if !exportsReady(1)(r) {
			t.Errorf("exports are %v, want them left to the host", r.GetExports())
		}
		w.mu.Lock()
		w.media["/dev/d7"] = m // under another name
		w.mu.Unlock()
		r = w.until("back", func(r *pb.TargetReport) bool { return legReport(r, 1).GetReady() })
		if d := r.GetDrives()[0]; d.GetError() != "" || d.GetDevice() != "/dev/d7" {
			t.Errorf("drive is reported as %v, want it well at /dev/d7", d)
		}
	})
}

func TestADriveThatFailsAWriteIsReported(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).TargetWanted)
		w.until("drives in", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 2 })
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		m.mu.Lock()
		m.fail = unix.EIO
		m.mu.Unlock()
		w.manager.set(want().drive(1).drive(2).leg(1, 1, 1, 0).volume(2, 2, 1).TargetWanted)
		w.until("the drive has an error", func(r *pb.TargetReport) bool {
			return strings.Contains(r.GetDrives()[0].GetError(), "input/output error")
		})
		w.until("the other one works", exportsReady(1))

		m.mu.Lock()
		m.fail = nil
		m.mu.Unlock()
		w.until("the drive works again, and has its leg", func(r *pb.TargetReport) bool {
			return r.GetDrives()[0].GetError() == "" && legReport(r, 1) != nil
		})
	})
}

// A drive that only reads is not usable.
func TestADriveThatFailsStaysSoWhileItCannotBeWritten(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).TargetWanted)
		w.until("drive in", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 1 })
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		m.mu.Lock()
		m.fail = unix.EIO
		m.mu.Unlock()
		w.manager.set(want().drive(1).leg(1, 1, 1, 0).TargetWanted)
		failed := func(r *pb.TargetReport) bool {
			return strings.Contains(r.GetDrives()[0].GetError(), "input/output error")
		}
		w.until("the drive has an error", failed)
		w.manager.set(want().drive(1).TargetWanted) // nothing is written to it any more
		time.Sleep(3 * scanEvery)
		if r := w.until("a report", func(*pb.TargetReport) bool { return true }); !failed(r) {
			t.Errorf("a drive that fails writes is reported as %v", r.GetDrives()[0])
		}
	})
}

func TestADriveThatDoesNotAnswerHoldsUpNoOther(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).TargetWanted)
		w.until("drives in", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 2 })
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		hang := make(chan struct{})
		m.mu.Lock()
		m.hang = hang
		m.mu.Unlock()
		w.manager.set(want().drive(1).drive(2).leg(1, 1, 1, 0).volume(2, 2, 1).TargetWanted)
		w.until("the other one works", exportsReady(1))
		w.until("the generation is reached", func(r *pb.TargetReport) bool { return r.GetGeneration() == 2 })
		w.until("the drive has an error", func(r *pb.TargetReport) bool {
			return strings.HasPrefix(r.GetDrives()[0].GetError(), "it does not answer, since 2000-01-01T00:0")
		})
		m.mu.Lock()
		m.hang = nil
		m.mu.Unlock()
		close(hang)
		w.until("it answers again", func(r *pb.TargetReport) bool {
			return r.GetDrives()[0].GetError() == "" && legReport(r, 1).GetReady()
		})
	})
}

// TestADriveThatHangsIsCalledThat: a scan in the middle of a hang finds no label. The report must
// not claim that the drive's own legs have it in use.
func TestADriveThatHangsIsCalledThat(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).TargetWanted)
		w.until("an export", exportsReady(1))
		hang := make(chan struct{})
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		m.set(func() { m.hang, m.mute = hang, true })
		w.until("the drive has an error", func(r *pb.TargetReport) bool {
			return r.GetDrives()[0].GetError() == "device /dev/d1 cannot be read: it does not answer, since a while"
		})
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).volume(2, 2, 1).TargetWanted)
		w.until("the other one works", admitted(2, 1))
		m.set(func() { m.hang, m.mute = nil, false })
		close(hang)
		w.until("it is taken back", func(r *pb.TargetReport) bool {
			return r.GetDrives()[0].GetError() == "" && legReport(r, 1).GetReady()
		})
	})
}

// TestADriveThatHangsWhenItIsOpenedHoldsUpNoOther: it answers the scan, but not the open.
func TestADriveThatHangsWhenItIsOpenedHoldsUpNoOther(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).TargetWanted)
		w.until("drives in", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 2 })
		w.stop()
		hang := make(chan struct{})
		w.opening = func(path string) {
			if path == "/dev/d1" {
				<-hang
			}
		}
		w.run()
		w.manager.set(want().volume(2, 2, 1).TargetWanted)
		w.until("the other one works", exportsReady(1))
		w.plug("/dev/d3", 4*block.GiB, "w3")
		w.manager.set(want().drive(3).volume(2, 2, 1).volume(3, 3, 1).TargetWanted)
		w.until("so does one that comes later", exportsReady(2))
		close(hang)
		w.until("it comes when it answers", func(r *pb.TargetReport) bool { return len(r.GetDrives()) == 3 })
	})
}

// TestALossOfAcknowledgedWritesIsReportedAndRecorded: the manager treats a new incarnation of a
// drive like a drive whose cache lost its power.
func TestALossOfAcknowledgedWritesIsReportedAndRecorded(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		incarnation := func(want string) func(*pb.TargetReport) bool {
			return func(r *pb.TargetReport) bool {
				return len(r.GetDrives()) == 1 && r.GetDrives()[0].GetIncarnation() == want
			}
		}
		set := func(change func()) {
			w.mu.Lock()
			defer w.mu.Unlock()
			change()
		}
		w.run()
		w.manager.set(want().drive(1).TargetWanted)
		w.until("a drive that has lost nothing", incarnation("0"))
		set(func() { w.losses = 2 })
		w.until("that it has", incarnation("2"))
		w.until("it on the label", func(*pb.TargetReport) bool { return w.labels()[0].Incarnation == 2 })
		w.stop()
		set(func() { w.losses = 0 })
		w.run()
		w.until("it, by an agent that has only the label", incarnation("2"))
		// A disk that was away, and whose cache lost its power.
		m := w.pull("/dev/d1")
		time.Sleep(2 * scanEvery)
		set(func() { w.media["/dev/d1"], w.sequence = m, "7" })
		w.until("that it is another one", incarnation("2.7"))
		set(func() { w.sequence = "8" }) // away for less time than a scan takes
		w.until("that it is another one again", incarnation("2.8"))
	})
}

func TestTheStreamIsMadeAgain(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.manager.away = true
		w.run()
		time.Sleep(time.Minute)
		w.manager.mu.Lock()
		w.manager.away = false
		w.manager.mu.Unlock()
		start := time.Now()
		w.until("a report", func(*pb.TargetReport) bool { return true })
		if d := time.Since(start); d > 4*time.Second {
			t.Errorf("the first report came after %v, want at most 4s", d)
		}
	})
}

// The manager judges the content of a drive that may have lost writes. Until then its legs are not
// mapped, so that no host finds them under the names that it knows.
func TestALegWaitsUntilTheManagerHasJudgedWhatItsDriveMayHaveLost(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		wanted := func(incarnation string) *pb.TargetWanted {
			x := want().drive(1).volume(1, 1, 1).TargetWanted
			x.Legs[0].Incarnation = incarnation
			return x
		}
		w.mu.Lock()
		w.sequence = "8"
		w.mu.Unlock()
		w.run()
		w.manager.set(wanted("0.7"))
		r := w.until("what it waits for", func(r *pb.TargetReport) bool {
			return len(r.GetLegs()) == 1 && r.GetLegs()[0].GetError() != "" && len(r.GetDrives()) == 1 && r.GetDrives()[0].GetError() == ""
		})
		if got, want := r.GetLegs()[0].GetError(), "its drive may have lost writes since the manager judged what it holds"; got != want {
			t.Errorf("the leg waits: %q, want %q", got, want)
		}
		time.Sleep(5 * time.Second)
		if r := w.until("another report", func(*pb.TargetReport) bool { return true }); len(r.GetExports()) > 0 && len(r.GetExports()[0].GetLegIds()) > 0 {
			t.Errorf("a leg that is not judged is exported: %v", r.GetExports())
		}
		w.manager.set(wanted("0.8"))
		w.until("it is served once it is judged", exportsReady(1))
		w.manager.set(wanted("")) // from a manager that does not know incarnations
		time.Sleep(5 * time.Second)
		w.until("it stays", exportsReady(1))
	})
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// oneDrive is a cluster with target t1 and a ready drive on it, after more commands.
func oneDrive(t *testing.T, commands ...string) (*script, *simTarget) {
	t.Helper()
	s := newScript(t)
	for _, c := range append([]string{"target t1 drives=10GiB"}, commands...) {
		s.run(c)
	}
	return s, s.targets["t1"]
}

// spoil makes all drives of a target report an error; an empty one repairs them.
func (t *simTarget) spoil(text string) {
	for _, d := range t.drives {
		d.error = text
	}
}

func TestADriveThatHadItsLabelIsNotFormattedAgain(t *testing.T) {
	s, t1 := oneDrive(t, "create db1 size=1GiB copies=1", "comply")
	for _, spoil := range []func(){
		func() {},
		func() { t1.spoil("input/output error") },
		func() { t1.drives, t1.devices[0].DriveID = map[block.DriveID]*simDrive{}, block.DriveID{} }, // blank
	} {
		spoil()
		s.reportTarget(t1)
		if got := s.state.WantedTarget("t1").Drives; len(got) != 0 {
			t.Errorf("WantedTarget(t1).Drives = %+v, want none: a blank device must not pass for the drive", got)
		}
	}
	if d := s.state.Drives("t1")[0]; d.State != DriveMissing || !strings.Contains(d.Reason, "without its label") {
		t.Errorf("drive is %s (%s), want it MISSING, without its label", d.State, d.Reason)
	}
	if v, err := s.state.Volume("db1"); err != nil || v.Health != Unavailable {
		t.Errorf("Volume(db1) = %v, %v; want it unavailable", v.Health, err)
	}
}

func TestAVolumeOnAFailedDriveCanBeDeletedAndTheDriveGivenUp(t *testing.T) {
	s, t1 := oneDrive(t, "create db1 size=1GiB copies=1", "comply")
	t1.spoil("input/output error")
	s.reportTarget(t1)
	s.run("delete db1")
	out := s.run("report t1") + s.run("explain db1")
	if !strings.Contains(out, "weft drive evict") {
		t.Errorf("explain db1 names no way out:\n%s", out)
	}
	out = s.run("evict-drive t1 /dev/nvme0n1")
	if st := s.state.Status(); st.Drives != 0 || st.Volumes != 0 {
		t.Errorf("evict-drive left %d drives and %d volumes, want none:\n%s", st.Drives, st.Volumes, out)
	}
}

func TestADriveThatFailsWhileItIsErasedSaysSoAndCanBeGivenUp(t *testing.T) {
	s, t1 := oneDrive(t, "evict-drive t1 /dev/nvme0n1")
	t1.spoil("device /dev/nvme0n1 is gone")
	s.reportTarget(t1)
	if d := s.state.Drives("t1")[0]; d.State != DriveRemoving || !strings.Contains(d.Reason, "gone") {
		t.Errorf("drive is %s (%s), want REMOVING and why", d.State, d.Reason)
	}
	s.run("evict-drive t1 /dev/nvme0n1")
	if got := s.state.Drives("t1"); len(got) != 0 {
		t.Errorf("Drives(t1) = %v, want none", got)
	}
}

func TestADriveOfADeadNodeThatIsBeingErasedCanBeGivenUp(t *testing.T) {
	s, _ := oneDrive(t, "evict-drive t1 /dev/nvme0n1", "lost t1", "confirm-dead t1", "evict-drive t1 /dev/nvme0n1")
	if got := s.state.Drives("t1"); len(got) != 0 {
		t.Errorf("Drives(t1) = %v, want none", got)
	}
}

func TestEachPartitionOfADiskIsADriveOfItsOwn(t *testing.T) {
	s := newScript(t)
	s.run("target t1 bare drives=10GiB,10GiB")
	t1 := s.targets["t1"]
	for i := range t1.devices {
		t1.devices[i].Serial, t1.devices[i].WWID = "disk", "disk"
	}
	s.reportTarget(t1)
	s.run("add-drive t1 /dev/nvme0n1")
	s.run("add-drive t1 /dev/nvme1n1")
	s.run("add-drive t1 /dev/nvme1n1")
	if got := s.state.Drives("t1"); len(got) != 2 || got[0].Device == got[1].Device {
		t.Errorf("Drives(t1) = %+v, want one for each partition", got)
	}
}

func TestALegThatItsTargetCanNotServeIsNotGranted(t *testing.T) {
	s, t1 := oneDrive(t, "create db1 size=1GiB copies=1", "comply", "host c1")
	v, err := s.state.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	r := t1.report()
	r.Legs = []LegReport{{Leg: v.Legs[0].ID, Error: "the drive does not hold it any more"}}
	s.step(TargetReported{Session: s.session, Report: r})
	out := s.run("attach db1 c1") + s.run("explain db1")
	if !strings.Contains(out, ReasonNoInSyncLeg) || !strings.Contains(out, "does not hold it any more") {
		t.Errorf("attach of a volume whose only leg is lost says\n%s\nwant %s and why", out, ReasonNoInSyncLeg)
	}
}

func TestANodeWithDrivesOfAnotherClusterMayJoinIfItExportsNothing(t *testing.T) {
	s := newScript(t)
	r := newSimTarget("t1", nil, 10*block.GiB).report()
	r.ClusterID = block.ClusterID{UUID: testSeed(9).id(0)}
	r.Devices[0].DriveID = block.DriveID{UUID: testSeed(8).id(0)}
	r.Devices[0].Cluster = r.ClusterID
	word := fmt.Sprintf("weft drive %v of cluster %v", r.Devices[0].DriveID, r.ClusterID)
	r.Devices[0].Signatures = []string{word}
	r.Devices[0].Refused = "it carries " + word + ", which is erased only if forced by exactly that name"
	if out := s.step(TargetReported{Session: s.session, Report: r}); strings.Contains(out, ReasonOtherCluster) {
		t.Errorf("its report is refused: %s", out)
	}
	in := AddDrive{Node: "t1", Device: r.Devices[0].Path, Seed: s.seed()}
	if out := s.step(in); !strings.Contains(out, ReasonForeignData) || !strings.Contains(out, word) || strings.Contains(out, "force-erase") {
		t.Errorf("add-drive = %s, want a refusal that names %q", out, word)
	}
	in.ForceErase = word
	if out := s.step(in); !strings.Contains(out, "drive.added") {
		t.Errorf("add-drive with %q = %s, want it taken", word, out)
	}
	r.Exports = []ExportReport{{NQN: "nqn.2026-11.dev.weft:x"}}
	if out := s.step(TargetReported{Session: s.session, Report: r}); !strings.Contains(out, ReasonOtherCluster) {
		t.Errorf("a report with exports of another cluster = %q, want it refused", out)
	}
}

func TestNothingIsPlacedOverALegThatOnlyTheLabelKnows(t *testing.T) {
	s, t1 := oneDrive(t)
	for _, d := range t1.drives {
		stray := block.LegID{UUID: testSeed(7).id(0)}
		d.labels[stray] = evidence.LegLabel{Leg: stray, Image: image.Of([]image.Extent{{Start: 0, Count: 2}}), Zeroed: true}
	}
	s.reportTarget(t1)
	out := s.run("create db1 size=1GiB copies=1") + s.run("comply")
	if v, err := s.state.Volume("db1"); t1.wrong != "" || err != nil || v.State != VolumeReady {
		t.Errorf("create = %s: %s, volume is %v", out, t1.wrong, v.State)
	}
	if out := s.run("create db2 size=9GiB copies=1"); !strings.Contains(out, "NO_SPACE") {
		t.Errorf("create of more than is left = %s, want NO_SPACE", out)
	}
}

// A drive that hangs while its agent starts is present but does not answer.
func TestADriveThatIsSeenAndNotOpenIsNotCalledAbsent(t *testing.T) {
	s := newScript(t)
	s.run("target t1 drives=4GiB")
	report := s.targets["t1"].report()
	report.Drives = nil
	s.step(TargetReported{Session: s.session, Report: report})
	for _, d := range s.state.Drives("t1") {
		if d.State != DriveMissing || !strings.Contains(d.Reason, "has not opened it yet") {
			t.Errorf("drive is %s (%s), want it said that it is there", d.State, d.Reason)
		}
	}
}

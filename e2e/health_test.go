// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// A drive's own log warns, through a real kernel and an NVMe drive: the drive is suspect, says
// why, and gets no new legs until the warning is gone.
func TestScenarioADriveWarnsOfItsEnd(t *testing.T) {
	vm.Require(t)
	b := testbed.Draw(t, testbed.Options{Managers: 1, Targets: 1, Drives: 2, TargetFlags: []string{"--health-every", "10s"}})
	b.Up(b.Manager, b.Targets[0])
	b.AddDrives()
	b.Eventually(2*time.Minute, "both drives' logs are read", func(ctx context.Context) error {
		drives, err := b.API.ListDrives(ctx, &pb.ListDrivesRequest{})
		for _, d := range drives.GetDrives() {
			if s := d.GetHealth().GetSmart(); s.GetCelsius() != 50 || s.GetCriticalWarning() != 0 {
				err = fmt.Errorf("the health of %s is %v, want 50 degrees as QEMU's drives say, and no warning", d.GetDevice(), d.GetHealth())
			}
		}
		return err
	})
	sick := b.Targets[0].Drive("T1D1")
	warn := func(bits uint8) {
		t.Helper()
		if err := sick.Warn(t.Context(), bits); err != nil {
			t.Fatal(err)
		}
	}
	suspects := func(want int) {
		t.Helper()
		b.Eventually(3*time.Minute, fmt.Sprintf("%d drives are suspect", want), func(ctx context.Context) error {
			drives, err := b.API.ListDrives(ctx, &pb.ListDrivesRequest{})
			n := 0
			for _, d := range drives.GetDrives() {
				if d.GetState() == pb.DriveState_DRIVE_STATE_SUSPECT {
					n++
				}
			}
			if err == nil && n != want {
				err = fmt.Errorf("%d are", n)
			}
			return err
		})
	}
	began := time.Now()
	warn(1 << 2)
	suspects(1)
	t.Logf("suspect %v after its warning:\n%s", time.Since(began).Round(time.Second), b.Weft("drive", "list", "--health"))
	if status := b.Weft("status"); !strings.Contains(status, "is suspect: its reliability is degraded") {
		t.Errorf("weft status does not say why:\n%s", status)
	}
	for i := range 4 {
		b.Create(fmt.Sprintf("v%d", i), "256MiB", 1, 1)
	}
	drives, err := b.API.ListDrives(t.Context(), &pb.ListDrivesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range drives.GetDrives() {
		if suspect := d.GetState() == pb.DriveState_DRIVE_STATE_SUSPECT; suspect != (d.GetAllocatedBytes() == 0) {
			t.Errorf("%s is %v and has %d bytes of legs", d.GetDevice(), d.GetState(), d.GetAllocatedBytes())
		}
	}
	warn(0)
	suspects(0)
	var kinds []string
	for _, e := range b.Events("") {
		if strings.HasPrefix(e.GetKind(), "drive.") {
			kinds = append(kinds, e.GetKind())
		}
	}
	if got := strings.Join(kinds, " "); !strings.HasSuffix(got, "drive.suspect drive.well") {
		t.Errorf("the events of the drives are %s", got)
	}
}

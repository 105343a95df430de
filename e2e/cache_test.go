// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/proto/pb"
)

// All targets lose power while the client runs, and their drives have volatile caches. On
// the kernel data path it is unknown which writes were flushed, so the devices of both
// volumes fail, reads included. After they are mounted again the synced data is there, and
// the operator is told what happened and what to do.
func TestScenarioCachesOfAllCopiesAreLost(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Caches: true})
	c1 := b.Clients[0]
	b.Datapath(c1, "kernel")
	copies := map[string]int{"one": 1, "two": 2}
	for volume, n := range copies {
		b.Create(volume, "256MiB", 1, n)
		device := b.Attach(volume, c1)
		shell(t, c1, fmt.Sprintf("mkfs.ext4 -q %s; mkdir -p /mnt/%s; mount %s /mnt/%s; head -c 4194304 /dev/urandom > /mnt/%s/synced; sha256sum < /mnt/%s/synced > /tmp/%s; sync; echo lost > /mnt/%s/cached",
			device, volume, device, volume, volume, volume, volume, volume))
	}
	for _, m := range b.Targets {
		m.Kill()
	}
	time.Sleep(5 * time.Second)
	b.Up(b.Targets...)

	for volume := range copies {
		b.Eventually(2*time.Minute, volume+" says that writes may be lost", func(context.Context) error {
			if e := b.LastEvent("volume "+volume, "volume.writes-lost"); e == nil || e.Severity != pb.Severity_SEVERITY_ERROR {
				return fmt.Errorf("no such event\n%s", b.State())
			}
			return nil
		})
		shell(t, c1, fmt.Sprintf("! dd if=/mnt/%s/synced of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null", volume))
		b.Eventually(time.Minute, volume+" says what holds the old device", func(context.Context) error {
			if text := b.Weft("explain", "volume", volume); !strings.Contains(text, "the file system on /mnt/"+volume) || !strings.Contains(text, "unmount") {
				return fmt.Errorf("explain says:\n%s", text)
			}
			return nil
		})
		shell(t, c1, "umount /mnt/"+volume)
		b.Eventually(2*time.Minute, volume+" is attached anew", func(context.Context) error {
			v := b.Volume(volume)
			if a := v.Attachment; a.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED || a.GetEpoch() < 2 {
				return fmt.Errorf("it is %v at epoch %d, %s", a.GetState(), a.GetEpoch(), a.GetWaitingFor())
			}
			return nil
		})
		shell(t, c1, fmt.Sprintf("mount /dev/weft/%s /mnt/%s && sha256sum < /mnt/%s/synced | cmp - /tmp/%s && echo anew > /mnt/%s/after && sync", volume, volume, volume, volume, volume))
	}
	b.WaitHealth("two", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
}

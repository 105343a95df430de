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
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A volume on the kernel data path grows twice while written: first with all targets up,
// then while one is down. When that target is back, its legs grow and receive what they
// missed, and nothing more: the new part is not copied.
func TestScenarioVolumeGrowsWithoutATarget(t *testing.T) {
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	b.Create("db1", "256MiB", 2, 2)
	device := b.Attach("db1", c1)
	acks := testbed.Acks{}
	w := b.Write(c1, device, span, 200, 1)
	w.AwaitProgress(100, time.Minute)
	expand(t, b, c1, "db1", 600*block.MiB)
	w.AwaitProgress(100, time.Minute)
	w.NoErrors()

	away := b.Holder("db1", 0, 1)
	killUnderWrites(t, b, w, away)
	expand(t, b, c1, "db1", 700*block.MiB)
	w.AwaitProgress(100, time.Minute)
	// Write to a part of the new space while the target is away.
	sum := shell(t, c1, fmt.Sprintf("dd if=/dev/urandom of=%s bs=1M seek=692 count=8 oflag=direct conv=notrunc status=none; %s", device, sumOf(device)))
	b.Up(away)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 2*time.Minute)
	copied := bytesCopied(t, b)
	t.Logf("rebuilt with %v copied", copied)
	if copied < 4*block.MiB || copied > 64*block.MiB {
		t.Errorf("the rebuild copied %v; want the data written meanwhile, and not all of the new part", copied)
	}
	w.AwaitProgress(50, time.Minute)

	// The rebuilt copy must hold what only the other copy had.
	killUnderWrites(t, b, w, b.Holder("db1", 0, 0))
	w.Stop()
	w.NoErrors()
	b.Verify(c1, device, span, acks.Add(w))
	if got := shell(t, c1, sumOf(device)); got != sum {
		t.Errorf("the rebuilt copy holds %s in the new part, want %s", got, sum)
	}
}

// sumOf is a command that sums the last MiBs of a device of 700 MiB, bypassing the page
// cache.
func sumOf(device string) string {
	return fmt.Sprintf("dd if=%s bs=1M skip=692 iflag=direct status=none | sha256sum", device)
}

// expand grows a volume and waits until its host's device has grown.
func expand(t *testing.T, b *testbed.Bed, c *vm.Machine, name string, size block.Size) {
	t.Helper()
	began := time.Now()
	b.Weft("volume", "expand", name, "--size", fmt.Sprint(uint64(size)))
	b.Eventually(2*time.Minute, fmt.Sprintf("%s to have %v", name, size), func(context.Context) error {
		v := b.Volume(name)
		if a := v.Attachment; v.SizeBytes != uint64(size) || a.GetSizeBytes() != uint64(size) {
			return fmt.Errorf("the volume has %d bytes, its device %d", v.SizeBytes, a.GetSizeBytes())
		}
		return nil
	})
	t.Logf("%s has grown to %v in %v", name, size, time.Since(began).Round(time.Millisecond))
	got := strings.Fields(shell(t, c, fmt.Sprintf("d=$(readlink -f /dev/weft/%s); blockdev --getsize64 $d; cat /sys/block/${d##*/}/dev; cat /sys/block/${d##*/}/queue/discard_max_bytes", name)))
	if want := []string{fmt.Sprint(uint64(size)), b.Volume(name).Attachment.GetDeviceNumber(), "0"}; strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("size, number and discards of %s's device are %v, want %v", name, got, want)
	}
}

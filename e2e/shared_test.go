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

// Two clients read one mirrored volume, a file system with files that one of them wrote
// before. A target dies during the reads, then one of the clients; the other client reads
// on. One target serves in user space, so that a kernel client meets read-only exports.
// Then both clients write to a raw volume with one copy.
func TestScenarioShared(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Clients: 2})
	c1, c2 := b.Clients[0], b.Clients[1]
	b.Create("data", "256MiB", 2, 2)
	b.Create("raw", "256MiB", 2, 1)
	device := b.Attach("data", c1)
	shell(t, c1, fmt.Sprintf("mkfs.ext4 -q %s; mkdir -p /mnt/data; mount %s /mnt/data; %s; sync; (cd /mnt/data && sha256sum files.*) > /tmp/sums; umount /mnt/data",
		device, device, fio("/mnt/data", "")))
	sums := shell(t, c1, "cat /tmp/sums")
	b.WaitHealth("data", pb.Health_HEALTH_HEALTHY, 3*time.Minute) // nothing is rebuilt while the volume is shared
	b.Detach("data")
	legs := b.Volume("data").Legs
	b.Datapath(b.Holder("data", 0, 1), "user")

	for _, c := range b.Clients {
		if got := share(b, "data", c, "shared-read-only"); got != device {
			t.Errorf("on %s the device is %s, want %s", c.Name(), got, device)
		}
		shell(t, c, fmt.Sprintf("mkdir -p /mnt/data; mount -o ro %s /mnt/data; cat > /tmp/sums <<'END'\n%sEND\n", device, sums))
		sameFiles(t, c)
		notWritten(t, c, device)
	}
	if _, err := b.Try("attach", "raw", "--node", "c1", "--timeout", "2m"); err != nil {
		t.Errorf("attach of another volume: %v", err)
	}
	b.Detach("raw")
	if _, err := b.Try("attach", "data", "--node", "c1"); err == nil {
		t.Error("one of the readers was granted exclusive access")
	}

	// A target dies and returns during reads; no copy goes stale because of that.
	read := readOn(c2, device, 60*time.Second)
	lost := b.Holder("data", 0, 0)
	lost.Kill()
	time.Sleep(15 * time.Second) // reads continue meanwhile
	sameFiles(t, c1)
	b.Up(lost)
	b.WaitHealth("data", pb.Health_HEALTH_HEALTHY, time.Minute)
	if err := <-read; err != nil {
		t.Errorf("reads while a target died and came back: %v", err)
	}
	for i, l := range b.Volume("data").Legs {
		if l.State != pb.LegState_LEG_STATE_IN_SYNC || l.Revision != legs[i].Revision {
			t.Errorf("leg %d.%d is %v at revision %d, want it as it was, at %d", l.Column, l.Copy, l.State, l.Revision, legs[i].Revision)
		}
	}
	b.Eventually(time.Minute, "c1 reads all copies again", func(context.Context) error {
		for _, l := range b.Volume("data").Legs {
			if out, err := c1.Shell(t.Context(), "cat /sys/class/nvme/nvme*/subsysnqn"); err != nil || !strings.Contains(out, "."+l.Node) {
				return fmt.Errorf("no controller of %s: %s %v", l.Node, out, err)
			}
		}
		return nil
	})

	// A client dies and is forcibly detached; the other one is not disturbed.
	read = readOn(c2, device, 20*time.Second)
	c1.Kill()
	b.Weft("detach", "data", "--node", "c1", "--force", "--timeout", "1m")
	if v := b.Volume("data"); len(v.Attachments) != 1 || v.Attachments[0].Node != "c2" || v.Attachments[0].Epoch != v.Epoch {
		t.Errorf("after the detach of c1: %v", v.Attachments)
	}
	if err := <-read; err != nil {
		t.Errorf("reads while the other client died: %v", err)
	}
	sameFiles(t, c2)
	shell(t, c2, "umount /mnt/data")
	b.Detach("data")

	// With one client again, the volume can be written, and no copies need to be made
	// equal.
	b.Attach("data", c2)
	shell(t, c2, fmt.Sprintf("e2fsck -fn %s >/dev/null; mount %s /mnt/data; %s; umount /mnt/data", device, device, fio("/mnt/data", "--verify_only=1")))
	b.Detach("data")

	b.Up(c1)
	raw := share(b, "raw", c1, "shared-block")
	share(b, "raw", c2, "shared-block")
	for i, c := range []*vm.Machine{c1, c2, c1} {
		text := fmt.Sprintf("written by %s as number %d", c.Name(), i)
		shell(t, c, fmt.Sprintf("(echo %s; head -c 4096 /dev/zero) | head -c 4096 | dd of=%s bs=4096 seek=%d conv=fsync 2>/dev/null", text, raw, 40*i))
		other := b.Clients[1-i%2]
		if got := shell(t, other, fmt.Sprintf("echo 3 > /proc/sys/vm/drop_caches; dd if=%s bs=4096 skip=%d count=1 2>/dev/null | head -n 1", raw, 40*i)); strings.TrimSpace(got) != text {
			t.Errorf("%s reads %q, want %q", other.Name(), got, text)
		}
	}
	b.Weft("detach", "raw", "--node", "c1", "--timeout", "1m")
	if _, err := b.Try("attach", "data", "--node", "c1", "--mode", "shared-block"); err == nil || !strings.Contains(err.Error(), "copies") {
		t.Errorf("sharing a mirrored volume for writing = %v, want a refusal that names the copies", err)
	}
}

// share attaches a volume to one of several clients.
func share(b *testbed.Bed, volume string, c *vm.Machine, mode string) string {
	return strings.TrimSpace(b.Weft("attach", volume, "--node", c.Name(), "--mode", mode, "--timeout", "2m"))
}

// sameFiles compares the files with what was written, bypassing the page cache.
func sameFiles(t *testing.T, c *vm.Machine) {
	t.Helper()
	shell(t, c, "echo 3 > /proc/sys/vm/drop_caches; cd /mnt/data; sha256sum -c /tmp/sums")
}

// notWritten fails the test if a client can write to its device.
func notWritten(t *testing.T, c *vm.Machine, device string) {
	t.Helper()
	if ro := strings.TrimSpace(shell(t, c, fmt.Sprintf("cat /sys/block/$(basename $(readlink -f %s))/ro", device))); ro != "1" {
		t.Errorf("on %s the device has ro %s, want 1", c.Name(), ro)
	}
	if out, err := c.Shell(t.Context(), fmt.Sprintf("echo x | dd of=%s conv=notrunc,fsync", device)); err == nil {
		t.Errorf("a write to %s on %s succeeded: %s", device, c.Name(), out)
	}
}

// readOn reads a device for a while; the channel receives the result.
func readOn(c *vm.Machine, device string, d time.Duration) <-chan error {
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), d+time.Minute)
		defer cancel()
		out, err := c.Shell(ctx, fmt.Sprintf("fio --name=read --filename=%s --readonly --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=4 --time_based --runtime=%d --minimal", device, int(d.Seconds())))
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		done <- err
	}()
	return done
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// A kernel host keeps a file on a thin volume. fio writes it again and again, each time with the number of the
// pass, and checks after each pass what it reads, while snapshots are taken and each target in turn loses power.
// Another host finds each write in a snapshot whole or not at all, and none from before the last pass that had
// ended: also where a target was away for the snapshot, has been given it since, and is alone. A volume that begins as
// such a snapshot has a sound file system.
func TestScenarioFilesSurviveSnapshotsAndKills(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2, DriveSize: "4GiB", TargetFlags: []string{"--datapath", "user"}})
	reader := b.Clients[1]
	b.Datapath(b.Clients[0], "kernel")
	b.Datapath(reader, "kernel")
	b.Weft("volume", "create", "db1", "--size", "256MiB", "--copies", "2", "--thin", "--wait")
	f := writeFile(t, b, b.Clients[0], b.Attach("db1", b.Clients[0]))

	f.await(1)
	taken := []passes{f.snapshot("all")}
	for i, target := range []*vm.Machine{b.Holder("db1", 0, 0), b.Holder("db1", 0, 1)} {
		target.Kill()
		b.WaitHealth("db1", pb.Health_HEALTH_DEGRADED, time.Minute)
		for _, s := range taken {
			f.holds(reader, s)
		}
		f.await(2)
		taken = append(taken, f.snapshot(fmt.Sprintf("without-%d", i)))
		f.await(1)
		b.Up(target)
		for _, v := range []string{"db1", taken[i].name, taken[i+1].name} {
			b.WaitHealth(v, pb.Health_HEALTH_HEALTHY, 3*time.Minute)
		}
	}
	b.Weft("snapshot", "delete", "db1@all")
	for _, s := range taken[1:] {
		f.holds(reader, s)
	}
	b.Weft("volume", "create", "c1", "--from", taken[2].name, "--wait")
	shell(t, reader, fmt.Sprintf("mount %s /mnt/files; umount /mnt/files; e2fsck -fn %[1]s", b.Attach("c1", reader))) // the mount replays the journal

	last := f.stop()
	b.Detach("db1")
	device := b.Attach("db1", reader)
	shell(t, reader, "e2fsck -fn "+device)
	check(t, reader, device, passes{"db1", last, last})
}

// file is written by fio, pass after pass.
type file struct {
	t      *testing.T
	b      *testbed.Bed
	writer *vm.Machine
	ended  <-chan error
}

// passes are those of which writes are in a volume or snapshot.
type passes struct {
	name        string
	first, last int
}

const onFile = "fio --name=file --filename=/mnt/files/file --size=4m --bs=16k --rw=randwrite --ioengine=libaio --direct=1 --iodepth=8" +
	" --verify=pattern --verify_pattern=$(printf 0x%08x $i) --verify_fatal=1 --minimal"

func writeFile(t *testing.T, b *testbed.Bed, writer *vm.Machine, device string) *file {
	shell(t, writer, fmt.Sprintf("mkfs.ext4 -q %s; mkdir -p /mnt/files; mount %[1]s /mnt/files; i=0; %s --rw=write >/dev/null; sync; echo 0 > /tmp/pass", device, onFile))
	return &file{t, b, writer, inBackground(t, writer, "i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); "+onFile+" --rate_iops=300 >/dev/null || exit 1; echo $i > /tmp/next; mv /tmp/next /tmp/pass; done")}
}

// pass is the number of the last pass that has ended.
func (f *file) pass() int {
	f.t.Helper()
	select {
	case err := <-f.ended:
		f.t.Fatalf("writing the file has ended: %v", err)
	default:
	}
	return f.lastPass()
}

// lastPass is pass, also if the writing has ended.
func (f *file) lastPass() int {
	f.t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(shell(f.t, f.writer, "cat /tmp/pass")))
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

// await waits until so many passes more have begun and ended.
func (f *file) await(more int) {
	f.t.Helper()
	want := f.pass() + 1 + more
	f.b.Eventually(3*time.Minute, "the file is written", func(context.Context) error {
		if now := f.pass(); now < want {
			return fmt.Errorf("%d passes have ended, want %d", now, want)
		}
		return nil
	})
}

// stop ends the writing after the pass that is under way, and returns its number.
func (f *file) stop() int {
	f.t.Helper()
	shell(f.t, f.writer, "touch /tmp/stop")
	if err := <-f.ended; err != nil {
		f.t.Fatalf("writing the file: %v", err)
	}
	shell(f.t, f.writer, "umount /mnt/files")
	n := f.lastPass()
	if n == 0 {
		f.t.Fatal("no pass has ended")
	}
	f.t.Logf("the file was written %d times", n)
	return n
}

func (f *file) snapshot(name string) passes {
	f.t.Helper()
	s := passes{name: "db1@" + name, first: f.pass()}
	f.b.Weft("snapshot", "create", s.name)
	s.last = f.pass() + 1
	return s
}

// holds checks a snapshot.
func (f *file) holds(reader *vm.Machine, s passes) {
	f.t.Helper()
	check(f.t, reader, f.b.Attach(s.name, reader), s)
	f.b.Weft("detach", s.name)
}

// check reads the file and checks that each of its blocks is of one pass. The journal of the file system is not replayed:
// the file had all of its places before.
func check(t *testing.T, reader *vm.Machine, device string, want passes) {
	t.Helper()
	const words = 16 << 10 / 4 // of a write; fio repeats the number in each
	out := shell(t, reader, fmt.Sprintf("mkdir -p /mnt/files; mount -o ro,noload %s /mnt/files; dd if=/mnt/files/file bs=1M iflag=direct status=none | od -v -An -tx1 -w4 | uniq -c; umount /mnt/files", device))
	total := 0
	for line := range strings.Lines(out) {
		count, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.Atoi(count)
		pass, err2 := strconv.ParseUint(strings.ReplaceAll(number, " ", ""), 16, 32)
		if err != nil || err2 != nil || n%words != 0 || int(pass) < want.first || int(pass) > want.last {
			t.Errorf("%s holds %d words of pass %d, want whole blocks of %d words, of the passes %d to %d", want.name, n, pass, words, want.first, want.last)
		}
		total += n
	}
	if total != 4<<20/4 {
		t.Errorf("%s holds %d words of the file:\n%s", want.name, total, out)
	}
}

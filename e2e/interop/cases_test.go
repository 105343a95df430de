// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
)

const mib = 1 << 20

// testCase is something that a host and a target must do together. Its name begins with the
// numbers of the blktests cases (nvme/<number>) with the same intent.
type testCase struct {
	name  string
	run   func(t *testing.T, l *lab)
	needs func(l *lab) string // returns the reason why l cannot run it, or ""; nil: any l can
}

func bothAuthenticate(l *lab) string {
	if os.Getenv("WEFT_GUEST") != "6.1" || l.host.ours() && l.target.ours() {
		return ""
	}
	return "Debian's 6.1 is built without DH-HMAC-CHAP"
}

func cases() []testCase {
	return []testCase{
		{"002,016,017 discovery lists every subsystem once", discoveryListsAll, nil},
		{"030 discovery follows what is linked and who may connect", discoveryFollows, nil},
		{"004,008,026 a namespace is found by its UUID", foundByUUID, nil},
		{"005,022 a reset controller comes back", resetComesBack, nil},
		{"010 data is what was written, with no digest", func(t *testing.T, l *lab) { dataIsRight(t, l, false, false) }, nil},
		{"010 data is what was written, with a header digest", func(t *testing.T, l *lab) { dataIsRight(t, l, true, false) }, nil},
		{"010 data is what was written, with a data digest", func(t *testing.T, l *lab) { dataIsRight(t, l, false, true) }, nil},
		{"010 data is what was written, with both digests", func(t *testing.T, l *lab) { dataIsRight(t, l, true, true) }, nil},
		{"014 a flush is answered", flushIsAnswered, nil},
		{"016,017 many namespaces are all there", manyNamespaces, nil},
		{"018 beyond the end is an error", beyondTheEnd, nil},
		{"019 discarded blocks can be written again", discards, nil},
		{"065 zeroed blocks read as zeroes", zeroes, nil},
		{"027 namespaces come, grow and go by themselves", namespacesComeGrowGo, nil},
		{"031 a controller may go right after it came", goneAtOnce, nil},
		{"038 a subsystem with nothing in it, on no port, may go", emptyGoes, nil},
		{"040 resets under load lose nothing", resetUnderLoad, nil},
		{"040 a host may leave under load", leaveUnderLoad, nil},
		{"048 another number of queues after a reconnect", otherQueues, nil},
		{"051,052 namespaces come and go side by side", comeAndGo, nil},
		{"055 a write to a namespace that is gone is an error", writeToGone, nil},
		{"057 paths fail over by ANA state under load", anaUnderLoad, nil},
		{"058 an nsid that means another namespace is another device", remapped, nil},
		{"061 a target that goes away and comes back under load", targetRestart, nil},
		{"a path that breaks is replaced by the other", pathBreaks, nil},
		{"a silent network is noticed by both, and survived", silence, nil},
		{"a host that is not allowed is refused", notAllowed, nil},
		{"041,042 a host proves its key, in each kind of key", keysOfEachKind, bothAuthenticate},
		{"043 a host proves its key by each hash and group", hashesAndGroups, bothAuthenticate},
		{"044 both prove their keys", bothProve, bothAuthenticate},
		{"041,044 a wrong key is refused", wrongKeys, bothAuthenticate},
	}
}

func runAll(t *testing.T, l *lab, all []testCase) {
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			if c.needs != nil {
				if why := c.needs(l); why != "" {
					t.Skip(why)
				}
			}
			if l.host.ours() && l.target.ours() {
				t.Parallel()
			}
			began := time.Now()
			c.run(t, l)
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}
}

func discoveryListsAll(t *testing.T, l *lab) {
	const n = 64 // more than fit in one log page
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, ports: 2, more: n})
	for port := range 2 {
		found := l.host.discover(t, s.portal(port), testHost)
		for _, nqn := range append(s.others(), s.nqn()) {
			if got := found[entry{nqn, s.portal(port)}]; got != 1 {
				t.Errorf("port %d lists %s at itself %d times", port, nqn, got)
			}
		}
		for e, count := range found {
			if count != 1 && e.nqn != discoveryNQN {
				t.Errorf("port %d lists %v %d times", port, e, count)
			}
		}
	}
}

func discoveryFollows(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &access{host: testHost}, ports: 2})
	lists := func(port int, id block.Host) bool {
		t.Helper()
		return l.host.discover(t, s.portal(port), id)[entry{s.nqn(), s.portal(port)}] > 0
	}
	if !lists(0, testHost) {
		t.Error("the host that may connect does not find the subsystem")
	}
	if lists(0, otherHost) {
		t.Error("a host that may not connect finds the subsystem")
	}
	if !l.target.ours() {
		return // nvmet closes a port without subsystems: there is no server to ask
	}
	s.unlink(0)
	if lists(0, testHost) {
		t.Error("a port lists a subsystem that is not linked to it")
	}
	if !lists(1, testHost) {
		t.Error("the other port does not list the subsystem linked to it")
	}
	s.link(0)
	if !lists(0, testHost) {
		t.Error("a port does not list a subsystem that was linked to it again")
	}
}

func foundByUUID(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: 2 * mib, 7: 3 * mib}})
	c := l.connect(t, s, options{})
	for nsid, size := range map[uint32]int64{1: 2 * mib, 7: 3 * mib} {
		d := c.device(nsid)
		if got := int64(d.Geometry().Size); got != size {
			t.Errorf("namespace %d has %d bytes, want %d", nsid, got, size)
		}
		if got := uuidOf(c, nsid, d); got != s.uuid(nsid) {
			t.Errorf("namespace %d has UUID %v, want %v", nsid, got, s.uuid(nsid))
		}
	}
	if got := len(c.namespaces()); got != 2 {
		t.Errorf("%d namespaces, want 2", got)
	}
}

func uuidOf(c session, nsid uint32, d block.Device) block.UUID {
	if n, ok := d.(interface{ UUID() block.UUID }); ok {
		return n.UUID()
	}
	u, _ := block.ParseUUID(text("/sys/block/" + c.path(nsid)[len("/dev/"):] + "/uuid"))
	return u
}

func resetComesBack(t *testing.T, l *lab) {
	_, c, d := l.up(t, mib, options{})
	want := pattern(unit, 1)
	must(t, block.WriteAt(d, want, 0))
	for range 3 {
		c.reset(0)
		eventually(t, "the controller is live again", func() bool { return c.live(0) })
		got := backend.Aligned(unit)
		must(t, block.ReadAt(d, got, 0))
		if !bytes.Equal(got, want) {
			t.Fatal("after a reset the data read has changed")
		}
	}
}

func pattern(n int, phase uint64) []byte {
	b := backend.Aligned(n)
	content(b, 0, phase)
	return b
}

func dataIsRight(t *testing.T, l *lab, header, data bool) {
	s, c, d := l.up(t, 24*mib, options{headerDigest: header, dataDigest: data})
	w := load(t, d, 8*mib)
	for range 5 {
		w.moves(t)
	}
	w.end(t)
	if path := c.path(1); path != "" {
		fioVerifies(t, path)
	}
	c.disconnect()
	c = l.connect(t, s, options{headerDigest: data, dataDigest: header})
	if c.path(1) == "" { // fio has overwritten the writer's data
		w.checkAll(t, c.device(1))
	}
}

// fioVerifies runs fio to write and read back, as blktests does.
func fioVerifies(t *testing.T, path string) {
	t.Helper()
	run(t, "fio", "--name=verify", "--filename="+path, "--direct=1", "--ioengine=libaio", "--iodepth=32",
		"--rw=randwrite", "--bsrange=4k-256k", "--size=16m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")
}

func flushIsAnswered(t *testing.T, l *lab) {
	_, _, d := l.up(t, mib, options{})
	for i := range 8 {
		must(t, block.WriteAt(d, pattern(unit, uint64(i+1)), int64(i)*unit))
		must(t, block.Flush(d))
	}
	must(t, block.Do(d, &block.IO{Op: block.OpWrite, Data: pattern(unit, 9), Len: unit, FUA: true}))
}

func manyNamespaces(t *testing.T, l *lab) {
	const n = 48
	all := map[uint32]int64{}
	for nsid := range uint32(n) {
		all[nsid+1] = int64(nsid+1) * 64 << 10
	}
	s := l.target.serve(t, spec{namespaces: all})
	c := l.connect(t, s, options{})
	eventually(t, "all namespaces are there", func() bool { return len(c.namespaces()) == n })
	for nsid, size := range c.namespaces() {
		if size != all[nsid] {
			t.Errorf("namespace %d has %d bytes, want %d", nsid, size, all[nsid])
		}
	}
	must(t, block.WriteAt(c.device(n), pattern(unit, 1), 0))
}

func beyondTheEnd(t *testing.T, l *lab) {
	s, c, d := l.up(t, mib, options{})
	if path := c.path(1); path != "" {
		// The block layer checks the device's end, so this sends a command of its own.
		lba := lbaSize(path)
		out, err := tryRun("nvme", "read", path, fmt.Sprintf("--start-block=%d", mib/lba), fmt.Sprintf("--block-count=%d", 4096/lba-1), "--data-size=4096")
		if err == nil {
			t.Errorf("reading beyond the end succeeds: %s", out)
		}
	} else if err := block.ReadAt(d, make([]byte, unit), mib); err == nil {
		t.Error("reading beyond the end succeeds")
	}
	must(t, block.WriteAt(d, pattern(unit, 1), mib-unit)) // the last unit
	if !c.live(0) {
		t.Errorf("the controller of %s is not live any more", s.nqn())
	}
}

func discards(t *testing.T, l *lab) {
	_, c, d := l.up(t, 4*mib, options{})
	want := pattern(mib, 1)
	must(t, block.WriteAt(d, want, mib))
	if path := c.path(1); path != "" {
		run(t, "blkdiscard", path)
	} else {
		must(t, block.Do(d, &block.IO{Op: block.OpDiscard, Len: 4 * mib}))
	}
	must(t, block.WriteAt(d, want, mib))
	got := backend.Aligned(mib)
	must(t, block.ReadAt(d, got, mib))
	if !bytes.Equal(got, want) {
		t.Error("data written after a discard does not read back")
	}
}

func zeroes(t *testing.T, l *lab) {
	_, c, d := l.up(t, 4*mib, options{})
	must(t, block.WriteAt(d, pattern(mib, 1), mib))
	if path := c.path(1); path != "" {
		run(t, "blkdiscard", "-z", "-o", fmt.Sprint(mib), "-l", fmt.Sprint(mib/2), path)
	} else {
		must(t, block.Do(d, &block.IO{Op: block.OpWriteZeroes, Off: mib, Len: mib / 2}))
	}
	got, want := backend.Aligned(mib), pattern(mib, 1)
	clear(want[:mib/2])
	must(t, block.ReadAt(d, got, mib))
	if !bytes.Equal(got, want) {
		t.Error("zeroing did not zero exactly the given range")
	}
}

func namespacesComeGrowGo(t *testing.T, l *lab) {
	s, c, _ := l.up(t, mib, options{})
	s.add(5, 2*mib)
	is := func(nsid uint32, size int64) func() bool {
		return func() bool { return c.namespaces()[nsid] == size }
	}
	t.Logf("added: seen after %v", eventually(t, "the new namespace is there", is(5, 2*mib)))
	must(t, block.WriteAt(c.device(5), pattern(unit, 1), 2*mib-unit))
	s.resize(5, 4*mib)
	t.Logf("grown: seen after %v", eventually(t, "the namespace has grown", is(5, 4*mib)))
	must(t, block.WriteAt(c.device(5), pattern(unit, 2), 4*mib-unit))
	s.remove(5)
	t.Logf("removed: seen after %v", eventually(t, "the namespace is gone", is(5, 0)))
	if !is(1, mib)() {
		t.Errorf("another namespace has changed: %v", c.namespaces())
	}
}

func goneAtOnce(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}})
	for range 10 {
		l.connect(t, s, options{}).disconnect()
	}
	must(t, block.WriteAt(l.connect(t, s, options{}).device(1), pattern(unit, 1), 0))
}

func emptyGoes(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{ports: 1})
	s.unlink(0)
	s.stop()
	s.start(0)
	l.connect(t, s, options{})
}

func resetUnderLoad(t *testing.T, l *lab) {
	_, c, d := l.up(t, 8*mib, options{})
	w := load(t, d, 8*mib)
	for range 5 {
		w.moves(t)
		c.reset(0)
		eventually(t, "the controller is live again", func() bool { return c.live(0) })
	}
	w.moves(t)
	w.end(t)
}

func leaveUnderLoad(t *testing.T, l *lab) {
	s, c, d := l.up(t, 8*mib, options{})
	w := load(t, d, 8*mib)
	w.moves(t)
	c.disconnect()
	ended := make(chan struct{})
	go func() { w.done.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(limit):
		t.Fatal("requests hang after the host has disconnected")
	}
	if w.failed() == nil {
		t.Error("requests succeed after the host has disconnected")
	}
	must(t, block.WriteAt(l.connect(t, s, options{}).device(1), pattern(unit, 1), 0))
}

func otherQueues(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: 8 * mib}, queues: 2})
	c := l.connect(t, s, options{queues: 2})
	w := load(t, c.device(1), 8*mib)
	w.moves(t)
	for _, queues := range []int{1, 2} {
		s.stop()
		s.start(queues)
		eventually(t, "the controller is live again", func() bool { return c.live(0) })
		w.moves(t)
		eventually(t, fmt.Sprintf("%d queues are connected", queues), func() bool { return c.queues(0) == queues })
	}
	w.end(t)
}

func comeAndGo(t *testing.T, l *lab) {
	s, c, d := l.up(t, 8*mib, options{})
	w := load(t, d, 8*mib)
	for range 10 {
		for nsid := uint32(2); nsid <= 5; nsid++ {
			s.add(nsid, mib)
		}
		w.moves(t)
		for nsid := uint32(2); nsid <= 5; nsid++ {
			s.remove(nsid)
		}
	}
	s.add(9, mib)
	eventually(t, "what is left is seen", func() bool {
		n := c.namespaces()
		return len(n) == 2 && n[1] == 8*mib && n[9] == mib
	})
	w.end(t)
}

func writeToGone(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib, 2: mib}})
	c := l.connect(t, s, options{})
	keep, d := c.device(1), c.device(2)
	must(t, block.WriteAt(d, pattern(unit, 1), 0))
	s.remove(2)
	err := make(chan error, 1)
	go func() { err <- block.WriteAt(d, pattern(unit, 1), 0) }()
	select {
	case err := <-err:
		if err == nil {
			t.Error("a write to a removed namespace succeeds")
		}
	case <-time.After(limit):
		t.Error("a write to a removed namespace hangs")
	}
	must(t, block.WriteAt(keep, pattern(unit, 1), 0))
}

func remapped(t *testing.T, l *lab) {
	s, c, first := l.up(t, mib, options{})
	must(t, block.WriteAt(first, pattern(unit, 1), 0))
	for i := range 10 { // faster than any host rescans
		s.remove(1)
		s.add(1, int64(i+2)*mib)
	}
	s.remove(1)
	eventually(t, "the host has caught up", func() bool { return len(c.namespaces()) == 0 })
	s.add(1, 13*mib)
	eventually(t, "the other namespace is seen", func() bool { return c.namespaces()[1] == 13*mib })
	got := backend.Aligned(unit)
	must(t, block.ReadAt(c.device(1), got, 0))
	if !bytes.Equal(got, make([]byte, unit)) {
		t.Fatal("a new namespace has an old one's data")
	}
	if err := block.WriteAt(first, pattern(unit, 9), 0); err == nil {
		t.Error("the device of a removed namespace writes to its successor")
	}
	must(t, block.ReadAt(c.device(1), got, 0))
	if !bytes.Equal(got, make([]byte, unit)) {
		t.Error("the device of a removed namespace has written to its successor")
	}
}

func targetRestart(t *testing.T, l *lab) {
	s, c, d := l.up(t, 8*mib, options{})
	w := load(t, d, 8*mib)
	for range 3 {
		w.moves(t)
		s.stop()
		w.rests(t)
		s.start(0)
		took := eventually(t, "the controller is live again", func() bool { return c.live(0) })
		w.moves(t)
		t.Logf("live again after %v", took)
	}
	w.end(t)
}

func notAllowed(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &access{host: testHost}})
	l.refused(t, s, options{host: otherHost}, "a host that is not allowed")
	must(t, block.WriteAt(l.connect(t, s, options{}).device(1), pattern(unit, 1), 0))
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/treecheck"
)

// thin gives a cluster drives of seven extents, and its volume more than twice the size.
func thin(c *cluster) {
	c.thin, c.size = true, 4*block.GiB
	for _, h := range c.targets {
		if err := os.Truncate(h.platter.file.Name(), 2<<30); err != nil {
			panic(err)
		}
	}
}

// chunks writes an edition to the beginning of each chunk of a range, and tells how many it has
// written.
func (m *mirror) chunks(number uint64, from, to int64, written chan<- int64) {
	for c := from; c < to; c++ {
		if err := block.WriteAt(m.users.device("c1").volume, edition(number), c<<20); err != nil {
			m.t.Errorf("chunk %d: %v", c, err)
			return
		}
		written <- c
	}
	close(written)
}

// stops returns the last chunk that is written before nothing is for some time; ok is false if all
// are.
func stops(written <-chan int64, patience time.Duration) (last int64, ok bool) {
	for {
		select {
		case c, more := <-written:
			if !more {
				return last, false
			}
			last = c
		case <-time.After(patience):
			return last, true
		}
	}
}

func (m *mirror) discard(from, to int64) {
	m.t.Helper()
	io := &block.IO{Op: block.OpDiscard, Off: from << 20, Len: (to - from) << 20}
	if err := block.Do(m.users.device("c1").volume, io); err != nil {
		m.t.Fatalf("discard: %v", err)
	}
}

// thinSpace returns how much the trees of a drive hold, and how much they may hold, each of the drive
// where that is most.
func (m *mirror) thinSpace() (used, granted block.Size) {
	m.t.Helper()
	drives, err := m.operator.ListDrives(context.Background(), &pb.ListDrivesRequest{})
	if err != nil {
		m.t.Fatal(err)
	}
	for _, d := range drives.GetDrives() {
		used, granted = max(used, block.Size(d.GetThinUsedBytes())), max(granted, block.Size(d.GetThinBytes()))
	}
	return used, granted
}

// Writers fill a thin volume until the drives are full. As long as there is a reserve, they need no
// manager for that. When the drives are full the writers wait, and no copy is lost. They go on with the
// space that a discard or another volume leaves.
func TestAFullDriveHoldsWritersAndNothingElse(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		if _, err := m.operator.CreateVolume(context.Background(), &pb.CreateVolumeRequest{Name: "plain", SizeBytes: uint64(512 * block.MiB), Copies: 2, Stripes: 1}); err != nil {
			t.Fatal(err)
		}
		m.attachedAndHealthy()
		time.Sleep(5 * time.Second)
		m.managers[0].kill()
		written := make(chan int64, 8)
		go m.chunks(1, 0, 300, written) // beyond the first extent
		if last, stopped := stops(written, 10*time.Second); stopped {
			t.Fatalf("without a manager, writes stop after chunk %d", last)
		}
		m.managers[0].start()
		m.attachedAndHealthy()

		written = make(chan int64, 8)
		go m.chunks(2, 300, 2000, written)
		last, stopped := stops(written, 20*time.Second)
		// Two of seven extents are the other volume's. Of the others a few chunks are for tables.
		if !stopped || last < 4*255+252-2 || last > 5*255 {
			t.Fatalf("writes stopped (%v) after chunk %d\n%s", stopped, last, m.explain())
		}
		m.did("full after chunk %d", last)
		for _, l := range m.volume().GetLegs() {
			if l.GetState() != pb.LegState_LEG_STATE_IN_SYNC || !l.GetFull() {
				t.Errorf("a leg on %s is %v, full: %v", l.GetNode(), l.GetState(), l.GetFull())
			}
		}
		if text := m.explain(); !strings.Contains(text, "is full") || !strings.Contains(text, "waiting for: space for leg 0.0") {
			t.Errorf("it is not explained:\n%s", text)
		}
		began := time.Now()
		if err := block.WriteAt(m.users.device("c1").volume, edition(3), 7<<20); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("a write to its own space took %v", took)
		}
		m.discard(10, 110) // as a file system does that deletes a file
		more, stopped := stops(written, 20*time.Second)
		if !stopped || more < last+99 || more > last+102 {
			t.Errorf("after 100 chunks were discarded, writes stop (%v) after chunk %d; before it was %d", stopped, more, last)
		}
		if _, err := m.operator.DeleteVolume(context.Background(), &pb.DeleteVolumeRequest{Volume: "plain"}); err != nil {
			t.Fatal(err)
		}
		last = more
		if more, stopped = stops(written, 20*time.Second); !stopped || more < last+2*255-2 {
			t.Errorf("after two extents were freed, writes stop (%v) after chunk %d; before it was %d", stopped, more, last)
		}
		m.discard(200, 1900)
		if last, stopped = stops(written, 20*time.Second); stopped {
			t.Errorf("writes stop after chunk %d, and most was discarded", last)
		}
		m.discard(200, 2000)
		m.eventually("the space is given back", func(context.Context) error {
			if used, granted := m.thinSpace(); used > 2*block.ExtentSize || granted > 4*block.ExtentSize {
				return fmt.Errorf("trees have %v, granted are %v", used, granted)
			}
			return nil
		})
		m.attachedAndHealthy()
		events, err := m.operator.ListEvents(context.Background(), &pb.ListEventsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"volume.full", "volume.room"} {
			if !slices.ContainsFunc(events.GetEvents(), func(e *pb.Event) bool { return e.GetKind() == kind }) {
				t.Errorf("no event %s", kind)
			}
		}
		for _, e := range events.GetEvents() {
			if e.GetKind() == "leg.stale" {
				t.Errorf("a copy was lost: %s", e.GetText())
			}
		}
		for _, lost := range []*targetHost{nil, m.second} { // from both copies
			if lost != nil {
				lost.kill()
			}
			for c, number := range map[int64]uint64{0: 1, 5: 1, 7: 3, 10: 0, 109: 0, 110: 1, 199: 1, 200: 0, 1500: 0, 3000: 0} {
				got, want := make([]byte, unit), edition(number)
				if number == 0 {
					want = make([]byte, unit)
				}
				if err := block.ReadAt(m.users.device("c1").volume, got, c<<20); err != nil || !bytes.Equal(got, want) {
					t.Errorf("chunk %d is not edition %d, without %v: %v", c, number, lost, err)
				}
			}
		}
	})
}

// A copy that was away is brought up to date, and a new one made, without space for what was never
// written.
func TestACopyOfAThinVolumeStaysThin(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		m.put("c1", 1, 0, 1, 300*256, 301*256)
		m.second.kill()
		m.put("c1", 2, 1, 600*256)
		m.second.start()
		m.attachedAndHealthy()
		if copied := m.copiedTo(m.second); len(copied) != 1 || copied[0] != 64*block.KiB {
			t.Errorf("%v were copied, want 64KiB: the four grains with data that may differ", copied)
		}
		time.Sleep(10 * time.Second) // reports of space are some seconds old
		for _, l := range m.volume().GetLegs() {
			if used := block.Size(l.GetUsedBytes()); used < 3*block.MiB || used > 8*block.MiB {
				t.Errorf("the leg on %s takes %v; three or four chunks were written", l.GetNode(), used)
			}
		}
		m.holdsWithout(m.first, 2, 1, 600*256)
		m.holds("c1", 1, 0, 300*256, 301*256)
	})
}

// copiedTo returns how much was copied to each leg of a target that came into sync, by the manager's
// events.
func (m *mirror) copiedTo(h *targetHost) (all []block.Size) {
	m.t.Helper()
	list, err := m.operator.ListEvents(context.Background(), &pb.ListEventsRequest{Object: "volume " + volumeName, Limit: 1000})
	if err != nil {
		m.t.Fatal(err)
	}
	for _, e := range list.GetEvents() {
		if e.GetKind() != "leg.in-sync" || e.GetAttributes()["node"] != h.name {
			continue
		}
		n, err := strconv.ParseUint(e.GetAttributes()["bytes_copied"], 10, 64)
		if err != nil {
			m.t.Fatal(err)
		}
		all = append(all, block.Size(n))
	}
	return all
}

// snapshot takes a snapshot of the volume, and waits for it.
func (m *mirror) snapshot(name string) {
	m.t.Helper()
	m.eventually("take "+name, func(ctx context.Context) error {
		_, err := m.operator.CreateSnapshots(ctx, &pb.CreateSnapshotsRequest{Snapshots: []*pb.NewSnapshot{{Volume: volumeName, Name: name}}})
		if err != nil {
			return err
		}
		v, err := m.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName + "@" + name})
		if err == nil && v.GetState() != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.GetState())
		}
		return err
	})
}

// copiesOfSnapshot waits until a snapshot has two legs in sync, none of them on a node, and compares each, on
// its drive, with the editions that units of it are to have.
func (m *mirror) copiesOfSnapshot(name string, not string, at []int64, want []uint64) {
	m.t.Helper()
	var legs []*pb.Leg
	m.eventually("copy "+name, func(ctx context.Context) error {
		v, err := m.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName + "@" + name})
		if err != nil {
			return err
		}
		legs = v.GetLegs()
		for _, l := range legs {
			if l.GetState() != pb.LegState_LEG_STATE_IN_SYNC || l.GetNode() == not {
				return fmt.Errorf("leg %v", l)
			}
		}
		if len(legs) != 2 {
			return fmt.Errorf("it has %d legs", len(legs))
		}
		return nil
	})
	for _, l := range legs {
		r, err := m.rawLeg(l, block.Size(volumeSize))
		if err != nil {
			m.t.Fatal(err)
		}
		p := make([]byte, 602*unit)
		if _, err := io.ReadFull(r, p); err != nil {
			m.t.Fatal(err)
		}
		for i, u := range at {
			data := p[u*unit:][:unit]
			if n := want[i]; n == 0 && !block.AllZero(data) || n > 0 && !bytes.Equal(data, edition(n)) {
				m.t.Errorf("%s on %s: unit %d is not of edition %d", name, l.GetNode(), u, n)
			}
		}
	}
}

// A leg that was away while snapshots were taken gets copies of them.
func TestSnapshotsAreCopiedToTheLegThatMissedThem(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		at := []int64{0, 1, 3, 7, 600, 601}
		m.put("c1", 1, 0, 1, 600)
		m.snapshot("mon")
		m.second.kill()
		m.put("c1", 2, 1, 3, 601)
		m.snapshot("tue")
		m.put("c1", 3, 7, 600)
		if err := block.Do(m.users.device("c1").volume, &block.IO{Op: block.OpWriteZeroes, Unmap: true, Off: 0, Len: 64 << 10}); err != nil {
			t.Fatal(err)
		}
		m.snapshot("wed")
		m.put("c1", 4, at...)
		m.second.start()
		m.attachedAndHealthy()
		m.copiesOfSnapshot("mon", "", at, []uint64{1, 1, 0, 0, 1, 0})
		m.copiesOfSnapshot("tue", "", at, []uint64{1, 2, 2, 0, 1, 2})
		m.copiesOfSnapshot("wed", "", at, []uint64{0, 0, 0, 0, 3, 2})
	})
}

// A drive with copies of snapshots is drained, of volumes that are thin and of others, although the target
// to which they are copied dies on the way: they are copied elsewhere first, and nothing is left on the drive.
func TestADriveWithCopiesOfSnapshotsIsDrained(t *testing.T) {
	for name, set := range map[string]func(*cluster){"thin": thin, "not thin": func(c *cluster) { c.roomForSnapshots() }} {
		t.Run(name, func(t *testing.T) {
			sparedAs(t, set, func(m *mirror, spare *targetHost) {
				at := []int64{0, 1, 3, 600, 601}
				m.put("c1", 1, 0, 1, 600)
				m.snapshot("mon")
				m.put("c1", 2, 1, 3, 601)
				m.snapshot("tue")
				m.put("c1", 3, at...)
				drive := m.volume().GetLegs()[1].GetDriveId()
				m.eventually("drain", func(ctx context.Context) error {
					_, err := m.operator.DrainDrive(ctx, &pb.DrainDriveRequest{DriveId: drive})
					return err
				})
				time.Sleep(12 * time.Second)
				spare.kill()
				m.put("c1", 4, at...)
				spare.start()
				m.copiesOfSnapshot("mon", m.second.name, at, []uint64{1, 1, 0, 1, 0})
				m.copiesOfSnapshot("tue", m.second.name, at, []uint64{1, 2, 2, 1, 2})
				m.eventually("nothing is left there", func(ctx context.Context) error {
					all, err := m.operator.ListVolumes(ctx, &pb.ListVolumesRequest{})
					snapshots, err2 := m.operator.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true})
					for _, v := range append(all.GetVolumes(), snapshots.GetVolumes()...) {
						for _, l := range v.GetLegs() {
							if l.GetDriveId() == drive {
								return fmt.Errorf("%s has %v there", v.GetName(), l)
							}
						}
					}
					return errors.Join(err, err2)
				})
				m.holds("c1", 4, at...)
			})
		})
	}
}

// A new copy of a thin volume is copied only where the volume has data, under writes and discards to
// all of it.
func TestANewCopyOfAThinVolumeIsCopiedWhereThereIsData(t *testing.T) {
	sparedAs(t, thin, func(m *mirror, spare *targetHost) {
		m.put("c1", 1, 0, 1, 300*256, 600*256)
		m.second.kill()
		time.Sleep(14 * time.Minute)
		device := m.users.device("c1").volume
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			r := rand.New(rand.NewPCG(1, 2))
			for n := uint64(2); !closed(stop); n++ {
				io := block.IO{Op: block.OpWrite, Off: ((1+r.Int64N(80))*40 + 8) << 20, Len: unit, Data: edition(n)}
				if n%3 == 0 {
					io.Op, io.Len, io.Data = block.OpDiscard, 1<<20, nil
				}
				if err := block.Do(device, &io); err != nil {
					t.Error(err)
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		}()
		time.Sleep(2 * time.Minute)
		m.second.start() // its leg is given up, and freed now
		m.copiesOn(m.first, spare)
		close(stop)
		<-ended
		copied := m.copiedTo(spare)
		if len(copied) != 1 || copied[0] < 3*16*block.KiB || copied[0] > 16*block.MiB {
			t.Errorf("the copy of %v has got %v, want some hundred KiB", m.cluster.size, copied)
		}
		m.did("%v were copied", copied)
		m.sameCopies()
		m.holdsWithout(m.first, 1, 0, 1, 300*256, 600*256)
	})
}

// The comparison of thin copies notices a byte that differs, and a record that one copy has lost.
func TestThinCopiesThatDifferAreNoticed(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		m.put("c1", 1, 0, 300*256)
		m.flush("c1")
		m.sameCopies()
		l := m.leg(m.first)
		id, err := block.ParseUUID(l.GetId())
		if err != nil {
			t.Fatal(err)
		}
		drive := m.first.platter.file
		tree, err := treeOn(drive, id)
		if err != nil {
			t.Fatal(err)
		}
		home := treecheck.FirstExtent + int64(tree.Home)*int64(block.ExtentSize)
		was := make([]byte, 64)
		put := func(p []byte, at ...int64) {
			m.first.platter.set(func() {
				for _, off := range at {
					if _, err := drive.WriteAt(p, off); err != nil {
						t.Error(err)
					}
				}
			})
		}
		// The first chunk that is written is in slot 3, and slot n has its records at n times 64 in both
		// tables.
		record := home + 64<<10 + 3*64
		for what, at := range map[string][]int64{
			"differs at unit 0":             {home + 3<<20 + 100},
			"both copies of the record are": {record, record + 448<<10},
		} {
			if _, err := drive.ReadAt(was, at[0]); err != nil {
				t.Fatal(err)
			}
			put(bytes.Repeat([]byte{0xa5}, len(was)), at...)
			if found := m.compareCopies(context.Background()); found == nil || !strings.Contains(found.Error(), what) {
				t.Errorf("the comparison says %v, want %q", found, what)
			}
			put(was, at...)
		}
		m.sameCopies()
	})
}

// The process of a target that serves a thin leg is replaced by its next one while the leg's tree
// grows, again and again: no write waits for longer than 0.1 s, no copy falls behind, and both trees
// have everything. Then the drives are full: a write waits through the handovers of both targets, and
// goes on when there is space, although one of the next processes has died.
func TestThinLegsAreHandedOverUnderWrites(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		m.attachedAndHealthy()
		before := m.revisions()
		device := m.users.device("c1").volume
		stop, ended := make(chan struct{}), make(chan int64)
		var longest time.Duration
		go func() { // to new places, and to old ones
			var n int64
			for ; !closed(stop); n++ {
				began := time.Now()
				for _, at := range []int64{n << 20, n/2<<20 + unit} {
					if err := block.WriteAt(device, edition(uint64(n)+1), at); err != nil {
						t.Errorf("chunk %d: %v", n, err)
					}
				}
				longest = max(longest, time.Since(began))
				time.Sleep(5 * time.Millisecond)
			}
			ended <- n
		}()
		for range 6 {
			for _, h := range []*targetHost{m.first, m.second} {
				h.handOver(true)
				time.Sleep(200 * time.Millisecond)
			}
		}
		close(stop)
		n := <-ended
		if n < 256 {
			t.Errorf("%d chunks were written: no tree had to grow", n)
		}
		if longest > 100*time.Millisecond {
			t.Errorf("the longest of %d writes took %v", 2*n, longest)
		}
		if after := m.revisions(); !slices.Equal(after, before) {
			t.Errorf("the legs were %v, and are %v", before, after)
		}
		m.sameCopies()

		written := make(chan int64, 8)
		go m.chunks(7, n, 2100, written)
		last, stopped := stops(written, 20*time.Second)
		if !stopped {
			t.Fatalf("no drive is full after chunk %d", last)
		}
		for _, h := range []*targetHost{m.second, m.first, m.second} {
			began := time.Now()
			h.handOver(true)
			if err := block.ReadAt(device, make([]byte, unit), 0); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took > 200*time.Millisecond {
				t.Errorf("%v hands over a full drive, and a read is answered after %v", h, took)
			}
			if more, stopped := stops(written, 10*time.Second); !stopped || more > 0 {
				t.Errorf("chunk %d was written on a full drive", more)
			}
		}
		m.told("volume.full", 2)
		m.told("volume.room", 0)
		if after := m.revisions(); !slices.Equal(after, before) {
			t.Errorf("the legs were %v, and are %v, with full drives", before, after)
		}
		m.second.handOver(false)
		m.discard(0, 50)
		if more, _ := stops(written, 20*time.Second); more < last+40 {
			t.Errorf("after 50 chunks were discarded, writes stop after chunk %d; before it was %d", more, last)
		}
		m.attachedAndHealthy()
		m.sameCopies()
		m.discard(n+1, n+900)
		if more, stopped := stops(written, 20*time.Second); stopped {
			t.Errorf("most is discarded, and writes stop after chunk %d", more)
		}
		m.attachedAndHealthy()
		m.sameCopies()
		for _, lost := range []*targetHost{m.first, m.second} {
			m.attachedAndHealthy()
			lost.kill()
			for c := int64(50); c < n; c++ {
				m.holdsAt("c1", uint64(c)+1, c<<20)
			}
			lost.start()
		}
	})
}

// holdsAt checks that a unit is of an edition.
func (m *mirror) holdsAt(client string, number uint64, at int64) {
	m.t.Helper()
	got := make([]byte, unit)
	if err := block.ReadAt(m.users.device(client).volume, got, at); err != nil || !bytes.Equal(got, edition(number)) {
		m.t.Errorf("at %d is %s, want edition %d: %v", at, numbers(got), number, err)
	}
}

// told checks how many events of a kind there are.
func (m *mirror) told(kind string, want int) {
	m.t.Helper()
	events, err := m.operator.ListEvents(context.Background(), &pb.ListEventsRequest{})
	if err != nil {
		m.t.Fatal(err)
	}
	n := 0
	for _, e := range events.GetEvents() {
		if e.GetKind() == kind {
			n++
		}
	}
	if n != want {
		m.t.Errorf("%d events %s, want %d", n, kind, want)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

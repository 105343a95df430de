// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
)

// Drives are filled to the last chunk of a tree, while all faults go on: volumes that are not thin take the
// free extents, and a large clone of a snapshot takes the space that is left in the trees that it shares
// with it. All writes that need space there wait, and no user may see more of it than that.

const (
	hoard       = 4 * block.GiB          // the size of the clone
	hoarders    = 8                      // how many writes it has under way
	hoardWaits  = 3 * time.Second        // a write that takes longer waits for space
	hoardsFor   = 30 * time.Second       // the longest that drives are full
	hoardsChunk = int64(block.MiB)       // a chunk of a tree, which one write takes
	hoardFrom   = int64(256 * block.MiB) // nothing of the snapshot is here
)

// fillDrives fills the drives, and has the space come free again later.
func (r *chaos) fillDrives() string {
	c, k := r.cluster, r.cluster.archive
	p := k.pick(r.random, func(*picture) bool { return true })
	if p == nil || r.due(spaceIsFree) || c.leader() == nil {
		return ""
	}
	k.mu.Lock()
	k.next++
	number := k.next
	k.mu.Unlock()
	host := c.clients[r.random.IntN(len(c.clients))].name
	name := block.VolumeName(fmt.Sprintf("f%d", number))
	f := &filling{archive: k, clone: name, host: host, stop: make(chan struct{}), full: make(chan struct{})}
	end, ok := k.begun("fill drives by %s", name)
	if !ok {
		return ""
	}
	k.work.Go(func() {
		defer end()
		f.fill(p)
		select {
		case <-f.stop:
			f.free()
		case <-k.ended.Done():
		}
	})
	r.later(hoardsFor, spaceIsFree, func() { close(f.stop) })
	r.later(hoardsFor, "drives may be full", func() { // then a leg is copied to, or copies are made equal
		if closed(f.full) && !closed(f.stop) {
			c.did("while drives are full, %s", []func() string{r.killTarget, r.killClient}[r.random.IntN(2)]())
		}
	})
	return fmt.Sprintf("the drives are filled, by %s, a clone of %s", name, p.name)
}

const spaceIsFree = "there is space again"

// filling is volumes that take all the space.
type filling struct {
	archive *archive
	clone   block.VolumeName
	host    string
	plain   []string
	stop    chan struct{} // closed when the space shall come free
	full    chan struct{} // closed when there is none
}

func (f *filling) over() bool { return closed(f.stop) || f.archive.ended.Err() != nil }

// try repeats something until it succeeds, is refused, or the time is over.
func (f *filling) try(do func(ctx context.Context) error) (err error) {
	for !f.over() {
		ctx, cancel := context.WithTimeout(f.archive.ended, time.Second)
		err = do(ctx)
		cancel()
		if err == nil || refuses(err) {
			return err
		}
		f.archive.sleep(100 * time.Millisecond)
	}
	return context.Canceled
}

// fill takes all free extents, and then all that is left in the trees of a snapshot.
func (f *filling) fill(p *picture) {
	k := f.archive
	for full := false; !full && len(f.plain) < 40; {
		name := fmt.Sprintf("%s-%d", f.clone, len(f.plain))
		f.plain = append(f.plain, name)
		full = f.try(func(ctx context.Context) error {
			_, err := k.api.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: uint64(block.ExtentSize), Copies: 1, Stripes: 1})
			return err
		}) != nil
	}
	err := f.try(func(ctx context.Context) error {
		v, err := k.api.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: string(f.clone), From: string(p.name), SizeBytes: uint64(hoard)})
		if err == nil && v.GetState() != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.GetState())
		}
		return err
	})
	if err != nil {
		k.cluster.did("%s is no clone of %s: %v", f.clone, p.name, err)
		return
	}
	err = f.try(func(ctx context.Context) error {
		_, err := k.api.Attach(ctx, &pb.AttachRequest{Volume: string(f.clone), Node: f.host})
		if err == nil && k.export(f.clone, f.host) == nil {
			err = fmt.Errorf("%s has no device", f.host)
		}
		return err
	})
	if d := k.export(f.clone, f.host); err == nil && d != nil {
		f.write(d)
	}
}

// write writes to one chunk after the other until there is no space left.
func (f *filling) write(d *export) {
	k := f.archive
	var written atomic.Int64
	var writers sync.WaitGroup
	for i := range int64(hoarders) {
		writers.Go(func() {
			for at := hoardFrom + i*hoardsChunk; at < int64(hoard) && f.writeAt(d, at); at += hoarders * hoardsChunk {
				written.Add(1)
			}
		})
	}
	writers.Wait()
	if !f.over() && k.waitsForSpace(f.clone) {
		k.cluster.did("%s is full, after %d chunks", f.clone, written.Load())
		k.count("full")
		close(f.full)
		f.watch()
	}
}

// writeAt writes to one chunk; false if that takes long, or fails.
func (f *filling) writeAt(d *export, at int64) bool {
	done := make(chan error, 1)
	d.at.awake()
	d.volume.Submit(&block.IO{Op: block.OpWrite, Off: at, Len: unit, Data: slices.Repeat([]byte{0xf1}, unit), Done: func(io *block.IO) { done <- io.Err }})
	select {
	case err := <-done:
		return err == nil && !f.over()
	case <-d.dead:
	case <-f.stop:
	case <-time.After(hoardWaits):
	}
	return false
}

// waitsForSpace reports whether the manager says that a leg of a volume waits for space.
func (k *archive) waitsForSpace(name block.VolumeName) bool {
	ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
	defer cancel()
	v, err := k.volume(ctx, name)
	return err == nil && slices.ContainsFunc(v.GetLegs(), (*pb.Leg).GetFull)
}

// watch counts what waits for space beside writes, for as long as drives are full.
func (f *filling) watch() {
	k, seen := f.archive, map[string]bool{}
	for !f.over() {
		ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
		list, _ := k.api.ListVolumes(ctx, &pb.ListVolumesRequest{})
		cancel()
		for _, v := range list.GetVolumes() {
			for _, l := range v.GetLegs() {
				seen["copied to without space"] = seen["copied to without space"] || l.GetFull() && l.GetState() == pb.LegState_LEG_STATE_REBUILDING
			}
			waits := v.GetAttachment().GetWaitingFor()
			seen["made equal without space"] = seen["made equal without space"] || strings.Contains(waits, "space for what another copy has")
		}
		k.sleep(500 * time.Millisecond)
	}
	for what, was := range seen {
		if was {
			k.count(what)
		}
	}
}

// noneLostForSpace finds a host that has a leg recorded as stale because the leg has no space.
func (c *cluster) noneLostForSpace(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	if r, ok := request.(*pb.RecordStaleRequest); ok {
		for _, l := range r.GetLegs() {
			if text := l.GetText(); strings.Contains(text, nvmetcp.CapacityExceeded.Error()) || strings.Contains(text, block.ErrFull.Error()) {
				c.t.Errorf("%s gives up leg %s for lack of space: %s", r.GetNode(), l.GetLegId(), text)
			}
		}
	}
	return next(ctx, method, request, reply, conn, o...)
}

// free deletes what took the space.
func (f *filling) free() {
	k := f.archive
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		_, err := k.api.Detach(ctx, &pb.DetachRequest{Volume: string(f.clone), Node: f.host, Force: true})
		if err != nil && !refuses(err) {
			return false, err
		}
		v, err := k.volume(ctx, f.clone)
		return v.GetAttachment() == nil, ignoreAbsent(err)
	})
	for _, name := range append(f.plain, string(f.clone)) {
		k.remove(block.VolumeName(name))
	}
	k.cluster.did("%s and what else filled the drives is gone", f.clone)
}

func ignoreAbsent(err error) error {
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// crowd fills the second target's drive with volumes that are not thin, and returns what makes room again.
// The volume's leg there keeps what its tree and the drive's reserve have.
func (m *mirror) crowd() (leave func()) {
	m.t.Helper()
	var there []string
	for i := range 40 {
		name := fmt.Sprintf("crowd-%d", i)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		_, err := m.operator.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: uint64(block.ExtentSize), Copies: 1, Stripes: 1})
		cancel()
		if err != nil {
			break // there is no room anywhere
		}
		there = append(there, name)
	}
	remove := func(name string) {
		m.eventually("delete "+name, func(ctx context.Context) error {
			_, err := m.operator.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: name})
			return ignoreAbsent(err)
		})
	}
	there = slices.DeleteFunc(there, func(name string) bool {
		v, err := m.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: name})
		if err != nil {
			m.t.Fatal(err)
		}
		if v.GetLegs()[0].GetNode() == m.second.name {
			return false
		}
		remove(name)
		return true
	})
	if len(there) == 0 {
		m.t.Fatal("nothing has come onto the second drive")
	}
	return func() {
		for _, name := range there {
			remove(name)
		}
	}
}

// A copy to a full drive waits, says so, holds nobody up, and goes on when there is space: the host needs no
// manager for that, and the copy does not begin anew.
func TestACopyToAFullDriveWaits(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		written := make(chan int64, 8)
		go m.chunks(1, 0, 100, written)
		if last, stopped := stops(written, 20*time.Second); stopped {
			t.Fatalf("writes stop after chunk %d", last)
		}
		m.attachedAndHealthy()
		leave := m.crowd()
		m.second.kill()
		written = make(chan int64, 8)
		go m.chunks(2, 50, 900, written)
		if last, stopped := stops(written, 20*time.Second); stopped {
			t.Fatalf("without the second copy, writes stop after chunk %d\n%s", last, m.explain())
		}
		m.second.start()
		m.eventually("the copy waits for space", func(context.Context) error {
			if text := m.explain(); !strings.Contains(text, "it waits for space on its drive") || !strings.Contains(text, "what is copied to it waits, and users do not") {
				return fmt.Errorf("it is not explained: %s", text)
			}
			return nil
		})
		revision := m.leg(m.second).GetRevision()
		began := time.Now()
		for c := int64(900); c < 1000; c++ {
			if err := block.WriteAt(m.users.device("c1").volume, edition(3), c<<20); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("100 writes to new places took %v", took)
		}
		time.Sleep(5 * time.Minute)
		if l := m.leg(m.second); l.GetState() != pb.LegState_LEG_STATE_REBUILDING || l.GetRevision() != revision {
			t.Errorf("after five minutes the leg is %v at revision %d, it was at %d", l.GetState(), l.GetRevision(), revision)
		}
		leave()
		m.attachedAndHealthy()
		m.first.kill()
		for c, number := range map[int64]uint64{0: 1, 49: 1, 50: 2, 899: 2, 900: 3, 999: 3} {
			m.holdsAt("c1", number, c<<20)
		}
	})
}

// A client dies while its writes are on one copy and wait for space on the other. The copies are made equal
// although there is none: the next host has the volume at once, with both copies in sync.
func TestCopiesAreMadeEqualOnAFullDrive(t *testing.T) {
	mirrored(t, thin, func(m *mirror) {
		m.attachedAndHealthy()
		m.crowd()
		var writers sync.WaitGroup
		d := m.users.device("c1")
		for i := range int64(hoarders) {
			writers.Go(func() {
				f := &filling{archive: &archive{cluster: m.cluster, ended: t.Context()}, stop: make(chan struct{})}
				for at := i * hoardsChunk; at < int64(m.size) && f.writeAt(d, at); at += hoarders * hoardsChunk {
				}
			})
		}
		writers.Wait() // each has a write that waits
		if a, b := m.leg(m.first), m.leg(m.second); a.GetFull() || !b.GetFull() {
			t.Fatalf("the leg on %s is full: %v, and that on %s: %v", a.GetNode(), a.GetFull(), b.GetNode(), b.GetFull())
		}
		m.clients[0].kill()
		began := time.Now()
		m.takenTo(m.clients[1], m.clients[0])
		m.attachedAndHealthy()
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("the next host has the volume after %v", took)
		}
		m.told("leg.stale", 0)
		m.detach(m.clients[1], false)
		m.sameCopies()
	})
}

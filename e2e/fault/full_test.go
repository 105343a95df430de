// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
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
	f := &filling{archive: k, clone: name, host: host, stop: make(chan struct{})}
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

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"reflect"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

// listing is a device that keeps a list of writes.
type listing struct {
	block.Device

	mu    sync.Mutex
	log   nvmetcp.WrittenLog
	got   []nvmetcp.Checkpoint
	err   error
	reads int
	moves int // the list is of another checkpoint after so many reads
}

func (d *listing) Checkpoint(k nvmetcp.Checkpoint) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.got = append(d.got, k)
	return d.err
}

func (d *listing) Written() (nvmetcp.WrittenLog, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reads++; d.reads == d.moves {
		d.log.Committed++
	}
	return d.log, d.err
}

// now lets f use the device's fields while the target may.
func (d *listing) now(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func TestAListOfWritesIsReadWhole(t *testing.T) {
	d := &listing{Device: ramdisk.New(block.MiB, blocks), log: nvmetcp.WrittenLog{Committed: 7, Begun: 8, Region: 65536, Words: 60_000}}
	for i := range d.log.Words {
		d.log.Regions = append(d.log.Regions, i*i)
	}
	w := newWorld(t, d)
	n := space(t, connect(t, w.config()), uuidA)
	d.now(func() {
		d.log.Behind = &nvmetcp.Behind{Since: 3, Ranges: [][2]int64{{0, 1 << 20}, {3 << 20, 1 << 40}}}
		d.log.BehindLen = 48
	})
	got, err := n.Written(t.Context())
	d.now(func() {
		if err != nil || !reflect.DeepEqual(got, d.log) {
			t.Errorf("Written: %d words, %v; want the %d of the device", len(got.Regions), err, len(d.log.Regions))
		}
	})
	d.now(func() { d.moves = d.reads + 3 })
	if _, err := n.Written(t.Context()); err == nil {
		t.Error("Written while a checkpoint is taken: no error")
	}
	d.now(func() { d.log = nvmetcp.WrittenLog{Words: mostWords + 1} })
	if _, err := n.Written(t.Context()); !errors.Is(err, block.ErrRange) {
		t.Errorf("Written of an endless list: %v, want %v", err, block.ErrRange)
	}
}

func TestCheckpointsReachTheDevice(t *testing.T) {
	d := &listing{Device: ramdisk.New(block.MiB, blocks)}
	w := newWorld(t, d)
	n := space(t, connect(t, w.config()), uuidA)
	for _, commit := range []bool{false, true} {
		if err := n.Checkpoint(t.Context(), commit, 1<<40+5); err != nil {
			t.Error(err)
		}
	}
	lacks := nvmetcp.Behind{Since: 1 << 50}
	for i := range int64(nvmetcp.MostBehind) {
		lacks.Ranges = append(lacks.Ranges, [2]int64{i << 40, i<<40 + 65536})
	}
	if err := n.CheckpointBehind(t.Context(), true, 9, lacks); err != nil {
		t.Error(err)
	}
	want := []nvmetcp.Checkpoint{{NSID: 1, Token: 1<<40 + 5}, {NSID: 1, Token: 1<<40 + 5, Commit: true}, {NSID: 1, Token: 9, Commit: true, Behind: &lacks}}
	d.now(func() {
		if !reflect.DeepEqual(d.got, want) {
			t.Errorf("the device got %+v, want %+v", d.got, want)
		}
	})
	for what, ranges := range map[string][][2]int64{
		"ranges out of order": {{65536, 131072}, {0, 65536}}, "an empty range": {{65536, 65536}}, "a negative range": {{-65536, 65536}},
		"too many ranges": append(lacks.Ranges, [2]int64{1 << 60, 1 << 61}),
	} {
		if err := n.CheckpointBehind(t.Context(), true, 10, nvmetcp.Behind{Ranges: ranges}); err == nil {
			t.Errorf("a checkpoint with %s: no error", what)
		}
	}
	if err := n.Checkpoint(t.Context(), false, 0); err == nil {
		t.Error("a checkpoint without a token: no error")
	}
	d.now(func() { d.err = errors.New("not now") })
	if err := n.Checkpoint(t.Context(), false, 6); !errors.Is(err, nvmetcp.CommandSequenceError) {
		t.Errorf("a checkpoint that the device refuses: %v, want %v", err, nvmetcp.CommandSequenceError)
	}
	if _, err := n.Written(t.Context()); err == nil {
		t.Error("a list that the device refuses: no error")
	}
}

func TestADeviceWithoutAListSaysSo(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks))
	n := space(t, connect(t, w.config()), uuidA)
	if err := n.Checkpoint(t.Context(), false, 5); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("a checkpoint without a list: %v, want %v", err, block.ErrUnsupported)
	}
	if err := n.CheckpointBehind(t.Context(), false, 5, nvmetcp.Behind{}); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("a checkpoint of a copy without a list: %v, want %v", err, block.ErrUnsupported)
	}
	if _, err := n.Written(t.Context()); !errors.Is(err, nvmetcp.InvalidLogPage) {
		t.Errorf("the list of a device without one: %v, want %v", err, nvmetcp.InvalidLogPage)
	}
}

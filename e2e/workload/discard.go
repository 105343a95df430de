// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// grain is how many blocks are discarded at a time: 16 KiB, which a thin volume gives back.
const grain = 4

// discard discards grains of the last quarter of the span until ctx ends, o.discards per second.
func (w *writer) discard(ctx context.Context, f disk, o options) {
	from, end := o.discardable()
	for ctx.Err() == nil {
		start := time.Now()
		if first, ok := w.takeGrain(from, end); ok {
			err := discardAt(f, int64(first*blockSize), grain*blockSize)
			w.discarded(first, start, time.Now(), err)
		}
		pause(ctx, time.Second/time.Duration(o.discards)-time.Since(start))
	}
}

// discardable are the grains from one to before another that are discarded.
func (o options) discardable() (from, end uint64) {
	end = o.blocks / grain
	return end - end/4, end
}

// takeGrain returns the first block of a grain, and keeps its blocks from being written; false if one of them is being
// written now.
func (w *writer) takeGrain(from, end uint64) (first uint64, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first = (from + w.rand.Uint64N(end-from)) * grain
	for n := first; n < first+grain; n++ {
		if w.busy[n] {
			return 0, false
		}
	}
	for n := first; n < first+grain; n++ {
		w.busy[n], w.blank[n] = true, true
		fmt.Fprintf(w.out, "d %d\n", n)
	}
	return first, true
}

func (w *writer) discarded(first uint64, start, end time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n := first; n < first+grain; n++ {
		delete(w.busy, n)
	}
	switch {
	case err == nil:
		fmt.Fprintf(w.out, "D %d %d %d\n", first, start.UnixNano(), end.UnixNano())
	case !errors.Is(err, unix.EOPNOTSUPP): // the device takes none while a leg is lost
		fmt.Fprintf(w.out, "E %d 0 %d %d discard: %v\n", first, start.UnixNano(), end.UnixNano(), err)
	}
}

// discardAt discards a part of a block device, or of a file.
func discardAt(d disk, off, length int64) error {
	f, ok := d.(*os.File)
	if !ok {
		return fmt.Errorf("discard: only block devices and files can, not %T", d)
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Mode().IsRegular() {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length)
	}
	part := [2]uint64{uint64(off), uint64(length)}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&part))); errno != 0 {
		return errno
	}
	return nil
}

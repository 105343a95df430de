// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"weft.dev/weft/proto/block"
)

// roomKept is what the drives of dev leave free on the file system: they are
// sparse, and the manager's store, which is beside them, does not survive a write
// that finds no room (Badger maps its files into memory).
const roomKept block.Size = 128 << 20

// room watches how much is free where a directory is. Its methods may be called
// concurrently.
type room struct {
	dir    string
	tell   func(format string, args ...any) // the user, when it becomes scarce, and when it is there again; may be nil
	asked  atomic.Int64                     // when, in ns
	scarce atomic.Bool
}

// roomAge is for how long an answer is taken for true.
const roomAge = 10 * time.Millisecond

// isScarce reports whether less than roomKept is free. What cannot be known is
// not scarce.
func (r *room) isScarce() bool {
	now := time.Now().UnixNano()
	if asked := r.asked.Load(); now-asked < int64(roomAge) || !r.asked.CompareAndSwap(asked, now) {
		return r.scarce.Load()
	}
	free, err := freeSpace(r.dir)
	scarce := err == nil && free < roomKept
	if r.scarce.Swap(scarce) != scarce && r.tell != nil {
		if scarce {
			r.tell("less than %v is free in %s: writes wait until there is more space", roomKept, r.dir)
		} else {
			r.tell("%s has space again: writes continue", r.dir)
		}
	}
	return scarce
}

func freeSpace(dir string) (block.Size, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("read the free space of %s: %w", dir, err)
	}
	return block.Size(s.Bavail * uint64(s.Bsize)), nil
}

// roomyDrive is a drive that takes no more writes when room is scarce.
type roomyDrive struct {
	block.Device
	room *room
}

func (d *roomyDrive) Submit(io *block.IO) {
	if (io.Op == block.OpWrite || io.Op == block.OpWriteZeroes && !io.Unmap) && d.room.isScarce() {
		io.Complete(fmt.Errorf("%w: less than %v is free in %s: %w", block.ErrMedium, roomKept, d.room.dir, syscall.ENOSPC))
		return
	}
	d.Device.Submit(io)
}

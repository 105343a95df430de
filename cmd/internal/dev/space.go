// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"weft.dev/weft/proto/block"
)

// spaceReserve is the space that the drives of dev leave free on the file system. The drives are sparse, and
// the manager's store beside them does not survive a write that finds no space (Badger maps its
// files into memory).
const spaceReserve block.Size = 128 << 20

// spaceGuard watches the free space of a directory's file system. Its methods may be called
// concurrently.
type spaceGuard struct {
	dir    string
	tell   func(format string, args ...any) // when space becomes scarce, and when it is back; may be nil
	asked  atomic.Int64                     // when, in ns
	scarce atomic.Bool
}

// spaceAge is how long an answer stays valid.
const spaceAge = 10 * time.Millisecond

// isScarce reports whether less than spaceReserve is free; false if that is unknown.
func (g *spaceGuard) isScarce() bool {
	now := time.Now().UnixNano()
	if asked := g.asked.Load(); now-asked < int64(spaceAge) || !g.asked.CompareAndSwap(asked, now) {
		return g.scarce.Load()
	}
	free, err := freeSpace(g.dir)
	scarce := err == nil && free < spaceReserve
	if g.scarce.Swap(scarce) != scarce && g.tell != nil {
		if scarce {
			g.tell("less than %v is free in %s: writes wait until there is more space", spaceReserve, g.dir)
		} else {
			g.tell("%s has space again: writes continue", g.dir)
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

// guardedDrive is a drive that accepts no writes while space is scarce.
type guardedDrive struct {
	block.Device
	space *spaceGuard
}

func (d *guardedDrive) Submit(io *block.IO) {
	if (io.Op == block.OpWrite || io.Op == block.OpWriteZeroes && !io.Unmap) && d.space.isScarce() {
		io.Complete(fmt.Errorf("%w: less than %v is free in %s: %w", block.ErrMedium, spaceReserve, d.space.dir, syscall.ENOSPC))
		return
	}
	d.Device.Submit(io)
}

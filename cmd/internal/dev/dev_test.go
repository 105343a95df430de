// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
)

func TestAnUnusableBlockDeviceIsRefusedWithTheReason(t *testing.T) {
	missing := []blockdev.Ability{
		{Kind: blockdev.UBLK, Reason: "no driver", Fix: "modprobe ublk_drv"},
		{Kind: blockdev.FUSE, Reason: "there is no /dev/fuse"},
	}
	there := append([]blockdev.Ability{{Kind: blockdev.NBD, Usable: true}}, missing...)
	for _, c := range []struct {
		wish      string
		abilities []blockdev.Ability
		kind      blockdev.Kind
		none, err string
	}{
		{wish: "auto", abilities: there, kind: blockdev.NBD},
		{wish: "nbd", abilities: there, kind: blockdev.NBD},
		{wish: "auto", abilities: missing, none: "there is no /dev/fuse"},
		{wish: "none", abilities: there, none: "--block-device none"},
		{wish: "ublk", abilities: there, err: "no driver; to enable it: modprobe ublk_drv"},
		{wish: "paper", abilities: there, err: "paper"},
	} {
		kind, none, err := chooseDevice(c.wish, c.abilities)
		switch {
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%s: error %v, want %q", c.wish, err, c.err)
		case c.err == "" && (err != nil || kind != c.kind || none != c.none):
			t.Errorf("%s = %q, %q, %v; want %q, %q", c.wish, kind, none, err, c.kind, c.none)
		}
	}
}

// acceptor is a device that accepts everything.
type acceptor struct{ block.Device }

func (acceptor) Submit(io *block.IO) { io.Complete(nil) }

func TestADriveTakesNoWritesWhereSpaceIsScarce(t *testing.T) {
	r := &spaceGuard{dir: t.TempDir()}
	drive := &guardedDrive{acceptor{}, r}
	r.scarce.Store(true)
	r.asked.Store(time.Now().Add(time.Hour).UnixNano()) // the answer stays valid
	p := make([]byte, 4096)
	if err := block.WriteAt(drive, p, 0); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("write = %v, want ENOSPC", err)
	}
	if err := block.Do(drive, &block.IO{Op: block.OpWriteZeroes, Len: 4096}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("zeroes that take space = %v, want ENOSPC", err)
	}
	for _, frees := range []*block.IO{{Op: block.OpWriteZeroes, Unmap: true, Len: 4096}, {Op: block.OpDiscard, Len: 4096}, {Op: block.OpFlush}} {
		if err := block.Do(drive, frees); err != nil {
			t.Errorf("%v, which takes no space = %v", frees.Op, err)
		}
	}
	if err := block.ReadAt(drive, p, 0); err != nil {
		t.Errorf("read = %v", err)
	}
	r.asked.Store(0)
	if free, err := freeSpace(r.dir); err != nil || free < 2*spaceReserve {
		t.Skipf("%v free here (%v)", free, err)
	}
	if err := block.WriteAt(drive, p, 0); err != nil {
		t.Errorf("write when there is space again = %v", err)
	}
}

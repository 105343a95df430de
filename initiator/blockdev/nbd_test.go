// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// client is the kernel's end of a link.
type client struct {
	t *testing.T
	f *os.File
}

func startLink(t *testing.T, disk block.Device) client {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	l := newNBDLink(pair[0], newGate(disk))
	go func() { defer close(ended); l.run() }()
	f := os.NewFile(uintptr(pair[1]), "client")
	t.Cleanup(func() {
		f.Close()
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			t.Error("the link does not end with its other end")
		}
	})
	return client{t, f}
}

func (c client) send(command, flags uint16, handle uint64, off int64, n int, data []byte) {
	c.t.Helper()
	b := binary.BigEndian.AppendUint32(nil, nbdRequestMagic)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, command)
	b = binary.BigEndian.AppendUint64(b, handle)
	b = binary.BigEndian.AppendUint64(b, uint64(off))
	b = binary.BigEndian.AppendUint32(b, uint32(n))
	if _, err := c.f.Write(append(b, data...)); err != nil {
		c.t.Fatal(err)
	}
}

// receive reads a reply; lengths says how much data follows which handle.
func (c client) receive(lengths map[uint64]int) (handle uint64, status uint32, data []byte) {
	c.t.Helper()
	var head [nbdReplySize]byte
	if _, err := io.ReadFull(c.f, head[:]); err != nil {
		c.t.Fatal(err)
	}
	if m := binary.BigEndian.Uint32(head[:]); m != nbdReplyMagic {
		c.t.Fatalf("reply begins with %#x", m)
	}
	status, handle = binary.BigEndian.Uint32(head[4:]), binary.BigEndian.Uint64(head[8:])
	if status == 0 {
		data = make([]byte, lengths[handle])
		if _, err := io.ReadFull(c.f, data); err != nil {
			c.t.Fatal(err)
		}
	}
	return handle, status, data
}

func TestAnNBDLinkAnswersWhatWasAsked(t *testing.T) {
	disk := newMemDisk(plain)
	c := startLink(t, disk)
	want := make(map[uint64][]byte)
	lengths := make(map[uint64]int)
	for i := range uint64(64) {
		p := randomBytes((1 + rand.IntN(80)) * 4096) // some larger than the link's buffer
		want[1000+i] = p
		c.send(nbdWrite, nbdFUA*uint16(i%2), i, int64(i)<<19, len(p), p)
	}
	for range want {
		if handle, status, _ := c.receive(nil); status != 0 || handle >= 64 {
			t.Errorf("write %d ended with %d", handle, status)
		}
	}
	go func() {
		for i := range uint64(64) {
			c.send(nbdRead, 0, 1000+i, int64(i)<<19, len(want[1000+i]), nil)
		}
	}()
	for h, p := range want {
		lengths[h] = len(p)
	}
	for range want {
		if handle, status, got := c.receive(lengths); status != 0 || !bytes.Equal(got, want[handle]) {
			t.Errorf("read %d ended with %d and other data", handle, status)
		}
	}
	if got := disk.fuaWrites(); got != 32 {
		t.Errorf("%d writes with FUA, want 32", got)
	}
}

func TestAnNBDLinkPassesEverythingOn(t *testing.T) {
	disk := newMemDisk(plain)
	c := startLink(t, disk)
	p := randomBytes(1 << 20)
	if err := block.WriteAt(disk, p, 0); err != nil {
		t.Fatal(err)
	}
	for i, r := range []struct {
		command uint16
		n       int
		op      block.Op
		status  uint32
	}{
		{nbdFlush, 0, block.OpFlush, 0},
		{nbdTrim, 65536, block.OpDiscard, 0},
		{nbdWriteZeroes, 65536, block.OpWriteZeroes, 0},
		{nbdTrim, 1000, 0, uint32(unix.EINVAL)},
		{99, 4096, 0, uint32(unix.EOPNOTSUPP)},
	} {
		before := disk.count(r.op)
		c.send(r.command, 0, uint64(i), 131072, r.n, nil)
		if handle, status, _ := c.receive(nil); handle != uint64(i) || status != r.status {
			t.Errorf("command %d ended with %d, want %d", r.command, status, r.status)
		}
		if r.op != 0 && disk.count(r.op) != before+1 {
			t.Errorf("command %d is no %v", r.command, r.op)
		}
	}
}

func TestAnNBDLinkEndsAtNonsense(t *testing.T) {
	for what, b := range map[string][]byte{
		"no magic": make([]byte, 28),
		"too long": append([]byte{0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1}, bytes.Repeat([]byte{255}, 20)...),
	} {
		c := startLink(t, newMemDisk(plain))
		if _, err := c.f.Write(b); err != nil {
			t.Fatal(err)
		}
		if n, err := c.f.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("%s: read %d, %v; want the end", what, n, err)
		}
	}
}

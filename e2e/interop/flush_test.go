// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"fmt"
	"os/exec"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/target/backend"
)

// cached is a drive with a volatile cache that can keep a flush without an answer.
type cached struct {
	*ramdisk.Disk
	arrived chan *block.IO // the flushes that are kept

	mu   sync.Mutex
	keep bool
	done int // flushes that were carried out
}

func (d *cached) Geometry() block.Geometry {
	g := d.Disk.Geometry()
	g.VolatileCache = true
	return g
}

func (d *cached) Submit(io *block.IO) {
	d.mu.Lock()
	keep := d.keep && io.Op == block.OpFlush
	if io.Op == block.OpFlush && !keep {
		d.done++
	}
	d.mu.Unlock()
	if keep {
		d.arrived <- io
		return
	}
	d.Disk.Submit(io)
}

// keeps has d keep flushes, or no more, and returns how many it has carried out.
func (d *cached) keeps(keep bool) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.keep = keep
	return d.done
}

// flushesAreLost cuts the path to a drive while a flush is under way there, which then fails. Linux (6.1
// and 6.12) lets fsync succeed although no drive has carried out a flush: nvme_failover_req sends on the
// bios of a request, and the block layer's own flush has none (drivers/nvme/host/multipath.c). So Weft relies
// on flushes that it passes through itself, which end with an error.
func flushesAreLost(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}})
	d := &cached{Disk: ramdisk.New(8*mib, 4096), arrived: make(chan *block.IO, 100)}
	must(t, s.(*ourSubsystem).subsystem.AddNamespace(controller.NamespaceConfig{NSID: 2, UUID: block.UUIDFromRandom(newID(2)), Device: d}))
	p := newProxy(t, s.portal(0))
	c := l.connect(t, s, options{portals: []string{p.portal()}})
	path := c.path(2)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	cut := func(flush func() error) (carriedOut int, err error) {
		_, err = unix.Pwrite(fd, backend.Aligned(4096), 0)
		must(t, err)
		before := d.keeps(true)
		flushed := make(chan error, 1)
		go func() { flushed <- flush() }()
		lost := <-d.arrived
		p.refuseAll(true)
		eventually(t, "the host has noticed", func() bool { return !c.live(0) })
		lost.Complete(fmt.Errorf("lost with its connection: %w", block.ErrMedium))
		d.keeps(false)
		p.refuseAll(false)
		eventually(t, "the host is back", func() bool { return c.live(0) })
		err = <-flushed
		return d.keeps(false) - before, err
	}
	n, err := cut(func() error { return unix.Fsync(fd) })
	t.Logf("fsync: %v; flushes that were carried out meanwhile: %d", err, n)
	n, err = cut(func() error { return exec.Command("nvme", "flush", path, "-n", "2").Run() })
	if err == nil && n == 0 {
		t.Error("a flush that was passed through is said to be done, and was not carried out")
	}
}

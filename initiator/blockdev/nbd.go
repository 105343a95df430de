// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// How long the kernel waits for an answer, for the two ways to set up a device.
//
// With several connections, the kernel declares a connection dead if a request on it is not
// answered in time, and sends the request on another; so the timeout must never expire. But
// the same timeout delays the resending of requests that a dead process left unanswered. With
// one connection and a timeout of 0, the kernel only checks every nbdLook whether there is a
// new connection, and logs that the request may be stuck.
const (
	nbdNever       = 2_000_000 // s, 23 days; in the kernel's ticks it must fit 31 bits
	nbdLook        = 10 * time.Second
	nbdConnections = 4
)

// nbdDisk is a device of the nbd driver.
type nbdDisk struct {
	sys   system
	index uint32
	links []*nbdLink
	look  bool          // it can be resumed
	ended chan struct{} // no link is left
}

func exportNBD(_ context.Context, sys system, g *gate, o Options) (_ frontend, err error) {
	links := min(nbdConnections, runtime.GOMAXPROCS(0))
	if o.Resume != "" {
		links = 1
	}
	d := &nbdDisk{sys: sys, look: o.Resume != ""}
	theirs, err := d.serve(g, links)
	if err != nil {
		return nil, err
	}
	defer closeAll(theirs)
	c := nbdConfig{geometry: *g.geometry.Load(), sockets: theirs, mark: mark(o), resumable: d.look}
	err = unshared(func() error { d.index, err = nbdConnect(c); return err }, theirs...)
	if err != nil {
		d.hangUp()
		return nil, fmt.Errorf("connect an nbd device: %w", err)
	}
	d.tune(o)
	return d, nil
}

// resumeNBD takes over the device that a dead process left.
func resumeNBD(sys system, g *gate, o Options, disk string) (frontend, error) {
	index, err := nbdIndex(disk)
	if err != nil {
		return nil, err
	}
	if was := sys.diskText(disk, "queue/logical_block_size"); was != strconv.FormatUint(uint64(g.geometry.Load().BlockSize), 10) {
		return nil, fmt.Errorf("%s has blocks of %s bytes", disk, was)
	}
	d := &nbdDisk{sys: sys, index: index, look: true}
	if err := d.reconnect(g, o); err != nil {
		return nil, err
	}
	return d, nil
}

func (d *nbdDisk) reconnect(g *gate, o Options) error {
	theirs, err := d.serve(g, 1)
	if err != nil {
		return err
	}
	defer closeAll(theirs)
	c := nbdConfig{geometry: *g.geometry.Load(), sockets: theirs, mark: mark(o)}
	if err := unshared(func() error { return nbdReconfigure(d.index, c) }, theirs...); err != nil {
		d.hangUp()
		return fmt.Errorf("reconnect %s: %w", d.disk(), err)
	}
	return nil
}

// serve makes socket pairs and serves one end of each; the other ends are for the kernel.
func (d *nbdDisk) serve(g *gate, n int) (theirs []int, err error) {
	d.ended = make(chan struct{})
	var all sync.WaitGroup
	for range n {
		var pair [2]int
		_, err := serving.open(func() ([]int, error) {
			var err error
			pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			return pair[:1], err
		})
		if err != nil {
			closeAll(theirs)
			d.hangUp()
			return nil, fmt.Errorf("make a pair of sockets: %w", err)
		}
		theirs = append(theirs, pair[1])
		l := newNBDLink(pair[0], g)
		d.links = append(d.links, l)
		all.Go(l.run)
	}
	go func() { all.Wait(); close(d.ended) }()
	return theirs, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// hangUp ends the links.
func (d *nbdDisk) hangUp() {
	for _, l := range d.links {
		l.hangUp()
	}
}

// tune sets what affects speed only: the next user of the device inherits it.
func (d *nbdDisk) tune(o Options) {
	if err := d.sys.setDisk(d.disk(), "queue/max_sectors_kb", "1024"); err != nil {
		o.Log.Debug("size of requests not raised", "err", err)
	}
	if d.look {
		if err := d.sys.setDisk(d.disk(), "queue/io_timeout", strconv.FormatInt(nbdLook.Milliseconds(), 10)); err != nil {
			o.Log.Debug("timeout of a resumed device not lowered", "err", err)
		}
	}
}

func (d *nbdDisk) disk() string          { return fmt.Sprintf("nbd%d", d.index) }
func (d *nbdDisk) gone() <-chan struct{} { return d.ended }

// survival: the driver itself waits for another process, see nbdConfig.
func (d *nbdDisk) survival() ([]int, error) { return nil, nil }

func (d *nbdDisk) abandon() bool { return false }

func (d *nbdDisk) resize(s block.Size) error {
	g := d.links[0].gate.geometry.Load()
	geometry := *g
	geometry.Size = s
	c := nbdConfig{geometry: geometry, mark: d.sys.diskText(d.disk(), "backend")}
	return unshared(func() error { return nbdReconfigure(d.index, c) })
}

func (d *nbdDisk) stop(ctx context.Context) error {
	err := unshared(func() error {
		// While we hold it exclusively nobody can mount it.
		fd, err := unix.Open(d.sys.node(d.disk()), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.EBUSY) {
			return errOpened
		}
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return nbdDisconnect(d.index)
	})
	if err != nil {
		return err
	}
	d.hangUp()
	return d.sys.waitNBDFree(ctx, d.disk())
}

func (d *nbdDisk) sever(context.Context) error {
	err := unshared(func() error { return nbdDisconnect(d.index) })
	d.hangUp()
	return err
}

// waitNBDFree waits until the driver has released a device; users who still have it open can
// delay that for long.
func (s system) waitNBDFree(ctx context.Context, disk string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 200 {
		if !exists(filepath.Join(s.sys, "block", disk, "pid")) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s to be free: %w", disk, ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}

func nbdIndex(disk string) (uint32, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(disk, "nbd"), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s is not the name of an nbd device", disk)
	}
	return uint32(n), nil
}

// nbdsOf finds the nbd devices that carry a mark.
func (s system) nbdsOf(mark string) []string {
	files, _ := filepath.Glob(filepath.Join(s.sys, "block/nbd*/backend"))
	var all []string
	for _, f := range files {
		if disk := filepath.Base(filepath.Dir(f)); s.diskText(disk, "backend") == mark {
			all = append(all, disk)
		}
	}
	return all
}

// cleanNBD removes what a dead process left under a name.
func cleanNBD(ctx context.Context, sys system, o Options, r record) error {
	var errs []error
	for _, disk := range sys.nbdsOf(mark(o)) {
		o.Log.Info("removing a dead nbd device", "disk", disk)
		errs = append(errs, sys.hide(r.named(o), disk), failNBD(ctx, sys, o, disk))
	}
	return errors.Join(errs...)
}

// failNBD ends a device that is not served. Before Linux 6.6, I/O that waits for a connection
// keeps waiting after a disconnect; so failNBD gives the device a connection that fails
// everything.
func failNBD(ctx context.Context, sys system, o Options, disk string) error {
	index, err := nbdIndex(disk)
	if err != nil {
		return err
	}
	d := &nbdDisk{sys: sys, index: index}
	size, _ := strconv.ParseUint(sys.diskText(disk, "size"), 10, 64)
	blockSize, _ := strconv.ParseUint(sys.diskText(disk, "queue/logical_block_size"), 10, 64)
	g := newGate(deadDevice{block.Geometry{Size: block.Size(size) * block.SectorSize, BlockSize: block.Size(blockSize)}})
	if err := d.reconnect(g, o); err != nil {
		o.Log.Debug("dead nbd device not reconnected", "disk", disk, "err", err)
	}
	err = d.sever(ctx)
	return errors.Join(err, sys.waitNBDFree(ctx, disk))
}

// deadDevice fails everything.
type deadDevice struct{ geometry block.Geometry }

func (d deadDevice) Geometry() block.Geometry { return d.geometry }
func (d deadDevice) Submit(io *block.IO)      { io.Complete(block.ErrGone) }

func (s system) probeNBD(a *Ability) {
	a.Survives = true
	if !exists(filepath.Join(s.sys, "module/nbd")) {
		s.missing(a, "nbd", "the kernel has no nbd driver loaded")
		return
	}
	if !s.root(a, "nbd devices") {
		return
	}
	if _, err := nbdFamily(); err != nil {
		a.Reason = fmt.Sprintf("the nbd driver does not answer on netlink: %v", err)
		return
	}
	a.Usable, a.Reason = true, "the nbd driver is loaded"
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
	"weft.dev/weft/proto/block"
)

const (
	ublkQueues = 4
	ublkDepth  = 128
	ublkMaxIO  = 512 * block.KiB
)

// ublkDisk is a device of the ublk driver.
type ublkDisk struct {
	sys     system
	info    ublkInfo
	char    int
	queues  []*ublkQueue
	gate    *gate
	severed atomic.Bool
	threads sync.WaitGroup
	ended   chan struct{} // closed when no queue is served
	freed   sync.Once
}

func exportUBLK(_ context.Context, sys system, g *gate, o Options) (_ frontend, err error) {
	geometry := g.geometry.Load()
	d := &ublkDisk{sys: sys, gate: g, char: -1, ended: make(chan struct{})}
	d.info = ublkInfo{
		queues: uint16(min(ublkQueues, runtime.GOMAXPROCS(0))), depth: ublkDepth, maxIO: uint32(ublkMaxIO),
		id: ^uint32(0), pid: int32(os.Getpid()), serverFlags: markNumber(o),
	}
	if geometry.MaxIO >= 4096 {
		d.info.maxIO = uint32(min(ublkMaxIO, geometry.MaxIO/4096*4096))
	}
	if o.Resume != "" {
		d.info.flags = ublkRecovery | ublkRecoveryReissue
	}
	err = withUBLK(sys, func(c *ublkControl) error {
		if err := c.add(&d.info); err != nil {
			return err
		}
		return c.setParams(d.info.id, ublkParamsOf(*geometry, d.info.maxIO))
	})
	if err == nil {
		err = d.serve(func(c *ublkControl) error { return c.start(d.info.id) })
	}
	if err != nil {
		return nil, errors.Join(err, d.drop(o))
	}
	return d, nil
}

// drop removes a device that could not be started.
func (d *ublkDisk) drop(o Options) error {
	if d.info.id == ^uint32(0) {
		return nil
	}
	d.severed.Store(true)
	for _, q := range d.queues {
		q.wake()
	}
	err := withUBLK(d.sys, func(c *ublkControl) error { return c.simple("stop", ublkStopDev, d.info.id, 0) })
	d.threads.Wait()
	d.leave()
	if d.gate.n.Load() == 0 { // otherwise pending I/O still uses our buffers
		d.free()
	}
	if err != nil {
		o.Log.Debug("could not stop a device that did not start", "err", err)
	}
	return withUBLK(d.sys, func(c *ublkControl) error { return c.remove(d.info.id) })
}

// serve starts the queues and then the device.
func (d *ublkDisk) serve(start func(*ublkControl) error) error {
	path := d.sys.control(fmt.Sprintf("ublkc%d", d.info.id))
	fds, err := serving.open(func() ([]int, error) {
		fd, err := openSoon(path)
		return []int{fd}, err
	})
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	d.char = fds[0]
	for i := range d.info.queues {
		q, err := newUBLKQueue(i, int(d.info.depth), int(d.info.maxIO), d.char, d.gate, &d.severed, d.info.flags&ublkIoctlEncode != 0)
		if err != nil {
			return err
		}
		d.queues = append(d.queues, q)
	}
	fetched := make(chan error, len(d.queues))
	for _, q := range d.queues {
		d.threads.Go(func() { q.run(func(err error) { fetched <- err }) })
	}
	go func() { d.threads.Wait(); close(d.ended) }()
	for range d.queues {
		err = errors.Join(err, <-fetched)
	}
	if err != nil {
		return err
	}
	return withUBLK(d.sys, start)
}

// openSoon opens a node that udev may still have to make.
func openSoon(path string) (fd int, err error) {
	for range 100 {
		fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil || !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) {
			return fd, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fd, err
}

// resumeUBLK takes over the device that a dead process left.
func resumeUBLK(ctx context.Context, sys system, g *gate, o Options, disk string) (frontend, error) {
	id, err := ublkID(disk)
	if err != nil {
		return nil, err
	}
	d := &ublkDisk{sys: sys, gate: g, char: -1, ended: make(chan struct{})}
	if err := withUBLK(sys, func(c *ublkControl) error { return d.recover(ctx, c, id, o) }); err != nil {
		return nil, err
	}
	if err := d.serve(func(c *ublkControl) error { return c.simple("resume", ublkEndRecovery, id, uint64(os.Getpid())) }); err != nil {
		return nil, errors.Join(err, d.drop(o))
	}
	if sys.diskText(disk, "size") != strconv.FormatUint(g.geometry.Load().Size.Sectors(), 10) {
		if err := d.resize(g.geometry.Load().Size); err != nil {
			o.Log.Warn("a resumed block device keeps its size", "err", err)
		}
	}
	return d, nil
}

// recover waits until the driver has noticed that the process is dead.
func (d *ublkDisk) recover(ctx context.Context, c *ublkControl, id uint32, o Options) (err error) {
	if d.info, err = c.info(id); err != nil {
		return err
	}
	blocks := d.sys.diskText(d.disk(), "queue/logical_block_size")
	if d.info.serverFlags != markNumber(o) || blocks != strconv.FormatUint(uint64(d.gate.geometry.Load().BlockSize), 10) {
		return fmt.Errorf("ublk device %d is another device, with blocks of %s bytes", id, blocks)
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for range 300 { // before Linux 6.7 the driver checks every 5 s
		if err = c.simple("take over", ublkStartRecovery, id, 0); !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return err
}

func (d *ublkDisk) disk() string          { return fmt.Sprintf("ublkb%d", d.info.id) }
func (d *ublkDisk) gone() <-chan struct{} { return d.ended }

// survival: the driver itself keeps the device, see ublkRecovery.
func (d *ublkDisk) survival() ([]int, error) { return nil, nil }

func (d *ublkDisk) abandon() bool { return false }

func (d *ublkDisk) resize(s block.Size) error {
	err := withUBLK(d.sys, func(c *ublkControl) error { return c.simple("resize", ublkUpdateSize, d.info.id, s.Sectors()) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("this kernel cannot change the size of a ublk device (Linux 6.16 can): %w", errors.ErrUnsupported)
	}
	return err
}

func (d *ublkDisk) stop(ctx context.Context) error {
	err := withUBLK(d.sys, func(c *ublkControl) error {
		// While we hold it exclusively nobody can mount it.
		fd, err := unix.Open(d.sys.node(d.disk()), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.EBUSY) {
			return errOpened
		}
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return c.simple("stop", ublkStopDev, d.info.id, 0)
	})
	if err != nil {
		return err
	}
	return d.remove(ctx)
}

// sever first makes the queues answer what the device does not complete: the driver ends a
// device only when all its requests are answered.
func (d *ublkDisk) sever(ctx context.Context) error {
	d.severed.Store(true)
	for _, q := range d.queues {
		q.wake()
	}
	err := withUBLK(d.sys, func(c *ublkControl) error { return c.simple("stop", ublkStopDev, d.info.id, 0) })
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	return d.remove(ctx)
}

// remove deletes a stopped device. Its number stays taken until its users have closed it;
// remove does not wait for them.
func (d *ublkDisk) remove(ctx context.Context) error {
	select {
	case <-d.ended:
	case <-ctx.Done():
		return fmt.Errorf("wait for the queues of %s: %w", d.disk(), ctx.Err())
	}
	d.leave()
	go func() { // the device may still use our buffers
		<-d.gate.idle
		d.free()
	}()
	done := make(chan error, 1)
	go func() { done <- withUBLK(d.sys, func(c *ublkControl) error { return c.remove(d.info.id) }) }()
	patience := time.NewTimer(settle)
	defer patience.Stop()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	case <-patience.C:
	}
	return nil
}

// leave releases the driver and keeps only the buffers that the device may still write to.
func (d *ublkDisk) leave() {
	for _, q := range d.queues {
		q.leave()
	}
	if d.char >= 0 {
		serving.forget(d.char)
		unix.Close(d.char)
		d.char = -1
	}
}

func (d *ublkDisk) free() {
	d.freed.Do(func() {
		for _, q := range d.queues {
			q.free()
		}
	})
}

func ublkID(disk string) (uint32, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(disk, "ublkb"), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s is not the name of a ublk device", disk)
	}
	return uint32(n), nil
}

// ublksOf finds the ublk devices that carry a mark.
func (s system) ublksOf(mark uint64) (ids []uint32, err error) {
	chars, _ := filepath.Glob(filepath.Join(s.sys, "class/ublk-char/ublkc*"))
	if len(chars) == 0 {
		return nil, nil
	}
	err = withUBLK(s, func(c *ublkControl) error {
		for _, char := range chars {
			id, err := ublkID("ublkb" + strings.TrimPrefix(filepath.Base(char), "ublkc"))
			if err != nil {
				continue
			}
			info, err := c.info(id)
			if err == nil && info.serverFlags == mark {
				ids = append(ids, id)
			}
		}
		return nil
	})
	return ids, err
}

// cleanUBLK removes what a dead process left under a name.
func cleanUBLK(ctx context.Context, sys system, o Options, r record) error {
	ids, err := sys.ublksOf(markNumber(o))
	if err != nil {
		o.Log.Debug("ublk devices cannot be listed", "err", err)
		return nil
	}
	var errs []error
	for _, id := range ids {
		d := &ublkDisk{sys: sys, info: ublkInfo{id: id}, char: -1, ended: make(chan struct{}), gate: newGate(deadDevice{})}
		close(d.ended)
		d.gate.shut()
		o.Log.Info("removing a dead ublk device", "disk", d.disk())
		errs = append(errs, sys.hide(r.named(o), d.disk()), d.sever(ctx))
	}
	return errors.Join(errs...)
}

func (s system) probeUBLK(a *Ability) {
	a.Survives = true
	switch {
	case !exists(s.control("ublk-control")):
		s.missing(a, "ublk_drv", "the kernel has no ublk driver loaded")
	case !s.root(a, "ublk devices"):
	case !s.opens(a, "ublk-control"):
	default:
		why, fix := s.uringRefused(uring.SQE128)
		if why != "" {
			a.Reason, a.Fix = "ublk needs io_uring, and "+why, fix
			return
		}
		a.Usable, a.Reason = true, "the ublk driver is loaded"
	}
}

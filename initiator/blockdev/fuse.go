// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

const (
	fuseMaxWrite      = block.MiB
	fuseMaxBackground = 256
	fuseType          = "fuse.weft"
)

// fuseDisk is a loop device over the one file of a FUSE file system.
type fuseDisk struct {
	sys   system
	fs    *fuseFS
	conn  *fuseConn
	rings *fuseRings // nil: plain FUSE
	place string     // where it is mounted
	loop  string
	file  int           // the file, opened with O_PATH: the mount may be out of this process's sight; -1: not open
	ended chan struct{} // the loop device has released the file, or the connection is gone

	aborted sync.Once
}

func fusePlace(o Options) string  { return filepath.Join(o.RunDir, string(o.Name)+".fuse") }
func fuseFile(o Options) string   { return filepath.Join(fusePlace(o), string(o.Name)) }
func fuseSource(o Options) string { return "weft-" + string(o.Name) }

func exportFUSE(ctx context.Context, sys system, g *gate, o Options) (_ frontend, err error) {
	d, err := mountFUSE(ctx, sys, g, o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.unmount()
		}
	}()
	pass, err := newPassage()
	if err != nil {
		return nil, err
	}
	defer pass.close()
	err = d.setUp(ctx, func() error {
		// Not an os.File: Go's poller would ask our own server whether the file is readable.
		f, err := unix.Open(fuseFile(o), unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", fuseFile(o), err)
		}
		defer unix.Close(f)
		path, err := unix.Open(fuseFile(o), unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", fuseFile(o), err)
		}
		defer unix.Close(path)
		if err := pass.send(path); err != nil {
			return err
		}
		if d.loop, err = sys.attachLoop(f, *g.geometry.Load(), mark(o)); err != nil {
			return err
		}
		if err := d.tune(o); err != nil {
			return errors.Join(err, sys.detachLoop(d.loop))
		}
		return nil
	}, pass.in)
	if err != nil {
		return nil, err
	}
	if d.file, err = pass.receive(); err != nil {
		return nil, err
	}
	d.fs.kept.Store(true)
	return d, nil
}

// resumeFUSE takes over the device that a dead process left with the holder.
func resumeFUSE(ctx context.Context, sys system, g *gate, o Options, disk string) (_ frontend, err error) {
	fds, err := takeHeld(ctx, o)
	if err != nil {
		return nil, err
	}
	if len(fds) != 2 {
		serving.forget(fds...)
		closeAll(fds)
		return nil, fmt.Errorf("the holder has %d descriptors, not the 2 of a fuse device", len(fds))
	}
	d := &fuseDisk{sys: sys, place: fusePlace(o), loop: disk, file: fds[1], ended: make(chan struct{})}
	d.fs = newFuseFS(g, string(o.Name), d.ended)
	d.fs.takenOver()
	d.fs.onEnd = func() { serving.forget(fds[0]) }
	if d.conn, err = newFuseConn(fds[0], d.fs, o.Log); err != nil {
		d.closeFile()
		return nil, fmt.Errorf("serve fuse: %w", err)
	}
	defer func() {
		if err != nil {
			d.conn.shut()
			d.closeFile()
		}
	}()
	if err := d.conn.resend(); err != nil {
		return nil, err
	}
	go d.conn.serve()
	if err := d.isOurs(ctx, o); err != nil {
		return nil, err
	}
	if sys.diskText(disk, "size") != strconv.FormatUint(g.geometry.Load().Size.Sectors(), 10) {
		if err := d.resize(g.geometry.Load().Size); err != nil {
			o.Log.Warn("a resumed block device keeps its size", "err", err)
		}
	}
	return d, nil
}

// isOurs checks that the loop device is over the file of the connection that was taken over.
func (d *fuseDisk) isOurs(ctx context.Context, o Options) error {
	blocks := d.sys.diskText(d.loop, "queue/logical_block_size")
	if blocks != strconv.FormatUint(uint64(d.fs.gate.geometry.Load().BlockSize), 10) {
		return fmt.Errorf("%s has blocks of %s bytes, the volume has others", d.loop, blocks)
	}
	ctx, cancel := context.WithTimeout(ctx, ringPatience)
	defer cancel()
	return unsharedWithin(ctx, func() error {
		return d.sys.onLoop(d.loop, func(fd int) error {
			info, err := unix.IoctlLoopGetStatus64(fd)
			if err != nil {
				return fmt.Errorf("look at %s: %w", d.loop, err)
			}
			text, _, _ := bytes.Cut(info.File_name[:], []byte{0})
			if string(text) != mark(o) || info.Inode != fileNode {
				return fmt.Errorf("%s is another device, %q", d.loop, text)
			}
			return nil
		})
	})
}

func (d *fuseDisk) closeFile() {
	if d.file >= 0 {
		serving.forget(d.file)
		unix.Close(d.file)
		d.file = -1
	}
}

// survival: the kernel must be able to give back the requests that a dead process had read.
func (d *fuseDisk) survival() ([]int, error) {
	if !d.fs.resends.Load() {
		return nil, errors.New("the kernel does not send FUSE requests again that a dead process had read (Linux 6.9 does)")
	}
	return []int{d.conn.fd, d.file}, nil
}

func (d *fuseDisk) abandon() bool {
	d.conn.shut()
	d.closeFile()
	return true
}

// mountFUSE mounts the file system and serves it: over io_uring if the machine allows that and
// it works, else over the connection's descriptor alone. A device that is to outlive this process
// does not use io_uring: the kernel gives back no request that a ring has taken.
func mountFUSE(ctx context.Context, sys system, g *gate, o Options) (*fuseDisk, error) {
	if depths, why, _ := sys.fuseRingState(); depths != nil && o.Resume == "" {
		d, err := mountFUSEWith(ctx, sys, g, o, depths)
		if err == nil {
			return d, nil
		}
		o.Log.Warn("FUSE cannot use io_uring here; serving without it", "err", err)
	} else {
		o.Log.Debug("FUSE works without io_uring", "because", why)
	}
	return mountFUSEWith(ctx, sys, g, o, nil)
}

// mountFUSEWith uses io_uring if depths, the numbers of entries in the kernel's queues, is not
// nil.
func mountFUSEWith(ctx context.Context, sys system, g *gate, o Options, depths []int) (*fuseDisk, error) {
	d := &fuseDisk{sys: sys, place: fusePlace(o), file: -1, ended: make(chan struct{})}
	d.fs = newFuseFS(g, string(o.Name), d.ended)
	if d.fs.ring = depths != nil; d.fs.ring {
		d.fs.maxIO = fuseRingMaxIO
	}
	if err := os.MkdirAll(d.place, 0o700); err != nil {
		return nil, fmt.Errorf("mount fuse: %w", err)
	}
	if err := d.mount(fuseSource(o), o.Log); err != nil || !d.fs.ring {
		return d, err
	}
	if err := d.useRings(ctx, depths, o.Log); err != nil {
		d.unmount()
		return nil, err
	}
	return d, nil
}

// ringPatience is how long the first request over io_uring may take. It needs nothing from the
// device.
const ringPatience = 5 * time.Second

// useRings serves all further requests over io_uring. The kernel holds them until each of its
// queues has an entry. A first request shows that they arrive.
func (d *fuseDisk) useRings(ctx context.Context, depths []int, log *slog.Logger) (err error) {
	ctx, cancel := context.WithTimeout(ctx, ringPatience)
	defer cancel()
	select {
	case agreed := <-d.fs.begun:
		if !agreed {
			return errors.New("the kernel did not offer io_uring")
		}
	case <-d.ended:
		return errors.New("the kernel ended the connection")
	case <-ctx.Done():
		return fmt.Errorf("wait for the kernel's first request: %w", ctx.Err())
	}
	if d.rings, err = startFuseRings(d.conn.fd, depths, d.fs, log, d.abort); err != nil {
		return err
	}
	err = unsharedWithin(ctx, func() error {
		var st unix.Stat_t
		return unix.Stat(d.place, &st)
	})
	if err != nil {
		return fmt.Errorf("the first request over io_uring: %w", err)
	}
	return nil
}

// setUpLimit is how long the device may take to answer the first reads of a new loop device.
// With loop.max_part set the kernel looks for partitions, and nobody can open the device until
// that has ended.
const setUpLimit = 10 * time.Second

// setUp runs f, which makes the loop device, on an unshared thread. If that takes too long it ends
// the connection, which makes f return.
// Of the process's descriptors f has only those in keep.
func (d *fuseDisk) setUp(ctx context.Context, f func() error, keep ...int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, setUpLimit, errUnanswered)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- unshared(f, keep...) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	d.unmount()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if <-done == nil {
			_ = unshared(func() error { return d.sys.detachLoop(d.loop) })
		}
	}()
	select {
	case <-ended:
	case <-time.After(setUpLimit / 2): // it waits for something other than the device
	}
	return fmt.Errorf("make a loop device: %w", context.Cause(ctx))
}

var errUnanswered = fmt.Errorf("the device did not answer for %s", setUpLimit)

// mount mounts the file system and serves it.
func (d *fuseDisk) mount(source string, log *slog.Logger) error {
	fds, err := serving.open(func() ([]int, error) {
		fd, err := unix.Open(d.sys.control("fuse"), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		return []int{fd}, err
	})
	if err != nil {
		return fmt.Errorf("mount fuse: open fuse: %w", err)
	}
	fd := fds[0]
	d.fs.onEnd = func() { serving.forget(fd) }
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,max_read=%d", fd, os.Geteuid(), os.Getegid(), fuseMaxWrite)
	if err := unix.Mount(source, d.place, fuseType, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		serving.forget(fd)
		unix.Close(fd)
		return fmt.Errorf("mount fuse on %s: %w", d.place, err)
	}
	if d.conn, err = newFuseConn(fd, d.fs, log); err != nil {
		serving.forget(fd)
		d.unmount()
		return fmt.Errorf("serve fuse on %s: %w", d.place, err)
	}
	go d.conn.serve()
	return nil
}

// tune resets what others have set on a loop device of this number: settings stay, even when
// the file changes. For the same reason it sets nothing that would harm the next user of the
// number. The worst of them is a write cache declared write through, because flushes would be
// dropped silently. It does not write a setting that is already right, since each write waits
// for I/O that others have under way.
func (d *fuseDisk) tune(o Options) error {
	// Older kernels do not set a write cache on a device that is not written to.
	if !d.fs.gate.geometry.Load().ReadOnly && d.sys.diskText(d.loop, "queue/write_cache") != "write back" {
		if err := d.sys.setDisk(d.loop, "queue/write_cache", "write back"); err != nil {
			return err
		}
	}
	if most := d.sys.diskText(d.loop, "queue/discard_max_bytes"); most == "0" && d.fs.gate.geometry.Load().DiscardUnit > 0 {
		// Once it is 0 the kernel accepts no other value: it must be a multiple of the
		// granularity, which is then 0 as well.
		o.Log.Warn("another program has disabled the discards of this loop device", "disk", d.loop)
	}
	if d.sys.diskText(d.loop, "queue/rotational") != "0" {
		if err := d.sys.setDisk(d.loop, "queue/rotational", "0"); err != nil {
			o.Log.Debug("still reported as rotational", "err", err)
		}
	}
	return nil
}

func (d *fuseDisk) disk() string          { return d.loop }
func (d *fuseDisk) gone() <-chan struct{} { return d.ended }

func (d *fuseDisk) resize(block.Size) error {
	err := unshared(func() error {
		// The loop driver uses the size that the file had at the last stat.
		var st unix.Stat_t
		if err := unix.Fstat(d.file, &st); err != nil {
			return err
		}
		return d.sys.onLoop(d.loop, func(fd int) error { return unix.IoctlSetInt(fd, unix.LOOP_SET_CAPACITY, 0) })
	}, d.file)
	if err != nil {
		return fmt.Errorf("resize %s: %w", d.loop, err)
	}
	return nil
}

func (d *fuseDisk) stop(ctx context.Context) error {
	if err := unsharedWithin(ctx, func() error { return d.sys.detachLoop(d.loop) }); err != nil {
		return err
	}
	patience := time.NewTimer(2 * time.Second)
	defer patience.Stop()
	select {
	case <-d.ended:
		d.unmount()
		return nil
	case <-ctx.Done():
	case <-patience.C:
	}
	if err := unshared(func() error { return d.sys.keepLoop(d.loop) }); errors.Is(err, unix.ENXIO) {
		d.unmount() // it has released the file just now
		return nil
	} else if err != nil {
		return fmt.Errorf("keep %s: %w", d.loop, err)
	}
	return errOpened
}

func (d *fuseDisk) sever(ctx context.Context) error {
	d.unmount() // fails all pending I/O, even what the device does not complete
	return unsharedWithin(ctx, func() error { return d.sys.detachLoop(d.loop) })
}

// unmount ends the connection and removes the mount, whoever has the file open.
func (d *fuseDisk) unmount() {
	d.abort()
	if d.rings != nil {
		d.rings.stop()
	}
	if d.conn != nil {
		d.conn.shut()
	}
	d.closeFile()
	_ = os.Remove(d.place)
}

// abort makes the kernel fail all I/O of the file system, present and future. It does so once:
// later, another file system may be mounted at the same place.
func (d *fuseDisk) abort() {
	d.aborted.Do(func() {
		_ = unix.Unmount(d.place, unix.MNT_FORCE|unix.MNT_DETACH)
		d.fs.end()
	})
}

// cleanFUSE removes what a dead process left under a name.
func cleanFUSE(sys system, o Options, r record) error {
	var errs []error
	loops := sys.loopsOf(mark(o), fuseFile(o), r.Disk)
	for sys.mounted(fusePlace(o), fuseSource(o)) {
		o.Log.Info("removing a dead mount", "place", fusePlace(o))
		if err := unix.Unmount(fusePlace(o), unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
			return errors.Join(append(errs, fmt.Errorf("unmount %s: %w", fusePlace(o), err))...)
		}
	}
	for _, loop := range loops { // their I/O has ended with the mount
		o.Log.Info("removing a dead loop device", "disk", loop)
		errs = append(errs, sys.hide(r.named(o), loop), sys.detachLoop(loop))
	}
	return errors.Join(append(errs, remove(fusePlace(o)))...)
}

// mounted reports whether a file system of ours is mounted at a place. It reads only the mount
// table: a dead file system answers with errors, and one whose process hangs does not answer.
func (s system) mounted(place, source string) bool {
	text, _ := os.ReadFile(filepath.Join(s.proc, "self/mountinfo"))
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		b, a := strings.Fields(before), strings.Fields(after)
		if len(b) > 4 && len(a) > 1 && unescape(b[4]) == place && slices.Equal(a[:2], []string{fuseType, source}) {
			return true
		}
	}
	return false
}

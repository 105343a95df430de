// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// errOpened says that somebody opened the device while it was being stopped; it keeps serving.
var errOpened = errors.New("opened meanwhile")

// Export makes dev available as the block device <DevDir>/weft/<Name>, and serves it until
// Close. What a dead process left of it is taken over (see Options.Resume) or removed. If
// another device has that name, the next of Options.Names is used. If others have all of them,
// or a living process has exported the volume, the error is ErrExported. If the machine does
// not have the kind, it is ErrUnavailable.
//
// The device is served when Export returns. The kernel may send I/O to dev even earlier,
// because it looks for partitions; Export returns only after dev has answered. For fuse the
// kernel reads nothing at that point, unless loop.max_part is set.
func Export(ctx context.Context, dev block.Device, o Options) (_ *Exported, err error) {
	if o, err = o.withDefaults(); err != nil {
		return nil, fmt.Errorf("export: %w", err)
	}
	e := &Exported{o: o, sys: systemOf(o)}
	if e.lock, err = lockName(o.RunDir, o.Name); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			e.lock.unlock()
		}
	}()
	if e.claim, err = e.sys.claimFor(o); err != nil {
		return nil, fmt.Errorf("export %s: %w", o.Name, err)
	}
	defer func() {
		if err != nil {
			e.claim.release()
		}
	}()
	if o.Chosen != nil {
		if err := o.Chosen(e.claim.name); err != nil {
			return nil, fmt.Errorf("export %s: %w", o.Name, err)
		}
	}
	becomeFlusher(o.Log)
	e.gate = newGate(dev)
	if err := e.start(ctx); err != nil {
		return nil, fmt.Errorf("export %s: %w", o.Name, err)
	}
	defer func() {
		if err != nil {
			e.gate.shut()
			e.hold.drop(ctx)
			err = errors.Join(err, e.front.sever(ctx))
		}
	}()
	if e.number, err = e.sys.waitNode(ctx, e.front.disk()); err != nil {
		return nil, fmt.Errorf("export %s: %w", o.Name, err)
	}
	r := record{Kind: e.kind, Disk: e.front.disk(), Name: e.claim.name, PID: os.Getpid()}
	if e.keep(ctx) {
		r.Resume = o.Resume
	}
	if err := errors.Join(writeRecord(o, r), e.sys.expose(e.claim.name, e.front.disk())); err != nil {
		return nil, fmt.Errorf("export %s: %w", o.Name, err)
	}
	o.Log.Info("block device created", "kind", string(e.kind), "way", e.Way(), "disk", e.front.disk(), "number", e.number.String(), "name", string(e.claim.name), "resumed", e.resumed)
	return e, nil
}

// keep prepares for the death of this process, if that is wished: it reports whether another one
// can then take over the device.
func (e *Exported) keep(ctx context.Context) bool {
	if e.o.Resume == "" {
		return false
	}
	fds, err := e.front.survival()
	if err != nil {
		e.o.Log.Warn("the block device will end with this process", "err", err)
		return false
	}
	if e.hold, err = holdDevice(ctx, e.o, fds); err != nil {
		e.o.Log.Warn("no holder for the block device", "err", err, "ends_with_this_process", len(fds) > 0)
		return len(fds) == 0 // the kernel keeps it, for as long as it takes
	}
	return true
}

func systemOf(o Options) system { return system{dev: o.DevDir, sys: "/sys", proc: "/proc"} }

// start takes over or removes what was left, and makes the device.
func (e *Exported) start(ctx context.Context) error {
	if e.resume(ctx) {
		return nil
	}
	if err := clean(ctx, e.sys, e.o, e.claim); err != nil {
		return err
	}
	var refused []error
	for _, k := range kinds {
		if e.o.Kind != Auto && e.o.Kind != k {
			continue
		}
		if a := e.sys.probe(k); !a.Usable {
			refused = append(refused, fmt.Errorf("%s is %w: %s", k, ErrUnavailable, a.Reason))
			continue
		}
		front, err := makers[k](ctx, e.sys, e.gate, e.o)
		if err == nil {
			e.kind, e.front = k, front
			return nil
		}
		refused = append(refused, fmt.Errorf("%s: %w", k, err))
		e.o.Log.Warn("could not make the block device", "kind", string(k), "err", err)
	}
	return errors.Join(refused...)
}

var makers = map[Kind]func(context.Context, system, *gate, Options) (frontend, error){
	UBLK: exportUBLK,
	NBD:  exportNBD,
	FUSE: exportFUSE,
}

// resume takes over the device of a dead process, if it was exported for that.
func (e *Exported) resume(ctx context.Context) bool {
	r := readRecord(e.o)
	if e.o.Resume == "" || r.Resume != e.o.Resume || e.o.Kind != Auto && e.o.Kind != r.Kind {
		return false
	}
	var err error
	switch {
	case r.Kind == UBLK:
		e.front, err = resumeUBLK(ctx, e.sys, e.gate, e.o, r.Disk)
	case r.Kind == FUSE:
		e.front, err = resumeFUSE(ctx, e.sys, e.gate, e.o, r.Disk)
	case r.Kind == NBD && slices.Contains(e.sys.nbdsOf(mark(e.o)), r.Disk):
		e.front, err = resumeNBD(e.sys, e.gate, e.o, r.Disk)
	default:
		return false
	}
	if err != nil {
		e.o.Log.Warn("could not resume the block device", "disk", r.Disk, "err", err)
		return false
	}
	e.kind, e.resumed = r.Kind, true
	e.gate.inherit()
	return true
}

// Remove removes what a dead process left under a name. If the process lives, the error is
// ErrExported.
func Remove(ctx context.Context, o Options) error {
	o, err := o.withDefaults()
	if err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	lock, err := lockName(o.RunDir, o.Name)
	if err != nil {
		return err
	}
	defer lock.unlock()
	sys := systemOf(o)
	if err := sys.confusable(o); err != nil {
		return fmt.Errorf("remove the rest of %s: %w", o.Name, err)
	}
	c, err := sys.claimName([]block.VolumeName{readRecord(o).named(o)}, sys.claimer(o))
	if err == nil {
		defer c.release()
	} else if !errors.Is(err, ErrExported) {
		return fmt.Errorf("remove the rest of %s: %w", o.Name, err)
	}
	if err := clean(ctx, sys, o, c); err != nil {
		return fmt.Errorf("remove the rest of %s: %w", o.Name, err)
	}
	return nil
}

// claimFor claims the name of the device that is to be exported: the one that it had when its process died,
// or else the best that no other device has.
func (s system) claimFor(o Options) (*claim, error) {
	if err := s.confusable(o); err != nil {
		return nil, err
	}
	names := slices.Clone(o.Names)
	if len(names) == 0 {
		names = []block.VolumeName{o.Name}
	}
	if had := slices.Index(names, readRecord(o).named(o)); had > 0 {
		names[0], names[had] = names[had], names[0]
	}
	return s.claimName(names, s.claimer(o))
}

// clean removes what a dead process left. The recorded disk may belong to another process by
// now, so its name is hidden only if this process has claimed it.
func clean(ctx context.Context, sys system, o Options, c *claim) error {
	r := readRecord(o)
	// First: a device whose I/O waits could not be removed.
	if err := dropHeld(ctx, o); err != nil {
		o.Log.Warn("the holder does not answer", "err", err)
		_ = unix.Unmount(fusePlace(o), unix.MNT_FORCE|unix.MNT_DETACH)
	}
	err := errors.Join(cleanFUSE(sys, o, r), cleanNBD(ctx, sys, o, r), cleanUBLK(ctx, sys, o, r))
	if r.Disk != "" && c != nil && c.name == r.named(o) {
		err = errors.Join(err, sys.hide(c.name, r.Disk))
	}
	return errors.Join(err, remove(recordFile(o)))
}

// Resize tells the kernel the new size in the exported Device's geometry.
func (e *Exported) Resize(context.Context) error {
	old := e.gate.geometry.Load()
	now := *old
	now.Size = e.gate.dev.Geometry().Size
	// The gate must know the new size before the kernel does, or it would refuse new blocks.
	e.gate.geometry.Store(&now)
	if err := e.front.resize(now.Size); err != nil {
		e.gate.geometry.Store(old)
		return fmt.Errorf("resize %s to %s: %w", e.Path(), now.Size, err)
	}
	return nil
}

// Close removes the device. If somebody has it open, the error is a *BusyError, and the device
// keeps serving. With force, its users get errors from then on, and an I/O that dev has not
// completed is answered with an error.
//
// Everything acknowledged is flushed before dev is released, except with force. After Close
// has returned nil, dev gets no I/O and has answered all that it had. If ctx ends before that,
// Close can be called again.
func (e *Exported) Close(ctx context.Context, force bool) error {
	if err := e.close(ctx, force); err != nil {
		if errors.Is(err, ErrBusy) {
			return err
		}
		return fmt.Errorf("close %s: %w", e.Path(), err)
	}
	return nil
}

func (e *Exported) close(ctx context.Context, force bool) error {
	e.closing.Lock()
	defer e.closing.Unlock()
	if e.closed {
		return nil
	}
	if !e.stopped {
		stop := e.stop
		if force {
			e.hold.drop(ctx)
			stop = e.front.sever
		}
		if err := stop(ctx); err != nil {
			return err
		}
		e.stopped = true
		e.hold.drop(ctx)
		e.gate.shut()
	}
	if err := e.gate.drained(ctx); err != nil {
		return err
	}
	err := errors.Join(e.sys.hide(e.claim.name, e.front.disk()), remove(recordFile(e.o)))
	e.claim.release()
	e.lock.unlock()
	e.closed = true
	e.o.Log.Info("block device removed", "disk", e.front.disk(), "forced", force)
	return err
}

// Leave ends this process's part in a device that [Exported.Survives], as its death would: I/O waits
// for the next Export with the same token, and what dev completes from now on is not told to the
// kernel. Call nothing else afterwards. In kinds other than fuse, the next Export succeeds only once
// this process has ended.
func (e *Exported) Leave() {
	e.closing.Lock()
	defer e.closing.Unlock()
	if e.closed {
		return
	}
	e.closed = true
	e.gate.left.Store(true)
	e.o.Log.Info("block device left to the next process", "disk", e.front.disk())
	if !e.front.abandon() {
		return // nor may the holder think that this process has ended
	}
	e.hold.leave()
	e.claim.unlock()
	e.lock.unlock()
}

// settle is how long Close waits for programs that briefly open each new or changed device, as
// udev's do.
const settle = 2 * time.Second

// stop removes the device if nobody has it open.
func (e *Exported) stop(ctx context.Context) error {
	select {
	case <-e.front.gone():
		return e.front.sever(ctx)
	default:
	}
	patience := time.Now().Add(settle)
	for {
		users, err := e.usersWithin(ctx)
		if err != nil {
			return err
		}
		if len(users) == 0 {
			if err := e.quiesce(ctx); err != nil {
				return err
			}
			if err := e.front.stop(ctx); !errors.Is(err, errOpened) {
				return err
			}
			users = []User{{Kind: "unknown"}}
		}
		if lasting(users) || time.Now().After(patience) {
			return &BusyError{Path: e.Path(), Users: users}
		}
		select {
		case <-ctx.Done():
			return &BusyError{Path: e.Path(), Users: users}
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// lasting reports whether some users will stay, rather than be gone in a moment.
func lasting(users []User) bool {
	for _, u := range users {
		if u.Kind == "mount" || u.Kind == "holder" || u.Kind == "swap" {
			return true
		}
	}
	return false
}

// quiesce writes everything in the page cache of the device node to the device, and flushes
// it. It takes as long as the device needs. A device through which nothing was written gets no
// request.
func (e *Exported) quiesce(ctx context.Context) error {
	err := unsharedWithin(ctx, func() error {
		fd, err := unix.Open(e.Node(), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
			err = unix.SyncFileRange(fd, 0, 0, all)
			unix.Close(fd)
		}
		return err
	})
	if err == nil {
		err = e.gate.flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("flush %s: %w", e.Node(), err)
	}
	return nil
}

// usersWithin is Users, but waits no longer than ctx lasts for others who are opening or
// closing the device.
func (e *Exported) usersWithin(ctx context.Context) (users []User, err error) {
	type answer struct {
		users []User
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		users, err := e.Users()
		done <- answer{users, err}
	}()
	select {
	case a := <-done:
		return a.users, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("find who has %s open: %w", e.Node(), ctx.Err())
	}
}

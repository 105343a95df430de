// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// Kind is a way to provide a block device.
type Kind string

// The kinds, best first. Auto chooses the first that works here.
const (
	Auto Kind = "auto"
	UBLK Kind = "ublk"
	NBD  Kind = "nbd"
	FUSE Kind = "fuse"
)

var kinds = []Kind{UBLK, NBD, FUSE}

// ParseKind parses the name of a kind.
func ParseKind(s string) (Kind, error) {
	switch k := Kind(s); k {
	case Auto, UBLK, NBD, FUSE:
		return k, nil
	}
	return "", fmt.Errorf("kind of block device %q: must be auto, ublk, nbd or fuse", s)
}

// Options say what to export, and where.
type Options struct {
	Name   block.VolumeName
	Kind   Kind   // "" is Auto
	DevDir string // "" is /dev
	RunDir string // on a tmpfs, for state that must not survive a boot; "" is /run/weft/blockdev

	// Resume, if set, lets the device outlive this process if the kind supports that (see the
	// package comment): I/O waits for an Export with the same name and token. Use another token
	// if the content may have changed without the kernel knowing, so that its caches are stale:
	// if another host has had the volume in between.
	Resume string

	// ResumeWithin is how long I/O waits for that Export; then the device is removed, and its I/O
	// fails. A holder sees to it (see Hold). 0: 2 minutes.
	ResumeWithin time.Duration

	// Holder is the command that runs Hold for RunDir and DevDir. It is started where Resume is set
	// and no holder runs; empty: none is started.
	Holder []string

	// Names are those that the device may have under DevDir, best first: it gets the first one that no
	// other device has. What a dead process made keeps its name. None: only Name.
	Names []block.VolumeName

	// Chosen, if set, is called with the device's name before the device has it. An error ends Export.
	Chosen func(block.VolumeName) error

	Log *slog.Logger // nil: none
}

func (o Options) withDefaults() (Options, error) {
	if _, err := block.ParseDeviceName(string(o.Name)); err != nil {
		return o, err
	}
	o.Kind = cmp.Or(o.Kind, Auto)
	if _, err := ParseKind(string(o.Kind)); err != nil {
		return o, err
	}
	o.DevDir = cmp.Or(o.DevDir, devices)
	run, err := filepath.Abs(cmp.Or(o.RunDir, "/run/weft/blockdev"))
	if err != nil {
		return o, err
	}
	// The kernel reports the resolved path of a mount.
	if err := os.MkdirAll(run, 0o700); err != nil {
		return o, err
	}
	if o.RunDir, err = filepath.EvalSymlinks(run); err != nil {
		return o, err
	}
	o.ResumeWithin = cmp.Or(o.ResumeWithin, 2*time.Minute)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Log = o.Log.With("volume", string(o.Name))
	return o, nil
}

// ErrUnavailable says that this machine lacks the requested kind, or any kind.
var ErrUnavailable = errors.New("not available on this machine")

// ErrExported says that another device has this name, or that a living process has exported the volume.
var ErrExported = errors.New("exported already")

// ErrBusy says that somebody has the device open; it comes as a *BusyError.
var ErrBusy = errors.New("device is in use")

// BusyError names those who have a device open.
type BusyError struct {
	Path  string
	Users []User
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("%s is in use by %s", e.Path, joinUsers(e.Users))
}

// Unwrap returns ErrBusy.
func (e *BusyError) Unwrap() error { return ErrBusy }

func joinUsers(users []User) string {
	var all []string
	for _, u := range users {
		all = append(all, u.String())
	}
	return strings.Join(all, ", ")
}

// frontend is one kind of kernel device, while it is served.
type frontend interface {
	disk() string // the kernel's name of the device: loop7, nbd0, ublkb0

	// resize tells the kernel the new size of the device.
	resize(s block.Size) error

	// stop removes a device that nobody has open. It may return errOpened if somebody has
	// opened it since.
	stop(ctx context.Context) error

	// sever fails all I/O, present and future, and removes as much of the device as its users
	// allow. It does not wait for users.
	sever(ctx context.Context) error

	// gone is closed when the device is no longer served, whoever ended it.
	gone() <-chan struct{}

	// survival says whether the device can wait for another process, and for that which
	// descriptors a holder must keep; an error says why it cannot.
	survival() (keep []int, err error)

	// abandon ends the service of a device that waits for another process. It reports whether that
	// can take it over now; else it can when this process has ended.
	abandon() bool
}

// Exported is an exported device.
type Exported struct {
	o      Options
	sys    system
	kind   Kind
	gate   *gate
	front  frontend
	lock   *nameLock
	claim  *claim
	number block.DeviceNumber

	hold *holding // nil: nobody keeps the device for the next process

	resumed bool // taken over from a dead process

	closing sync.Mutex
	stopped bool // the kernel's device is gone or dead
	closed  bool
}

// Path is what users open, <DevDir>/weft/<name>, with the first of Options.Names that no other device had.
func (e *Exported) Path() string { return e.sys.link(e.claim.name) }

// Node is the kernel's device, <DevDir>/loop7.
func (e *Exported) Node() string { return e.sys.node(e.front.disk()) }

// Kind is the way it is provided.
func (e *Exported) Kind() Kind { return e.kind }

// Way is how the kernel and this process exchange requests, in words: a kind may have more than
// one way.
func (e *Exported) Way() string {
	if d, ok := e.front.(*fuseDisk); ok && d.rings != nil {
		return overURing
	}
	return string(e.kind)
}

// overURing is the way of FUSE devices that use io_uring.
const overURing = "fuse over io_uring"

// Number is the kernel's number of the device.
func (e *Exported) Number() block.DeviceNumber { return e.number }

// Done is closed when the device is no longer served: after Close, or because somebody else
// removed it (umount, losetup -d, nbd-client -d).
func (e *Exported) Done() <-chan struct{} { return e.front.gone() }

// Resumed reports whether the device was taken over from a dead process, with its users and
// their pending I/O.
func (e *Exported) Resumed() bool { return e.resumed }

// Survives reports whether I/O would wait for another process if this one died.
func (e *Exported) Survives() bool { return e.hold != nil }

// Users lists who has the device open, as far as this process can see. It is empty if nobody
// does; "a process" stands for one that cannot be named.
func (e *Exported) Users() ([]User, error) { return e.sys.users(e.front.disk(), e.number) }

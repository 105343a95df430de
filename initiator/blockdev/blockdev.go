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

	"weft.dev/weft/proto/block"
)

// Kind is a way of giving a device out.
type Kind string

// The kinds, best first. Auto takes the first that works here.
const (
	Auto Kind = "auto"
	UBLK Kind = "ublk"
	NBD  Kind = "nbd"
	FUSE Kind = "fuse"
)

var kinds = []Kind{UBLK, NBD, FUSE}

// ParseKind checks s.
func ParseKind(s string) (Kind, error) {
	switch k := Kind(s); k {
	case Auto, UBLK, NBD, FUSE:
		return k, nil
	}
	return "", fmt.Errorf("kind of block device %q: must be auto, ublk, nbd or fuse", s)
}

// Options say what is exported, and where.
type Options struct {
	Name   block.VolumeName
	Kind   Kind   // "" is Auto
	DevDir string // "" is /dev
	RunDir string // on a tmpfs, for what must not outlive a boot; "" is /run/weft/blockdev

	// Resume, if set, lets the device outlive this process where the kind can
	// (see the package comment): I/O waits for an Export with the same name and
	// the same token. Give another token when the device's content may have
	// changed behind the back of the kernel, whose caches then no longer fit: if
	// another host has had the volume in between.
	Resume string

	Log *slog.Logger // nil: none
}

func (o Options) withDefaults() (Options, error) {
	if _, err := block.ParseVolumeName(string(o.Name)); err != nil {
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
	// The kernel tells the true path of what is mounted there.
	if err := os.MkdirAll(run, 0o700); err != nil {
		return o, err
	}
	if o.RunDir, err = filepath.EvalSymlinks(run); err != nil {
		return o, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Log = o.Log.With("volume", string(o.Name))
	return o, nil
}

// ErrUnavailable: the machine does not have the kind that was asked for, or none.
var ErrUnavailable = errors.New("not available on this machine")

// ErrExported: a process that lives has this name exported.
var ErrExported = errors.New("exported already")

// ErrBusy: somebody has the device open; it comes as a *BusyError.
var ErrBusy = errors.New("device is in use")

// BusyError says who has a device open.
type BusyError struct {
	Path  string
	Users []User
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("%s is in use by %s", e.Path, joinUsers(e.Users))
}

// Unwrap makes it an ErrBusy.
func (e *BusyError) Unwrap() error { return ErrBusy }

func joinUsers(users []User) string {
	var all []string
	for _, u := range users {
		all = append(all, u.String())
	}
	return strings.Join(all, ", ")
}

// frontend is one kind of device in the kernel, being served.
type frontend interface {
	disk() string // the kernel's name of the device: loop7, nbd0, ublkb0

	// resize tells the kernel that the device has another size.
	resize(s block.Size) error

	// stop takes the device away, which nobody has open. It may return
	// errOpened if somebody has opened it since.
	stop(ctx context.Context) error

	// sever makes everything fail that is under way or comes, and takes away as
	// much of the device as its users let go. It does not wait for users.
	sever(ctx context.Context) error

	// gone is closed when the device is served no more, whoever ended it.
	gone() <-chan struct{}
}

// Exported is a device that was given out.
type Exported struct {
	o      Options
	sys    system
	kind   Kind
	gate   *gate
	front  frontend
	lock   *nameLock
	claim  *claim
	number block.DeviceNumber

	resumed bool // from a process that died

	closing sync.Mutex
	stopped bool // the kernel's device is gone or dead
	closed  bool
}

// Path is the name that users see, <DevDir>/weft/<name>.
func (e *Exported) Path() string { return e.sys.link(e.o.Name) }

// Node is the kernel's device, <DevDir>/loop7.
func (e *Exported) Node() string { return e.sys.node(e.front.disk()) }

// Kind is how it was given out.
func (e *Exported) Kind() Kind { return e.kind }

// Number is the kernel's number of the device.
func (e *Exported) Number() block.DeviceNumber { return e.number }

// Done is closed when the device is served no more: after Close, or because
// somebody else took it away (umount, losetup -d, nbd-client -d).
func (e *Exported) Done() <-chan struct{} { return e.front.gone() }

// Resumed tells whether the device is one that a dead process had exported, taken
// over with its users and what they wait for.
func (e *Exported) Resumed() bool { return e.resumed }

// Users lists who has the device open, as far as this process may see. It is
// empty when nobody does; who cannot be named is "a process".
func (e *Exported) Users() ([]User, error) { return e.sys.users(e.front.disk(), e.number) }

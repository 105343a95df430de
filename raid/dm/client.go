// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"syscall"

	"weft.dev/weft/proto/block"
)

// Error is the error type of all methods of Client. Err is an errno if the kernel
// returned one; ENXIO means that there is no such device.
type Error struct {
	Op   string // "load", "suspend"
	Name string // the device, if there is one
	Err  error
}

func (e *Error) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("device-mapper: %s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("device-mapper: %s %s: %v", e.Op, e.Name, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// NotFound reports whether err means that the device does not exist.
func NotFound(err error) bool { return errors.Is(err, syscall.ENXIO) }

func opError(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{op, name, err}
}

// kernel is the part of the control node that Client uses.
type kernel interface {
	// ioctl passes the buffer, which begins with a header, to the kernel, which writes
	// its answer into it. It returns an errno unchanged.
	ioctl(cmd uint32, buf []byte) error
	// watch calls changed once, and again after each device-mapper event, until changed
	// returns true or an error, or ctx ends. No event after the first call is missed.
	watch(ctx context.Context, changed func() (bool, error)) error
	close() error
}

// Client is a handle on the device mapper. Its methods may be called concurrently.
type Client struct{ kernel kernel }

// Close closes the control node. Mapped devices stay.
func (c *Client) Close() error { return opError("close", "", c.kernel.close()) }

// A buffer starts with firstBuffer bytes and is doubled, up to maxBuffer, while the
// kernel reports that it is full.
const (
	firstBuffer = 16 << 10
	maxBuffer   = 64 << 20
)

// call makes one ioctl and returns the answer's header and data.
func (c *Client) call(op string, cmd uint32, h header, payload []byte) (header, []byte, error) {
	fail := func(err error) (header, []byte, error) { return header{}, nil, opError(op, h.name, err) }
	if err := checkName(h.name, h.uuid); err != nil {
		return fail(err)
	}
	h.version, h.dataStart = interfaceVersion, headerSize
	for size := max(firstBuffer, headerSize+len(payload)); size <= maxBuffer; size *= 2 {
		h.dataSize = uint32(size)
		buf := make([]byte, size)
		h.encode(buf)
		copy(buf[headerSize:], payload)
		if err := c.kernel.ioctl(cmd, buf); err != nil {
			return fail(err)
		}
		answer, err := decodeHeader(buf)
		if err != nil {
			return fail(err)
		}
		if answer.flags&flagBufferFull == 0 {
			return answer, answer.data(buf), nil
		}
	}
	return fail(fmt.Errorf("answer is larger than %d bytes", maxBuffer))
}

func checkName(name, uuid string) error {
	switch {
	case len(name) >= nameSize:
		return fmt.Errorf("name of %d bytes, at most %d allowed", len(name), nameSize-1)
	case len(uuid) >= uuidSize:
		return fmt.Errorf("uuid of %d bytes, at most %d allowed", len(uuid), uuidSize-1)
	case strings.ContainsAny(name, "/\x00") || strings.ContainsRune(uuid, 0):
		return fmt.Errorf("name or uuid %q holds a slash or a zero byte", name+" "+uuid)
	}
	return nil
}

// Version is a major, minor, patch number.
type Version [3]uint32

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

// Version returns the kernel's version of the ioctl interface.
func (c *Client) Version() (Version, error) {
	h, _, err := c.call("version", cmdVersion, header{}, nil)
	return Version(h.version), err
}

// Targets lists the target types that the kernel has loaded. Others may still be loaded
// on demand, when a table names them.
func (c *Client) Targets() (map[string]Version, error) {
	_, data, err := c.call("list targets", cmdListVersions, header{}, nil)
	if err != nil {
		return nil, err
	}
	targets := map[string]Version{}
	err = walk(data, 0, 16, func(e []byte) {
		if name := cString(e[16:]); name != "" {
			targets[name] = Version{order.Uint32(e[4:]), order.Uint32(e[8:]), order.Uint32(e[12:])}
		}
	})
	return targets, opError("list targets", "", err)
}

// Info is the state of a mapped device.
type Info struct {
	Name, UUID string
	Number     block.DeviceNumber
	Open       int    // the number of its openers, with mapped devices above it
	EventNr    uint32 // grows with each event; see Wait
	Suspended  bool
	Live       bool // has a live table
	Inactive   bool // has a loaded table, which the next Resume makes live
	ReadOnly   bool
}

func infoOf(h header) Info {
	return Info{
		Name: h.name, UUID: h.uuid, Number: decodeNumber(h.dev), Open: int(h.openCount), EventNr: h.eventNr,
		Suspended: h.flags&flagSuspend != 0, Live: h.flags&flagActive != 0,
		Inactive: h.flags&flagInactive != 0, ReadOnly: h.flags&flagReadOnly != 0,
	}
}

// Info reports the state of a device; see [NotFound].
func (c *Client) Info(name string) (Info, error) {
	h, _, err := c.call("info", cmdDevStatus, header{name: name}, nil)
	if err != nil {
		return Info{}, err
	}
	return infoOf(h), nil
}

// Listed is an entry of [Client.List].
type Listed struct {
	Name   string
	Number block.DeviceNumber
}

// List returns all mapped devices of the machine, sorted by name.
func (c *Client) List() ([]Listed, error) { return c.list("") }

// list lists the devices whose uuid begins with prefix. Linux before 5.13 lists the others too.
func (c *Client) list(prefix string) ([]Listed, error) {
	_, data, err := c.call("list", cmdListDevices, header{uuid: prefix}, nil)
	if err != nil {
		return nil, err
	}
	var list []Listed
	err = walk(data, 8, 12, func(e []byte) {
		// A single element with device 0 means that there are no devices.
		if dev := order.Uint64(e); dev != 0 {
			list = append(list, Listed{cString(e[12:]), decodeNumber(dev)})
		}
	})
	slices.SortFunc(list, func(a, b Listed) int { return strings.Compare(a.Name, b.Name) })
	return list, opError("list", "", err)
}

// Create makes a device without a table. EBUSY means that the name or the uuid is taken.
func (c *Client) Create(name, uuid string) (Info, error) {
	if name == "" {
		return Info{}, opError("create", name, syscall.EINVAL)
	}
	h, _, err := c.call("create", cmdCreate, header{name: name, uuid: uuid}, nil)
	if err != nil {
		return Info{}, err
	}
	return infoOf(h), nil
}

// Load gives a device an inactive table, and replaces the inactive table that it may
// have. The table's devices are opened now. The kernel returns EINVAL for most errors and
// gives the reason in its log.
func (c *Client) Load(name string, t Table) error { return c.load(name, t, false) }

func (c *Client) load(name string, t Table, readOnly bool) error {
	if err := t.Check(); err != nil {
		return opError("load", name, err)
	}
	t, err := c.resolve(t)
	if err != nil {
		return opError("load", name, err)
	}
	h := header{name: name, targetCount: uint32(len(t))}
	if readOnly {
		h.flags = flagReadOnly
	}
	_, _, err = c.call("load", cmdTableLoad, h, encodeTable(t))
	return err
}

// resolve replaces the names of mapped devices in t with their numbers.
func (c *Client) resolve(t Table) (Table, error) {
	numbers := map[Ref]Ref{}
	for _, r := range t.Refs() {
		if _, ok := r.Number(); ok {
			continue
		}
		info, err := c.Info(string(r))
		if err != nil {
			return nil, err
		}
		numbers[r] = RefTo(info.Number)
	}
	return t.mapRefs(func(r Ref) Ref {
		if n, ok := numbers[r]; ok {
			return n
		}
		return r
	}), nil
}

// Clear drops the inactive table.
func (c *Client) Clear(name string) error {
	_, _, err := c.call("clear", cmdTableClear, header{name: name}, nil)
	return err
}

// Udev tells udev which rules to skip for a device.
type Udev uint16

// The flags of libdevmapper that are used here. The cookie in the device's uevents
// carries them.
const (
	udevNoSubsystemRules Udev = 0x0002
	udevNoDiskRules      Udev = 0x0004
	udevNoOtherRules     Udev = 0x0008
	udevPrimarySource    Udev = 0x0040

	// UdevNormal: udev treats the device as an ordinary disk.
	UdevNormal = udevPrimarySource
	// UdevInner: udev makes the /dev/mapper name and nothing else. The contents must not
	// be scanned or assembled.
	UdevInner = udevPrimarySource | udevNoSubsystemRules | udevNoDiskRules | udevNoOtherRules
)

// cookie returns the number that udev's rules decode. Its lower half would name a
// semaphore to wait on; it is unused here.
func (u Udev) cookie() uint32 { return uint32(u) << 16 }

// Resume lets I/O through. If there is an inactive table, it becomes live first; a device
// that is not suspended is suspended for that switch.
func (c *Client) Resume(name string, u Udev) error {
	_, _, err := c.call("resume", cmdSuspend, header{name: name, eventNr: u.cookie()}, nil)
	return err
}

// Suspend stops the device: new I/O waits until the device is resumed. Suspend returns
// when the I/O under way has ended. If this process ends before, a mirror is suspended
// all the same, later: suspend_linux.go tells why.
//
// With noflush, it does not wait for I/O that a target can hand back: writes that a mirror
// holds go through the table that is live after the resume. Without noflush, a mirror
// fails the writes that it holds. Unless skipLockFS is set, a file system mounted on the
// device is frozen first.
//
// After a suspend, a mirror needs its table loaded again before it is resumed, even if the
// table is the same. [Diff] does so.
func (c *Client) Suspend(name string, noflush, skipLockFS bool) error {
	h := header{name: name, flags: flagSuspend}
	if noflush {
		h.flags |= flagNoFlush
	}
	if skipLockFS {
		h.flags |= flagSkipLockFS
	}
	_, _, err := c.call("suspend", cmdSuspend, h, nil)
	return err
}

// Remove removes a device. EBUSY means that the device is open. With deferred, an open
// device is removed when its last user closes it.
func (c *Client) Remove(name string, deferred bool) error {
	h := header{name: name}
	if deferred {
		h.flags |= flagDeferredRemove
	}
	_, _, err := c.call("remove", cmdRemove, h, nil)
	return err
}

// Rename gives a device another name.
func (c *Client) Rename(name, to string) error {
	if to == "" || checkName(to, "") != nil {
		return opError("rename", name, syscall.EINVAL)
	}
	_, _, err := c.call("rename", cmdRename, header{name: name, eventNr: UdevNormal.cookie()}, append([]byte(to), 0))
	return err
}

// Table returns the live table of a device, with devices by number. It is empty if the
// device has none.
func (c *Client) Table(name string) (Table, error) {
	rows, err := c.rows("table", name, flagStatusTable)
	if err != nil {
		return nil, err
	}
	var t Table
	for _, raw := range rows {
		r, err := raw.row()
		if err != nil {
			return nil, opError("table", name, err)
		}
		t = append(t, r)
	}
	return t, nil
}

// Status is the kernel's report on one row of a live table.
type Status struct {
	Start, Length block.Size
	Type, Params  string
}

// Status returns the state of each row of the live table.
func (c *Client) Status(name string) ([]Status, error) {
	rows, err := c.rows("status", name, 0)
	if err != nil {
		return nil, err
	}
	var all []Status
	for _, r := range rows {
		all = append(all, Status{block.Size(r.start) * block.SectorSize, block.Size(r.length) * block.SectorSize, r.kind, r.params})
	}
	return all, nil
}

// MirrorStatus returns the status of a device whose table is a single mirror.
func (c *Client) MirrorStatus(name string) (MirrorStatus, error) {
	rows, err := c.Status(name)
	if err != nil {
		return MirrorStatus{}, err
	}
	if len(rows) != 1 || rows[0].Type != "mirror" {
		return MirrorStatus{}, opError("status", name, fmt.Errorf("is not a mirror"))
	}
	s, err := ParseMirrorStatus(rows[0].Params)
	return s, opError("status", name, err)
}

// rows queries without a flush, because a status must not wait for I/O.
func (c *Client) rows(op, name string, flags uint32) ([]rawRow, error) {
	h, data, err := c.call(op, cmdTableStatus, header{name: name, flags: flags | flagNoFlush}, nil)
	if err != nil || h.flags&flagActive == 0 {
		return nil, err
	}
	rows, err := decodeRows(data, h.targetCount)
	return rows, opError(op, name, err)
}

// Deps returns the devices that the live table has open.
func (c *Client) Deps(name string) ([]block.DeviceNumber, error) {
	_, data, err := c.call("deps", cmdTableDeps, header{name: name}, nil)
	if err != nil || len(data) < 8 {
		return nil, err
	}
	count := uint64(order.Uint32(data))
	if count > uint64(len(data)-8)/8 {
		return nil, opError("deps", name, fmt.Errorf("%d devices in %d bytes", count, len(data)))
	}
	var deps []block.DeviceNumber
	for i := range count {
		deps = append(deps, decodeNumber(order.Uint64(data[8+8*i:])))
	}
	return deps, nil
}

// Message sends a message to the target at an offset of the device, and returns the
// target's answer.
func (c *Client) Message(name string, at block.Size, message string) (string, error) {
	payload := make([]byte, 8, 9+len(message))
	order.PutUint64(payload, sectors(at))
	h, data, err := c.call("message", cmdMessage, header{name: name}, append(append(payload, message...), 0))
	if err != nil || h.flags&flagDataOut == 0 {
		return "", err
	}
	return cString(data), nil
}

// Wait waits until the event number of a device differs from eventNr, and returns the
// device's state. It returns the error of Info if the device goes away, and ctx's if that
// ends first.
func (c *Client) Wait(ctx context.Context, name string, eventNr uint32) (Info, error) {
	var info Info
	err := c.kernel.watch(ctx, func() (changed bool, err error) {
		info, err = c.Info(name)
		return info.EventNr != eventNr, err
	})
	if _, ok := errors.AsType[*Error](err); err != nil && !ok {
		err = opError("wait", name, err)
	}
	return info, err
}

// NodePath returns the path of a mapped device in the kernel's devtmpfs. The name under
// /dev/mapper is made by udev and may not exist.
func NodePath(n block.DeviceNumber) string { return path.Join("/dev", fmt.Sprintf("dm-%d", n.Minor)) }

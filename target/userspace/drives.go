// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/agentlock"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/backend"
	"weft.dev/weft/target/drive"
)

// fileMajor is the major number of drives that are regular files; no block device has it.
const fileMajor = legMajor + 1

// Drives are a machine's block devices and files that are, or could be, drives. A drive in use is
// held exclusively, by the reader of its label and by each leg on it. The methods may be called
// concurrently.
type Drives struct {
	root      string
	locks     string // see Config
	shared    bool
	inventory *drive.Inventory
	medium    func(path string, data block.Device) block.Device
	calls     func(path string, kernel Calls) Calls
	label     func(path string, m drive.Medium) drive.Medium
	losses    lossNotes
	hungry    func()        // a tree needs space; may be nil
	fullFor   time.Duration // how long a write waits for space here
	ending    chan struct{} // closed when no I/O is to wait here any more
	counting  chan struct{} // holds one while the space of a tree's legs is counted
	end       sync.Once
	// background is what is done in trees, and ends soon after ending is closed.
	background sync.WaitGroup
	log        *slog.Logger
	rows       *Rows // legs that the kernel maps; nil: there are none

	mu      sync.Mutex
	opening map[block.DeviceNumber]*sync.Mutex // held while a drive is opened, which can take time
	files   map[inode]uint32                   // minor numbers
	held    map[block.DeviceNumber]*held
	unnoted map[block.DriveID]uint32 // incarnations that this process or the previous one could not note
	resumed map[string]bool          // paths of drives that the previous process has held until now
}

type inode struct{ device, number uint64 }

// held is a drive that this process has locked for itself.
type held struct {
	drives *Drives
	number block.DeviceNumber
	lock   io.Closer
	file   *backend.File
	data   block.Device // file, or its wrapper
	gone   atomic.Bool  // the file has been unlinked

	opened atomic.Pointer[beginning] // nil until its label has been read
	label  atomic.Pointer[drive.Drive]
	trees  trees
	noting sync.Mutex // held while a loss is noted

	copying pace // of what is copied in the background

	users, legs int // under drives.mu; users counts legs too
}

// beginning is the state of a drive when this process found it.
type beginning struct {
	id          block.DriveID
	incarnation uint32
}

func newDrives(c Config) *Drives {
	log := c.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	root := c.Root
	if root == "" {
		root = "/"
	}
	inventory := drive.NewInventory(root, c.Files...)
	if c.FilesOnly {
		inventory = drive.NewFileInventory(root, c.Files...)
	}
	return &Drives{
		root: root, locks: c.Locks, shared: c.Shared, inventory: inventory, medium: c.Medium, calls: c.Calls, label: c.Label,
		losses: lossNotes{c.LossDir}, log: log, hungry: c.Hungry, fullFor: fullFor, ending: make(chan struct{}), counting: make(chan struct{}, 1),
		opening: map[block.DeviceNumber]*sync.Mutex{}, files: map[inode]uint32{}, held: map[block.DeviceNumber]*held{},
		unnoted: map[block.DriveID]uint32{},
	}
}

// Scan lists devices and files. A drive whose file was removed accepts no more IO, since writes to
// an unlinked file are lost when it is closed. Nor does a drive whose file was cut off.
func (d *Drives) Scan(ctx context.Context) ([]*pb.Device, error) {
	devices, err := d.inventory.Scan(ctx)
	if err != nil {
		return nil, err
	}
	there := map[block.DeviceNumber]*pb.Device{}
	for _, dev := range devices {
		if n, err := d.Number(dev.GetPath()); err == nil {
			there[n] = dev
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for n, h := range d.held {
		dev := there[n]
		h.gone.Store(n.Major == fileMajor && dev == nil)
		if dev != nil && h.data.Geometry().VolatileCache {
			dev.VolatileCache = true // as it is served, whatever the device reports
		}
		h.file.Check() //nolint:errcheck // its IO fails with what was found
	}
	return devices, nil
}

// Number is a block device's own number; a file gets one from this process: a new file at the same
// path has a new number.
func (d *Drives) Number(path string) (block.DeviceNumber, error) {
	path = filepath.Join(d.root, path)
	info, err := os.Stat(path)
	if err != nil {
		return block.DeviceNumber{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() {
		return dm.MajorMinor(path)
	}
	i := inode{uint64(st.Dev), st.Ino}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.files[i] == 0 {
		d.files[i] = uint32(len(d.files)) + 1
	}
	return block.DeviceNumber{Major: fileMajor, Minor: d.files[i]}, nil
}

// Sequence is [drive.Sequence]; empty for a file.
func (d *Drives) Sequence(n block.DeviceNumber) string { return drive.Sequence(d.root, n) }

// Disk is an open drive. Its methods may be called concurrently.
type Disk struct {
	*drive.Drive
	held *held
}

// Open reads a drive's label, whatever its cluster, and holds the drive.
func (d *Drives) Open(path string) (*Disk, error) {
	h, err := d.hold(path)
	if err != nil {
		return nil, err
	}
	opened, err := d.openLabel(path, h)
	if err != nil {
		return nil, errors.Join(err, h.release(false))
	}
	h.begin(opened.ID(), opened.Label().Incarnation)
	h.label.Store(opened)
	return &Disk{opened, h}, nil
}

// begin is called when a drive's label has been read.
func (h *held) begin(id block.DriveID, label uint32) {
	noted, err := h.drives.losses.read(id)
	if err != nil {
		h.drives.log.Warn("cannot read what the previous process noted of a drive's lost writes", "drive", id, "err", err)
	}
	h.drives.mu.Lock()
	unnoted := h.drives.unnoted[id]
	h.drives.mu.Unlock()
	if h.opened.CompareAndSwap(nil, &beginning{id, max(label, noted, unnoted)}) && h.file.Losses() > 0 {
		h.noteLoss()
	}
}

// noteLoss is called for each loss before any host hears of it: the process may die before the
// label records it.
func (h *held) noteLoss() {
	began := h.opened.Load()
	if began == nil {
		return // begin will see it
	}
	h.noting.Lock()
	defer h.noting.Unlock()
	if err := h.drives.losses.write(began.id, h.incarnation()); err != nil {
		h.drives.log.Warn("cannot note a drive's lost writes for the next process; only the drive's label will record them", "drive", began.id, "err", err)
		h.drives.mu.Lock()
		h.drives.unnoted[began.id] = h.incarnation()
		h.drives.mu.Unlock()
	}
}

func (h *held) incarnation() uint32 { return h.opened.Load().incarnation + uint32(h.file.Losses()) }

func (d *Drives) openLabel(path string, h *held) (*drive.Drive, error) {
	m, err := d.device(path, h)
	if err != nil {
		return nil, err
	}
	opened, err := d.open(path, m)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, errors.Join(err, m.Close()))
	}
	return opened, nil
}

// open reads the label on m, the medium of the drive at path.
func (d *Drives) open(path string, m drive.Medium) (*drive.Drive, error) {
	d.mu.Lock()
	resumed := d.resumed[path]
	delete(d.resumed, path)
	d.mu.Unlock()
	if resumed {
		return drive.Resume(m)
	}
	return drive.Open(m, block.ClusterID{})
}

// device returns the held device at path as the medium of its label.
func (d *Drives) device(path string, h *held) (drive.Medium, error) {
	opened, err := drive.OpenDevice(filepath.Join(d.root, path), drive.ReadWrite)
	if err != nil {
		return nil, err
	}
	m := drive.Medium(opened)
	if d.label != nil {
		m = d.label(path, m)
	}
	return labelMedium{m, h.file}, nil
}

// labelMedium is the drive as the medium of its label. The legs' data may be in the same cache, so
// a failed flush of the label may have lost that data too.
type labelMedium struct {
	drive.Medium
	file *backend.File
}

func (m labelMedium) Flush() error {
	if err := m.Medium.Flush(); err != nil {
		return m.file.Lose(err)
	}
	return nil
}

// Incarnation is the value that the label should record: the label's or an earlier process's noted
// value when this process took the drive, plus one for each event since then that may have lost
// acknowledged writes.
func (d *Disk) Incarnation() uint32 { return d.held.incarnation() }

// Close releases the drive, except for the legs on it.
func (d *Disk) Close() error { return errors.Join(d.Drive.Close(), d.held.release(false)) }

// Update is [drive.Drive.Update]. Like all writes it keeps the lock until it ends, even if the disk
// is closed meanwhile.
func (d *Disk) Update(change func(*drive.Label) error) error {
	return d.locked(func() error { return d.Drive.Update(change) })
}

// ZeroLeg is [drive.Drive.ZeroLeg].
func (d *Disk) ZeroLeg(ctx context.Context, id block.LegID, progress func(done block.Size)) error {
	return d.locked(func() error { return d.Drive.ZeroLeg(ctx, id, progress) })
}

// Erase is [drive.Drive.Erase].
func (d *Disk) Erase() error { return d.locked(d.Drive.Erase) }

// Rewrite is [drive.Drive.Rewrite].
func (d *Disk) Rewrite() error { return d.locked(d.Drive.Rewrite) }

func (d *Disk) locked(do func() error) error {
	h := d.held
	h.drives.mu.Lock()
	closed := h.users == 0
	if !closed {
		h.users++
	}
	h.drives.mu.Unlock()
	if closed {
		return fmt.Errorf("drive %v: %w", d.ID(), fs.ErrClosed)
	}
	return errors.Join(do(), h.release(false))
}

// Format makes a device or file an empty drive. It returns EBUSY if anyone uses it.
func (d *Drives) Format(path string, cluster block.ClusterID, id block.DriveID, force string) error {
	h, err := d.hold(path)
	if err != nil {
		return err
	}
	defer h.release(false) //nolint:errcheck // what was written has been flushed
	d.mu.Lock()
	legs := h.legs
	d.mu.Unlock()
	if legs > 0 {
		return fmt.Errorf("format %s: %d legs are mapped on it: %w", path, legs, unix.EBUSY)
	}
	if d.shared { // what is held keeps nobody else from it
		return drive.FormatPath(filepath.Join(d.root, path), cluster, id, force)
	}
	m, err := d.device(path, h)
	if err != nil {
		return err
	}
	if err := drive.Format(m, cluster, id, force); err != nil {
		return fmt.Errorf("%s: %w", path, errors.Join(err, m.Close()))
	}
	return m.Close()
}

// Device returns the drive with a number, for a leg; the drive must be open.
func (d *Drives) Device(n block.DeviceNumber) (Device, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.held[n]
	if h == nil {
		return nil, fmt.Errorf("drive %v: %w", n, fs.ErrNotExist)
	}
	h.users++
	h.legs++
	return &lent{h}, nil
}

// hold returns the drive at path and counts one more user.
func (d *Drives) hold(path string) (*held, error) {
	n, err := d.Number(path)
	if err != nil {
		return nil, err
	}
	opening := d.openingOf(n)
	opening.Lock()
	defer opening.Unlock()
	if h := d.share(n); h != nil {
		return h, nil
	}
	h, err := d.take(path, n)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held[n] = h
	return h, nil
}

func (d *Drives) openingOf(n block.DeviceNumber) *sync.Mutex {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.opening[n] == nil {
		d.opening[n] = &sync.Mutex{}
	}
	return d.opening[n]
}

func (d *Drives) share(n block.DeviceNumber) *held {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.held[n]
	if h != nil {
		h.users++
	}
	return h
}

// take locks a drive and opens it.
func (d *Drives) take(path string, n block.DeviceNumber) (_ *held, retErr error) {
	where := filepath.Join(d.root, path)
	lock, err := d.lock(where, n)
	if err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, lock.Close())
		}
	}()
	// A test's medium may use virtual time, which cannot advance while a goroutine waits for the
	// kernel's completions without any IO.
	h := &held{drives: d, number: n, lock: lock, users: 1, trees: trees{turn: make(chan struct{}, 1)}}
	o := backend.Options{Buffered: d.medium != nil, FlushAgain: true, OnLoss: h.noteLoss}
	if d.calls != nil {
		o.Calls = func(kernel Calls) Calls { return d.calls(path, kernel) }
	}
	file, err := backend.Open(where, o)
	if err != nil {
		return nil, err
	}
	if again, err := d.Number(path); err != nil || again != n {
		return nil, errors.Join(fmt.Errorf("open %s: another file has replaced it", path), err, file.Close())
	}
	h.file, h.data = file, file
	if d.medium != nil {
		h.data = d.medium(path, file)
	}
	return h, nil
}

// lock keeps other processes from a drive: those of Weft by a lock on a file, which is also there where the
// kernel has mapped legs on the drive, and otherwise all by holding it exclusively.
func (d *Drives) lock(path string, n block.DeviceNumber) (_ io.Closer, retErr error) {
	var held locked
	defer func() {
		if retErr != nil {
			retErr = errors.Join(fmt.Errorf("lock %s: %w", path, retErr), held.Close())
		}
	}()
	file, err := d.lockFile(n)
	if err != nil {
		return nil, err
	}
	held = append(held, file...)
	device, err := drive.OpenDevice(path, drive.Exclusive)
	switch {
	case !d.shared && err == nil:
		return append(held, device), nil
	case !d.shared, !errors.Is(err, unix.EBUSY) && err != nil:
		return nil, err
	case err == nil:
		return held, device.Close() // nobody has it
	}
	// The kernel's legs keep everybody from holding it. If it has none, another program does.
	if holders, _ := os.ReadDir(filepath.Join(d.root, "sys/dev/block", n.String(), "holders")); len(holders) == 0 { //nolint:errcheck // then there are none
		return nil, err
	}
	return held, nil
}

// lockFile locks the file that stands for a block device; empty if there is none.
func (d *Drives) lockFile(n block.DeviceNumber) (locked, error) {
	if d.locks == "" || n.Major == fileMajor && !d.shared { // a file is locked itself
		return nil, nil
	}
	err := os.MkdirAll(d.locks, 0o755)
	var file *os.File
	if err == nil {
		name := filepath.Join(d.locks, fmt.Sprintf("drive-%v.lock", n))
		file, err = agentlock.Take(name, os.O_RDWR|os.O_CREATE, 0o644, unix.LOCK_EX)
		if errors.Is(err, fs.ErrPermission) { // another user's, which can be locked all the same
			file, err = agentlock.Take(name, os.O_RDONLY, 0, unix.LOCK_EX)
		}
	}
	switch {
	case err == nil:
		return locked{file}, nil
	case errors.Is(err, unix.EWOULDBLOCK):
		return nil, fmt.Errorf("another process of Weft uses it: %w", unix.EBUSY)
	case !d.shared && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EROFS)):
		return nil, nil // it may not write there, and nobody has made the file
	}
	return nil, err
}

// locked are open files that keep other processes from a drive.
type locked []io.Closer

func (l locked) Close() error {
	var errs []error
	for _, c := range l {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// release ends one use; the last one closes the drive. The lock is released last.
func (h *held) release(leg bool) error {
	h.drives.mu.Lock()
	h.users--
	if leg {
		h.legs--
	}
	last := h.users == 0
	if last {
		delete(h.drives.held, h.number)
	}
	h.drives.mu.Unlock()
	if !last {
		return nil
	}
	return errors.Join(h.file.Close(), h.lock.Close())
}

// lent is a drive as one leg uses it.
type lent struct{ held *held }

func (l *lent) Geometry() block.Geometry { return l.held.data.Geometry() }

func (l *lent) Submit(io *block.IO) {
	if l.held.gone.Load() {
		io.Complete(fmt.Errorf("%v, to a file that was removed: %w", io.Op, block.ErrGone))
		return
	}
	l.held.data.Submit(io)
}

func (l *lent) Losses() uint64 { return l.held.file.Losses() }

func (l *lent) Close() error { return l.held.release(true) }

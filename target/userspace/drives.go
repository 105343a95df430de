// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/backend"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
)

// fileMajor numbers drives that are regular files; no block device has it.
const fileMajor = legMajor + 1

// Drives are the block devices and files of a machine that are, or could be,
// drives. One that is in use is held exclusively: by its label's reader, and by
// each leg on it. Its methods may be called concurrently.
type Drives struct {
	root      string
	inventory *drive.Inventory
	medium    func(path string, data block.Device) block.Device
	calls     func(path string, kernel Calls) Calls
	label     func(path string, m drive.Medium) drive.Medium

	mu      sync.Mutex
	opening map[block.DeviceNumber]*sync.Mutex // held while a drive is opened, which can take time
	files   map[inode]uint32                   // minor numbers
	held    map[block.DeviceNumber]*held
}

type inode struct{ device, number uint64 }

// held is a drive that this process has to itself.
type held struct {
	drives *Drives
	number block.DeviceNumber
	lock   *drive.Device
	file   *backend.File
	data   block.Device // file, or what stands before it
	gone   atomic.Bool  // the file has no name any more

	began atomic.Pointer[uint32] // the label's incarnation before this process

	users, legs int // under drives.mu; users counts legs too
}

func newDrives(c Config) *Drives {
	root := c.Root
	if root == "" {
		root = "/"
	}
	inventory := drive.NewInventory(root, c.Files...)
	if c.FilesOnly {
		inventory = drive.NewFileInventory(root, c.Files...)
	}
	return &Drives{
		root: root, inventory: inventory, medium: c.Medium, calls: c.Calls, label: c.Label,
		opening: map[block.DeviceNumber]*sync.Mutex{}, files: map[inode]uint32{}, held: map[block.DeviceNumber]*held{},
	}
}

// Scan lists devices and files. A drive whose file was taken away takes no more
// IO: what would be written to a file without a name is lost when it is closed.
// Nor does one whose file was cut off.
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
			dev.VolatileCache = true // as it is served, whatever the device says
		}
		h.file.Check() //nolint:errcheck // its IO fails with what was found
	}
	return devices, nil
}

// Number is a block device's own, and one of this process for a file: another
// file at the same path has another number.
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

// Sequence is [drive.Sequence]; a file has none.
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
	opened, err := d.openLabel(path)
	if err != nil {
		return nil, errors.Join(err, h.release(false))
	}
	began := opened.Label().Incarnation
	h.began.CompareAndSwap(nil, &began)
	return &Disk{opened, h}, nil
}

func (d *Drives) openLabel(path string) (*drive.Drive, error) {
	m, err := d.device(path)
	if err != nil {
		return nil, err
	}
	opened, err := drive.Open(m, block.ClusterID{})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, errors.Join(err, m.Close()))
	}
	return opened, nil
}

// device is the device at path as its label is read and written.
func (d *Drives) device(path string) (drive.Medium, error) {
	m, err := drive.OpenDevice(filepath.Join(d.root, path), drive.ReadWrite)
	if err != nil || d.label == nil {
		return m, err
	}
	return d.label(path, m), nil
}

// Incarnation is what the label is to say: what it said when this process took the
// drive, and one more for each time that acknowledged writes may have been lost since.
func (d *Disk) Incarnation() uint32 { return *d.held.began.Load() + uint32(d.held.file.Losses()) }

// Close lets go of the drive, but for the legs on it.
func (d *Disk) Close() error { return errors.Join(d.Drive.Close(), d.held.release(false)) }

// Update is [drive.Drive.Update]; like all writes it keeps the lock for as long as
// it takes, even if the disk is closed meanwhile.
func (d *Disk) Update(change func(*drive.Label) error) error {
	return d.locked(func() error { return d.Drive.Update(change) })
}

// ZeroLeg is [drive.Drive.ZeroLeg].
func (d *Disk) ZeroLeg(ctx context.Context, id block.LegID, progress func(done block.Size)) error {
	return d.locked(func() error { return d.Drive.ZeroLeg(ctx, id, progress) })
}

// Erase is [drive.Drive.Erase].
func (d *Disk) Erase() error { return d.locked(d.Drive.Erase) }

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

// Format makes a device or file an empty drive. EBUSY if anybody uses it.
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
	m, err := d.device(path)
	if err != nil {
		return err
	}
	if err := drive.Format(m, cluster, id, force); err != nil {
		return fmt.Errorf("%s: %w", path, errors.Join(err, m.Close()))
	}
	return m.Close()
}

// Device is the drive with a number, for a leg; the drive must be open.
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

// hold is the drive at path with one user more.
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
	lock, err := drive.OpenDevice(where, drive.Exclusive)
	if err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, lock.Close())
		}
	}()
	// A test's medium may keep a time of its own, which must not wait for the
	// kernel's completions while there is no IO.
	o := backend.Options{Buffered: d.medium != nil, FlushAgain: true}
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
	h := &held{drives: d, number: n, lock: lock, file: file, data: file, users: 1}
	if d.medium != nil {
		h.data = d.medium(path, file)
	}
	return h, nil
}

// release gives back what one user has; the last one closes the drive. The lock
// goes last.
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

// lent is a drive as one leg has it.
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

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// shelf holds the node's devices and the drives among them, open. A drive that
// goes away stays on the shelf, with an error, until its label is found again.
type shelf struct {
	hardware hardware
	log      *slog.Logger

	refreshing sync.Mutex // held during a refresh

	mu      sync.Mutex
	scanned bool
	devices []*pb.Device
	drives  map[block.DriveID]*shelved
}

type shelved struct {
	disk   disk
	device string
	number block.DeviceNumber
	gone   string // why the device can not be read
	broken string // what went wrong with it
	uses   int    // who is at work on it
}

func newShelf(h hardware, log *slog.Logger) *shelf {
	return &shelf{hardware: h, log: log, drives: map[block.DriveID]*shelved{}}
}

// refresh looks at all devices, opens drives that have come and marks those that
// are gone.
func (s *shelf) refresh(ctx context.Context) error {
	s.refreshing.Lock()
	defer s.refreshing.Unlock()
	devices, err := s.hardware.Scan(ctx)
	if err != nil {
		return fmt.Errorf("scan devices: %w", err)
	}
	s.mark(devices) // so that one that has moved is opened where it is now
	var errs []error
	for _, d := range devices {
		if d.GetDriveId() != "" {
			errs = append(errs, s.open(d, devices))
		}
	}
	s.mark(devices)
	s.done()
	return errors.Join(errs...)
}

// mark notes what a scan found, and which drives it did not.
func (s *shelf) mark(devices []*pb.Device) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.devices = devices
	for id, d := range s.drives {
		d.gone = missing(devices, id, d.device)
	}
}

// done says that a first scan is over, with what it could open on the shelf.
func (s *shelf) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scanned = true
}

// open puts a labelled device on the shelf, unless it is there.
func (s *shelf) open(d *pb.Device, all []*pb.Device) error {
	id, err := block.ParseDriveID(d.GetDriveId())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	if others := carriers(all, id); len(others) > 1 {
		return fmt.Errorf("open %s: %s", d.GetPath(), several(others))
	}
	number, err := s.hardware.Number(d.GetPath())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	if s.keeps(id, d.GetPath(), number) {
		return nil
	}
	opened, err := s.hardware.Open(d.GetPath())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	s.put(id, &shelved{disk: opened, device: d.GetPath(), number: number})
	return nil
}

// keeps reports whether the drive on the shelf stays: it is that device and has
// not been away, or somebody is still at work on it, and two views of one label
// would overwrite one another.
func (s *shelf) keeps(id block.DriveID, path string, number block.DeviceNumber) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.drives[id]
	if old == nil {
		return false
	}
	return old.uses > 0 || old.gone == "" && old.number == number && old.device == path
}

// put replaces what is on the shelf. A drive that was written to in vain stays
// broken, unless it has been away.
func (s *shelf) put(id block.DriveID, fresh *shelved) {
	s.mu.Lock()
	old := s.drives[id]
	s.drives[id] = fresh
	s.mu.Unlock()
	s.log.Info("drive opened", "drive", id, "device", fresh.device)
	if old != nil {
		s.close(id, old)
	}
}

func (s *shelf) close(id block.DriveID, d *shelved) {
	if err := d.disk.Close(); err != nil {
		s.log.Warn("drive not closed", "drive", id, "device", d.device, "err", err)
	}
}

// missing says why a drive can not be used after a scan: its device is gone, or
// its label, or another device has the same one.
func missing(devices []*pb.Device, id block.DriveID, path string) string {
	found := carriers(devices, id)
	if len(found) > 1 {
		return several(found)
	}
	if slices.Contains(found, path) {
		return ""
	}
	i := slices.IndexFunc(devices, func(d *pb.Device) bool { return d.GetPath() == path })
	if i < 0 {
		return fmt.Sprintf("device %s is gone", path)
	}
	return fmt.Sprintf("the label on %s can not be read: %s", path, devices[i].GetRefused())
}

// carriers are the devices with a drive's label.
func carriers(devices []*pb.Device, id block.DriveID) []string {
	var out []string
	for _, d := range devices {
		if d.GetDriveId() == id.String() {
			out = append(out, d.GetPath())
		}
	}
	return out
}

func several(paths []string) string {
	return "several devices carry this label: " + strings.Join(paths, ", ")
}

// take is a drive to work with, until release is called.
func (s *shelf) take(id block.DriveID) (d disk, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	on := s.drives[id]
	if on == nil {
		return nil, nil, fmt.Errorf("drive %v: not here", id)
	}
	if on.gone != "" {
		return nil, nil, fmt.Errorf("drive %v: %s", id, on.gone)
	}
	on.uses++
	return on.disk, func() { s.release(on) }, nil
}

func (s *shelf) release(d *shelved) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.uses--
}

// judge draws the conclusion from an access to a drive: an error that comes from
// the device breaks it, a success after that mends it.
func (s *shelf) judge(id block.DriveID, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.drives[id]
	if d == nil {
		return
	}
	switch {
	case err == nil:
		d.broken = ""
	case deviceError(err):
		d.broken = err.Error()
		s.log.Error("drive failed", "drive", id, "device", d.device, "err", err)
	}
}

func deviceError(err error) bool {
	for _, e := range []error{
		drive.ErrOverwritten,
		syscall.EIO, syscall.ENXIO, syscall.ENODEV, syscall.EROFS, syscall.ENODATA, syscall.ETIMEDOUT,
		syscall.EREMOTEIO, syscall.EILSEQ, syscall.EPERM,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// drop takes a drive from the shelf for good.
func (s *shelf) drop(id block.DriveID) {
	s.mu.Lock()
	d := s.drives[id]
	delete(s.drives, id)
	s.mu.Unlock()
	if d != nil {
		s.close(id, d)
	}
}

// replaced drops what a device was before it was made another drive.
func (s *shelf) replaced(device string, id block.DriveID) {
	s.mu.Lock()
	var old []block.DriveID
	for other, d := range s.drives {
		if d.device == device && other != id && d.uses == 0 {
			old = append(old, other)
		}
	}
	s.mu.Unlock()
	for _, other := range old {
		s.drop(other)
	}
}

func (s *shelf) closeAll() {
	s.mu.Lock()
	drives := s.drives
	s.drives = map[block.DriveID]*shelved{}
	s.mu.Unlock()
	for id, d := range drives {
		s.close(id, d)
	}
}

// look is what is on the shelf now; ok is false until the first scan is done.
func (s *shelf) look() (devices []*pb.Device, drives map[block.DriveID]driveSeen, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	drives = map[block.DriveID]driveSeen{}
	for id, d := range s.drives {
		err := d.gone
		if err == "" {
			err = d.broken
		}
		drives[id] = driveSeen{device: d.device, number: d.number, label: d.disk.Label(), err: err}
	}
	return s.devices, drives, s.scanned
}

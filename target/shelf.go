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

	"google.golang.org/protobuf/proto"

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
	closed  bool
	opening map[string]bool   // paths of devices that are being opened or formatted, or hang in it
	refused map[string]string // why devices with a label were not opened, by path
	devices []*pb.Device
	drives  map[block.DriveID]*shelved
}

type shelved struct {
	disk   disk
	device string
	number block.DeviceNumber
	gone   string // why the device cannot be read
	broken string // what went wrong with it
	uses   int    // who is at work on it

	sequence string
}

func newShelf(h hardware, log *slog.Logger) *shelf {
	return &shelf{hardware: h, log: log, opening: map[string]bool{}, refused: map[string]string{}, drives: map[block.DriveID]*shelved{}}
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
	for _, end := range s.openAll(devices) {
		select {
		case err := <-end:
			errs = append(errs, err)
		case <-ctx.Done(): // it goes on, and the drive comes when it answers
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

// openAll opens all that carry labels at once, since each may hang in it: but for
// those that an earlier call is still at. What it returns gets the outcomes.
func (s *shelf) openAll(devices []*pb.Device) (ends []<-chan error) {
	for _, d := range devices {
		if d.GetDriveId() == "" || !s.begin(d.GetPath()) {
			continue
		}
		end := make(chan error, 1)
		ends = append(ends, end)
		go func() {
			defer s.end(d.GetPath())
			err := s.open(d, devices)
			s.opened(d.GetPath(), err)
			end <- err
		}()
	}
	return ends
}

// opened notes whether a device with a label could be opened.
func (s *shelf) opened(path string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.refused, path)
	if err != nil {
		s.refused[path] = err.Error()
	}
}

// begin claims a device for opening or formatting it, until end is called; false:
// it is claimed.
func (s *shelf) begin(path string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.opening[path] {
		return false
	}
	s.opening[path] = true
	return true
}

func (s *shelf) end(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.opening, path)
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
	sequence := s.hardware.Sequence(number)
	if s.keeps(id, d.GetPath(), number, sequence) {
		return nil
	}
	opened, err := s.hardware.Open(d.GetPath())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	s.put(id, &shelved{disk: opened, device: d.GetPath(), number: number, sequence: sequence})
	return nil
}

// keeps reports whether the drive on the shelf stays: it is that device and has
// not been away, or somebody is still at work on it, and two views of one label
// would overwrite one another.
func (s *shelf) keeps(id block.DriveID, path string, number block.DeviceNumber, sequence string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.drives[id]
	if old == nil {
		return false
	}
	return old.uses > 0 || old.gone == "" && old.number == number && old.sequence == sequence && old.device == path
}

// put replaces what is on the shelf. A drive that was written to in vain stays
// broken, unless it has been away.
func (s *shelf) put(id block.DriveID, fresh *shelved) {
	s.mu.Lock()
	old, closed := s.drives[id], s.closed
	if !closed {
		s.drives[id] = fresh
	}
	s.mu.Unlock()
	if closed {
		s.close(id, fresh)
		return
	}
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

// missing says why a drive cannot be used after a scan: its device is gone, or
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
	d := devices[i]
	carries := strings.Join(d.GetSignatures(), ", ")
	switch {
	case d.GetUnread() != "": // not why it cannot be added: that is its legs, which hold it
		return fmt.Sprintf("device %s cannot be read: %s", path, d.GetUnread())
	case slices.ContainsFunc(d.GetSignatures(), func(s string) bool { return strings.HasPrefix(s, "weft drive "+id.String()) }):
		return fmt.Sprintf("device %s cannot be used: %s", path, d.GetRefused())
	case carries == "":
		return fmt.Sprintf("the label on %s is gone", path)
	}
	return fmt.Sprintf("the label on %s is gone: it carries %s", path, carries)
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

// incarnation is what a drive's label is to say. In the kernel's data path it stays:
// there is no page cache that all legs share, and each host's own flush fails.
func incarnation(d disk, label *drive.Label) uint32 {
	if counts, ok := d.(interface{ Incarnation() uint32 }); ok {
		return counts.Incarnation()
	}
	return label.Incarnation
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
	s.drives, s.closed = map[block.DriveID]*shelved{}, true
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
		label := d.disk.Label()
		drives[id] = driveSeen{
			device: d.device, number: d.number, label: label, err: err,
			sequence: d.sequence, incarnation: max(label.Incarnation, incarnation(d.disk, label)),
		}
	}
	return s.unopened(), drives, s.scanned
}

// unopened lists the devices of the last scan. A device that has a label and could
// not be opened says why.
func (s *shelf) unopened() []*pb.Device {
	devices := slices.Clone(s.devices)
	for i, d := range devices {
		id, err := block.ParseDriveID(d.GetDriveId())
		why := s.refused[d.GetPath()]
		if why == "" || err != nil || s.drives[id] != nil {
			continue
		}
		devices[i] = proto.CloneOf(d)
		devices[i].Unread = why
	}
	return devices
}

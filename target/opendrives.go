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
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// openDrives holds the node's devices and keeps those that are drives open. A drive that disappears
// stays listed, with an error, until its label is found again.
type openDrives struct {
	hardware hardware
	log      *slog.Logger

	refreshing sync.Mutex // held during a refresh

	mu      sync.Mutex
	scanned bool
	closed  bool
	opening map[string]bool   // paths of devices being opened or formatted, or hanging in it
	refused map[string]string // why devices with a label were not opened, by path
	devices []*pb.Device
	drives  map[block.DriveID]*openDrive
}

type openDrive struct {
	disk   disk
	device string
	number block.DeviceNumber
	gone   string // why the device cannot be read
	broken string // what went wrong with it
	uses   int    // callers that use it now

	sequence string
}

func newOpenDrives(h hardware, log *slog.Logger) *openDrives {
	return &openDrives{hardware: h, log: log, opening: map[string]bool{}, refused: map[string]string{}, drives: map[block.DriveID]*openDrive{}}
}

// refresh scans all devices, opens new drives and marks those that are gone.
func (o *openDrives) refresh(ctx context.Context) error {
	o.refreshing.Lock()
	defer o.refreshing.Unlock()
	devices, err := o.hardware.Scan(ctx)
	if err == nil && ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		err = context.Cause(ctx) // the agent ends: what has not answered yet would count as without a label
	}
	if err != nil {
		return fmt.Errorf("scan devices: %w", err)
	}
	return errors.Join(o.useLocked(ctx, devices), await(ctx, o.tryBroken()))
}

// use opens the drives among devices that another process has scanned.
func (o *openDrives) use(ctx context.Context, devices []*pb.Device) error {
	o.refreshing.Lock()
	defer o.refreshing.Unlock()
	return o.useLocked(ctx, devices)
}

func (o *openDrives) useLocked(ctx context.Context, devices []*pb.Device) error {
	o.mark(devices) // first, so that a drive that has moved is opened at its new place
	err := await(ctx, o.openAll(devices))
	o.mark(devices)
	o.done()
	return err
}

// await waits for outcomes. When ctx ends, what is under way continues: a drive appears when it
// answers.
func await(ctx context.Context, ends []<-chan error) error {
	var errs []error
	for _, end := range ends {
		select {
		case err := <-end:
			errs = append(errs, err)
		case <-ctx.Done():
		}
	}
	return errors.Join(errs...)
}

// apart does something with a device in a goroutine of its own, since it may hang, unless an earlier
// call still works with the device. The channel delivers the outcome; nil if nothing was started.
func (o *openDrives) apart(path string, do func() error) <-chan error {
	if !o.begin(path) {
		return nil
	}
	end := make(chan error, 1)
	go func() {
		defer o.end(path)
		end <- do()
	}()
	return end
}

// tryBroken writes the label of each drive that has failed once more: a drive whose label can be
// written is usable.
func (o *openDrives) tryBroken() (ends []<-chan error) {
	for id, path := range o.broken() {
		end := o.apart(path, func() error {
			o.tryAgain(id)
			return nil // a failure is known already
		})
		if end != nil {
			ends = append(ends, end)
		}
	}
	return ends
}

// broken lists the drives that are there and have failed, with their devices.
func (o *openDrives) broken() map[block.DriveID]string {
	o.mu.Lock()
	defer o.mu.Unlock()
	found := map[block.DriveID]string{}
	for id, d := range o.drives {
		if d.broken != "" && d.gone == "" && d.uses == 0 {
			found[id] = d.device
		}
	}
	return found
}

// tryAgain writes a broken drive's label again.
func (o *openDrives) tryAgain(id block.DriveID) {
	d, release, err := o.take(id)
	if err != nil {
		return
	}
	defer release()
	if err := d.Rewrite(); err != nil {
		return
	}
	o.judge(id, nil)
	o.log.Info("drive works again", "drive", id)
}

// mark notes what a scan found, and which drives it did not find.
func (o *openDrives) mark(devices []*pb.Device) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.devices = devices
	for id, d := range o.drives {
		d.gone = missing(devices, id, d.device)
	}
}

// done notes that the first scan is complete and every drive that could be opened is open.
func (o *openDrives) done() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.scanned = true
}

// openAll opens all labelled devices concurrently, since each may hang, except those that an
// earlier call is still opening. The returned channels deliver the outcomes.
func (o *openDrives) openAll(devices []*pb.Device) (ends []<-chan error) {
	for _, d := range devices {
		if d.GetDriveId() == "" {
			continue
		}
		end := o.apart(d.GetPath(), func() error {
			err := o.open(d, devices)
			o.opened(d.GetPath(), err)
			return err
		})
		if end != nil {
			ends = append(ends, end)
		}
	}
	return ends
}

// opened notes whether a device with a label could be opened.
func (o *openDrives) opened(path string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.refused, path)
	if err != nil {
		o.refused[path] = err.Error()
	}
}

// begin claims a device for opening or formatting it, until end is called; it returns false if the
// device is already claimed.
func (o *openDrives) begin(path string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.opening[path] {
		return false
	}
	o.opening[path] = true
	return true
}

func (o *openDrives) end(path string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.opening, path)
}

// open opens a labelled device, unless it is open already.
func (o *openDrives) open(d *pb.Device, all []*pb.Device) error {
	id, err := block.ParseDriveID(d.GetDriveId())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	if others := carriers(all, id); len(others) > 1 {
		return fmt.Errorf("open %s: %s", d.GetPath(), several(others))
	}
	number, err := o.hardware.Number(d.GetPath())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	sequence := o.hardware.Sequence(number)
	if o.keeps(id, d.GetPath(), number, sequence) {
		return nil
	}
	opened, err := o.hardware.Open(d.GetPath())
	if err != nil {
		return fmt.Errorf("open %s: %w", d.GetPath(), err)
	}
	if found := opened.Label().Drive; found != id { // another disk has its path since the scan
		return errors.Join(fmt.Errorf("open %s: it is drive %v, not %v", d.GetPath(), found, id), opened.Close())
	}
	o.put(id, &openDrive{disk: opened, device: d.GetPath(), number: number, sequence: sequence})
	return nil
}

// keeps reports whether the open drive stays: either it is still that device and has not been away,
// or somebody still uses it. Two open views of one label would overwrite each other.
func (o *openDrives) keeps(id block.DriveID, path string, number block.DeviceNumber, sequence string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	old := o.drives[id]
	if old == nil {
		return false
	}
	return old.uses > 0 || old.gone == "" && old.number == number && old.sequence == sequence && old.device == path
}

// put replaces the open drive of that identity.
func (o *openDrives) put(id block.DriveID, fresh *openDrive) {
	o.mu.Lock()
	old, closed := o.drives[id], o.closed
	if !closed {
		o.drives[id] = fresh
	}
	o.mu.Unlock()
	if closed {
		o.close(id, fresh)
		return
	}
	o.log.Info("drive opened", "drive", id, "device", fresh.device)
	if old != nil {
		o.close(id, old)
	}
}

func (o *openDrives) close(id block.DriveID, d *openDrive) {
	if err := d.disk.Close(); err != nil {
		o.log.Warn("drive not closed", "drive", id, "device", d.device, "err", err)
	}
}

// missing says why a drive cannot be used after a scan: its device is gone, its label is gone, or
// another device carries the same label.
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
	case d.GetUnread() != "": // the reason that it cannot be added would mislead: its own legs hold it
		return fmt.Sprintf("device %s cannot be read: %s", path, d.GetUnread())
	case slices.ContainsFunc(d.GetSignatures(), func(s string) bool { return strings.HasPrefix(s, "weft drive "+id.String()) }):
		return fmt.Sprintf("device %s cannot be used: %s", path, d.GetRefused())
	case carries == "":
		return fmt.Sprintf("the label on %s is gone", path)
	}
	return fmt.Sprintf("the label on %s is gone: it carries %s", path, carries)
}

// carriers lists the devices that carry a drive's label.
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

// take returns a drive to work with, until release is called.
func (o *openDrives) take(id block.DriveID) (d disk, release func(), err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	on := o.drives[id]
	if on == nil {
		return nil, nil, fmt.Errorf("drive %v: not here", id)
	}
	if on.gone != "" {
		return nil, nil, fmt.Errorf("drive %v: %s", id, on.gone)
	}
	on.uses++
	return on.disk, func() { o.release(on) }, nil
}

// incarnation returns the incarnation that a drive's label should record. In the kernel's data path
// it never changes: the legs share no page cache there, and each host's own flush fails.
func incarnation(d disk, label *drive.Label) uint32 {
	if counts, ok := d.(interface{ Incarnation() uint32 }); ok {
		return counts.Incarnation()
	}
	return label.Incarnation
}

func (o *openDrives) release(d *openDrive) {
	o.mu.Lock()
	defer o.mu.Unlock()
	d.uses--
}

// judge updates a drive's health after an access: an error from the device marks it broken, a later
// success clears that.
func (o *openDrives) judge(id block.DriveID, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	d := o.drives[id]
	if d == nil {
		return
	}
	switch {
	case err == nil:
		d.broken = ""
	case deviceError(err):
		d.broken = err.Error()
		o.log.Error("drive failed", "drive", id, "device", d.device, "err", err)
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

// drop closes a drive for good.
func (o *openDrives) drop(id block.DriveID) {
	o.mu.Lock()
	d := o.drives[id]
	delete(o.drives, id)
	o.mu.Unlock()
	if d != nil {
		o.close(id, d)
	}
}

// replaced drops the drive that a device used to be, before it was formatted as another.
func (o *openDrives) replaced(device string, id block.DriveID) {
	o.mu.Lock()
	var old []block.DriveID
	for other, d := range o.drives {
		if d.device == device && other != id && d.uses == 0 {
			old = append(old, other)
		}
	}
	o.mu.Unlock()
	for _, other := range old {
		o.drop(other)
	}
}

// closeAll closes all drives side by side, since each flushes what its drive has in its cache. It returns after
// limit in any case; closed is closed when all are, and until then those that are late stay locked.
func (o *openDrives) closeAll(limit time.Duration) (closed <-chan struct{}) {
	o.mu.Lock()
	drives := o.drives
	o.drives, o.closed = map[block.DriveID]*openDrive{}, true
	o.mu.Unlock()
	var closing sync.WaitGroup
	for id, d := range drives {
		closing.Go(func() { o.close(id, d) })
	}
	all := make(chan struct{})
	go func() {
		closing.Wait()
		close(all)
	}()
	if !within(all, limit) {
		o.log.Error("a drive does not end its last flush; it stays locked", "after", limit)
	}
	return all
}

// within waits until a channel is closed, and reports whether that is so before limit.
func within(closed <-chan struct{}, limit time.Duration) bool {
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-closed:
		return true
	case <-late.C:
		return false
	}
}

// list returns the devices and the open drives; ok is false until the first scan is done.
func (o *openDrives) list() (devices []*pb.Device, drives map[block.DriveID]driveSeen, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	drives = map[block.DriveID]driveSeen{}
	for id, d := range o.drives {
		err := d.gone
		if err == "" {
			err = d.broken
		}
		label := d.disk.Label()
		seen := driveSeen{
			device: d.device, number: d.number, label: label, err: err,
			sequence: d.sequence, incarnation: max(label.Incarnation, incarnation(d.disk, label)),
		}
		if p, ok := d.disk.(planted); ok {
			seen.trees = p.Trees()
		}
		drives[id] = seen
	}
	return o.unopened(), drives, o.scanned
}

// unopened lists the devices of the last scan. A labelled device that could not be opened says why.
func (o *openDrives) unopened() []*pb.Device {
	devices := slices.Clone(o.devices)
	for i, d := range devices {
		id, err := block.ParseDriveID(d.GetDriveId())
		why := o.refused[d.GetPath()]
		if why == "" || err != nil || o.drives[id] != nil {
			continue
		}
		devices[i] = proto.CloneOf(d)
		devices[i].Unread = why
	}
	return devices
}

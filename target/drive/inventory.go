// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Inventory finds the block devices of a node that could become drives, and the regular files that
// it was told to treat as such.
type Inventory struct {
	root      string // holds sys, proc and dev
	files     []string
	filesOnly bool

	mu   sync.Mutex
	busy map[string]time.Time // since when a device is being read, or hangs in a read
}

// NewInventory looks below root, which is "/" on a real machine, for block
// devices and at the files with the given paths.
func NewInventory(root string, files ...string) *Inventory {
	return &Inventory{root: root, files: files, busy: map[string]time.Time{}}
}

// NewFileInventory looks only at the given files.
func NewFileInventory(root string, files ...string) *Inventory {
	return &Inventory{root: root, files: files, filesOnly: true, busy: map[string]time.Time{}}
}

// Scan lists all devices, and the files that exist, sorted by path. drive_id and cluster_id are set
// on those that carry a good label and are used by Weft alone; refused says why each of the others
// cannot be added. It reads about 2 MiB of each device, so it should not run every second. A device
// that does not answer before ctx ends, or that an earlier scan is still reading, is listed as
// refused.
func (inv *Inventory) Scan(ctx context.Context) ([]*pb.Device, error) {
	var found []found
	if !inv.filesOnly {
		var err error
		if found, err = sysfs(inv.root).devices(); err != nil {
			return nil, fmt.Errorf("scan devices: %w", err)
		}
	}
	found = append(found, sysfs(inv.root).regularFiles(inv.files)...)
	carried := inv.readAll(ctx, found)
	devices := make([]*pb.Device, len(found))
	for i, f := range found {
		judge(f, carried[f.Path])
		devices[i] = f.Device
	}
	slices.SortFunc(devices, func(a, b *pb.Device) int { return strings.Compare(a.Path, b.Path) })
	return devices, nil
}

// reading is the content found on a device, or why it is unknown.
type reading struct {
	path string
	contents
	err error
}

var errSilent = errors.New("it does not answer")

// silent is errSilent, with the time since which the device has been silent.
func silent(since time.Time) error {
	return fmt.Errorf("%w, since %s", errSilent, since.UTC().Format(time.RFC3339))
}

// few lets as many calls go on at a time as it has room for. A call that takes longer than slow does not
// count any more: others do not wait for devices that hang.
type few chan struct{}

const slow = time.Second

// do calls f, unless ctx ends first.
func (slots few) do(ctx context.Context, f func()) {
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	late := time.AfterFunc(slow, func() { <-slots })
	f()
	if late.Stop() {
		<-slots
	}
}

// readAll reads all devices, a few at a time. A read that hangs in the kernel cannot be ended: its
// goroutine stays as long as the read does, one per device.
func (inv *Inventory) readAll(ctx context.Context, found []found) map[string]reading {
	answers := make(chan reading, len(found))
	slots := make(few, 8)
	all := map[string]reading{}
	began := time.Now()
	for _, f := range found {
		all[f.Path] = reading{err: silent(began)}
		go func() {
			slots.do(ctx, func() { answers <- inv.read(f) })
		}()
	}
	for range found {
		select {
		case r := <-answers:
			all[r.path] = r
		case <-ctx.Done():
			return all
		}
	}
	return all
}

func (inv *Inventory) read(f found) (r reading) {
	r.path = f.Path
	if since, ok := inv.begin(f.Path); !ok {
		r.err = silent(since)
		return r
	}
	defer inv.end(f.Path)
	m, err := OpenDevice(sysfs(inv.root).path(f.Path), ReadOnly)
	if err != nil {
		r.err = err
		return r
	}
	r.contents, err = examine(m, m.Size())
	r.err = errors.Join(err, m.Close())
	return r
}

// begin claims a device for reading. If a read is already under way, it returns since when.
func (inv *Inventory) begin(path string) (since time.Time, ok bool) {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	if since, reading := inv.busy[path]; reading {
		return since, false
	}
	inv.busy[path] = time.Now()
	return time.Time{}, true
}

func (inv *Inventory) end(path string) {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	delete(inv.busy, path)
}

// judge fills in what the content of a device says, and whether it can be added.
func judge(f found, r reading) {
	if r.err == nil {
		f.Signatures = r.signatures()
	} else {
		f.Unread = r.err.Error()
	}
	if r.err == nil && r.contents.err == nil && !f.heldByOthers {
		f.DriveId, f.ClusterId = r.label.Drive.String(), r.label.Cluster.String()
	}
	f.Refused = refusal(f, r)
}

func refusal(f found, r reading) string {
	size := block.Size(f.SizeBytes)
	switch {
	case len(f.Holders) > 0:
		return "in use: " + strings.Join(f.Holders, ", ")
	case len(f.partitions) > 0:
		return "has partitions: " + strings.Join(f.partitions, ", ")
	case f.diskInUse != "":
		return "its disk is in use: " + f.diskInUse
	case f.ReadOnly:
		return "read-only"
	case f.zoned:
		return "zoned"
	case size < block.LeastDrive:
		return fmt.Sprintf("too small: %s, at least %v are needed", size.Short(), block.LeastDrive)
	case r.err != nil:
		return r.err.Error()
	case len(f.Signatures) == 0 || errors.Is(r.contents.err, ErrUnfinished):
		return "" // an unfinished format may continue: erasing was agreed
	}
	why := carries(strings.Join(f.Signatures, ", "))
	if r.contents.err != nil && !errors.Is(r.contents.err, ErrNoLabel) {
		why += ": " + r.contents.err.Error()
	}
	return why
}

// CheckAdd says why a device cannot be added, given what the operator has agreed to erase. It
// returns nil if the device is blank, or if forceErase is exactly its signatures joined by ", ",
// and nothing else prevents it. Format checks again at the moment of writing.
func CheckAdd(device *pb.Device, forceErase string) error {
	what := strings.Join(device.GetSignatures(), ", ")
	switch {
	case device.GetRefused() == "":
		return nil
	case what != "" && what == forceErase && strings.HasPrefix(device.GetRefused(), carries(what)):
		return nil
	}
	return fmt.Errorf("%s: %s", device.GetPath(), device.GetRefused())
}

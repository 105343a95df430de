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

// Inventory finds the block devices of a node that could be given to Weft, and
// those regular files that it was told to take for such.
type Inventory struct {
	root      string // holds sys, proc and dev
	files     []string
	filesOnly bool

	mu   sync.Mutex
	busy map[string]time.Time // since when a device is being read, or hangs in it
}

// NewInventory looks below root, which is "/" on a real machine, for block
// devices and at the files with the given paths.
func NewInventory(root string, files ...string) *Inventory {
	return &Inventory{root: root, files: files, busy: map[string]time.Time{}}
}

// NewFileInventory looks at the given files alone.
func NewFileInventory(root string, files ...string) *Inventory {
	return &Inventory{root: root, files: files, filesOnly: true, busy: map[string]time.Time{}}
}

// Scan lists all devices, and the files that exist, sorted by path, with drive_id
// and cluster_id set on those that carry a good label and that only Weft may be
// using, and with refused saying why each of the others cannot be added. It reads
// about 2 MiB of each device, so it is not for every second. A device that does not answer before ctx ends, and is
// still being read by an earlier scan, is listed as refused.
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

// reading is what was found on a device, or why that is not known.
type reading struct {
	path string
	contents
	err error
}

var errSilent = errors.New("it does not answer")

// silent is errSilent, with the time since which it is so.
func silent(since time.Time) error {
	return fmt.Errorf("%w, since %s", errSilent, since.UTC().Format(time.RFC3339))
}

// readAll looks at all devices, a few at a time. Nothing can end a read that
// hangs in the kernel: its goroutine stays until the read does, one per device.
func (inv *Inventory) readAll(ctx context.Context, found []found) map[string]reading {
	answers := make(chan reading, len(found))
	slots := make(chan struct{}, 8)
	all := map[string]reading{}
	began := time.Now()
	for _, f := range found {
		all[f.Path] = reading{err: silent(began)}
		go func() {
			select {
			case slots <- struct{}{}:
				answers <- inv.read(f)
				<-slots
			case <-ctx.Done():
			}
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

// begin says since when a device is being read already, if it is.
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

// judge fills in what the contents of a device say, and whether it can be added.
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
	case size < MinSize:
		return fmt.Sprintf("too small: %s, at least %v are needed", size.Short(), MinSize)
	case r.err != nil:
		return r.err.Error()
	case len(f.Signatures) == 0 || errors.Is(r.contents.err, ErrUnfinished):
		return "" // an unfinished format may go on: erasing was agreed to
	}
	why := carries(strings.Join(f.Signatures, ", "))
	if r.contents.err != nil && !errors.Is(r.contents.err, ErrNoLabel) {
		why += ": " + r.contents.err.Error()
	}
	return why
}

// CheckAdd says why a device cannot be added, given what the operator has
// agreed to erase: nil if it is blank, or if forceErase is exactly its
// signatures joined by ", " and nothing else stands against it. Format looks
// again at the moment of writing.
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

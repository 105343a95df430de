// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"path/filepath"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/uevent"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
)

// machine is the hardware of this node.
type machine struct {
	root      string
	inventory *drive.Inventory
}

func newMachine(root string) machine {
	return machine{root: root, inventory: drive.NewInventory(root)}
}

func (m machine) Scan(ctx context.Context) ([]*pb.Device, error) { return m.inventory.Scan(ctx) }

// Open accepts any cluster: whose a drive is, is reported, and decided later.
func (m machine) Open(path string) (disk, error) {
	return drive.OpenPath(filepath.Join(m.root, path), block.ClusterID{})
}

func (m machine) Format(path string, cluster block.ClusterID, id block.DriveID, force string) error {
	return drive.FormatPath(filepath.Join(m.root, path), cluster, id, force)
}

func (m machine) Number(path string) (block.DeviceNumber, error) {
	return dm.MajorMinor(filepath.Join(m.root, path))
}

func (m machine) Sequence(n block.DeviceNumber) string { return drive.Sequence(m.root, n) }

// watchDevices calls changed when a block device other than a mapped one comes,
// goes or changes: our own mapping is no news.
func watchDevices(ctx context.Context, changed func()) error {
	return uevent.Watch(ctx, func(e uevent.Event) {
		lost := e.Action == "" // events, more than one could read
		if lost || e.Vars["SUBSYSTEM"] == "block" && !strings.HasPrefix(e.Vars["DEVNAME"], "dm-") {
			changed()
		}
	})
}

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

// nodeDevices is the hardware of this node.
type nodeDevices struct {
	sensors
	root      string
	inventory *drive.Inventory
}

func newNodeDevices(root string) nodeDevices {
	return nodeDevices{sensors: sensors{root}, root: root, inventory: drive.NewInventory(root)}
}

func (m nodeDevices) Scan(ctx context.Context) ([]*pb.Device, error) { return m.inventory.Scan(ctx) }

// Open accepts any cluster: the owner of a drive is reported here and judged later.
func (m nodeDevices) Open(path string) (disk, error) {
	return drive.OpenPath(filepath.Join(m.root, path), block.ClusterID{})
}

func (m nodeDevices) Format(path string, cluster block.ClusterID, id block.DriveID, force string) error {
	return drive.FormatPath(filepath.Join(m.root, path), cluster, id, force)
}

func (m nodeDevices) Number(path string) (block.DeviceNumber, error) {
	return dm.MajorMinor(filepath.Join(m.root, path))
}

func (m nodeDevices) Sequence(n block.DeviceNumber) string { return drive.Sequence(m.root, n) }

// watchDevices calls changed when a block device is added, removed or changed. It ignores mapped
// devices, since those are our own doing.
func watchDevices(ctx context.Context, changed func()) error {
	return uevent.Watch(ctx, func(e uevent.Event) {
		lost := e.Action == "" // more events than could be read
		if lost || e.Vars["SUBSYSTEM"] == "block" && !strings.HasPrefix(e.Vars["DEVNAME"], "dm-") {
			changed()
		}
	})
}

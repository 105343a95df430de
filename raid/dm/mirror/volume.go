// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// TopName returns the name of a volume's device: users open /dev/mapper/<TopName>.
func TopName(v block.VolumeID) string { return "weft-" + v.String() }

// TopUUID returns that device's uuid. The uuids of all devices of the volume begin with
// it, so dm.Client.Devices(TopUUID(v)) lists them.
func TopUUID(v block.VolumeID) string { return UUIDPrefix + v.String() }

// UUIDPrefix is the beginning of the uuid of every mapped device of an attached volume.
const UUIDPrefix = "weft-vol-"

// ColumnName returns the name of the device of column k.
func ColumnName(v block.VolumeID, k int) string { return fmt.Sprintf("%s-c%d", TopName(v), k) }

// ColumnUUID returns the uuid of the device of column k.
func ColumnUUID(v block.VolumeID, k int) string { return fmt.Sprintf("%s-c%d", TopUUID(v), k) }

// NewColumn returns column k of a volume of the given size, without legs.
func NewColumn(v block.VolumeID, k int, l block.Layout, size block.Size, log dm.Ref) Column {
	return Column{Name: ColumnName(v, k), UUID: ColumnUUID(v, k), Size: l.LegSize(size), Log: log}
}

// Top returns the device of a volume: exactly size bytes, striped over its columns.
//
// dm-stripe needs whole rounds, one chunk for each column. The rest of the size, less
// than one round, is mapped chunk by chunk in linear rows of the same table, to the
// places that raid.Locate gives. So the device has exactly the requested size, and no
// further device is needed to truncate it.
func Top(v block.VolumeID, l block.Layout, size block.Size) dm.Device {
	d := dm.Device{Name: TopName(v), UUID: TopUUID(v), Udev: dm.UdevNormal}
	if l.Stripes == 1 {
		d.Table = dm.Whole(size, dm.Linear{Device: dm.Ref(ColumnName(v, 0))})
		return d
	}
	round := l.Chunk * block.Size(l.Stripes)
	whole := size / round * round
	if whole > 0 {
		legs := make([]dm.Leg, l.Stripes)
		for k := range legs {
			legs[k].Device = dm.Ref(ColumnName(v, k))
		}
		d.Table = dm.Whole(whole, dm.Striped{Chunk: l.Chunk, Legs: legs})
	}
	for at := whole; at < size; at += l.Chunk {
		p := raid.Locate(l, at)
		d.Table = append(d.Table, dm.Row{
			Start:  at,
			Length: min(l.Chunk, size-at),
			Target: dm.Linear{Device: dm.Ref(ColumnName(v, p.Column)), Offset: p.Offset},
		})
	}
	return d
}

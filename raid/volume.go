// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// TopName is the name of a volume's device: what users open is /dev/mapper/<TopName>.
func TopName(v block.VolumeID) string { return "weft-" + v.String() }

// TopUUID is that device's uuid, and begins the uuids of all devices of the
// volume: dm.Client.Devices(TopUUID(v)) lists them.
func TopUUID(v block.VolumeID) string { return UUIDPrefix + v.String() }

// UUIDPrefix begins the uuid of every mapped device of an attached volume.
const UUIDPrefix = "weft-vol-"

// ColumnName is the name of a column's device.
func ColumnName(v block.VolumeID, k int) string { return fmt.Sprintf("%s-c%d", TopName(v), k) }

// ColumnUUID is its uuid.
func ColumnUUID(v block.VolumeID, k int) string { return fmt.Sprintf("%s-c%d", TopUUID(v), k) }

// NewColumn is column k of a volume, still without legs.
func NewColumn(v block.VolumeID, k int, l block.Layout, size block.Size, log dm.Ref) Column {
	return Column{Name: ColumnName(v, k), UUID: ColumnUUID(v, k), Size: l.LegSize(size), Log: log}
}

// Top is the device of a volume: exactly size bytes, striped over its columns.
//
// dm-stripe wants whole rounds of chunks, one to each column. What of the size
// is left after these, less than one round, is mapped chunk by chunk by linear
// rows of the same table; they go where Locate says. So no volume is larger than
// asked for, and no further device is needed to cut it off.
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
		p := Locate(l, at)
		d.Table = append(d.Table, dm.Row{
			Start:  at,
			Length: min(l.Chunk, size-at),
			Target: dm.Linear{Device: dm.Ref(ColumnName(v, p.Column)), Offset: p.Offset},
		})
	}
	return d
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"weft.dev/weft/proto/block"
)

// The kernel's format (include/uapi/linux/dm-ioctl.h): a header of headerSize bytes, then
// data from data_start on, all in one buffer of data_size bytes. Numbers have the
// machine's byte order.
const (
	headerSize = 312
	specSize   = 40
	nameSize   = 128 // with its NUL
	uuidSize   = 129

	offDataSize    = 12
	offDataStart   = 16
	offTargetCount = 20
	offOpenCount   = 24
	offFlags       = 28
	offEventNr     = 32
	offDev         = 40
	offName        = 48
	offUUID        = offName + nameSize
)

// Ioctl numbers, all _IOWR(0xfd, n, struct dm_ioctl).
const (
	cmdVersion      = 0xc138fd00
	cmdListDevices  = 0xc138fd02
	cmdCreate       = 0xc138fd03
	cmdRemove       = 0xc138fd04
	cmdRename       = 0xc138fd05
	cmdSuspend      = 0xc138fd06
	cmdDevStatus    = 0xc138fd07
	cmdTableLoad    = 0xc138fd09
	cmdTableClear   = 0xc138fd0a
	cmdTableDeps    = 0xc138fd0b
	cmdTableStatus  = 0xc138fd0c
	cmdListVersions = 0xc138fd0d
	cmdMessage      = 0xc138fd0e
	cmdArmPoll      = 0xc138fd10
)

// Flags of the header.
const (
	flagReadOnly       = 1 << 0
	flagSuspend        = 1 << 1
	flagStatusTable    = 1 << 4
	flagActive         = 1 << 5
	flagInactive       = 1 << 6
	flagBufferFull     = 1 << 8
	flagSkipLockFS     = 1 << 10
	flagNoFlush        = 1 << 11
	flagQueryInactive  = 1 << 12
	flagDataOut        = 1 << 16
	flagDeferredRemove = 1 << 17
)

// interfaceVersion is the version of our requests. 4.0 is enough for the header: the
// kernel refuses only another major number, and answers with its own version.
var interfaceVersion = [3]uint32{4, 0, 0}

// header is struct dm_ioctl.
type header struct {
	version     [3]uint32
	dataSize    uint32
	dataStart   uint32
	targetCount uint32
	openCount   int32
	flags       uint32
	eventNr     uint32
	dev         uint64
	name, uuid  string
}

var order = binary.NativeEndian

func (h header) encode(b []byte) {
	for i, v := range h.version {
		order.PutUint32(b[4*i:], v)
	}
	order.PutUint32(b[offDataSize:], h.dataSize)
	order.PutUint32(b[offDataStart:], h.dataStart)
	order.PutUint32(b[offTargetCount:], h.targetCount)
	order.PutUint32(b[offOpenCount:], uint32(h.openCount))
	order.PutUint32(b[offFlags:], h.flags)
	order.PutUint32(b[offEventNr:], h.eventNr)
	order.PutUint64(b[offDev:], h.dev)
	copy(b[offName:offName+nameSize-1], h.name)
	copy(b[offUUID:offUUID+uuidSize-1], h.uuid)
}

func decodeHeader(b []byte) (h header, err error) {
	if len(b) < headerSize {
		return h, fmt.Errorf("header of %d bytes, want %d", len(b), headerSize)
	}
	for i := range h.version {
		h.version[i] = order.Uint32(b[4*i:])
	}
	h.dataSize = order.Uint32(b[offDataSize:])
	h.dataStart = order.Uint32(b[offDataStart:])
	h.targetCount = order.Uint32(b[offTargetCount:])
	h.openCount = int32(order.Uint32(b[offOpenCount:]))
	h.flags = order.Uint32(b[offFlags:])
	h.eventNr = order.Uint32(b[offEventNr:])
	h.dev = order.Uint64(b[offDev:])
	h.name = cString(b[offName : offName+nameSize])
	h.uuid = cString(b[offUUID : offUUID+uuidSize])
	return h, nil
}

// data returns the data that the kernel wrote after the header.
func (h header) data(b []byte) []byte {
	end := min(uint64(h.dataSize), uint64(len(b)))
	if uint64(h.dataStart) > end {
		return nil
	}
	return b[h.dataStart:end]
}

// cString returns b up to its first NUL.
func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// encodeNumber is the kernel's huge_encode_dev, decodeNumber its inverse.
func encodeNumber(n block.DeviceNumber) uint64 {
	return uint64(n.Minor&0xff) | uint64(n.Major)<<8 | uint64(n.Minor&^0xff)<<12
}

func decodeNumber(dev uint64) block.DeviceNumber {
	return block.DeviceNumber{Major: uint32(dev>>8) & 0xfff, Minor: uint32(dev&0xff) | uint32(dev>>12)&^0xff}
}

// rawRow is a row as in the kernel's struct dm_target_spec.
type rawRow struct {
	start, length uint64 // sectors
	kind, params  string
}

// encodeTable encodes rows for TABLE_LOAD; "next" is counted from each row's own start.
func encodeTable(t Table) []byte {
	var b []byte
	for _, r := range t {
		params := r.Target.String()
		size := (specSize + len(params) + 1 + 7) &^ 7
		spec := make([]byte, size)
		order.PutUint64(spec[0:], sectors(r.Start))
		order.PutUint64(spec[8:], sectors(r.Length))
		order.PutUint32(spec[20:], uint32(size))
		copy(spec[24:39], r.Target.Type())
		copy(spec[specSize:], params)
		b = append(b, spec...)
	}
	return b
}

// decodeRows decodes the answer of TABLE_STATUS; "next" is counted from the start of the data.
func decodeRows(b []byte, count uint32) ([]rawRow, error) {
	var rows []rawRow
	at := uint64(0)
	for i := range count {
		if at+specSize > uint64(len(b)) {
			return nil, fmt.Errorf("row %d of %d lies beyond the %d bytes of data", i, count, len(b))
		}
		spec := b[at:]
		rows = append(rows, rawRow{
			start:  order.Uint64(spec[0:]),
			length: order.Uint64(spec[8:]),
			kind:   cString(spec[24:specSize]),
			params: cString(spec[specSize:]),
		})
		next := uint64(order.Uint32(spec[20:]))
		if next <= at && i+1 < count {
			return nil, fmt.Errorf("row %d of %d goes back to byte %d", i, count, next)
		}
		at = next
	}
	return rows, nil
}

func (r rawRow) row() (Row, error) {
	if limit := uint64(^block.Size(0) / block.SectorSize); r.start > limit || r.length > limit {
		return Row{}, fmt.Errorf("row of %d sectors at %d: too large", r.length, r.start)
	}
	t, err := ParseTarget(r.kind, r.params)
	if err != nil {
		return Row{}, err
	}
	return Row{block.Size(r.start) * block.SectorSize, block.Size(r.length) * block.SectorSize, t}, nil
}

// walk calls f with each element of the list in b. An element has at least fixed bytes; at
// offset nextAt it holds the distance to the next one, 0 in the last.
func walk(b []byte, nextAt, fixed int, f func(element []byte)) error {
	for len(b) > 0 {
		if len(b) < fixed {
			return fmt.Errorf("list element of %d bytes, want at least %d", len(b), fixed)
		}
		f(b)
		next := order.Uint32(b[nextAt:])
		if next == 0 {
			return nil
		}
		if uint64(next) > uint64(len(b)) {
			return fmt.Errorf("list goes on %d bytes further, %d are left", next, len(b))
		}
		b = b[next:]
	}
	return nil
}

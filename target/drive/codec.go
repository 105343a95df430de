// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Format version 1. A copy of the label is a header of 512 bytes, then the
// payload; numbers are little-endian. A later version keeps the first 32 bytes
// as they are, so that an older program knows what it must not touch.
//
//	  0  16  magic "weft drive label"
//	 16   4  version
//	 20   4  CRC32C of the header, these 4 bytes taken as zero
//	 24   8  generation
//	 32  16  cluster id
//	 48  16  drive id
//	 64   8  size of the device in bytes
//	 72   8  size of an extent in bytes
//	 80   8  offset of the first extent in bytes
//	 88   4  number of extents
//	 92   4  flags: 1 = unfinished
//	 96   4  length of the payload in bytes
//	100   4  CRC32C of the payload
//	104   4  incarnation
//	108      zeroes
//	512      payload: for each leg, by leg id, its length as a varint and a
//	         weft.v1.LegLabel, fields by number, map entries by key
//
// A copy is written in whole blocks of 4 KiB, padded with zeroes.
const (
	magic         = "weft drive label"
	formatVersion = 1
	headerSize    = 512
	copyUnit      = 4 * block.KiB // what copies are padded to: the largest block size
	unfinished    = 1
)

func crc(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// encode makes a copy of l as it stands in a slot.
func encode(l *Label) ([]byte, error) {
	if err := l.check(); err != nil {
		return nil, err
	}
	b := make([]byte, headerSize)
	for _, leg := range l.Legs {
		record, err := proto.MarshalOptions{Deterministic: true}.Marshal(leg)
		if err != nil {
			return nil, fmt.Errorf("encode leg %s: %w", leg.LegId, err)
		}
		b = append(binary.AppendUvarint(b, uint64(len(record))), record...)
	}
	length := block.Size(len(b)).RoundUp(copyUnit)
	if length > labelMax {
		return nil, fmt.Errorf("encode label: %d legs take %v, at most %v fit", len(l.Legs), length, labelMax)
	}
	payload := b[headerSize:]
	flags := uint32(0)
	if l.unfinished {
		flags = unfinished
	}
	h := append(b[:0], magic...)
	h = binary.LittleEndian.AppendUint32(h, formatVersion)
	h = binary.LittleEndian.AppendUint32(h, 0)
	h = binary.LittleEndian.AppendUint64(h, l.Generation)
	h = append(h, l.Cluster.UUID[:]...)
	h = append(h, l.Drive.UUID[:]...)
	h = binary.LittleEndian.AppendUint64(h, uint64(l.Size))
	h = binary.LittleEndian.AppendUint64(h, uint64(block.ExtentSize))
	h = binary.LittleEndian.AppendUint64(h, uint64(firstExtent))
	h = binary.LittleEndian.AppendUint32(h, uint32(Extents(l.Size)))
	h = binary.LittleEndian.AppendUint32(h, flags)
	h = binary.LittleEndian.AppendUint32(h, uint32(len(payload)))
	h = binary.LittleEndian.AppendUint32(h, crc(payload))
	binary.LittleEndian.AppendUint32(h, l.Incarnation)
	binary.LittleEndian.PutUint32(b[20:], crc(b[:headerSize]))
	return append(b, make([]byte, int(length)-len(b))...), nil
}

// checkHeader says what is wrong with the 512 bytes of a header: ErrNoLabel if
// they are none, ErrNewer, or ErrCorrupt.
func checkHeader(b []byte) error {
	if !bytes.HasPrefix(b, []byte(magic)) {
		return ErrNoLabel
	}
	h := bytes.Clone(b[:headerSize])
	sum := binary.LittleEndian.Uint32(h[20:])
	clear(h[20:24])
	if crc(h) != sum {
		return fmt.Errorf("%w: header checksum", ErrCorrupt)
	}
	switch version := binary.LittleEndian.Uint32(h[16:]); {
	case version > formatVersion:
		return fmt.Errorf("%w: version %d, this program knows %d", ErrNewer, version, formatVersion)
	case version == 0:
		return fmt.Errorf("%w: version 0", ErrCorrupt)
	}
	return nil
}

// payloadLength is what a good header says, checked against what fits.
func payloadLength(header []byte) (int, error) {
	n := binary.LittleEndian.Uint32(header[96:])
	if block.Size(n)+headerSize > labelMax {
		return 0, fmt.Errorf("%w: payload of %d bytes", ErrCorrupt, n)
	}
	return int(n), nil
}

// decode reads what encode made; b begins with a header that checkHeader
// accepted and holds at least the payload.
func decode(b []byte) (*Label, error) {
	length, err := payloadLength(b)
	if err != nil {
		return nil, err
	}
	if len(b) < headerSize+length {
		return nil, fmt.Errorf("%w: payload of %d bytes, %d there", ErrCorrupt, length, len(b)-headerSize)
	}
	h, payload := b[:headerSize], b[headerSize:headerSize+length]
	if crc(payload) != binary.LittleEndian.Uint32(h[100:]) {
		return nil, fmt.Errorf("%w: payload checksum", ErrCorrupt)
	}
	l := &Label{
		Generation:  binary.LittleEndian.Uint64(h[24:]),
		Cluster:     block.ClusterID{UUID: block.UUID(h[32:48])},
		Drive:       block.DriveID{UUID: block.UUID(h[48:64])},
		Size:        block.Size(binary.LittleEndian.Uint64(h[64:])),
		Incarnation: binary.LittleEndian.Uint32(h[104:]),
		unfinished:  binary.LittleEndian.Uint32(h[92:])&unfinished != 0,
	}
	if block.Size(binary.LittleEndian.Uint64(h[72:])) != block.ExtentSize ||
		block.Size(binary.LittleEndian.Uint64(h[80:])) != firstExtent ||
		binary.LittleEndian.Uint32(h[88:]) != uint32(Extents(l.Size)) {
		return nil, fmt.Errorf("%w: geometry", ErrCorrupt)
	}
	if l.Legs, err = decodeLegs(payload); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if err := l.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return l, nil
}

func decodeLegs(payload []byte) ([]*pb.LegLabel, error) {
	var legs []*pb.LegLabel
	for len(payload) > 0 {
		n, used := binary.Uvarint(payload)
		if used <= 0 || n > uint64(len(payload)-used) {
			return nil, fmt.Errorf("record %d is longer than the payload", len(legs))
		}
		leg := new(pb.LegLabel)
		if err := proto.Unmarshal(payload[used:used+int(n)], leg); err != nil {
			return nil, fmt.Errorf("record %d: %w", len(legs), err)
		}
		legs = append(legs, leg)
		payload = payload[used+int(n):]
	}
	return legs, nil
}

// slotCopy is what one slot holds.
type slotCopy struct {
	offset block.Size
	label  *Label // nil unless good
	bytes  []byte // of the copy, if good
	err    error  // why there is no label: ErrNoLabel, ErrNewer, ErrCorrupt, or that of the device
}

// copies are the slots of a device: head A, head B, tail A, tail B.
type copies [4]slotCopy

func readCopies(r io.ReaderAt, size block.Size) copies {
	var c copies
	for i, offset := range slotOffsets(size) {
		c[i] = readSlot(r, offset)
	}
	return c
}

func slotOffsets(size block.Size) [4]block.Size {
	tail := tailArea(size)
	return [4]block.Size{0, slotSize, tail, tail + slotSize}
}

func readSlot(r io.ReaderAt, offset block.Size) slotCopy {
	s := slotCopy{offset: offset}
	header := make([]byte, headerSize)
	if _, s.err = r.ReadAt(header, int64(offset)); s.err != nil {
		return s
	}
	if s.err = checkHeader(header); s.err != nil {
		return s
	}
	length, err := payloadLength(header)
	if err != nil {
		s.err = err
		return s
	}
	b := make([]byte, headerSize+length)
	if _, s.err = r.ReadAt(b, int64(offset)); s.err != nil {
		return s
	}
	if s.label, s.err = decode(b); s.err == nil {
		s.bytes = b
	}
	return s
}

// newest is the label that the copies amount to.
func (c *copies) newest() (*Label, error) {
	var best *slotCopy
	for i := range c {
		s := &c[i]
		switch {
		case errors.Is(s.err, ErrNewer):
			return nil, s.err
		case s.label == nil:
		case best == nil || s.label.Generation > best.label.Generation:
			best = s
		case s.label.Generation == best.label.Generation && !bytes.Equal(s.bytes, best.bytes):
			return nil, fmt.Errorf("%w: two labels of generation %d differ", ErrCorrupt, s.label.Generation)
		}
	}
	if best != nil {
		return best.label, nil
	}
	return nil, c.worst()
}

// worst says why there is no good copy. Only if no slot has our magic, and all
// could be read, is there no label.
func (c *copies) worst() error {
	for i := range c {
		if err := c[i].err; !errors.Is(err, ErrNoLabel) && !errors.Is(err, ErrCorrupt) {
			return fmt.Errorf("read label at %v: %w", c[i].offset, err)
		}
	}
	for i := range c {
		if errors.Is(c[i].err, ErrCorrupt) {
			return c[i].err
		}
	}
	return ErrNoLabel
}

// complete reports whether both ends hold the label of this generation.
func (c *copies) complete(generation uint64) bool {
	has := func(s slotCopy) bool { return s.label != nil && s.label.Generation == generation }
	return slices.ContainsFunc(c[:2], has) && slices.ContainsFunc(c[2:], has)
}

// ReadLabel reads the newest good copy of the label on a device of size bytes:
// ErrNoLabel, ErrCorrupt, ErrNewer, ErrOtherSize, ErrUnfinished, or the
// device's error if it cannot be said.
func ReadLabel(r io.ReaderAt, size block.Size) (*Label, error) {
	if size < MinSize {
		return nil, fmt.Errorf("%w: the device is too small for one", ErrNoLabel)
	}
	c := readCopies(r, size)
	l, err := c.newest()
	if err != nil {
		return nil, err
	}
	return l, l.usable(size)
}

// usable says why a good label does not make a drive of a device of size bytes.
func (l *Label) usable(size block.Size) error {
	switch {
	case l.Size != size:
		return fmt.Errorf("drive %v: %w: %v, this one has %v", l.Drive, ErrOtherSize, l.Size, size)
	case l.unfinished:
		return fmt.Errorf("drive %v: %w: add it again", l.Drive, ErrUnfinished)
	}
	return nil
}

// spare picks the slot of one end (two neighbours of copies) that may be
// overwritten: one without a good copy, else the older. B goes before A, so that
// what made a fresh device recognisable stays until a label of ours stands.
func spare(end []slotCopy) *slotCopy {
	a, b := &end[0], &end[1]
	switch {
	case b.label == nil:
		return b
	case a.label == nil || a.label.Generation < b.label.Generation:
		return a
	}
	return b
}

// length is how much of the slot a good copy takes.
func (s *slotCopy) length() int { return int(block.Size(len(s.bytes)).RoundUp(copyUnit)) }

// over pads b so that nothing of a longer copy is left behind it, where it could
// be taken for somebody's signature.
func (s *slotCopy) over(b []byte) []byte {
	return append(b[:len(b):len(b)], make([]byte, max(0, s.length()-len(b)))...)
}

// writeLabel writes l over the older copy at each end, the head durably before
// the tail: whatever a cut leaves, the newest good copy is l or what was before.
func writeLabel(m Medium, c *copies, l *Label) error {
	b, err := encode(l)
	if err != nil {
		return err
	}
	for _, end := range [][]slotCopy{c[:2], c[2:]} {
		slot := spare(end)
		if _, err := m.WriteAt(slot.over(b), int64(slot.offset)); err != nil {
			return fmt.Errorf("write label at %v: %w", slot.offset, err)
		}
		if err := m.Flush(); err != nil {
			return fmt.Errorf("flush label at %v: %w", slot.offset, err)
		}
	}
	return nil
}

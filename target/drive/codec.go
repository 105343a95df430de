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
	"sync"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Format version 2. A copy of the label is a header of 512 bytes, then the payload; numbers are
// little-endian. A later version keeps the first 32 bytes as they are, so that an older program
// recognizes a drive that it must not touch.
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
//	512      payload: entries, each its kind and its length as varints, and a
//	         message, fields by number, map entries by key. Kind 1 is a
//	         weft.v1.LegLabel, 2 a TreeLabel, 3 the ReserveLabel, 4 says that
//	         the kernel may read trees by itself, and is empty; legs and trees
//	         stand in order of their ids
//
// A copy is written in whole blocks of 4 KiB, padded with zeroes. A program that does not know an
// entry's kind must not touch the drive: it would write a label without that entry, and would treat
// its extents as free. A drive without mapped legs and without a reserve has entries of kind 1 alone.
//
// In version 1 the payload holds only legs, without kinds. It can be read, and the next write
// converts it to version 2.
const (
	magic         = "weft drive label"
	formatVersion = 2
	headerSize    = 512
	copyUnit      = 4 * block.KiB // copies are padded to this: the largest block size
	unfinished    = 1
)

// The kinds of entries in a payload.
const (
	entryLeg     = 1
	entryTree    = 2 // the tree of mapped legs
	entryReserve = 3 // what trees may get; at most one
	entryPinned  = 4 // see Label.Pinned; at most one
)

// entry is a part of a payload, in its encoded form.
type entry struct {
	kind    uint64
	message []byte
}

func crc(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// encode makes a copy of l in the form that a slot holds.
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
		b = append(binary.AppendUvarint(binary.AppendUvarint(b, entryLeg), uint64(len(record))), record...)
	}
	space, err := l.spaceEntries()
	if err != nil {
		return nil, err
	}
	for _, e := range space {
		b = append(binary.AppendUvarint(binary.AppendUvarint(b, e.kind), uint64(len(e.message))), e.message...)
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

// checkHeader says what is wrong with the 512 bytes of a header: ErrNoLabel if there is no header,
// ErrNewer, or ErrCorrupt.
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

// payloadLength returns the length that a good header states, after checking that it fits.
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
	entries, err := decodeEntries(payload, binary.LittleEndian.Uint32(h[16:]))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if l.Legs, err = decodeLegs(entries); err != nil {
		return nil, err
	}
	if err := l.decodeSpace(entries); err != nil {
		return nil, err
	}
	if err := l.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return l, nil
}

// decodeEntries splits a payload of the given version into its entries.
func decodeEntries(payload []byte, version uint32) (entries []entry, err error) {
	for len(payload) > 0 {
		e := entry{kind: entryLeg}
		if version > 1 {
			kind, used := binary.Uvarint(payload)
			if used <= 0 {
				return nil, fmt.Errorf("entry %d: no kind", len(entries))
			}
			e.kind, payload = kind, payload[used:]
		}
		n, used := binary.Uvarint(payload)
		if used <= 0 || n > uint64(len(payload)-used) {
			return nil, fmt.Errorf("entry %d is longer than the payload", len(entries))
		}
		e.message, payload = payload[used:used+int(n)], payload[used+int(n):]
		entries = append(entries, e)
	}
	return entries, nil
}

// decodeLegs reads the legs: ErrNewer if anything is unknown to this program, ErrCorrupt if a leg
// cannot be decoded.
func decodeLegs(entries []entry) (legs []*pb.LegLabel, err error) {
	for _, e := range entries {
		if e.kind < entryLeg || e.kind > entryPinned {
			return nil, fmt.Errorf("%w: an entry of kind %d, this program knows %d to %d", ErrNewer, e.kind, entryLeg, entryPinned)
		}
	}
	for i, e := range entries {
		if e.kind != entryLeg {
			continue
		}
		leg := new(pb.LegLabel)
		if err := proto.Unmarshal(e.message, leg); err != nil {
			return nil, fmt.Errorf("%w: entry %d: %w", ErrCorrupt, i, err)
		}
		if err := ImageOf(leg).Check(); err != nil {
			return nil, fmt.Errorf("%w: leg %s: %w", ErrNewer, leg.GetLegId(), err)
		}
		legs = append(legs, leg)
	}
	return legs, nil
}

// slotCopy is the content of one slot.
type slotCopy struct {
	offset block.Size
	label  *Label // nil unless good
	bytes  []byte // of the copy, if good
	err    error  // why there is no label: ErrNoLabel, ErrNewer, ErrCorrupt, or the device's error
}

// copies are the slots of a device: head A, head B, tail A, tail B.
type copies [4]slotCopy

// readCopies reads all slots at once: fences and handovers wait for it.
func readCopies(r io.ReaderAt, size block.Size) (c copies) {
	var all sync.WaitGroup
	for i, offset := range slotOffsets(size) {
		all.Go(func() { c[i] = readSlot(r, offset) })
	}
	all.Wait()
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

// newest returns the label that the copies stand for.
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

// worst says why there is no good copy. It is ErrNoLabel only if all slots could be read and none
// has our magic.
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

// ReadLabel reads the newest good copy of the label on a device of size bytes: ErrNoLabel,
// ErrCorrupt, ErrNewer, ErrOtherSize, ErrUnfinished, or the device's error.
func ReadLabel(r io.ReaderAt, size block.Size) (*Label, error) {
	_, l, err := readLabel(r, size)
	return l, err
}

// readLabel is ReadLabel, and returns all copies too.
func readLabel(r io.ReaderAt, size block.Size) (c copies, l *Label, err error) {
	if size < MinSize {
		return c, nil, fmt.Errorf("%w: the device is too small for one", ErrNoLabel)
	}
	c = readCopies(r, size)
	if l, err = c.newest(); err != nil {
		return c, nil, err
	}
	return c, l, l.usable(size)
}

// usable says why a good label does not make a usable drive of a device of size bytes.
func (l *Label) usable(size block.Size) error {
	switch {
	case l.Size != size:
		return fmt.Errorf("drive %v: %w: %v, this one has %v", l.Drive, ErrOtherSize, l.Size, size)
	case l.unfinished:
		return fmt.Errorf("drive %v: %w: add it again", l.Drive, ErrUnfinished)
	}
	return nil
}

// spare picks the slot of one end (two neighbours of copies) that may be overwritten: one without a
// good copy, else the older one. B goes before A, so that the signatures on a fresh device stay
// until one of our labels is in place.
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

// length is the size that a good copy takes in the slot.
func (s *slotCopy) length() int { return int(block.Size(len(s.bytes)).RoundUp(copyUnit)) }

// over pads b so that no tail of a longer, older copy remains, which could be taken for a foreign
// signature.
func (s *slotCopy) over(b []byte) []byte {
	return append(b[:len(b):len(b)], make([]byte, max(0, s.length()-len(b)))...)
}

// writeLabel writes l over the older copy at each end, the head durably before the tail: after a
// power cut, the newest good copy is l or its predecessor.
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

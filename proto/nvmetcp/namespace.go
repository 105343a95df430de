// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// LBAFormat is one of a namespace's formats.
type LBAFormat struct {
	MetadataSize uint16
	BlockShift   uint8 // LBADS: blocks of 2^n bytes, 9 or more; 0: no such format
	Performance  uint8 // RP: 0 best to 3 degraded
}

// Namespace is the Identify Namespace data structure of the NVM command set (NVM,
// figure 97). Counts are logical blocks.
type Namespace struct {
	Size, Capacity, Utilization uint64 // NSZE, NCAP, NUSE
	Features                    uint8  // NSFEAT
	Formats                     []LBAFormat
	FormatIndex                 uint8 // the format in use, an index into Formats
	MetadataCapabilities        uint8
	DataProtectionCapabilities  uint8
	DataProtection              uint8
	Shared                      bool  // NMIC bit 0: several controllers may attach it
	ReservationCapabilities     uint8 // RESCAP
	DeallocatedReads            uint8 // DLFEAT bits 2:0: 0 unspecified, 1 zeroes, 2 ones
	DeallocateByWriteZeroes     bool  // DLFEAT bit 3
	AWUN, AWUPF, ACWU           uint16
	AtomicBoundary              uint16 // NABSN
	OptimalBoundary             uint16 // NOIOB
	WriteGranularity            uint16 // NPWG, 0's based
	WriteAlignment              uint16 // NPWA, 0's based
	DeallocateGranularity       uint16 // NPDG, 0's based
	DeallocateAlignment         uint16 // NPDA, 0's based
	OptimalWriteSize            uint16 // NOWS, 0's based
	ANAGroup                    uint32
	WriteProtected              bool // NSATTR bit 0
	SetID, EnduranceGroup       uint16
	NGUID                       [16]byte
	EUI64                       [8]byte
}

// The bits of Namespace fields.
const (
	NSFeatThin             uint8 = 1 << 0
	NSFeatAtomics          uint8 = 1 << 1 // NAWUN and so on replace the controller's values
	NSFeatOptimal          uint8 = 1 << 4 // NPWG, NPWA, NPDG, NPDA, NOWS are given
	DeallocatedReadsZeroes uint8 = 1

	RESCAPPersist                      uint8 = 1 << 0 // persists through power loss
	RESCAPWriteExclusive               uint8 = 1 << 1
	RESCAPExclusiveAccess              uint8 = 1 << 2
	RESCAPWriteExclusiveRegistrants    uint8 = 1 << 3
	RESCAPExclusiveAccessRegistrants   uint8 = 1 << 4
	RESCAPWriteExclusiveAllRegistrants uint8 = 1 << 5
	RESCAPExclusiveAccessAll           uint8 = 1 << 6
	RESCAPIgnoreExistingKey            uint8 = 1 << 7 // as 1.3 and later define it
)

// Append adds IdentifySize bytes to b. Formats beyond 64 are left out.
func (n *Namespace) Append(b []byte) []byte {
	b, o := grow(b, IdentifySize)
	le.PutUint64(o[0:], n.Size)
	le.PutUint64(o[8:], n.Capacity)
	le.PutUint64(o[16:], n.Utilization)
	formats := n.Formats[:min(len(n.Formats), 64)]
	o[24] = n.Features
	o[25] = uint8(max(len(formats), 1) - 1)
	o[26] = n.FormatIndex&15 | n.FormatIndex>>4&3<<5
	o[27], o[28], o[29] = n.MetadataCapabilities, n.DataProtectionCapabilities, n.DataProtection
	o[30], o[31] = bit(n.Shared, 0), n.ReservationCapabilities
	o[33] = n.DeallocatedReads&7 | bit(n.DeallocateByWriteZeroes, 3)
	for i, v := range []uint16{n.AWUN, n.AWUPF, n.ACWU, n.AtomicBoundary} {
		le.PutUint16(o[34+2*i:], v)
	}
	le.PutUint16(o[46:], n.OptimalBoundary)
	for i, v := range []uint16{n.WriteGranularity, n.WriteAlignment, n.DeallocateGranularity, n.DeallocateAlignment, n.OptimalWriteSize} {
		le.PutUint16(o[64+2*i:], v)
	}
	le.PutUint32(o[92:], n.ANAGroup)
	o[99] = bit(n.WriteProtected, 0)
	le.PutUint16(o[100:], n.SetID)
	le.PutUint16(o[102:], n.EnduranceGroup)
	copy(o[104:], n.NGUID[:])
	copy(o[120:], n.EUI64[:])
	for i, f := range formats {
		at := o[128+4*i:]
		le.PutUint16(at, f.MetadataSize)
		at[2], at[3] = f.BlockShift, f.Performance&3
	}
	return b
}

// ParseNamespace is the inverse of Append.
func ParseNamespace(b []byte) (Namespace, error) {
	if len(b) < IdentifySize {
		return Namespace{}, short("identify namespace", len(b), IdentifySize)
	}
	n := Namespace{
		Size: le.Uint64(b[0:]), Capacity: le.Uint64(b[8:]), Utilization: le.Uint64(b[16:]), Features: b[24],
		FormatIndex: b[26]&15 | b[26]>>5&3<<4, MetadataCapabilities: b[27], DataProtectionCapabilities: b[28], DataProtection: b[29],
		Shared: b[30]&1 != 0, ReservationCapabilities: b[31], DeallocatedReads: b[33] & 7, DeallocateByWriteZeroes: b[33]&8 != 0,
		AWUN: le.Uint16(b[34:]), AWUPF: le.Uint16(b[36:]), ACWU: le.Uint16(b[38:]), AtomicBoundary: le.Uint16(b[40:]),
		OptimalBoundary:  le.Uint16(b[46:]),
		WriteGranularity: le.Uint16(b[64:]), WriteAlignment: le.Uint16(b[66:]), DeallocateGranularity: le.Uint16(b[68:]),
		DeallocateAlignment: le.Uint16(b[70:]), OptimalWriteSize: le.Uint16(b[72:]),
		ANAGroup: le.Uint32(b[92:]), WriteProtected: b[99]&1 != 0, SetID: le.Uint16(b[100:]), EnduranceGroup: le.Uint16(b[102:]),
		NGUID: [16]byte(b[104:120]), EUI64: [8]byte(b[120:128]),
	}
	count := int(b[25]) + 1
	if count > 64 {
		return n, fmt.Errorf("parse identify namespace: %d formats, at most 64 allowed", count)
	}
	n.Formats = make([]LBAFormat, count)
	for i := range n.Formats {
		at := b[128+4*i:]
		n.Formats[i] = LBAFormat{MetadataSize: le.Uint16(at), BlockShift: at[2], Performance: at[3] & 3}
	}
	return n, nil
}

// BlockSize is the length of a logical block in bytes. The error says why Weft cannot use
// the format: it has metadata, or blocks outside 512 bytes to 64 KiB.
func (n *Namespace) BlockSize() (block.Size, error) {
	if int(n.FormatIndex) >= len(n.Formats) {
		return 0, fmt.Errorf("namespace is of format %d and has %d", n.FormatIndex, len(n.Formats))
	}
	f := n.Formats[n.FormatIndex]
	if f.MetadataSize != 0 || f.BlockShift < 9 || f.BlockShift > 16 {
		return 0, fmt.Errorf("namespace has blocks of 2^%d bytes with %d of metadata: not supported", f.BlockShift, f.MetadataSize)
	}
	return 1 << f.BlockShift, nil
}

// IndependentNamespace is the I/O Command Set Independent Identify Namespace data
// structure (Base, figure 280).
type IndependentNamespace struct {
	Features                uint8
	Shared                  bool
	ReservationCapabilities uint8
	ANAGroup                uint32
	WriteProtected          bool
	SetID, EnduranceGroup   uint16
	Ready                   bool // NSTAT bit 0
}

// Append adds IdentifySize bytes to b.
func (n IndependentNamespace) Append(b []byte) []byte {
	b, o := grow(b, IdentifySize)
	o[0], o[1], o[2] = n.Features, bit(n.Shared, 0), n.ReservationCapabilities
	le.PutUint32(o[4:], n.ANAGroup)
	o[8] = bit(n.WriteProtected, 0)
	le.PutUint16(o[10:], n.SetID)
	le.PutUint16(o[12:], n.EnduranceGroup)
	o[14] = bit(n.Ready, 0)
	return b
}

// ParseIndependentNamespace is the inverse of Append.
func ParseIndependentNamespace(b []byte) (IndependentNamespace, error) {
	if len(b) < IdentifySize {
		return IndependentNamespace{}, short("independent identify namespace", len(b), IdentifySize)
	}
	return IndependentNamespace{
		Features: b[0], Shared: b[1]&1 != 0, ReservationCapabilities: b[2], ANAGroup: le.Uint32(b[4:]),
		WriteProtected: b[8]&1 != 0, SetID: le.Uint16(b[10:]), EnduranceGroup: le.Uint16(b[12:]), Ready: b[14]&1 != 0,
	}, nil
}

// MaxNamespaceList is the number of NSIDs that one namespace list holds.
const MaxNamespaceList = IdentifySize / 4

// AppendNamespaceList adds a list of NSIDs, which must be sorted, as IdentifySize bytes.
// For the NSIDs that do not fit, the host asks again, starting after the last one.
func AppendNamespaceList(b []byte, ids []uint32) []byte {
	b, o := grow(b, IdentifySize)
	for i, id := range ids[:min(len(ids), MaxNamespaceList)] {
		le.PutUint32(o[4*i:], id)
	}
	return b
}

// ParseNamespaceList reads NSIDs up to the first zero. An unsorted list is an error: a host
// that asks again after the last NSID might otherwise never finish.
func ParseNamespaceList(b []byte) ([]uint32, error) {
	if len(b) < IdentifySize {
		return nil, short("namespace list", len(b), IdentifySize)
	}
	var ids []uint32
	for i := range MaxNamespaceList {
		id := le.Uint32(b[4*i:])
		if id == 0 {
			break
		}
		if len(ids) > 0 && id <= ids[len(ids)-1] {
			return nil, fmt.Errorf("parse namespace list: %d comes after %d", id, ids[len(ids)-1])
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// AppendControllerList adds a controller list (Base, figure 135): at most 2047 ids.
func AppendControllerList(b []byte, ids []uint16) []byte {
	b, o := grow(b, IdentifySize)
	ids = ids[:min(len(ids), IdentifySize/2-1)]
	le.PutUint16(o, uint16(len(ids)))
	for i, id := range ids {
		le.PutUint16(o[2+2*i:], id)
	}
	return b
}

// ParseControllerList is the inverse of AppendControllerList.
func ParseControllerList(b []byte) ([]uint16, error) {
	if len(b) < IdentifySize {
		return nil, short("controller list", len(b), IdentifySize)
	}
	n := int(le.Uint16(b))
	if n > IdentifySize/2-1 {
		return nil, fmt.Errorf("parse controller list: %d ids, at most %d allowed", n, IdentifySize/2-1)
	}
	ids := make([]uint16, n)
	for i := range ids {
		ids[i] = le.Uint16(b[2+2*i:])
	}
	return ids, nil
}

// Descriptors is the Namespace Identification Descriptor list (Base, figure 277). A zero
// identifier means that there is none.
type Descriptors struct {
	EUI64      [8]byte
	NGUID      [16]byte
	UUID       block.UUID
	CommandSet CommandSet
	HasSet     bool // the list names the command set
}

// The descriptor types (NIDT).
const (
	descriptorEUI64 = 1
	descriptorNGUID = 2
	descriptorUUID  = 3
	descriptorCSI   = 4
)

// Append adds IdentifySize bytes to b.
func (d Descriptors) Append(b []byte) []byte {
	b, o := grow(b, IdentifySize)
	put := func(kind byte, id []byte) {
		o[0], o[1] = kind, byte(len(id))
		o = o[4+copy(o[4:], id):]
	}
	if d.EUI64 != [8]byte{} {
		put(descriptorEUI64, d.EUI64[:])
	}
	if d.NGUID != [16]byte{} {
		put(descriptorNGUID, d.NGUID[:])
	}
	if !d.UUID.IsZero() {
		put(descriptorUUID, d.UUID[:])
	}
	if d.HasSet {
		put(descriptorCSI, []byte{byte(d.CommandSet)})
	}
	return b
}

// ParseDescriptors reads a list and skips types that it does not know.
func ParseDescriptors(b []byte) (Descriptors, error) {
	var d Descriptors
	if len(b) < IdentifySize {
		return d, short("namespace descriptors", len(b), IdentifySize)
	}
	for b = b[:IdentifySize]; len(b) >= 4 && b[1] != 0; {
		kind, n := b[0], int(b[1])
		if 4+n > len(b) {
			return d, fmt.Errorf("parse namespace descriptors: descriptor of %d bytes, %d are left", n, len(b)-4)
		}
		if err := d.set(kind, b[4:4+n]); err != nil {
			return d, err
		}
		b = b[4+n:]
	}
	return d, nil
}

func (d *Descriptors) set(kind byte, id []byte) error {
	var into []byte
	switch kind {
	case descriptorEUI64:
		into = d.EUI64[:]
	case descriptorNGUID:
		into = d.NGUID[:]
	case descriptorUUID:
		into = d.UUID[:]
	case descriptorCSI:
		if len(id) != 1 {
			return fmt.Errorf("parse namespace descriptors: command set of %d bytes", len(id))
		}
		d.CommandSet, d.HasSet = CommandSet(id[0]), true
		return nil
	default:
		return nil
	}
	if len(id) != len(into) {
		return fmt.Errorf("parse namespace descriptors: type %d has %d bytes, not %d", kind, len(id), len(into))
	}
	copy(into, id)
	return nil
}

// AppendCommandSets adds the I/O Command Set data structure (Base, figure 288):
// each vector is a combination that can be enabled; at most 512.
func AppendCommandSets(b []byte, vectors []uint64) []byte {
	b, o := grow(b, IdentifySize)
	for i, v := range vectors[:min(len(vectors), IdentifySize/8)] {
		le.PutUint64(o[8*i:], v)
	}
	return b
}

// ParseCommandSets reads vectors up to the first zero.
func ParseCommandSets(b []byte) ([]uint64, error) {
	if len(b) < IdentifySize {
		return nil, short("I/O command sets", len(b), IdentifySize)
	}
	var vectors []uint64
	for i := range IdentifySize / 8 {
		v := le.Uint64(b[8*i:])
		if v == 0 {
			break
		}
		vectors = append(vectors, v)
	}
	return vectors, nil
}

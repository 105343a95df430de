// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"fmt"
	"strings"

	"weft.dev/weft/proto/block"
)

// DiscoveryNQN is the well-known name of every discovery controller.
const DiscoveryNQN block.NQN = "nqn.2014-08.org.nvmexpress.discovery"

// DiscoveryEntrySize is the length of the log's header and of each of its entries.
const DiscoveryEntrySize = 1024

// SubsystemType is the kind of subsystem that a discovery log entry points to.
type SubsystemType uint8

// The subsystem types.
const (
	SubsystemReferral         SubsystemType = 1 // another discovery subsystem
	SubsystemNVM              SubsystemType = 2
	SubsystemCurrentDiscovery SubsystemType = 3
)

// TransportType is TRTYPE.
type TransportType uint8

// The transports.
const (
	TransportRDMA TransportType = 1
	TransportFC   TransportType = 2
	TransportTCP  TransportType = 3
)

// AddressFamily is ADRFAM.
type AddressFamily uint8

// The address families.
const (
	FamilyIPv4 AddressFamily = 1
	FamilyIPv6 AddressFamily = 2
)

// NoFlowControl is the bit of TREQ that allows SQ flow control to be off.
const NoFlowControl uint8 = 1 << 2

// MinAdminQueue is the smallest that ASQSZ may be.
const MinAdminQueue = 32

// FamilyOf is the family of an IP address.
func FamilyOf(address string) AddressFamily {
	if strings.Contains(address, ":") {
		return FamilyIPv6
	}
	return FamilyIPv4
}

// DiscoveryEntry is one record of the discovery log (Base, figure 272).
type DiscoveryEntry struct {
	Transport    TransportType
	Family       AddressFamily
	Type         SubsystemType
	Requirements uint8 // TREQ: bits 1:0 secure channel: 0 unspecified, 1 required, 2 not required; bit 2: SQ flow control may be off
	PortID       uint16
	ControllerID uint16 // DynamicController, or the controller to connect to
	AdminQueue   uint16 // largest admin queue (ASQSZ), in entries; at least 32
	Flags        uint16 // EFLAGS
	Service      string // TRSVCID: the TCP port
	Subsystem    block.NQN
	Address      string // TRADDR
	Security     uint8  // TSAS of TCP: 0 none, 1 TLS 1.2, 2 TLS 1.3
}

// Append adds DiscoveryEntrySize bytes to b. Values longer than their fields are cut.
func (e DiscoveryEntry) Append(b []byte) []byte {
	b, o := grow(b, DiscoveryEntrySize)
	o[0], o[1], o[2], o[3] = byte(e.Transport), byte(e.Family), byte(e.Type), e.Requirements
	le.PutUint16(o[4:], e.PortID)
	le.PutUint16(o[6:], e.ControllerID)
	le.PutUint16(o[8:], e.AdminQueue)
	le.PutUint16(o[10:], e.Flags)
	putText(o[32:64], e.Service)
	putNQN(o[256:512], e.Subsystem)
	putText(o[512:768], e.Address)
	o[768] = e.Security
	return b
}

// ParseDiscoveryEntry is the inverse of Append.
func ParseDiscoveryEntry(b []byte) (DiscoveryEntry, error) {
	if len(b) < DiscoveryEntrySize {
		return DiscoveryEntry{}, short("discovery log entry", len(b), DiscoveryEntrySize)
	}
	e := DiscoveryEntry{
		Transport: TransportType(b[0]), Family: AddressFamily(b[1]), Type: SubsystemType(b[2]), Requirements: b[3],
		PortID: le.Uint16(b[4:]), ControllerID: le.Uint16(b[6:]), AdminQueue: le.Uint16(b[8:]), Flags: le.Uint16(b[10:]),
		Security: b[768],
	}
	var err error
	if e.Service, err = printable(b[32:64]); err != nil {
		return e, fmt.Errorf("parse discovery log entry: service: %w", err)
	}
	if e.Address, err = printable(b[512:768]); err != nil {
		return e, fmt.Errorf("parse discovery log entry: address: %w", err)
	}
	if e.Subsystem, err = parseNQN(b[256:512]); err != nil {
		return e, fmt.Errorf("parse discovery log entry: subsystem: %w", err)
	}
	return e, nil
}

// printable reads text that is padded with spaces or zero bytes: peers use either.
func printable(b []byte) (string, error) {
	s := strings.TrimRight(string(untilZero(b)), " ")
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return "", fmt.Errorf("byte %#02x in text", s[i])
		}
	}
	return s, nil
}

// DiscoveryLog is LogDiscovery (Base, figure 271).
type DiscoveryLog struct {
	Generation uint64 // changes with every change: parts read under one generation fit together
	Records    uint64 // the number of records
	Entries    []DiscoveryEntry
}

// Append adds the log to b: header, then entries. Records is the count of Entries.
func (d DiscoveryLog) Append(b []byte) []byte {
	b, o := grow(b, DiscoveryEntrySize)
	le.PutUint64(o, d.Generation)
	le.PutUint64(o[8:], uint64(len(d.Entries)))
	for _, e := range d.Entries {
		b = e.Append(b)
	}
	return b
}

// ParseDiscoveryLog reads the header and as many of its Records as b holds. An entry that
// cannot be parsed is an error.
func ParseDiscoveryLog(b []byte) (DiscoveryLog, error) {
	if len(b) < DiscoveryEntrySize {
		return DiscoveryLog{}, short("discovery log", len(b), DiscoveryEntrySize)
	}
	d := DiscoveryLog{Generation: le.Uint64(b), Records: le.Uint64(b[8:])}
	if format := le.Uint16(b[16:]); format != 0 {
		return d, fmt.Errorf("parse discovery log: record format %d", format)
	}
	b = b[DiscoveryEntrySize:]
	for n := d.Records; n > 0 && len(b) >= DiscoveryEntrySize; n-- {
		e, err := ParseDiscoveryEntry(b)
		if err != nil {
			return d, err
		}
		d.Entries = append(d.Entries, e)
		b = b[DiscoveryEntrySize:]
	}
	return d, nil
}

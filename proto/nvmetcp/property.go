// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"fmt"
	"time"
)

// Property is the offset of a controller register (Base, 3.1.3).
type Property uint32

// The properties that exist over fabrics.
const (
	PropertyCAP  Property = 0x00 // 8 bytes
	PropertyVS   Property = 0x08
	PropertyCC   Property = 0x14
	PropertyCSTS Property = 0x1c
	PropertyNSSR Property = 0x20
	PropertyCRTO Property = 0x68
)

func (p Property) String() string {
	switch p {
	case PropertyCAP:
		return "CAP"
	case PropertyVS:
		return "VS"
	case PropertyCC:
		return "CC"
	case PropertyCSTS:
		return "CSTS"
	case PropertyNSSR:
		return "NSSR"
	case PropertyCRTO:
		return "CRTO"
	}
	return fmt.Sprintf("property %#x", uint32(p))
}

// Size is the property's length, 4 or 8 bytes.
func (p Property) Size() int {
	if p == PropertyCAP {
		return 8
	}
	return 4
}

func (p Property) sizeCode() byte { return byte(p.Size()/4 - 1) }

// Version is the value of VS, and of Identify's VER: 0x00020000 is 2.0.0.
type Version uint32

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v>>16, v>>8&0xff, v&0xff) }

// Capabilities is CAP (Base, 3.1.3.1).
type Capabilities struct {
	MaxQueueEntries    uint32        // MQES, 1 to 65536
	ContiguousQueues   bool          // CQR; set over fabrics
	Timeout            time.Duration // TO: time limit for becoming ready; units of 500 ms
	CommandSets        uint8         // CSS: bit 0 NVM, bit 6 I/O command sets, bit 7 none
	MinPageSize        uint8         // MPSMIN: 2^(12+n) bytes
	MaxPageSize        uint8         // MPSMAX
	ControllerReady    uint8         // CRMS: bit 0 ready with media, bit 1 independent of media
	SubsystemReset     bool          // NSSRS
	PersistentMemory   bool          // PMRS
	ControllerMemory   bool          // CMBS
	ArbitrationSupport uint8         // AMS
}

// Encode makes CAP's value.
func (c Capabilities) Encode() uint64 {
	return uint64(uint16(c.MaxQueueEntries-1)) | uint64(bit(c.ContiguousQueues, 0))<<16 |
		uint64(c.ArbitrationSupport&3)<<17 | uint64(uint8(c.Timeout/(500*time.Millisecond)))<<24 |
		uint64(bit(c.SubsystemReset, 0))<<36 | uint64(c.CommandSets)<<37 |
		uint64(c.MinPageSize&15)<<48 | uint64(c.MaxPageSize&15)<<52 |
		uint64(bit(c.PersistentMemory, 0))<<56 | uint64(bit(c.ControllerMemory, 0))<<57 |
		uint64(c.ControllerReady&3)<<59
}

// ParseCapabilities is the inverse of Encode.
func ParseCapabilities(v uint64) Capabilities {
	return Capabilities{
		MaxQueueEntries:    uint32(uint16(v)) + 1,
		ContiguousQueues:   v>>16&1 != 0,
		ArbitrationSupport: uint8(v>>17) & 3,
		Timeout:            time.Duration(uint8(v>>24)) * 500 * time.Millisecond,
		SubsystemReset:     v>>36&1 != 0,
		CommandSets:        uint8(v >> 37),
		MinPageSize:        uint8(v>>48) & 15,
		MaxPageSize:        uint8(v>>52) & 15,
		PersistentMemory:   v>>56&1 != 0,
		ControllerMemory:   v>>57&1 != 0,
		ControllerReady:    uint8(v>>59) & 3,
	}
}

// Configuration is CC (Base, 3.1.3.5).
type Configuration struct {
	Enable                bool
	CommandSet            uint8 // CSS: 0 NVM, 6 all supported, 7 admin only
	PageSize              uint8 // MPS: 2^(12+n) bytes
	Arbitration           uint8 // AMS
	Shutdown              uint8 // SHN: 0 none, 1 normal, 2 abrupt
	SubmissionEntrySize   uint8 // IOSQES: 2^n bytes; 6
	CompletionEntrySize   uint8 // IOCQES: 2^n bytes; 4
	ReadyIndependentMedia bool  // CRIME
}

// Encode makes CC's value.
func (c Configuration) Encode() uint32 {
	return uint32(bit(c.Enable, 0)) | uint32(c.CommandSet&7)<<4 | uint32(c.PageSize&15)<<7 | uint32(c.Arbitration&7)<<11 |
		uint32(c.Shutdown&3)<<14 | uint32(c.SubmissionEntrySize&15)<<16 | uint32(c.CompletionEntrySize&15)<<20 |
		uint32(bit(c.ReadyIndependentMedia, 0))<<24
}

// ParseConfiguration is the inverse of Encode.
func ParseConfiguration(v uint32) Configuration {
	return Configuration{
		Enable: v&1 != 0, CommandSet: uint8(v>>4) & 7, PageSize: uint8(v>>7) & 15, Arbitration: uint8(v>>11) & 7,
		Shutdown: uint8(v>>14) & 3, SubmissionEntrySize: uint8(v>>16) & 15, CompletionEntrySize: uint8(v>>20) & 15,
		ReadyIndependentMedia: v>>24&1 != 0,
	}
}

// ControllerStatus is CSTS (Base, 3.1.3.6).
type ControllerStatus struct {
	Ready    bool
	Fatal    bool  // CFS
	Shutdown uint8 // SHST: 0 normal operation, 1 under way, 2 complete
	Paused   bool  // PP
}

// Encode makes CSTS's value.
func (c ControllerStatus) Encode() uint32 {
	return uint32(bit(c.Ready, 0)|bit(c.Fatal, 1)|bit(c.Paused, 5)) | uint32(c.Shutdown&3)<<2
}

// ParseControllerStatus is the inverse of Encode.
func ParseControllerStatus(v uint32) ControllerStatus {
	return ControllerStatus{Ready: v&1 != 0, Fatal: v&2 != 0, Shutdown: uint8(v>>2) & 3, Paused: v>>5&1 != 0}
}

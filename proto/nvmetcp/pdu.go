// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"encoding/binary"
	"fmt"
)

var le = binary.LittleEndian

// Type is the type of a PDU (TCP, 3.6.1).
type Type uint8

// The PDU types. H2C travel from host to controller, C2H the other way.
const (
	TypeICReq       Type = 0x00 // H2C
	TypeICResp      Type = 0x01 // C2H
	TypeH2CTermReq  Type = 0x02
	TypeC2HTermReq  Type = 0x03
	TypeCapsuleCmd  Type = 0x04 // H2C
	TypeCapsuleResp Type = 0x05 // C2H
	TypeH2CData     Type = 0x06
	TypeC2HData     Type = 0x07
	TypeR2T         Type = 0x09 // C2H
)

func (t Type) String() string {
	switch t {
	case TypeICReq:
		return "ICReq"
	case TypeICResp:
		return "ICResp"
	case TypeH2CTermReq:
		return "H2CTermReq"
	case TypeC2HTermReq:
		return "C2HTermReq"
	case TypeCapsuleCmd:
		return "CapsuleCmd"
	case TypeCapsuleResp:
		return "CapsuleResp"
	case TypeH2CData:
		return "H2CData"
	case TypeC2HData:
		return "C2HData"
	case TypeR2T:
		return "R2T"
	}
	return fmt.Sprintf("PDU type %#02x", uint8(t))
}

// The flags of a PDU's common header. ReaderConfig.check knows which PDU may carry which.
const (
	FlagHeaderDigest uint8 = 1 << 0 // HDGSTF: a digest follows the header
	FlagDataDigest   uint8 = 1 << 1 // DDGSTF: a digest follows the data
	FlagLastPDU      uint8 = 1 << 2 // LAST_PDU: the last of an R2T's, or of a command's, data
	FlagSuccess      uint8 = 1 << 3 // SUCCESS: of C2HData; the command is done, no CapsuleResp follows
)

// The lengths of PDU headers (HLEN), without digest.
const (
	CommonHeaderSize = 8
	ICSize           = 128 // ICReq and ICResp
	CapsuleCmdSize   = CommonHeaderSize + CommandSize
	CapsuleRespSize  = CommonHeaderSize + CompletionSize
	DataHeaderSize   = 24 // H2CData, C2HData, R2T
	TermReqSize      = 24

	// MaxTermReqData is how much of the invalid header a TermReq may carry.
	MaxTermReqData = 128

	maxHeaderSize = 128
)

// Header is the common header that every PDU begins with (TCP, 3.6.1).
type Header struct {
	Type  Type
	Flags uint8
	HLen  uint8  // length of the header, without digest
	PDO   uint8  // where data begins, from the start of the PDU; 0: no data
	PLen  uint32 // length of the whole PDU, with digests
}

// Append adds the header's 8 bytes to b.
func (h Header) Append(b []byte) []byte {
	b = append(b, byte(h.Type), h.Flags, h.HLen, h.PDO)
	return le.AppendUint32(b, h.PLen)
}

// ParseHeader reads the first 8 bytes of a PDU. It checks only the length.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < CommonHeaderSize {
		return Header{}, short("PDU header", len(b), CommonHeaderSize)
	}
	return Header{Type: Type(b[0]), Flags: b[1], HLen: b[2], PDO: b[3], PLen: le.Uint32(b[4:])}, nil
}

// short is the error for a structure that is too short.
func short(what string, have, want int) error {
	return fmt.Errorf("parse %s: %d bytes, at least %d needed", what, have, want)
}

// ICReq requests a connection (TCP, 3.6.2.2).
type ICReq struct {
	PFV          uint16 // format version; 0
	HPDA         uint8  // data of C2HData begins at a multiple of (HPDA+1)*4 bytes; at most 31
	HeaderDigest bool
	DataDigest   bool
	MaxR2T       uint32 // how many R2Ts of a command may be outstanding; at least 1
}

// ICResp accepts a connection (TCP, 3.6.2.3).
type ICResp struct {
	PFV          uint16 // format version; 0
	CPDA         uint8  // data of H2C PDUs begins at a multiple of (CPDA+1)*4 bytes; at most 31
	HeaderDigest bool
	DataDigest   bool
	MaxH2CData   uint32 // bytes of one H2CData; at least 4096, a multiple of 4
}

// Append adds the whole PDU to b.
func (p ICReq) Append(b []byte) []byte {
	return appendIC(b, TypeICReq, p.PFV, p.HPDA, p.HeaderDigest, p.DataDigest, p.MaxR2T-1)
}

// Append adds the whole PDU to b.
func (p ICResp) Append(b []byte) []byte {
	return appendIC(b, TypeICResp, p.PFV, p.CPDA, p.HeaderDigest, p.DataDigest, p.MaxH2CData)
}

func appendIC(b []byte, t Type, pfv uint16, pda uint8, hdgst, ddgst bool, limit uint32) []byte {
	start := len(b)
	b = Header{Type: t, HLen: ICSize, PLen: ICSize}.Append(b)
	b = le.AppendUint16(b, pfv)
	b = append(b, pda, bit(hdgst, 0)|bit(ddgst, 1))
	b = le.AppendUint32(b, limit)
	return append(b, make([]byte, ICSize-(len(b)-start))...)
}

func bit(on bool, n uint) byte {
	if on {
		return 1 << n
	}
	return 0
}

// ParseICReq reads the PDU's bytes and checks the fields that the specification restricts.
// The error is a [*FatalError] that names the field.
func ParseICReq(b []byte) (ICReq, error) {
	if len(b) < ICSize {
		return ICReq{}, short("ICReq", len(b), ICSize)
	}
	p := ICReq{PFV: le.Uint16(b[8:]), HPDA: b[10], HeaderDigest: b[11]&1 != 0, DataDigest: b[11]&2 != 0, MaxR2T: le.Uint32(b[12:]) + 1}
	switch {
	case p.PFV != 0:
		return p, fatal(FESUnsupportedParameter, 8, b[:ICSize], "ICReq has PDU format version %d", p.PFV)
	case p.HPDA > 31:
		return p, fatal(FESInvalidHeader, 10, b[:ICSize], "ICReq has HPDA %d", p.HPDA)
	case p.MaxR2T == 0: // 2^32, 0's based
		p.MaxR2T = 1<<32 - 1
	}
	return p, nil
}

// ParseICResp does the same for an ICResp.
func ParseICResp(b []byte) (ICResp, error) {
	if len(b) < ICSize {
		return ICResp{}, short("ICResp", len(b), ICSize)
	}
	p := ICResp{PFV: le.Uint16(b[8:]), CPDA: b[10], HeaderDigest: b[11]&1 != 0, DataDigest: b[11]&2 != 0, MaxH2CData: le.Uint32(b[12:])}
	switch {
	case p.PFV != 0:
		return p, fatal(FESUnsupportedParameter, 8, b[:ICSize], "ICResp has PDU format version %d", p.PFV)
	case p.CPDA > 31:
		return p, fatal(FESInvalidHeader, 10, b[:ICSize], "ICResp has CPDA %d", p.CPDA)
	case p.MaxH2CData < 4096 || p.MaxH2CData%4 != 0:
		return p, fatal(FESInvalidHeader, 12, b[:ICSize], "ICResp has MAXH2CDATA %d", p.MaxH2CData)
	}
	return p, nil
}

// DataHeader is the part of an H2CData, C2HData or R2T that follows the common header (TCP,
// 3.6.2.7 to 3.6.2.9).
type DataHeader struct {
	CID    uint16 // of the command (CCCID)
	TTAG   uint16 // identifies the transfer; chosen by the controller; unused in C2HData
	Offset uint32 // bytes from the start of the command's data (DATAO, R2TO)
	Length uint32 // bytes (DATAL, R2TL)
}

// Append adds the 16 bytes that follow the common header.
func (d DataHeader) Append(b []byte) []byte {
	b = le.AppendUint16(b, d.CID)
	b = le.AppendUint16(b, d.TTAG)
	b = le.AppendUint32(b, d.Offset)
	b = le.AppendUint32(b, d.Length)
	return append(b, 0, 0, 0, 0)
}

// ParseDataHeader reads the header of a PDU, common header included.
func ParseDataHeader(b []byte) (DataHeader, error) {
	if len(b) < DataHeaderSize {
		return DataHeader{}, short("data PDU header", len(b), DataHeaderSize)
	}
	return DataHeader{CID: le.Uint16(b[8:]), TTAG: le.Uint16(b[10:]), Offset: le.Uint32(b[12:]), Length: le.Uint32(b[16:])}, nil
}

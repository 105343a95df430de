// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import "fmt"

// FES is a fatal error status: the reason for ending a connection (TCP, 3.6.2.4).
type FES uint16

// The fatal error statuses.
const (
	FESInvalidHeader        FES = 1 // FEI: the offset of the field
	FESSequence             FES = 2 // an unexpected PDU
	FESHeaderDigest         FES = 3 // FEI: the digest that was received
	FESOutOfRange           FES = 4 // data outside the range of the command or of the R2T
	FESLimitExceeded        FES = 5 // more data, or more R2Ts, than negotiated
	FESUnsupportedParameter FES = 6 // FEI: the offset of the field
)

func (f FES) String() string {
	switch f {
	case FESInvalidHeader:
		return "invalid PDU header field"
	case FESSequence:
		return "PDU sequence error"
	case FESHeaderDigest:
		return "header digest error"
	case FESOutOfRange:
		return "data transfer out of range"
	case FESLimitExceeded:
		return "data transfer limit exceeded"
	case FESUnsupportedParameter:
		return "unsupported parameter"
	}
	return fmt.Sprintf("fatal error status %#x", uint16(f))
}

// TermReq ends a connection. The receiver closes it; the sender waits at most 30 seconds
// for that (TCP, 3.5).
type TermReq struct {
	ToHost bool // C2HTermReq, else H2CTermReq
	FES    FES
	FEI    uint32 // its meaning depends on FES
	Header []byte // of the invalid PDU: at most MaxTermReqData bytes are sent
}

// Append adds the whole PDU to b.
func (t TermReq) Append(b []byte) []byte {
	h := Header{Type: TypeH2CTermReq, HLen: TermReqSize}
	if t.ToHost {
		h.Type = TypeC2HTermReq
	}
	data := t.Header[:min(len(t.Header), MaxTermReqData)]
	h.PLen = TermReqSize + uint32(len(data))
	b = h.Append(b)
	b = le.AppendUint16(b, uint16(t.FES))
	b = le.AppendUint32(b, t.FEI)
	b = append(b, make([]byte, 10)...)
	return append(b, data...)
}

// ParseTermReq reads the bytes of a PDU of either type. Header aliases b.
func ParseTermReq(b []byte) (TermReq, error) {
	if len(b) < TermReqSize {
		return TermReq{}, short("TermReq", len(b), TermReqSize)
	}
	if len(b) > TermReqSize+MaxTermReqData {
		return TermReq{}, fmt.Errorf("parse TermReq: %d bytes, at most %d allowed", len(b), TermReqSize+MaxTermReqData)
	}
	return TermReq{
		ToHost: Type(b[0]) == TypeC2HTermReq,
		FES:    FES(le.Uint16(b[8:])),
		FEI:    le.Uint32(b[10:]),
		Header: b[TermReqSize:],
	}, nil
}

// FatalError is a fault of the peer that ends the connection. The end that finds it sends
// its TermReq.
type FatalError struct {
	FES    FES
	FEI    uint32
	Header []byte // a copy of the invalid header
	Text   string
}

func (e *FatalError) Error() string { return e.Text + ": " + e.FES.String() }

// TermReq is the PDU that reports the fault to the peer.
func (e *FatalError) TermReq(toHost bool) TermReq {
	return TermReq{ToHost: toHost, FES: e.FES, FEI: e.FEI, Header: e.Header}
}

// Fatal makes a FatalError with a copy of header.
func Fatal(fes FES, fei uint32, header []byte, text string) *FatalError {
	return &FatalError{FES: fes, FEI: fei, Header: append([]byte(nil), header...), Text: text}
}

func fatal(fes FES, fei uint32, header []byte, format string, args ...any) error {
	return Fatal(fes, fei, header, fmt.Sprintf(format, args...))
}

// TerminatedError is the error for a TermReq that the peer has sent.
type TerminatedError struct{ TermReq TermReq }

func (e *TerminatedError) Error() string {
	return fmt.Sprintf("peer terminated the connection: %v (%#x)", e.TermReq.FES, e.TermReq.FEI)
}

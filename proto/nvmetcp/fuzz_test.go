// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

// fuzzStructures feeds bytes to each structure of a list.
func fuzzStructures(f *testing.F, list []structure) {
	const padded = 0x80 // zeroes fill the input up to the structure's length: short inputs mutate faster
	for i, s := range list {
		f.Add(uint8(i), make([]byte, s.size))
		f.Add(uint8(i)|padded, []byte{1, 2, 3, 4, 5, 6, 7, 8})
		if _, again, err := s.read(bytes.Repeat([]byte{1, 0, 0, 0}, s.size/4+1)); err == nil {
			f.Add(uint8(i), again)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, b []byte) {
		s := list[int(which&^padded)%len(list)]
		if which&padded != 0 && len(b) < s.size {
			b = append(b, make([]byte, s.size-len(b))...)
		}
		stable(t, s, b)
	})
}

func FuzzPDUs(f *testing.F)     { fuzzStructures(f, pduStructures) }
func FuzzFabrics(f *testing.F)  { fuzzStructures(f, fabricsStructures) }
func FuzzIdentify(f *testing.F) { fuzzStructures(f, identifyStructures) }
func FuzzLogs(f *testing.F)     { fuzzStructures(f, logStructures) }
func FuzzIO(f *testing.F)       { fuzzStructures(f, ioStructures) }

// FuzzReader feeds a stream to a Reader of every role and agreement, in one piece and byte
// by byte. Both must return the same PDUs, use bounded memory, and end.
func FuzzReader(f *testing.F) {
	for i, a := range everyAgreement {
		var b bytes.Buffer
		w := a.writer(&b)
		w.Raw(ICReq{MaxR2T: 1}.Append(nil))
		w.Command(&Command{1, 2, 3}, []byte("data in the capsule"))
		w.Data(TypeH2CData, FlagLastPDU, DataHeader{CID: 1}, []byte("more data"))
		w.Raw(TermReq{FES: FESSequence, Header: []byte{1, 2, 3}}.Append(nil))
		if err := w.Flush(); err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), b.Bytes())
		b.Reset()
		w.Raw(ICResp{MaxH2CData: 4096}.Append(nil))
		w.Completion(&Completion{1})
		w.R2T(DataHeader{Length: 5})
		w.Data(TypeC2HData, FlagLastPDU|FlagSuccess, DataHeader{CID: 1}, []byte("some data"))
		if err := w.Flush(); err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i)|0x80, b.Bytes())
	}
	f.Fuzz(func(t *testing.T, how uint8, stream []byte) {
		a := everyAgreement[int(how&0x7f)%len(everyAgreement)]
		role := Role(how >> 7)
		whole, err := collect(a.reader(bytes.NewReader(stream), role), false)
		parts, again := collect(a.reader(iotest.OneByteReader(bytes.NewReader(stream)), role), true)
		if err.Error() != again.Error() {
			t.Fatalf("in one piece: %v; byte by byte: %v", err, again)
		}
		both, third := collect(a.reader(twoPlaces{iotest.HalfReader(bytes.NewReader(stream))}, role), true)
		if err.Error() != third.Error() {
			t.Fatalf("in one piece: %v; into two places: %v", err, third)
		}
		if !bytes.Equal(whole, parts) || !bytes.Equal(whole, both) {
			t.Fatal("in one piece, byte by byte and into two places differ")
		}
		if len(whole) > len(stream) {
			t.Fatalf("%d bytes came of %d", len(whole), len(stream))
		}
	})
}

// collect reads PDUs until an error, and returns their headers and data.
func collect(r *Reader, straight bool) (all []byte, err error) {
	for {
		pdu, err := r.Next()
		if err != nil {
			return all, err
		}
		all = append(all, pdu.Head...)
		var data []byte
		switch {
		case isTermReq(pdu.Type):
			var te *TerminatedError
			if err := r.TermReq(); !errors.As(err, &te) {
				return all, err
			}
		case straight && pdu.DataLen > 0:
			data = make([]byte, pdu.DataLen)
			err = r.ReadData(data)
		case pdu.DataLen > uint32(8<<10):
			data = make([]byte, pdu.DataLen)
			err = r.ReadData(data)
		default:
			data, err = r.Data()
		}
		if err != nil && !errors.Is(err, ErrDataDigest) {
			return all, err
		}
		if err == nil {
			all = append(all, data...)
		}
		if errors.Is(err, io.EOF) {
			return all, err
		}
	}
}

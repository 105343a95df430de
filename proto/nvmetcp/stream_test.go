// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"
)

// agreed is one possible result of a negotiation.
type agreed struct {
	hdgst, ddgst bool
	align        uint8
}

func (a agreed) String() string {
	return fmt.Sprintf("hdgst=%v,ddgst=%v,align=%d", a.hdgst, a.ddgst, a.align)
}

var everyAgreement = []agreed{{}, {hdgst: true}, {ddgst: true}, {hdgst: true, ddgst: true}, {align: 3}, {hdgst: true, ddgst: true, align: 15}}

func (a agreed) reader(src io.Reader, role Role) *Reader {
	return NewReader(src, ReaderConfig{Role: role, HeaderDigest: a.hdgst, DataDigest: a.ddgst, Align: a.align,
		MaxCapsuleData: 8 << 10, MaxData: 128 << 10, BufferSize: 9 << 10})
}

func (a agreed) writer(dst io.Writer) *Writer {
	return NewWriter(dst, WriterConfig{HeaderDigest: a.hdgst, DataDigest: a.ddgst, Align: a.align})
}

// sources are the ways in which a stream can arrive.
var sources = map[string]func(io.Reader) io.Reader{
	"whole":        func(r io.Reader) io.Reader { return r },
	"bytewise":     iotest.OneByteReader,
	"halves":       iotest.HalfReader,
	"error too":    iotest.DataErrReader,
	"both":         func(r io.Reader) io.Reader { return twoPlaces{r} },
	"halves, both": func(r io.Reader) io.Reader { return twoPlaces{iotest.HalfReader(r)} },
}

// twoPlaces reads into two places at once, as package socket does.
type twoPlaces struct{ io.Reader }

func (s twoPlaces) ReadBoth(p, q []byte) (int, error) {
	b := make([]byte, len(p)+len(q))
	n, err := s.Read(b)
	copy(q, b[copy(p, b[:n]):n])
	return n, err
}

func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

var lengths = []int{1, 4, 511, 1024, 4096, 5000, 8192}

func TestWhatAWriterAddsAReaderTakes(t *testing.T) {
	for _, a := range everyAgreement {
		for name, source := range sources {
			t.Run(a.String()+","+name, func(t *testing.T) {
				var stream bytes.Buffer
				w := a.writer(&stream)
				var cmd Command
				for i := range cmd {
					cmd[i] = byte(i)
				}
				for i, n := range lengths {
					w.Command(&cmd, nil)
					w.Command(&cmd, noise(n))
					w.Data(TypeH2CData, FlagLastPDU, DataHeader{CID: uint16(i), TTAG: 7, Offset: 9}, noise(n*8))
				}
				size := w.Buffered()
				if err := w.Flush(); err != nil {
					t.Fatal(err)
				}
				if stream.Len() != size || w.Buffered() != 0 {
					t.Fatalf("wrote %d bytes, Buffered said %d, says %d", stream.Len(), size, w.Buffered())
				}
				r := a.reader(source(&stream), RoleController)
				for i, n := range lengths {
					pdu := next(t, r)
					if pdu.Type != TypeCapsuleCmd || pdu.DataLen != 0 || *pdu.Command() != cmd {
						t.Fatalf("got %v %+v", pdu.Type, pdu)
					}
					pdu = next(t, r)
					data, err := r.Data()
					if err != nil || !bytes.Equal(data, noise(n)) || *pdu.Command() != cmd {
						t.Fatalf("capsule with %d bytes: %v", n, err)
					}
					pdu = next(t, r)
					if d := pdu.Data(); d != (DataHeader{uint16(i), 7, 9, uint32(n * 8)}) || pdu.Flags&FlagLastPDU == 0 {
						t.Fatalf("data header %+v", d)
					}
					dst := make([]byte, pdu.DataLen)
					if err := r.ReadData(dst); err != nil || !bytes.Equal(dst, noise(n*8)) {
						t.Fatalf("%d bytes of data: %v", n*8, err)
					}
				}
				if _, err := r.Next(); err != io.EOF { //nolint:errorlint // io.EOF itself is promised
					t.Fatalf("at the end: %v", err)
				}
			})
		}
	}
}

func next(t *testing.T, r *Reader) *PDU {
	t.Helper()
	pdu, err := r.Next()
	if err != nil {
		t.Fatal(err)
	}
	return pdu
}

func TestDataThatNobodyTakesIsSkipped(t *testing.T) {
	var stream bytes.Buffer
	a := agreed{hdgst: true, ddgst: true}
	w := a.writer(&stream)
	for i := range 20 {
		w.Data(TypeC2HData, FlagLastPDU|FlagSuccess, DataHeader{CID: uint16(i)}, noise(1+i*3000))
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	r := a.reader(&stream, RoleHost)
	for i := range 20 {
		if d := next(t, r).Data(); d.CID != uint16(i) {
			t.Fatalf("PDU %d is of command %d", i, d.CID)
		}
	}
}

func TestATruncatedStreamIsUnexpectedEOF(t *testing.T) {
	var stream bytes.Buffer
	a := agreed{hdgst: true, ddgst: true}
	w := a.writer(&stream)
	w.Data(TypeC2HData, FlagLastPDU, DataHeader{}, noise(100))
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	for n := range stream.Len() {
		r := a.reader(bytes.NewReader(stream.Bytes()[:n]), RoleHost)
		_, err := r.Next()
		if err == nil {
			_, err = r.Data()
		}
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if !errors.Is(err, want) {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if _, again := r.Next(); !errors.Is(again, want) {
			t.Fatalf("%d bytes, asked again: %v", n, again)
		}
	}
}

func TestADamagedDigestIsFound(t *testing.T) {
	var stream bytes.Buffer
	a := agreed{hdgst: true, ddgst: true}
	w := a.writer(&stream)
	w.Data(TypeC2HData, FlagLastPDU, DataHeader{}, noise(100))
	w.Completion(&Completion{})
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	good := bytes.Clone(stream.Bytes())

	bad := bytes.Clone(good)
	bad[9] ^= 1
	_, err := a.reader(bytes.NewReader(bad), RoleHost).Next()
	var fe *FatalError
	if !errors.As(err, &fe) || fe.FES != FESHeaderDigest || len(fe.Header) != DataHeaderSize {
		t.Fatalf("damaged header: %v", err)
	}

	bad = bytes.Clone(good)
	bad[50] ^= 1
	for name, take := range map[string]func(r *Reader) error{
		"Data":     func(r *Reader) error { _, err := r.Data(); return err },
		"ReadData": func(r *Reader) error { return r.ReadData(make([]byte, 100)) },
	} {
		r := a.reader(bytes.NewReader(bad), RoleHost)
		next(t, r)
		if err := take(r); !errors.Is(err, ErrDataDigest) {
			t.Fatalf("%s of damaged data: %v", name, err)
		}
		if next(t, r).Type != TypeCapsuleResp {
			t.Fatalf("%s: the connection does not continue after a damaged data digest", name)
		}
	}
}

func TestALyingHeaderIsRefused(t *testing.T) {
	header := func(t Type, flags, hlen, pdo uint8, plen uint32) []byte {
		return append(Header{t, flags, hlen, pdo, plen}.Append(nil), make([]byte, 300)...)
	}
	plain, digests := agreed{}, agreed{hdgst: true, ddgst: true}
	for name, c := range map[string]struct {
		a     agreed
		role  Role
		bytes []byte
		fes   FES
		fei   uint32
	}{
		"unknown type":                    {plain, RoleController, header(8, 0, 24, 0, 24), FESInvalidHeader, 0},
		"a controller's PDU at one":       {plain, RoleController, header(TypeR2T, 0, 24, 0, 24), FESInvalidHeader, 0},
		"a host's PDU at one":             {plain, RoleHost, header(TypeCapsuleCmd, 0, 72, 0, 72), FESInvalidHeader, 0},
		"header length":                   {plain, RoleController, header(TypeCapsuleCmd, 0, 71, 0, 72), FESInvalidHeader, 2},
		"header digest not agreed on":     {plain, RoleController, header(TypeCapsuleCmd, 1, 72, 0, 76), FESInvalidHeader, 1},
		"header digest missing":           {digests, RoleController, header(TypeCapsuleCmd, 0, 72, 0, 72), FESInvalidHeader, 1},
		"data digest not agreed on":       {plain, RoleController, header(TypeH2CData, 2, 24, 24, 32), FESInvalidHeader, 1},
		"data digest missing":             {digests, RoleController, header(TypeH2CData, 1, 24, 28, 32), FESInvalidHeader, 1},
		"SUCCESS from a host":             {plain, RoleController, header(TypeH2CData, 8, 24, 24, 32), FESInvalidHeader, 1},
		"SUCCESS before the last":         {plain, RoleHost, header(TypeC2HData, 8, 24, 24, 32), FESInvalidHeader, 1},
		"length below the header's":       {plain, RoleController, header(TypeCapsuleCmd, 0, 72, 0, 71), FESInvalidHeader, 4},
		"length 0":                        {plain, RoleController, header(TypeCapsuleCmd, 0, 72, 0, 0), FESInvalidHeader, 4},
		"completion with data":            {plain, RoleHost, header(TypeCapsuleResp, 0, 24, 24, 28), FESInvalidHeader, 4},
		"data within the header":          {plain, RoleController, header(TypeCapsuleCmd, 0, 72, 68, 80), FESInvalidHeader, 3},
		"data not aligned":                {agreed{align: 3}, RoleController, header(TypeCapsuleCmd, 0, 72, 72, 80), FESInvalidHeader, 3},
		"data beyond the end":             {plain, RoleController, header(TypeCapsuleCmd, 0, 72, 200, 80), FESInvalidHeader, 4},
		"no room for the digest":          {digests, RoleController, header(TypeCapsuleCmd, 3, 72, 76, 80), FESInvalidHeader, 4},
		"too much in the capsule":         {plain, RoleController, header(TypeCapsuleCmd, 0, 72, 72, 72+8<<10+1), FESLimitExceeded, 4},
		"too much data":                   {plain, RoleController, header(TypeH2CData, 0, 24, 24, 1<<32-1), FESLimitExceeded, 4},
		"data PDU without data":           {plain, RoleController, header(TypeH2CData, 0, 24, 0, 24), FESInvalidHeader, 4},
		"data length is not the PDU's":    {plain, RoleController, header(TypeH2CData, 0, 24, 24, 32), FESInvalidHeader, 16},
		"TermReq with too long a header":  {plain, RoleController, header(TypeH2CTermReq, 0, 24, 0, 153), FESInvalidHeader, 4},
		"TermReq below its header length": {plain, RoleController, header(TypeH2CTermReq, 0, 24, 0, 23), FESInvalidHeader, 4},
	} {
		_, err := c.a.reader(bytes.NewReader(c.bytes), c.role).Next()
		var fe *FatalError
		if !errors.As(err, &fe) || fe.FES != c.fes || fe.FEI != c.fei {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// endless is a connection that never ends: it repeats the same bytes.
type endless struct {
	b  []byte
	at int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.b[e.at:])
	e.at = (e.at + n) % len(e.b)
	return n, nil
}

func TestNoMemoryIsTakenPerPDU(t *testing.T) {
	for _, a := range everyAgreement {
		var stream bytes.Buffer
		w := a.writer(&stream)
		var cmd Command
		data := noise(4096)
		add := func() {
			w.Command(&cmd, data)
			w.Command(&cmd, nil)
			w.Data(TypeH2CData, FlagLastPDU, DataHeader{}, data)
		}
		add()
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		w.dst = io.Discard
		if n := testing.AllocsPerRun(100, func() {
			for range 30 {
				add()
			}
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%v: %v allocations of a Writer", a, n)
		}
		r := a.reader(&endless{b: bytes.Clone(stream.Bytes())}, RoleController)
		dst := make([]byte, 4096)
		if n := testing.AllocsPerRun(300, func() {
			pdu := next(t, r)
			if pdu.DataLen != 0 {
				if err := r.ReadData(dst); err != nil {
					t.Fatal(err)
				}
			}
		}); n != 0 {
			t.Errorf("%v: %v allocations of a Reader", a, n)
		}
	}
}

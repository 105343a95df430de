// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

func testLabel(legs ...*pb.LegLabel) *Label {
	return &Label{Generation: 9, Cluster: cluster1, Drive: drive1, Size: testSize, Legs: legs}
}

// setVersion changes the version of a header and corrects its checksum.
func setVersion(header []byte, version uint32) {
	binary.LittleEndian.PutUint32(header[16:], version)
	clear(header[20:24])
	binary.LittleEndian.PutUint32(header[20:], crc(header[:headerSize]))
}

func TestDecodeIsTheInverseOfEncode(t *testing.T) {
	full := leg(1, 1, run(0, 1), run(3, 1))
	full.Zeroed, full.AdmittedEpoch, full.Copy = true, 1<<40, 2
	for _, l := range []*Label{testLabel(), testLabel(full), testLabel(full, leg(2, 2, run(1, 1))), {
		Generation: 1<<64 - 1, Cluster: cluster2, Drive: drive2, Size: 100 * block.TiB, unfinished: true, Incarnation: 1<<32 - 1,
	}} {
		b, err := encode(l)
		must(t, err)
		if len(b)%int(copyUnit) != 0 {
			t.Errorf("encode made %d bytes, want whole blocks", len(b))
		}
		got, err := decode(b)
		must(t, err)
		if diff := cmp.Diff(l, got, protocmp.Transform(), cmp.AllowUnexported(Label{})); diff != "" {
			t.Errorf("decode(encode(l)) (-want +got):\n%s", diff)
		}
		again, err := encode(got)
		if err != nil || !bytes.Equal(b, again) {
			t.Errorf("encode(decode(b)) differs from b, %v", err)
		}
	}
}

// The bytes on existing drives must not change.
func TestTheFormatIsWhatItWas(t *testing.T) {
	l := testLabel(&pb.LegLabel{LegId: legID(1).String(), Extents: []*pb.Extent{run(1, 2)}, Zeroed: true, AdmittedEpoch: 3,
		Volume: &pb.VolumeLabel{VolumeId: volumeID(1).String(), Labels: map[string]string{"b": "2", "a": "1"}}})
	b, err := encode(l)
	must(t, err)
	want := strings.Join([]string{
		hex.EncodeToString([]byte("weft drive label")), "02000000", "@header",
		"0900000000000000",
		"01010000000000000000000000000000", "02010000000000000000000000000000",
		"0088004100000000", "0000001000000000", "0000800000000000", "04000000", "00000000", "6a000000", "@payload",
	}, "")
	want = strings.NewReplacer("@header", hex.EncodeToString(b[20:24]), "@payload", hex.EncodeToString(b[100:104])).Replace(want)
	if got := hex.EncodeToString(b[:104]); got != want {
		t.Errorf("header\n got %s\nwant %s", got, want)
	}
	const checksums = "b4fa4f2f 6cb2edaf"
	if got := hex.EncodeToString(b[20:24]) + " " + hex.EncodeToString(b[100:104]); got != checksums {
		t.Errorf("checksums of header and payload = %s, want %s", got, checksums)
	}
	if !allZero(b[104:headerSize]) {
		t.Error("the header does not end with zeroes")
	}
}

func TestEveryFlippedBitIsNoticed(t *testing.T) {
	b, err := encode(testLabel(leg(1, 1, run(0, 1))))
	must(t, err)
	length, err := payloadLength(b)
	must(t, err)
	for i := range (headerSize + length) * 8 {
		c := bytes.Clone(b)
		c[i/8] ^= 1 << (i % 8)
		if l, err := parse(c); err == nil {
			t.Fatalf("bit %d flipped: parsed as %v", i, l)
		}
	}
	for n := range headerSize + length {
		if _, err := parse(b[:n]); err == nil {
			t.Fatalf("the first %d bytes: parsed", n)
		}
	}
}

// parse does what readSlot does, on bytes in memory.
func parse(b []byte) (*Label, error) {
	if len(b) < headerSize {
		return nil, ErrNoLabel
	}
	if err := checkHeader(b); err != nil {
		return nil, err
	}
	return decode(b)
}

func TestALabelThatDoesNotFitIsRefused(t *testing.T) {
	l := &Label{Generation: 1, Cluster: cluster1, Drive: drive1, Size: 20 * block.TiB}
	for i := range 20000 {
		r := leg(1, 1, run(uint32(i), 1))
		r.LegId = block.LegID{UUID: block.UUID{3, byte(i >> 8), byte(i)}}.String()
		l.Legs = append(l.Legs, r)
	}
	if _, err := encode(l); err == nil || !strings.Contains(err.Error(), "at most 3MiB fit") {
		t.Errorf("encode of 20000 legs = %v, want an error", err)
	}
	l.Legs = l.Legs[:8000]
	if _, err := encode(l); err != nil {
		t.Errorf("encode of 8000 legs = %v", err)
	}
}

func TestALongPayloadIsRefusedBeforeItIsRead(t *testing.T) {
	b, err := encode(testLabel())
	must(t, err)
	binary.LittleEndian.PutUint32(b[96:], 1<<32-1)
	setVersion(b, formatVersion)
	m := newMemory(testSize)
	_, err = m.WriteAt(b, 0)
	must(t, err)
	if s := readSlot(m, 0); !errors.Is(s.err, ErrCorrupt) {
		t.Errorf("readSlot = %v, want %v", s.err, ErrCorrupt)
	}
}

func TestTwoLabelsOfOneGenerationAreCorrupt(t *testing.T) {
	m := formatted(t)
	c := readCopies(m, testSize)
	l, err := c.newest()
	must(t, err)
	other := l.clone()
	must(t, other.PutLeg(leg(1, 1, run(0, 1))))
	b, err := encode(other)
	must(t, err)
	_, err = m.WriteAt(b, int64(spare(c[:2]).offset))
	must(t, err)
	if _, err := ReadLabel(m, testSize); !errors.Is(err, ErrCorrupt) {
		t.Errorf("ReadLabel = %v, want %v", err, ErrCorrupt)
	}
}

func TestExtentsFitBetweenTheLabels(t *testing.T) {
	for size, want := range map[block.Size]int{
		0: 0, block.GiB / 8: 0, MinSize - 1: 0, MinSize: 1, MinSize + block.ExtentSize - 1: 1, MinSize + block.ExtentSize: 2,
		block.TiB: 4095, 7681501126656: 28615, 1<<64 - 1: 1<<32 - 1,
	} {
		got := Extents(size)
		if got != want {
			t.Errorf("Extents(%d) = %d, want %d", size, got, want)
		}
		if end := firstExtent + block.Size(got)*block.ExtentSize; got > 0 && end > tailArea(size) {
			t.Errorf("Extents(%d) = %d: they end at %v, behind the tail at %v", size, got, end, tailArea(size))
		}
	}
}

func TestSegmentsAreTheLegsBytesInItsOrder(t *testing.T) {
	const e, first = block.ExtentSize, firstExtent
	for _, test := range []struct {
		extents []*pb.Extent
		size    block.Size
		want    []Segment
	}{
		{nil, 0, nil},
		{[]*pb.Extent{run(0, 1)}, 0, []Segment{{first, e}}},
		{[]*pb.Extent{run(0, 1), run(1, 2)}, 0, []Segment{{first, 3 * e}}},
		{[]*pb.Extent{run(1, 1), run(0, 1)}, 0, []Segment{{first + e, e}, {first, e}}},
		{[]*pb.Extent{run(5, 2), run(9, 1)}, 2*e + block.MiB, []Segment{{first + 5*e, 2 * e}, {first + 9*e, block.MiB}}},
		{[]*pb.Extent{run(5, 2), run(9, 1)}, e, []Segment{{first + 5*e, e}}},
		{[]*pb.Extent{run(1<<32-2, 1)}, 0, []Segment{{first + (1<<32-2)*e, e}}},
	} {
		if diff := cmp.Diff(test.want, ImageOf(&pb.LegLabel{Extents: test.extents}).Segments(test.size)); diff != "" {
			t.Errorf("Segments(%v, %v) (-want +got):\n%s", test.extents, test.size, diff)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, l := range []*Label{testLabel(), testLabel(leg(1, 1, run(0, 1)), leg(2, 2, run(1, 2)))} {
		b, err := encode(l)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:1024])
	}
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		// Checksums are corrected, so that the code behind them is reached.
		if len(b) >= headerSize {
			if n := binary.LittleEndian.Uint32(b[96:]); uint64(n) <= uint64(len(b)-headerSize) {
				binary.LittleEndian.PutUint32(b[100:], crc(b[headerSize:headerSize+int(n)]))
			}
			setVersion(b, binary.LittleEndian.Uint32(b[16:]))
		}
		l, err := parse(b)
		if err != nil {
			return
		}
		again, err := encode(l)
		if err != nil {
			t.Fatalf("encode of what was parsed = %v", err)
		}
		if l2, err := parse(again); err != nil || !l2.equal(l) || l2.Generation != l.Generation {
			t.Fatalf("parse(encode(parse(b))) = %v, %v; want %v", l2, err, l)
		}
	})
}

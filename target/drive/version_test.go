// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// kept is a drive as an older version left it, stored in testdata: its size, and each block of 4
// KiB that is not zeroes, after its offset.
func kept(t *testing.T, name string) *memory {
	t.Helper()
	f, err := os.Open("testdata/v1/" + name + ".gz")
	must(t, err)
	defer f.Close() //nolint:errcheck // only read
	z, err := gzip.NewReader(f)
	must(t, err)
	b, err := io.ReadAll(z)
	must(t, err)
	m := newMemory(block.Size(binary.LittleEndian.Uint64(b)))
	for b = b[8:]; len(b) > 0; b = b[8+4096:] {
		_, err := m.WriteAt(b[8:8+4096], int64(binary.LittleEndian.Uint64(b)))
		must(t, err)
	}
	must(t, m.Flush())
	m.writes = 0
	return m
}

// newestCopy returns the bytes of the newest copy of a label.
func newestCopy(t *testing.T, m *memory) []byte {
	t.Helper()
	c := readCopies(m, m.size)
	l, err := c.newest()
	must(t, err)
	for _, s := range c {
		if s.label != nil && s.label.Generation == l.Generation {
			return s.bytes
		}
	}
	t.Fatal("no copy of the newest label")
	return nil
}

func versionOf(header []byte) uint32 { return binary.LittleEndian.Uint32(header[16:]) }

// The drives were written by the commits that name them: each has a leg of a three-copy volume, one
// of whose copies missed writes.
func TestALabelOfVersion1IsReadAsItWasAndWrittenAsVersion2(t *testing.T) {
	for _, name := range []string{"a0391d4", "1580f6c"} {
		t.Run(name, func(t *testing.T) {
			m := kept(t, name)
			old := newestCopy(t, m)
			if versionOf(old) != 1 {
				t.Fatalf("the kept label is of version %d", versionOf(old))
			}
			label, err := ReadLabel(m, m.size)
			must(t, err)
			var again []byte
			for _, leg := range label.Legs {
				record, err := proto.MarshalOptions{Deterministic: true}.Marshal(leg)
				must(t, err)
				again = append(binary.AppendUvarint(again, uint64(len(record))), record...)
			}
			if len(label.Legs) == 0 || !bytes.Equal(again, old[headerSize:]) {
				t.Errorf("%d legs are not what the label of version 1 says", len(label.Legs))
			}
			rewrite(t, m, label)
		})
	}
}

// rewrite changes a label of version 1, with a power cut at every write of that change.
func rewrite(t *testing.T, m *memory, old *Label) {
	t.Helper()
	id, err := block.ParseVolumeID(old.Legs[0].Volume.VolumeId)
	must(t, err)
	admit := func(m *memory) error {
		d, err := Open(m, old.Cluster)
		must(t, err)
		return d.Admit(id, 77)
	}
	whole := m.clone()
	must(t, admit(whole))
	next, err := ReadLabel(whole, whole.size)
	must(t, err)
	if versionOf(newestCopy(t, whole)) != 2 || next.Generation != old.Generation+1 || next.Legs[0].AdmittedEpoch != 77 {
		t.Errorf("version %d, generation %d after %d, admitted %d", versionOf(newestCopy(t, whole)), next.Generation, old.Generation, next.Legs[0].AdmittedEpoch)
	}
	next.Legs[0].AdmittedEpoch = old.Legs[0].AdmittedEpoch
	if !next.equal(old) {
		t.Errorf("the label of version 2 says %v, that of version 1 said %v", next, old)
	}
	random := rand.New(rand.NewPCG(3, 4))
	for cutAt := 1; cutAt <= whole.writes; cutAt++ {
		cut := m.clone()
		cut.cutAt = cutAt
		if err := admit(cut); !errors.Is(err, errCut) {
			t.Fatalf("cut at sector %d: %v", cutAt, err)
		}
		for _, left := range cut.afterCut(random) {
			l, err := ReadLabel(left, left.size)
			if err != nil || l.Generation != old.Generation && l.Generation != old.Generation+1 {
				t.Fatalf("cut at sector %d: label %v, %v", cutAt, l, err)
			}
			must(t, admit(left))
		}
	}
}

// newerEntry adds an entry to the copy in a slot, of a kind that no program knows yet.
func newerEntry(m *memory, slot block.Size) {
	s := readSlot(m, slot)
	if s.err != nil {
		panic(s.err)
	}
	b := append(bytes.Clone(s.bytes), 7, 3, 'a', 'b', 'c')
	binary.LittleEndian.PutUint32(b[96:], uint32(len(b)-headerSize))
	binary.LittleEndian.PutUint32(b[100:], crc(b[headerSize:]))
	setVersion(b, formatVersion)
	for at := 0; at < len(b); at += sector {
		m.damage(int64(slot)+int64(at), string(b[at:min(at+sector, len(b))]))
	}
}

func TestAnEntryOfAnUnknownKindIsNamed(t *testing.T) {
	m := formatted(t)
	must(t, mustOpen(t, m).PutLeg(leg(1, 1, run(0, 1))))
	newerEntry(m, readCopies(m, testSize)[0].offset)
	_, err := Open(m, cluster1)
	if want := "an entry of kind 7, this program knows 1 to 4"; !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), want) {
		t.Errorf("Open = %v, want %v: %s", err, ErrNewer, want)
	}
}

// The same holds if a newer program adds such an entry while the drive is open: it is not
// overwritten.
func TestAnEntryOfAnUnknownKindIsNotDropped(t *testing.T) {
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(0, 1))))
	for i, s := range readCopies(m, testSize) {
		if s.label != nil && s.label.Generation == d.Label().Generation {
			newerEntry(m, slotOffsets(testSize)[i])
		}
	}
	before := m.writes
	if err := d.Admit(volumeID(1), 5); !errors.Is(err, ErrNewer) || m.writes != before {
		t.Errorf("Admit = %v after %d writes, want %v after none", err, m.writes-before, ErrNewer)
	}
}

func TestALegWithAnImageOfAnUnknownKindIsNotTouched(t *testing.T) {
	message, err := proto.Marshal(&pb.LegLabel{LegId: legID(1).String(), Image: 9, Extents: []*pb.Extent{run(0, 1)}})
	must(t, err)
	_, err = decodeLegs([]entry{{entryLeg, message}})
	if want := "leg " + legID(1).String() + ": image of kind 9: this program knows 1 (plain), 2 (checked), 3 (mapped) and 4 (based)"; !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), want) {
		t.Errorf("decodeLegs = %v, want %v: %s", err, ErrNewer, want)
	}
	newer := leg(1, 1, run(0, 1))
	newer.Image = 9
	if err := mustOpen(t, formatted(t)).PutLeg(newer); err == nil {
		t.Error("PutLeg took an image that this program does not know")
	}
	plain, spelled := leg(1, 1, run(0, 1)), leg(1, 1, run(0, 1))
	spelled.Image = pb.ImageKind_IMAGE_KIND_PLAIN
	if !ImageOf(spelled).Extends(ImageOf(plain)) || ImageOf(newer).Extends(ImageOf(plain)) {
		t.Error("a plain image is the same whether it is spelled out or not, and as no other")
	}
}

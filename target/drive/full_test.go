// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// fresh is the record of a newly carved leg: everything in it that can grow is small.
func fresh(n int) *pb.LegLabel {
	id := func(n int) block.UUID { return block.UUIDFromRandom([16]byte{byte(n >> 16), byte(n >> 8), byte(n), 1}) }
	return &pb.LegLabel{
		LegId: id(2 * n).String(), Extents: []*pb.Extent{{Start: uint32(4 * n), Count: 4}}, Revision: 1,
		Volume: &pb.VolumeLabel{
			VolumeId: id(1<<20 + n).String(), Name: fmt.Sprintf("pvc-%s", id(n)), SizeBytes: 1 << 30, Pool: "default", Spread: "node",
			Layout: &pb.Layout{Stripes: 1, Copies: 2, ChunkBytes: 128 << 10}, Generation: 1, Created: timestamppb.Now(),
		},
	}
}

// most makes everything in a record that can grow as large as possible.
func most(r *pb.LegLabel) {
	v := r.Volume
	v.InSyncLegs = nil
	for range v.Layout.Stripes * v.Layout.Copies {
		v.InSyncLegs = append(v.InSyncLegs, r.LegId)
	}
	v.Generation, v.Epoch, v.SizeBytes, v.ExpandingToBytes, v.Clean = math.MaxUint64, math.MaxUint64, math.MaxUint64, math.MaxUint64, true
	r.Revision, r.AdmittedEpoch, r.Zeroed = math.MaxUint64, math.MaxUint64, true
}

// TestAFullLabelCanStillBeFenced carves legs until the label accepts no more. All of their volumes
// can then still become ready and be attached, for ever.
func TestAFullLabelCanStillBeFenced(t *testing.T) {
	m := newMemory(30 * block.TiB)
	must(t, Format(m, cluster1, drive1, ""))
	d, err := Open(m, cluster1)
	must(t, err)
	carved := int(block.LabelRoom / reserved(fresh(0)))
	carve := func(from, to int) error {
		return d.Update(func(l *Label) error {
			for n := from; n < to; n++ {
				l.Legs = append(l.Legs, fresh(n))
			}
			return nil
		})
	}
	must(t, carve(0, carved))
	if err := carve(carved, carved+1); !errors.Is(err, ErrFull) || carved < 4000 {
		t.Fatalf("one more leg on a label with %d: %v, want %v", carved, err, ErrFull)
	}
	must(t, d.Update(func(l *Label) error {
		for _, leg := range l.Legs {
			most(leg)
		}
		return nil
	}))
	for _, leg := range []int{0, carved / 2, carved - 1} {
		v, err := block.ParseVolumeID(fresh(leg).Volume.VolumeId)
		must(t, err)
		must(t, d.Admit(v, math.MaxUint64))
	}
	again, err := Open(m, cluster1)
	must(t, err)
	if n := len(again.Label().Legs); n != carved {
		t.Errorf("%d legs were carved, the label has %d", carved, n)
	}
	// A leg that grows, or whose volume gets labels, is also refused room that does not exist.
	for what, change := range map[string]func(*pb.LegLabel){
		"extents in many pieces": func(r *pb.LegLabel) {
			for i := range uint32(1000) {
				r.Extents = append(r.Extents, &pb.Extent{Start: 100_000 + 2*i, Count: 1})
			}
		},
		"labels": func(r *pb.LegLabel) { r.Volume.Labels = map[string]string{"a": string(make([]byte, 10_000))} },
	} {
		err := d.Update(func(l *Label) error { change(l.Legs[0]); return nil })
		if !errors.Is(err, ErrFull) {
			t.Errorf("%s on a full label: %v, want %v", what, err, ErrFull)
		}
	}
}

// TestTheReserveIsEnoughForEveryField fills in every field of a record. If this test does not know
// a field, no room is reserved for it: count it in block.LegRecord, and then here.
func TestTheReserveIsEnoughForEveryField(t *testing.T) {
	const legs, runs = block.MaxStripes * block.MaxSlots, 100
	id := legID(1).String()
	texts := map[protoreflect.FullName]string{
		"weft.v1.VolumeLabel.writer": string(make([]byte, 63)), "weft.v1.LegLabel.boot_id": id,
		"weft.v1.LegLabel.incarnation": fmt.Sprintf("%d.%d", uint32(math.MaxUint32), uint64(math.MaxUint64)),
		"weft.v1.LegLabel.tree_id":     id,
		"weft.v1.LegLabel.leg_id":      id, "weft.v1.VolumeLabel.volume_id": id, "weft.v1.VolumeLabel.restoring_to_id": id,
		"weft.v1.SnapshotOf.volume_id": id, "weft.v1.SnapshotOf.group_id": id, "weft.v1.SnapshotOf.volume_name": string(make([]byte, 63)),
		"weft.v1.VolumeLabel.name": string(make([]byte, 63)), "weft.v1.VolumeLabel.pool": string(make([]byte, 63)), "weft.v1.VolumeLabel.spread": string(make([]byte, 300)),
	}
	r := &pb.LegLabel{}
	var fill func(protoreflect.Message)
	fill = func(m protoreflect.Message) {
		for i := range m.Descriptor().Fields().Len() {
			f := m.Descriptor().Fields().Get(i)
			text, known := texts[f.FullName()]
			switch {
			case f.FullName() == "weft.v1.LegLabel.extents":
				for range runs {
					r.Extents = append(r.Extents, &pb.Extent{Start: math.MaxUint32, Count: math.MaxUint32})
				}
			case f.FullName() == "weft.v1.VolumeLabel.in_sync_legs", f.FullName() == "weft.v1.VolumeLabel.other_legs":
			case f.FullName() == "weft.v1.VolumeLabel.crowded_columns":
				for column := range uint32(block.MaxStripes) {
					r.Volume.CrowdedColumns = append(r.Volume.CrowdedColumns, column)
				}
			case f.FullName() == "weft.v1.VolumeLabel.suspect_legs": // a leg is in one of three lists, and takes most here
				for range legs {
					r.Volume.SuspectLegs = append(r.Volume.SuspectLegs, id)
				}
			case f.FullName() == "weft.v1.VolumeLabel.labels":
				r.Volume.Labels = map[string]string{"a": string(make([]byte, 20_000)), "b": ""}
			case f.IsList() || f.IsMap():
				t.Errorf("no room is reserved for the list %s", f.FullName())
			case f.Kind() == protoreflect.MessageKind:
				fill(m.Mutable(f).Message())
			case f.Kind() == protoreflect.StringKind && known:
				m.Set(f, protoreflect.ValueOfString(text))
			case f.Kind() == protoreflect.Uint64Kind:
				m.Set(f, protoreflect.ValueOfUint64(math.MaxUint64))
			case f.Kind() == protoreflect.Uint32Kind:
				m.Set(f, protoreflect.ValueOfUint32(math.MaxUint32))
			case f.Kind() == protoreflect.Int64Kind:
				m.Set(f, protoreflect.ValueOfInt64(-1))
			case f.Kind() == protoreflect.Int32Kind:
				m.Set(f, protoreflect.ValueOfInt32(-1))
			case f.Kind() == protoreflect.EnumKind:
				m.Set(f, protoreflect.ValueOfEnum(-1))
			case f.Kind() == protoreflect.BoolKind:
				m.Set(f, protoreflect.ValueOfBool(true))
			default:
				t.Errorf("no room is reserved for %s", f.FullName())
			}
		}
	}
	fill(r.ProtoReflect())
	r.Volume.Layout = &pb.Layout{Stripes: block.MaxStripes, Data: proto.Uint32(block.MaxCopies - 1), Parity: proto.Uint32(1), ChunkBytes: math.MaxUint64}
	const prefix = 1 + 10 // of each record: its kind and its length
	if n, room := block.Size(proto.Size(r)+prefix), reserved(r); n > room {
		t.Errorf("a record can take %d bytes, %d are reserved", n, room)
	}
}

// A label from before room was reserved can hold too much: changes that take no more of the reserve
// succeed as long as they fit.
func TestALabelThatIsTooFullIsNotRefusedAFence(t *testing.T) {
	l := &Label{Generation: 1, Cluster: cluster1, Drive: drive1, Size: 30 * block.TiB}
	for n := range int(block.LabelRoom/reserved(fresh(0))) + 100 {
		l.Legs = append(l.Legs, fresh(n))
	}
	next := l.clone()
	most(next.Legs[0])
	if err := next.checkRoom(l); err != nil {
		t.Errorf("an epoch and an in-sync set: %v", err)
	}
	next.Legs = append(next.Legs, fresh(1<<16))
	if err := next.checkRoom(l); !errors.Is(err, ErrFull) {
		t.Errorf("one more leg: %v, want %v", err, ErrFull)
	}
}

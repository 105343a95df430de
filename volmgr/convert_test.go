// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
)

// fillMessage sets every field of a message to a value that is not zero.
func fillMessage(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		switch f := fields.Get(i); {
		case f.IsMap():
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("key").MapKey(), protoreflect.ValueOfString("value"))
		case f.IsList() && f.Message() != nil:
			fillMessage(m.Mutable(f).List().AppendMutable().Message())
		case f.IsList():
			m.Mutable(f).List().Append(fieldValue(f))
		case f.Message() != nil:
			fillMessage(m.Mutable(f).Message())
		default:
			m.Set(f, fieldValue(f))
		}
	}
}

func fieldValue(f protoreflect.FieldDescriptor) protoreflect.Value {
	switch name := string(f.Name()); {
	case f.Kind() == protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case f.Kind() == protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(f.Name()))
	case f.Kind() == protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(2)
	case f.Kind() == protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(7)
	case f.Kind() == protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(7)
	case f.Kind() == protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(7)
	case f.Kind() == protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(7)
	case name == "nqn":
		return protoreflect.ValueOfString("nqn.2014-08.org.nvmexpress:uuid:" + uuid(7))
	case name == "node":
		return protoreflect.ValueOfString("n1")
	case strings.HasSuffix(name, "id") && name != "wwid" && name != "boot_id", name == "leg_ids", name == "in_sync_legs", name == "suspect_legs", name == "other_legs":
		return protoreflect.ValueOfString(uuid(7))
	default:
		return protoreflect.ValueOfString(name)
	}
}

// fillValue sets every field of a value of package cluster likewise.
func fillValue(v reflect.Value) {
	switch t := v.Type(); {
	case t == reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.Unix(7, 0).UTC()))
	case t == reflect.TypeFor[block.Secret]():
		v.Set(reflect.ValueOf(block.NewSecret([]byte("secret"))))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fillValue(v.Field(i))
		}
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		fillValue(v.Elem())
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(t, 1, 1))
		fillValue(v.Index(0))
	case v.Kind() == reflect.Array:
		for i := range v.Len() {
			fillValue(v.Index(i))
		}
	case v.Kind() == reflect.Map:
		v.Set(reflect.MakeMap(t))
		key, value := reflect.New(t.Key()).Elem(), reflect.New(t.Elem()).Elem()
		fillValue(key)
		fillValue(value)
		v.SetMapIndex(key, value)
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(7)
	case v.CanUint():
		v.SetUint(7)
	default:
		v.SetString(word(t))
	}
}

// word is a valid word of a string type.
func word(t reflect.Type) string {
	words := map[reflect.Type]any{
		reflect.TypeFor[cluster.DriveState](): cluster.DriveReady, reflect.TypeFor[cluster.LegState](): cluster.LegInSync,
		reflect.TypeFor[cluster.VolumeState](): cluster.VolumeReady, reflect.TypeFor[cluster.Health](): cluster.Healthy,
		reflect.TypeFor[cluster.AttachMode](): cluster.AttachExclusive, reflect.TypeFor[cluster.AttachmentState](): cluster.Granted,
		reflect.TypeFor[event.Severity](): event.Trouble, reflect.TypeFor[block.Transport](): block.RDMA,
	}
	if w, ok := words[t]; ok {
		return reflect.ValueOf(w).String()
	}
	return "text"
}

// zeros lists the fields of a value that are zero.
func zeros(v reflect.Value, path string) (found []string) {
	switch {
	case v.IsZero():
		return []string{path}
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]():
		for i := range v.NumField() {
			found = append(found, zeros(v.Field(i), path+"."+v.Type().Field(i).Name)...)
		}
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			found = append(found, zeros(v.Index(i), path)...)
		}
	}
	return found
}

func TestReportsLoseNoFieldOnTheWayIn(t *testing.T) {
	for _, c := range []struct {
		message proto.Message
		convert func(proto.Message) (any, error)
	}{
		{&pb.TargetReport{}, func(m proto.Message) (any, error) { return targetReport(m.(*pb.TargetReport)) }},
		{&pb.InitiatorReport{}, func(m proto.Message) (any, error) { return initiatorReport(m.(*pb.InitiatorReport)) }},
	} {
		fillMessage(c.message.ProtoReflect())
		got, err := c.convert(c.message)
		if err != nil {
			t.Errorf("%T: %v", c.message, err)
			continue
		}
		excused := []string{"TargetReport.Drives.Legs.Based"} // it is a kind of image
		lost := zeros(reflect.ValueOf(got), reflect.TypeOf(got).Name())
		if lost = slices.DeleteFunc(lost, func(path string) bool { return slices.Contains(excused, path) }); len(lost) > 0 {
			t.Errorf("a full %T leaves %v empty", c.message, lost)
		}
	}
}

func filled[T any]() (value T) {
	fillValue(reflect.ValueOf(&value).Elem())
	return value
}

func TestAnswersLoseNoFieldOnTheWayOut(t *testing.T) {
	excused := map[string]bool{
		// The agents take the default range of controller ids.
		"TargetWanted.exports.cntlid_min": true, "TargetWanted.exports.cntlid_max": true,
		// The manager does not ask for these yet.
		"InitiatorWanted.attachments.legs.paths": true, "TargetWanted.exports.paths": true,
		// A label is of what was taken.
		"TargetWanted.legs.volume.snapshot.freezes": true,
		// fillMessage sets a duration of less than a second.
		"Node.target.silent.seconds": true, "Node.initiator.silent.seconds": true,
		"Device.health.latency.seconds": true, "Drive.health.latency.seconds": true,
		"Volume.scrub_every_seconds": true, "Volume.rebuilds.left.seconds": true, "InitiatorWanted.attachments.holds.limit.seconds": true,
		// Package parts sets these when it sends a state.
		"TargetWanted.scale.part": true, "TargetWanted.scale.more": true, "TargetWanted.scale.unchanged": true,
		"InitiatorWanted.scale.part": true, "InitiatorWanted.scale.more": true, "InitiatorWanted.scale.unchanged": true,
		"TargetWanted.scale.difference": true, "TargetWanted.scale.lost": true,
		"InitiatorWanted.scale.difference": true, "InitiatorWanted.scale.lost": true,
	}
	for _, m := range []proto.Message{
		targetWanted(filled[cluster.TargetWanted]()), initiatorWanted(filled[cluster.InitiatorWanted]()),
		pbStatus(filled[cluster.Status](), "1"), pbNode(filled[cluster.Node]()), pbDevice(filled[cluster.Device]()),
		pbDrive(filled[cluster.Drive]()), pbPool(filled[cluster.Pool]()), pbVolume(filled[cluster.Volume]()),
		pbEvent(filled[event.Event]()), pbExplanation(filled[cluster.Explanation]()),
	} {
		unset(t, m.ProtoReflect(), string(m.ProtoReflect().Descriptor().Name()), excused)
	}
}

// A leg with a tree over its extents is plain by its image, and told as what it is.
func TestABasedLegIsPlainWithATree(t *testing.T) {
	label, err := fromLegLabel(&pb.LegLabel{LegId: uuid(1), TreeId: uuid(2), Image: pb.ImageKind_IMAGE_KIND_BASED, Extents: []*pb.Extent{{Start: 3, Count: 1}}})
	if err != nil || !label.Based || label.Kind != image.Plain || label.Tree.IsZero() || len(label.Extents) != 1 {
		t.Errorf("the label is %+v, %v", label, err)
	}
	if got := pbImage(image.Image{Kind: image.Based}); got != pb.ImageKind_IMAGE_KIND_BASED {
		t.Errorf("a based image is told as %v", got)
	}
}

// A newer program may send values that this one does not know.
func TestUnknownValuesAreNotTakenForOthers(t *testing.T) {
	if mode := fromEnum[cluster.AttachMode](pb.AttachMode(77), attachModePrefix); mode == "" || mode == cluster.AttachExclusive {
		t.Errorf("an unknown mode of access is %q, want none that exists", mode)
	}
	report, err := fromAttachmentReport(&pb.AttachmentReport{
		VolumeId: uuid(1), Phase: 77, Legs: []*pb.LegLink{{LegId: uuid(2), State: 77}}, GaveUp: &pb.GaveUp{Why: "it had to", Reason: 77},
	})
	if err != nil || report.Phase != "77" || report.Legs[0].State != "77" || report.GaveUp != (cluster.GaveUp{Why: "it had to", Reason: "77"}) {
		t.Errorf("a report with unknown values is %+v, %v; want their numbers", report, err)
	}
	portals := fromPortals([]*pb.Portal{{Transport: 77, Address: "192.0.2.9"}, {Address: "192.0.2.1"}})
	if len(portals) != 1 || portals[0].Address != "192.0.2.1" || portals[0].Transport != block.TCP {
		t.Errorf("portals %v, want the one of an unknown transport left out", portals)
	}
}

func TestLayoutsCrossTheWire(t *testing.T) {
	for _, want := range []block.Layout{
		{Stripes: 2, Copies: 3, Chunk: block.MiB},
		{Stripes: 2, Data: 4, Parity: 2, Chunk: block.MiB},
	} {
		label := &pb.VolumeLabel{VolumeId: uuid(7), Layout: pbLayout(want)}
		if got, err := fromVolumeLabel(label); err != nil || got.Layout != want {
			t.Errorf("%v came back as %v, %v", want, got.Layout, err)
		}
	}
}

func TestConversionsTellWhoHeals(t *testing.T) {
	v := pbVolume(cluster.Volume{Heal: &cluster.Attachment{Node: "h2", Epoch: 7, Run: "this process"}})
	if h := v.GetHealing(); h.GetNode() != "h2" || h.GetEpoch() != 7 || v.GetAttachment() != nil {
		t.Errorf("a volume that h2 heals is told as healed by %v, attached to %v", h, v.GetAttachment())
	}
	if a := pbWantedAttachment(cluster.WantedAttachment{Heal: "this process"}); a.GetHealerId() != "this process" {
		t.Errorf("the host is told that process %q is to heal it", a.GetHealerId())
	}
}

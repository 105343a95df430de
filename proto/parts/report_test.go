// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/pb"
)

// know is a whole report, kept by what its differences say.
type know struct {
	legs, admissions, exports map[string]proto.Message
	drives                    map[string]*pb.DriveReport // without labels
	labels                    map[[2]string]*pb.LegLabel
}

func (k *know) hear(r *pb.TargetReport, c Change) {
	if !c.Partial {
		*k = know{map[string]proto.Message{}, map[string]proto.Message{}, map[string]proto.Message{}, map[string]*pb.DriveReport{}, map[[2]string]*pb.LegLabel{}}
	}
	for _, l := range r.Legs {
		k.legs[l.LegId] = l
	}
	for _, a := range r.Admissions {
		k.admissions[a.VolumeId] = a
	}
	for _, x := range r.Exports {
		k.exports[x.Nqn] = x
	}
	for _, d := range r.Drives {
		for _, l := range d.Legs {
			k.labels[[2]string{d.DriveId, l.LegId}] = l
		}
		if !c.Partial || len(d.Legs) == 0 {
			k.drives[d.DriveId] = withoutLabels(d)
		}
	}
	for _, id := range c.Gone.Legs {
		delete(k.legs, id)
	}
	for _, id := range c.Gone.Admissions {
		delete(k.admissions, id)
	}
	for _, id := range c.Gone.Exports {
		delete(k.exports, id)
	}
	for _, id := range c.Gone.Drives {
		delete(k.drives, id)
	}
	for _, id := range c.Gone.Labels {
		delete(k.labels, id)
	}
}

func (k *know) text() string {
	return fmt.Sprint(k.legs, k.admissions, k.exports, k.drives, k.labels)
}

// randomly is a report of some of 60 legs on 3 drives.
func randomly(rng *rand.Rand, was *pb.TargetReport) *pb.TargetReport {
	r := proto.CloneOf(was)
	r.Legs, r.Drives, r.Admissions, r.Exports = nil, nil, nil, nil
	for d := range 3 {
		if rng.IntN(20) > 0 {
			r.Drives = append(r.Drives, &pb.DriveReport{DriveId: fmt.Sprint("d", d), Extents: uint32(100 + rng.IntN(20)/19)})
		}
	}
	for i := range 60 {
		id := fmt.Sprint("leg", i)
		if rng.IntN(10) > 0 {
			r.Legs = append(r.Legs, &pb.LegReport{LegId: id, ZeroedBytes: uint64(rng.IntN(20) / 19)})
		}
		if rng.IntN(10) > 0 && len(r.Drives) > 0 {
			d := r.Drives[i%len(r.Drives)]
			d.Legs = append(d.Legs, &pb.LegLabel{LegId: id, Revision: uint64(rng.IntN(20) / 19)})
		}
		if rng.IntN(10) > 0 {
			r.Admissions = append(r.Admissions, &pb.Admission{VolumeId: fmt.Sprint("vol", i), Epoch: uint64(1 + rng.IntN(20)/19)})
			r.Exports = append(r.Exports, &pb.ExportReport{Nqn: fmt.Sprint("nqn", i), LegIds: []string{id}})
		}
	}
	return r
}

// The manager learns of each report what it would learn of the whole one.
func TestDifferencesOfReportsSayWhatTheWholeSays(t *testing.T) {
	agent, manager, up, down := pair[*pb.TargetReport, *pb.TargetWanted]()
	rng := rand.New(rand.NewPCG(5, 6))
	r := &pb.TargetReport{Node: "t1", BootId: "1", Scale: Understood()}
	var known know
	partial := 0
	for i := range 200 {
		switch r = randomly(rng, r); rng.IntN(4) {
		case 0:
			r.Generation++
		case 1:
			r.Problems = append(r.Problems, &pb.Problem{Object: fmt.Sprint(i)})
		}
		got, _, _ := send(t, agent, manager, up, r)
		if got.Generation != r.Generation || len(got.Problems) != len(r.Problems) || got.Node != "t1" || got.BootId != "1" {
			t.Fatalf("the head of the report arrived as %v", got)
		}
		if manager.Change().Partial {
			partial++
		}
		known.hear(got, manager.Change())
		var want know
		want.hear(proto.CloneOf(r), Change{})
		if known.text() != want.text() {
			t.Fatalf("report %d: the manager knows\n%s\nwant\n%s", i, known.text(), want.text())
		}
		if again, _, size := send(t, agent, manager, up, proto.CloneOf(r)); i > 2 && (!again.GetScale().GetUnchanged() || size > 30) {
			t.Fatalf("the same report again took %d bytes: %v", size, again)
		}
		if i == 1 { // the manager has answered
			send(t, manager, agent, down, &pb.TargetWanted{Scale: Understood()})
		}
	}
	if partial < 150 {
		t.Errorf("%d of 200 reports were sent as differences", partial)
	}
}

// Agents keep entries that do not change from report to report, and may report a thing twice.
func TestEntriesThatStayAreNotSentAgain(t *testing.T) {
	agent, manager, up, down := pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, agent, manager, up, &pb.TargetReport{Node: "t1", Scale: Understood()})
	send(t, manager, agent, down, &pb.TargetWanted{Scale: Understood()})
	legs := []*pb.LegReport{{LegId: "a"}, {LegId: "b"}, {LegId: "c"}}
	var known know
	for i, c := range []struct {
		legs  []*pb.LegReport
		sends int
	}{
		{legs, 3}, {legs[1:], 0}, {legs, 1}, {append(legs[:2:2], &pb.LegReport{LegId: "c", Ready: true}), 1},
		{append(legs[:2:2], &pb.LegReport{LegId: "b", Ready: true}), 3}, {append(legs[:2:2], &pb.LegReport{LegId: "b", Ready: true}), 0}, {legs, 2},
	} {
		got, _, _ := send(t, agent, manager, up, &pb.TargetReport{Node: "t1", Scale: Understood(), Legs: c.legs})
		if got.GetScale().GetUnchanged() {
			continue
		}
		known.hear(got, manager.Change())
		want := map[string]bool{}
		for _, l := range c.legs {
			want[l.LegId] = l.Ready
		}
		for id, ready := range want {
			if l, ok := known.legs[id].(*pb.LegReport); !ok || l.Ready != ready {
				t.Errorf("report %d: of leg %s is known %v, want ready %v", i, id, l, ready)
			}
		}
		if len(known.legs) != len(want) || len(got.Legs) != c.sends {
			t.Errorf("report %d sent %d legs, and %d are known; want %d and %d", i, len(got.Legs), len(known.legs), c.sends, len(want))
		}
	}
}

// One leg of 2000 changes: that, and not the report, is sent.
func TestAChangeOfOneLegIsSmallOnTheWire(t *testing.T) {
	agent, manager, up, down := pair[*pb.TargetReport, *pb.TargetWanted]()
	r := report(1999)
	send(t, agent, manager, up, r)
	send(t, manager, agent, down, &pb.TargetWanted{Scale: Understood()})
	r = report(2000)
	send(t, agent, manager, up, r)
	r = proto.CloneOf(r)
	r.Drives[0].Legs[77].Revision = 9
	got, _, size := send(t, agent, manager, up, r)
	if size > 500 || !manager.Change().Partial || len(got.Drives) != 1 || len(got.Drives[0].Legs) != 1 || got.Drives[0].Legs[0].Revision != 9 {
		t.Errorf("a change of one label took %d bytes, and arrived as %v, %+v", size, got, manager.Change())
	}
}

func TestAManagerWithoutDifferencesGetsWholeReports(t *testing.T) {
	agent, manager, up, _ := pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, agent, manager, up, report(3))
	if err := manager.stream.Send(&pb.TargetWanted{Scale: &pb.Scale{Understood: true}}); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	if got, _, _ := send(t, agent, manager, up, report(4)); !proto.Equal(got, report(4)) || got.GetScale().GetDifference() != nil {
		t.Errorf("a manager that knows no differences got %v", got)
	}
}

// The stream ends, and the next one begins with the whole report.
func TestADifferenceOfAnotherReportIsRefused(t *testing.T) {
	for what, d := range map[string]*pb.Difference{
		"from another number": {From: 7, To: 8},
		"to another sum":      {From: 0, To: 1, Sum: 3},
	} {
		_, manager, up, _ := pair[*pb.TargetReport, *pb.TargetWanted]()
		up.sent = append(up.sent, &pb.TargetReport{Node: "t1", Scale: &pb.Scale{Understood: true, Difference: d}})
		if got, err := manager.Recv(); status.Code(err) != codes.Aborted {
			t.Errorf("%s = %v, %v; want ABORTED", what, got, err)
		}
	}
	_, manager, up, _ := pair[*pb.InitiatorReport, *pb.InitiatorWanted]()
	up.sent = append(up.sent, &pb.InitiatorReport{Node: "c1", Scale: &pb.Scale{Difference: &pb.Difference{To: 1}}})
	if got, err := manager.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a difference of an initiator's report = %v, %v; want INVALID_ARGUMENT", got, err)
	}
}

// fillAll sets every field of a message, and of those in it.
func fillAll(m protoreflect.Message) {
	for i, fields := 0, m.Descriptor().Fields(); i < fields.Len(); i++ {
		switch f := fields.Get(i); {
		case f.Name() == "scale":
		case f.IsMap():
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("key").MapKey(), protoreflect.ValueOfString("value"))
		case f.IsList() && f.Message() != nil:
			fillAll(m.Mutable(f).List().AppendMutable().Message())
		case !f.IsList() && f.Message() != nil:
			fillAll(m.Mutable(f).Message())
		case f.IsList() && f.Kind() == protoreflect.Uint32Kind:
			m.Mutable(f).List().Append(protoreflect.ValueOfUint32(7))
		case f.IsList():
			m.Mutable(f).List().Append(protoreflect.ValueOfString("x"))
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, protoreflect.ValueOfString("x"))
		case f.Kind() == protoreflect.BoolKind:
			m.Set(f, protoreflect.ValueOfBool(true))
		case f.Kind() == protoreflect.Uint64Kind:
			m.Set(f, protoreflect.ValueOfUint64(7))
		case f.Kind() == protoreflect.Uint32Kind:
			m.Set(f, protoreflect.ValueOfUint32(7))
		}
	}
}

// A field that is added to a report later has to be cut, too.
func TestDifferencesHaveEveryFieldOfAReport(t *testing.T) {
	agent, manager, up, down := pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, agent, manager, up, &pb.TargetReport{Node: "t1", Scale: Understood()})
	send(t, manager, agent, down, &pb.TargetWanted{Scale: Understood()})
	full := &pb.TargetReport{}
	fillAll(full.ProtoReflect())
	full.Scale = Understood()
	got, _, _ := send(t, agent, manager, up, proto.CloneOf(full))
	if !proto.Equal(got, full) {
		t.Errorf("%v arrived as %v", full, got)
	}
}

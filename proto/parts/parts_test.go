// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

// wire holds what one end has sent until the other end receives it.
type wire[M State] struct{ sent []M }

type end[Out, In State] struct {
	out *wire[Out]
	in  *wire[In]
}

func (e end[Out, In]) Send(m Out) error {
	e.out.sent = append(e.out.sent, proto.CloneOf(m))
	return nil
}

func (e end[Out, In]) Recv() (m In, err error) {
	if len(e.in.sent) == 0 {
		return m, io.EOF
	}
	m, e.in.sent = e.in.sent[0], e.in.sent[1:]
	return m, nil
}

// pair is the two ends of a stream and the messages in transit between them.
func pair[Report, Wanted State]() (agent *Stream[Report, Wanted], manager *Stream[Wanted, Report], up *wire[Report], down *wire[Wanted]) {
	up, down = &wire[Report]{}, &wire[Wanted]{}
	return Reporting[Report, Wanted](end[Report, Wanted]{up, down}), Wanting[Wanted, Report](end[Wanted, Report]{down, up}), up, down
}

// acquainted is a pair whose ends have both sent a state. The manager knows parts, but no
// differences.
func acquainted(t *testing.T) (agent *Stream[*pb.TargetReport, *pb.TargetWanted], manager *Stream[*pb.TargetWanted, *pb.TargetReport],
	up *wire[*pb.TargetReport], down *wire[*pb.TargetWanted]) {
	agent, manager, up, down = pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, agent, manager, up, &pb.TargetReport{Node: "t1", Scale: Understood()})
	if err := manager.Send(&pb.TargetWanted{Scale: &pb.Scale{Understood: true}}); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	return agent, manager, up, down
}

func report(legs int) *pb.TargetReport {
	r := &pb.TargetReport{Node: "t1", BootId: "1", Generation: 7, Scale: Understood()}
	d := &pb.DriveReport{DriveId: "d1"}
	for i := range legs {
		id := fmt.Sprintf("%036d", i)
		d.Legs = append(d.Legs, &pb.LegLabel{LegId: id, Volume: &pb.VolumeLabel{VolumeId: id, Labels: map[string]string{"a": "b"}}})
	}
	r.Drives = append(r.Drives, d)
	return r
}

// send sends one state and returns it as the other end receives it, with the number of
// messages and the size of the largest.
func send[Out, In State](t *testing.T, from *Stream[Out, In], to *Stream[In, Out], w *wire[Out], m Out) (got Out, messages, largest int) {
	t.Helper()
	if err := from.Send(m); err != nil {
		t.Fatal(err)
	}
	for _, s := range w.sent {
		messages, largest = messages+1, max(largest, proto.Size(s))
	}
	got, err := to.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return got, messages, largest
}

func TestStatesArriveWholeWhateverTheirSize(t *testing.T) {
	agent, manager, up, down := acquainted(t)
	for _, legs := range []int{0, 1, 20_000, 60_000, 3} {
		want := report(legs)
		got, messages, largest := send(t, agent, manager, up, want)
		if !proto.Equal(got, want) {
			t.Errorf("a report of %d legs arrived changed", legs)
		}
		if most := partMost + 100; largest > most || messages > 1+proto.Size(want)/partMost {
			t.Errorf("a report of %d bytes took %d messages of up to %d bytes, want parts of up to %d", proto.Size(want), messages, largest, most)
		}
	}
	wanted := &pb.TargetWanted{Generation: 3, Scale: Understood(), Legs: []*pb.WantedLeg{{LegId: strings.Repeat("x", 3<<20)}}}
	if got, messages, _ := send(t, manager, agent, down, wanted); !proto.Equal(got, wanted) || messages != 4 {
		t.Errorf("a wanted state of 3 MiB took %d messages, and arrived changed: %v", messages, !proto.Equal(got, wanted))
	}
}

func TestInitiatorsStatesGoInPartsToo(t *testing.T) {
	agent, manager, up, down := pair[*pb.InitiatorReport, *pb.InitiatorWanted]()
	report := &pb.InitiatorReport{Node: "c1", Scale: Understood(), Attachments: []*pb.AttachmentReport{{WaitingFor: strings.Repeat("x", 5<<20)}}}
	if got, messages, _ := send(t, agent, manager, up, report); !proto.Equal(got, report) || messages != 6 {
		t.Errorf("a report of 5 MiB took %d messages, or arrived changed", messages)
	}
	wanted := &pb.InitiatorWanted{Scale: Understood(), Attachments: []*pb.WantedAttachment{{VolumeName: strings.Repeat("x", 5<<20)}}}
	if got, messages, _ := send(t, manager, agent, down, wanted); !proto.Equal(got, wanted) || messages != 6 {
		t.Errorf("a wanted state of 5 MiB took %d messages, or arrived changed", messages)
	}
}

func TestAnUnchangedReportIsNotSentAgain(t *testing.T) {
	agent, manager, up, down := pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, agent, manager, up, report(100))
	if got, _, _ := send(t, agent, manager, up, report(100)); got.GetScale().GetUnchanged() {
		t.Error("a manager that has not said that it understands parts got only a note that the report is unchanged")
	}
	send(t, manager, agent, down, &pb.TargetWanted{Scale: Understood()})
	again := report(100)
	again.Generation = 8
	got, _, size := send(t, agent, manager, up, again)
	if !got.GetScale().GetUnchanged() || got.GetGeneration() != 8 || size > 20 {
		t.Errorf("an unchanged report of generation 8 is %v in %d bytes, want only a note that it is unchanged", got, size)
	}
	other := report(100)
	other.Drives[0].Legs[42].Volume.Labels["a"] = "c"
	if got, _, _ := send(t, agent, manager, up, other); !proto.Equal(got, other) {
		t.Error("a report that has changed was not sent")
	}
}

func TestAnOlderPeerGetsWholeStates(t *testing.T) {
	agent, manager, up, down := pair[*pb.InitiatorReport, *pb.InitiatorWanted]()
	old := &pb.InitiatorReport{Node: "c1"} // does not say that it understands parts
	if err := agent.stream.Send(old); err != nil {
		t.Fatal(err)
	}
	if _, err := manager.Recv(); err != nil {
		t.Fatal(err)
	}
	wanted := &pb.InitiatorWanted{Scale: Understood(), ClusterId: "x", Attachments: []*pb.WantedAttachment{{VolumeName: strings.Repeat("x", 2<<20)}}}
	if _, messages, _ := send(t, manager, agent, down, wanted); messages != 1 {
		t.Errorf("an agent that knows no parts got %d of them, and would have released everything", messages)
	}
	if err := manager.Send(wanted); err != nil || len(up.sent) > 0 {
		t.Fatal(err)
	}
}

func TestAnInterruptedStateIsDropped(t *testing.T) {
	agent, manager, up, _ := acquainted(t)
	if err := agent.Send(report(20_000)); err != nil {
		t.Fatal(err)
	}
	up.sent = up.sent[:1] // one of several
	want := report(1)
	if got, _, _ := send(t, agent, manager, up, want); !proto.Equal(got, want) {
		t.Error("after an interrupted report the next one arrived changed")
	}
	if err := agent.Send(report(20_000)); err != nil {
		t.Fatal(err)
	}
	up.sent = up.sent[:len(up.sent)-1]
	if got, err := manager.Recv(); err != io.EOF {
		t.Errorf("a report without its last part = %v, %v; want only the end of the stream", got, err)
	}
}

func TestEachPartIsASignOfLife(t *testing.T) {
	agent, manager, up, _ := acquainted(t)
	signs := 0
	manager.Part = func() { signs++ }
	if _, messages, _ := send(t, agent, manager, up, report(20_000)); signs != messages-1 {
		t.Errorf("%d parts gave %d signs of life, want one for each but the last", messages, signs)
	}
}

func TestAPeerThatSendsTooMuchIsTold(t *testing.T) {
	agent, manager, _, _ := pair[*pb.TargetReport, *pb.TargetWanted]()
	manager.most = 2 << 20
	if err := agent.Send(report(60_000)); err != nil {
		t.Fatal(err)
	}
	_, err := manager.Recv()
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "TargetReport is larger than the 2097152 bytes") {
		t.Errorf("a report beyond the limit = %v, want RESOURCE_EXHAUSTED with the limit", err)
	}
	if len(manager.parts) > manager.most {
		t.Errorf("the receiver keeps %d bytes of a refused report", len(manager.parts))
	}
	agent.most = 2 << 20
	if err := agent.Send(report(60_001)); err == nil || !strings.Contains(err.Error(), "2097152") {
		t.Errorf("sending a report beyond the limit = %v, want an error with the limit", err)
	}
}

func TestWhatNoPeerSendsIsRefused(t *testing.T) {
	for what, m := range map[string]*pb.TargetReport{
		"unchanged, and nothing before it": {Scale: &pb.Scale{Unchanged: true}},
		"an empty part":                    {Scale: &pb.Scale{More: true}},
		"parts of no state":                {Scale: &pb.Scale{Part: []byte{0xff}}},
	} {
		_, manager, up, _ := pair[*pb.TargetReport, *pb.TargetWanted]()
		up.sent = append(up.sent, m)
		if got, err := manager.Recv(); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s = %v, %v; want INVALID_ARGUMENT", what, got, err)
		}
	}
}

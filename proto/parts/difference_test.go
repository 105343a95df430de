// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

// volumes is a wanted state of volumes, by id, each with legs at some revision.
type volumes map[int]uint64

func (v volumes) piece(id int) *pb.TargetWanted {
	key := fmt.Sprintf("%06d", id)
	if v[id] == 0 {
		return nil
	}
	return &pb.TargetWanted{
		Legs:       []*pb.WantedLeg{{LegId: key + ".0", Revision: v[id], Volume: &pb.VolumeLabel{VolumeId: key, Labels: map[string]string{"a": "1", "b": "2", "c": "3"}}}, {LegId: key + ".1"}},
		Admissions: []*pb.Admission{{VolumeId: key, Epoch: v[id]}},
	}
}

func (v volumes) pieces(of ...int) (all []Piece[*pb.TargetWanted]) {
	for _, id := range of {
		all = append(all, Piece[*pb.TargetWanted]{Key: fmt.Sprintf("%06d", id), State: v.piece(id)})
	}
	return all
}

func (v volumes) ids() (all []int) {
	for id := range v {
		all = append(all, id)
	}
	slices.Sort(all)
	return all
}

// whole is the state as one message.
func (v volumes) whole(head *pb.TargetWanted) *pb.TargetWanted {
	all := proto.CloneOf(head)
	all.Scale = Understood()
	for _, id := range v.ids() {
		proto.Merge(all, v.piece(id))
	}
	return all
}

type ends struct {
	t       *testing.T
	agent   *Stream[*pb.TargetReport, *pb.TargetWanted]
	manager *Stream[*pb.TargetWanted, *pb.TargetReport]
	up      *wire[*pb.TargetReport]
	down    *wire[*pb.TargetWanted]
	number  uint64
}

func newEnds(t *testing.T) *ends {
	e := &ends{t: t}
	e.agent, e.manager, e.up, e.down = pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, e.agent, e.manager, e.up, &pb.TargetReport{Node: "t1", Scale: Understood()})
	return e
}

// tell sends the whole state or what has changed of it, and returns what the agent then has.
func (e *ends) tell(v volumes, changed ...int) (got, want *pb.TargetWanted, sent int) {
	e.t.Helper()
	e.number++
	head := &pb.TargetWanted{Generation: e.number, Term: 7, ClusterId: "c"}
	all := e.manager.Starts(7)
	if all {
		changed = v.ids()
	}
	if err := e.manager.SendPieces(head, all, v.pieces(changed...)); err != nil {
		e.t.Fatal(err)
	}
	for _, m := range e.down.sent {
		sent += proto.Size(m)
	}
	got, err := e.agent.Recv()
	if err != nil {
		e.t.Fatal(err)
	}
	return got, v.whole(head), sent
}

// Whatever changes, the agent has the whole state after each difference, and only what has
// changed is sent.
func TestDifferencesMakeTheWholeState(t *testing.T) {
	e, v, rng := newEnds(t), volumes{}, rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		v[i] = 1
	}
	e.tell(v)
	for range 500 {
		var changed []int
		for range rng.IntN(4) {
			id := rng.IntN(330)
			if v[id]++; rng.IntN(3) == 0 {
				delete(v, id)
			}
			changed = append(changed, id)
		}
		changed = append(changed, 3, 3) // may have changed, but has not
		got, want, sent := e.tell(v, changed...)
		if !proto.Equal(got, want) {
			t.Fatalf("after %v changed, the agent has\n%v\nwant\n%v", changed, got, want)
		}
		if sent > 1000 {
			t.Fatalf("a change of %v was sent in %d bytes", changed, sent)
		}
	}
}

func TestTheWholeStateIsSentInPartsAndThenDiffers(t *testing.T) {
	e, v := newEnds(t), volumes{}
	for i := range 20_000 {
		v[i] = 1
	}
	if got, want, sent := e.tell(v); !proto.Equal(got, want) || sent < partMost {
		t.Errorf("the first state of 20 000 volumes took %d bytes, and arrived unchanged: %v", sent, proto.Equal(got, want))
	}
	v[77] = 2
	if got, want, sent := e.tell(v, 77); !proto.Equal(got, want) || sent > 500 {
		t.Errorf("one volume of 20 000 took %d bytes, and arrived unchanged: %v", sent, proto.Equal(got, want))
	}
}

// An agent that misses a difference, holds something else or meets another term must not act
// on what is left: it waits for the whole state, and gets it after its next report.
func TestAnAgentThatCannotFollowGetsTheWholeState(t *testing.T) {
	for what, disturb := range map[string]func(e *ends){
		"a lost difference": func(e *ends) {
			_ = e.manager.SendPieces(&pb.TargetWanted{Term: 7}, false, volumes{5: 9}.pieces(5))
			e.down.sent = nil
		},
		"another content": func(e *ends) {
			e.agent.held.pieces[2].hash++
			e.agent.held.sum++
		},
		"another term": func(e *ends) { e.agent.held.term = 6 },
	} {
		t.Run(what, func(t *testing.T) {
			e, v := newEnds(t), volumes{1: 1, 2: 1, 3: 1}
			e.tell(v)
			disturb(e)
			v[2] = 2
			if err := e.manager.SendPieces(&pb.TargetWanted{Generation: 8, Term: 7}, false, v.pieces(2)); err != nil {
				t.Fatal(err)
			}
			if got, err := e.agent.Recv(); err == nil {
				t.Fatalf("the agent acts on %v", got)
			}
			if e.manager.Starts(7) {
				t.Fatal("the manager begins again, and has not been asked to")
			}
			for range 2 { // one that has changed, and one that has not
				if err := e.agent.Send(&pb.TargetReport{Node: "t1", Version: what, Scale: Understood()}); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				if _, err := e.manager.Recv(); err != nil {
					t.Fatal(err)
				}
			}
			if !e.manager.Lost() {
				t.Error("the manager does not know that the agent needs the whole state")
			}
			if got, want, _ := e.tell(v); !proto.Equal(got, want) {
				t.Errorf("then the agent has\n%v\nwant\n%v", got, want)
			}
			v[1] = 5
			if got, want, _ := e.tell(v, 1); !proto.Equal(got, want) {
				t.Errorf("after one more difference the agent has\n%v\nwant\n%v", got, want)
			}
		})
	}
}

func TestAnAgentWithoutDifferencesIsNotSentAny(t *testing.T) {
	agent, manager, up, _ := pair[*pb.TargetReport, *pb.TargetWanted]()
	send(t, agent, manager, up, &pb.TargetReport{Node: "t1", Scale: &pb.Scale{Understood: true}})
	if manager.TakesDifferences() {
		t.Error("an agent that knows only parts passes for one that knows differences")
	}
	send(t, agent, manager, up, &pb.TargetReport{Node: "t1", Scale: Understood()})
	if !manager.TakesDifferences() {
		t.Error("an agent that knows differences passes for one that does not")
	}
}

// A difference that arrives before any state is not applied to nothing.
func TestADifferenceOfNothingIsRefused(t *testing.T) {
	e := newEnds(t)
	e.down.sent = append(e.down.sent, &pb.TargetWanted{Scale: &pb.Scale{Difference: &pb.Difference{From: 3, To: 4}}})
	if got, err := e.agent.Recv(); err == nil {
		t.Errorf("the agent acts on %v", got)
	}
	if !e.agent.Lost() {
		t.Error("the agent does not ask for the whole state")
	}
	if err := e.manager.SendPieces(&pb.TargetWanted{}, false, nil); err == nil || !strings.Contains(err.Error(), "holds nothing") {
		t.Errorf("SendPieces of a part, first = %v, want a refusal", err)
	}
}

// Every list of a wanted state has to be joined, also one that is added later.
func TestDifferencesHaveEveryListOfAWantedState(t *testing.T) {
	e := newEnds(t)
	full := &pb.TargetWanted{}
	for i, fields := 0, full.ProtoReflect().Descriptor().Fields(); i < fields.Len(); i++ {
		if f := fields.Get(i); f.IsList() {
			full.ProtoReflect().Mutable(f).List().AppendMutable()
		}
	}
	if err := e.manager.SendPieces(&pb.TargetWanted{}, true, []Piece[*pb.TargetWanted]{{Key: "x", State: full}}); err != nil {
		t.Fatal(err)
	}
	got, err := e.agent.Recv()
	if err != nil {
		t.Fatal(err)
	}
	full.Scale = Understood()
	if !proto.Equal(got, full) {
		t.Errorf("%v arrived as %v", full, got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package quorum

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/volmgr/quorum/wal"
)

// alone returns a node that is the only voter, and all that it saves.
func alone(t *testing.T) (*Node, *wal.State) {
	t.Helper()
	s := &wal.State{Hard: wal.HardState{Term: 3, Commit: 1}, Base: Position{1, 3, Members{{ID: 1, Address: "m1", Voter: true}}}.Base()}
	n, err := New(1, *s)
	if err != nil {
		t.Fatal(err)
	}
	run(t, n, s)
	return n, s
}

// run steps a node through inputs and does what it says.
func run(t *testing.T, n *Node, s *wal.State, inputs ...Input) (committed []Entry, answers []Answer) {
	t.Helper()
	out, err := n.Step(inputs...)
	for ; out != nil && err == nil; out, err = n.Done() {
		if out.Hard != nil {
			s.Hard = *out.Hard
		}
		s.Entries = append(s.Entries, out.Entries...)
		committed, answers = append(committed, out.Committed...), append(answers, out.Answers...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return committed, answers
}

// Proposals of one step are one write, and come out in order with their answers.
func TestProposalsOfOneStepAreOneWrite(t *testing.T) {
	n, s := alone(t)
	out, err := n.Step(Propose{1, n.Term(), []byte("a")}, Propose{2, n.Term(), []byte("b")})
	if err != nil || len(out.Entries) != 2 || len(out.Committed) != 0 || len(out.Answers) != 0 {
		t.Fatalf("Step = %+v, %v; want two entries to save, and nothing committed yet", out, err)
	}
	s.Entries = append(s.Entries, out.Entries...)
	out, err = n.Done()
	if err != nil || out.Hard != nil || len(out.Entries) != 0 {
		t.Fatalf("then %+v, %v; want nothing more to save", out, err)
	}
	if len(out.Committed) != 2 || string(out.Committed[0].Data) != "a" || string(out.Committed[1].Data) != "b" {
		t.Errorf("committed %v", out.Committed)
	}
	if len(out.Answers) != 2 || out.Answers[0] != (Answer{1, nil}) || out.Answers[1] != (Answer{2, nil}) {
		t.Errorf("answers %v", out.Answers)
	}
}

// What was decided in an earlier term of the same leader is not taken: others may have led
// meanwhile.
func TestAnEarlierTermsDecisionIsNotTaken(t *testing.T) {
	n, s := alone(t)
	term := n.Term()
	n, err := New(1, *s)
	if err != nil {
		t.Fatal(err)
	}
	run(t, n, s)
	committed, answers := run(t, n, s, Propose{1, term, []byte("a")}, Read{2, term}, Read{3, n.Term()})
	if want := []Answer{{1, ErrNotLeading}, {2, ErrNotLeading}, {3, nil}}; !slices.Equal(answers, want) || len(committed) > 0 {
		t.Errorf("committed %v, answers %v; want nothing and %v", committed, answers, want)
	}
}

// After a restart a lone voter applies its log again from the base on, in a later term.
func TestARestartedNodeAppliesItsLogAgain(t *testing.T) {
	n, s := alone(t)
	run(t, n, s, Propose{1, n.Term(), []byte("a")})
	term := n.Term()
	n, err := New(1, *s)
	if err != nil {
		t.Fatal(err)
	}
	committed, _ := run(t, n, s)
	if len(committed) != 1 || string(committed[0].Data) != "a" {
		t.Errorf("it applies %v", committed)
	}
	if role, leader := n.Role(); role != Leader || leader != 1 || n.Term() <= term {
		t.Errorf("it is %v of term %d, and was of term %d", role, n.Term(), term)
	}
}

// The base of a compacted log has the members of that time: a change behind it is in the log.
func TestABaseHasTheMembersOfItsTime(t *testing.T) {
	n, s := alone(t)
	for i := range Ticket(5) {
		run(t, n, s, Propose{i + 1, n.Term(), []byte(strings.Repeat("x", 100))})
	}
	_, answers := run(t, n, s, AddLearner{10, Member{ID: 2, Address: "m2"}})
	if len(answers) != 1 || answers[0].Err != nil {
		t.Fatal(answers)
	}
	run(t, n, s, Propose{11, n.Term(), []byte("y")})
	for _, c := range []struct {
		keep    int64
		members int
	}{{1 << 20, 1}, {400, 1}, {20, 2}, {0, 2}} {
		got, err := n.Compact(c.keep)
		if err != nil {
			t.Fatal(err)
		}
		members, err := DecodeMembers(got.Base.Members)
		if err != nil || len(members) != c.members {
			t.Errorf("keeping %d bytes, the base is %d with members %v, %v; want %d", c.keep, got.Base.Index, members, err, c.members)
		}
		again, err := New(1, *got)
		if err != nil {
			t.Fatal(err)
		}
		run(t, again, &wal.State{})
		if len(again.Applied().Members) != 2 {
			t.Errorf("keeping %d bytes, after a restart the members are %v", c.keep, again.Applied().Members)
		}
	}
}

// A log that ends before what it says is committed has lost its end.
func TestALogThatLacksWhatIsCommittedIsRefused(t *testing.T) {
	n, s := alone(t)
	run(t, n, s, Propose{1, n.Term(), []byte("a")})
	s.Hard.Commit = 100
	if _, err := New(1, *s); !errors.Is(err, ErrOlderDisk) {
		t.Errorf("New = %v, want %v", err, ErrOlderDisk)
	}
}

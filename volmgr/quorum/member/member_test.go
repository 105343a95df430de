// SPDX-License-Identifier: Apache-2.0

package member

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/wal/waltest"
)

// still is a quorum without faults, whose clients are the test alone.
func still(t *testing.T, size int) *world {
	w := newWorld(t, 1, size)
	w.settle()
	return w
}

func (w *world) others(m *machine) (others []*machine) {
	for _, other := range w.machines {
		if other != m {
			others = append(others, other)
		}
	}
	return others
}

func role(m *machine) quorum.Role {
	r, _ := m.member.Node().Role()
	return r
}

// A single manager leads at once, without waiting for an election's timeout.
func TestASingleVoterLeadsAtOnce(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.crash(w.machines[0])
	w.start(w.machines[0])
	if got := role(w.machines[0]); got != quorum.Leader {
		t.Errorf("after its start it is %v", got)
	}
}

// One commit of a single voter is one fsync.
func TestACommitIsOneSync(t *testing.T) {
	w := newWorld(t, 1, 1)
	m := w.machines[0]
	before, committed := m.disk.Ops(), w.counts["committed"]
	w.propose(m)
	if got := m.disk.Ops() - before; got != 2 || w.counts["committed"] != committed+1 {
		t.Errorf("%d operations on the disk and %d commits; want a write and a sync, and 1", got, w.counts["committed"]-committed)
	}
}

// A leader that is cut off steps down by itself; what it had proposed is not known. The
// others have a new leader within two seconds of 50 ms ticks.
func TestALeaderThatIsCutOffStepsDown(t *testing.T) {
	w := still(t, 3)
	old := w.leader()
	for _, other := range w.others(old) {
		w.cut[[2]quorum.ID{old.id, other.id}] = true
		w.cut[[2]quorum.ID{other.id, old.id}] = true
	}
	unknown, began := w.counts["unknown"], w.now
	w.propose(old)
	w.until("another one leads", func() bool {
		return role(w.others(old)[0]) == quorum.Leader || role(w.others(old)[1]) == quorum.Leader
	})
	if took := w.now - began; took > 40 {
		t.Errorf("it took %d ticks", took)
	}
	w.until("the old one has stepped down", func() bool { return role(old) != quorum.Leader })
	if w.counts["unknown"] == unknown {
		t.Error("nobody was told that the outcome is unknown")
	}
	w.settle()
}

// A leader that stops hands over within a few messages, not after a timeout.
func TestALeaderHandsOver(t *testing.T) {
	w := still(t, 3)
	old := w.leader()
	w.step(old, quorum.Transfer{})
	w.deliver()
	w.deliver()
	if role(old) == quorum.Leader || w.leader() == nil {
		t.Errorf("the old leader is %v, and the new one is %v", role(old), w.leader())
	}
	w.settle()
}

// A follower takes no proposal, allows no read, and says who leads.
func TestAFollowerDecidesNothing(t *testing.T) {
	w := still(t, 3)
	leader := w.leader()
	follower := w.others(leader)[0]
	if r, id := follower.member.Node().Role(); r != quorum.Follower || id != leader.id {
		t.Errorf("Role = %v, %v; want a follower of %v", r, id, leader.id)
	}
	for what, in := range map[string]quorum.Input{
		"propose": quorum.Propose{Ticket: 1000, Term: leader.member.Node().Term(), Data: []byte("{}")},
		"read":    quorum.Read{Ticket: 1000, Term: leader.member.Node().Term()},
		"add":     quorum.AddLearner{Ticket: 1000, Member: quorum.Member{ID: 99}},
		"promote": quorum.Promote{Ticket: 1000, ID: 99},
		"remove":  quorum.Remove{Ticket: 1000, ID: leader.id},
	} {
		answers, err := follower.member.Step(in)
		want := quorum.ErrNotLeading
		if what == "promote" {
			want = quorum.ErrRefused // there is no such member
		}
		if err != nil || len(answers) != 1 || !errors.Is(answers[0].Err, want) {
			t.Errorf("%s at a follower = %v, %v; want %v", what, answers, err, want)
		}
	}
}

// Changes of the members that make no sense are refused, and repeated ones are done.
func TestChangesOfTheMembers(t *testing.T) {
	w := newWorld(t, 1, 1)
	m := w.machines[0]
	ask := func(in quorum.Input) error {
		t.Helper()
		answers, err := m.member.Step(in)
		if err != nil || len(answers) != 1 {
			t.Fatalf("%T = %v, %v", in, answers, err)
		}
		return answers[0].Err
	}
	if err := ask(quorum.Remove{Ticket: 1000, ID: m.id}); !errors.Is(err, quorum.ErrRefused) {
		t.Errorf("Remove of the last voter = %v", err)
	}
	for range 2 {
		if err := ask(quorum.AddLearner{Ticket: 1001, Member: quorum.Member{ID: 9, Address: "m9", Name: "nine"}}); err != nil {
			t.Errorf("AddLearner = %v", err)
		}
	}
	for what, like := range map[string]quorum.Member{
		"address": {ID: 10, Address: "m9"}, "name": {ID: 10, Address: "m10", Name: "nine"},
	} {
		if err := ask(quorum.AddLearner{Ticket: 1005, Member: like}); !errors.Is(err, quorum.ErrRefused) {
			t.Errorf("AddLearner of one with the %s of another = %v", what, err)
		}
	}
	if err := ask(quorum.AddLearner{Ticket: 1002, Member: quorum.Member{ID: 9, Address: "elsewhere"}}); !errors.Is(err, quorum.ErrRefused) {
		t.Errorf("AddLearner of one that is at another address = %v", err)
	}
	if err := ask(quorum.Promote{Ticket: 1003, ID: 9}); !errors.Is(err, quorum.ErrBusy) {
		t.Errorf("Promote of one that has not answered yet = %v", err)
	}
	for range 2 {
		if err := ask(quorum.Remove{Ticket: 1004, ID: 9}); err != nil {
			t.Errorf("Remove = %v", err)
		}
	}
}

// A leader does not remove itself: the others might never know that it is committed.
func TestALeaderDoesNotRemoveItself(t *testing.T) {
	w := still(t, 2)
	l := w.leader()
	answers, err := l.member.Step(quorum.Remove{Ticket: 1000, ID: l.id})
	if err != nil || len(answers) != 1 || !errors.Is(answers[0].Err, quorum.ErrRefused) {
		t.Errorf("Remove = %v, %v; want %v", answers, err, quorum.ErrRefused)
	}
}

// A member that has applied a change of the members knows it after a restart, before it hears
// of anybody: otherwise it might wait for the vote of one that is gone.
func TestARestartedMemberKnowsTheMembers(t *testing.T) {
	w := still(t, 3)
	w.join()
	w.until("the new one votes", func() bool {
		for _, m := range w.machines {
			if len(m.member.Node().Applied().Members.Voters()) < 4 {
				return false
			}
		}
		return true
	})
	for _, m := range w.machines {
		w.crash(m)
		w.start(m)
		if members := m.member.Node().Applied().Members; len(members.Voters()) < 4 {
			t.Errorf("%v knows the members %v", m.id, members)
		}
	}
	w.settle()
}

// A member whose disk was replaced by an older copy stops, since it does not know any more
// what it has acknowledged.
func TestAnOlderDiskIsRefused(t *testing.T) {
	w := still(t, 3)
	m := w.others(w.leader())[0]
	disk, state := m.disk.Copy(), m.store.now.clone()
	for range 5 {
		w.propose(w.leader())
		w.deliver()
	}
	t.Run("its log and its store", func(t *testing.T) {
		older := newStore(w.applies)
		older.now, older.synced = state.clone(), state
		member, err := Open(Config{Log: disk.Copy(), Store: older, Send: func(Outgoing) {}})
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			for _, f := range messagesTo(w, m.id) {
				if _, err = member.Step(quorum.Receive{Message: f}); err != nil {
					break
				}
			}
		}
		if !errors.Is(err, quorum.ErrOlderDisk) {
			t.Errorf("the leader's heartbeat = %v, want %v", err, quorum.ErrOlderDisk)
		}
		if _, err := member.Step(quorum.Tick{}); !errors.Is(err, quorum.ErrOlderDisk) {
			t.Errorf("a step after that = %v, want the same", err)
		}
	})
	t.Run("its log alone", func(t *testing.T) {
		if _, err := Open(Config{Log: disk.Copy(), Store: m.store, Send: func(Outgoing) {}}); !errors.Is(err, quorum.ErrOlderDisk) {
			t.Errorf("Open = %v, want %v", err, quorum.ErrOlderDisk)
		}
	})
	t.Run("its store alone", func(t *testing.T) {
		for range 60 { // until the log begins later
			w.propose(w.leader())
			w.deliver()
		}
		older := newStore(w.applies)
		older.now = state.clone()
		if _, err := Open(Config{Log: m.disk.Copy(), Store: older, Send: func(Outgoing) {}}); err == nil || !strings.Contains(err.Error(), "older copy") {
			t.Errorf("Open = %v, want that the store is an older copy", err)
		}
	})
}

// underWay counts the messages under way that one member has sent, by type.
func (w *world) underWay(from quorum.ID) map[string]int {
	w.t.Helper()
	count := map[string]int{}
	for _, f := range w.net {
		m, err := quorum.DecodeMessage(f.text)
		if err != nil {
			w.t.Fatal(err)
		}
		if m.From() == from {
			count[m.Type()]++
		}
	}
	return count
}

// A leader sends an entry to the others before it is on its own disk, and answers only after that.
func TestFollowersWriteWhileTheLeaderDoes(t *testing.T) {
	w := still(t, 3)
	leader := w.leader()
	leader.disk.CutAt = leader.disk.Ops() + 1
	w.propose(leader)
	if leader.member != nil {
		t.Fatal("its disk was not written")
	}
	if got := w.underWay(leader.id); got["MsgApp"] != 2 {
		t.Errorf("sent before the disk has the entry: %v, want it at both others", got)
	}
	if p := w.proposals[len(w.proposals)-1]; p.answered != 0 {
		t.Errorf("the proposal is answered with %v", p.err)
	}
	w.settle()
}

// What a member acknowledges is on its disk.
func TestAFollowerAcknowledgesWhatIsOnItsDisk(t *testing.T) {
	w := still(t, 3)
	leader := w.leader()
	follower := w.others(leader)[0]
	follower.disk.CutAt = follower.disk.Ops() + 2 // the sync after the write
	w.propose(leader)
	w.deliver()
	if follower.member != nil {
		t.Fatal("its disk was not synced")
	}
	if got := w.underWay(follower.id); got["MsgAppResp"] != 0 {
		t.Errorf("sent before the sync: %v", got)
	}
	w.settle()
}

// messagesTo takes what is under way to a member after a tick of the others.
func messagesTo(w *world, id quorum.ID) (messages []quorum.Message) {
	for _, m := range w.machines {
		if m.id != id {
			w.step(m, quorum.Tick{})
		}
	}
	for _, f := range w.net {
		if m, err := quorum.DecodeMessage(f.text); err == nil && m.To() == id {
			messages = append(messages, m)
		}
	}
	w.net = nil
	return messages
}

// After a failed fsync the member refuses everything.
func TestAFailedSyncEndsTheMember(t *testing.T) {
	w := newWorld(t, 1, 1)
	m := w.machines[0]
	m.disk.FailSync = true
	_, err := m.member.Step(quorum.Propose{Ticket: 1000, Term: m.member.Node().Term(), Data: []byte("{}")})
	if !errors.Is(err, waltest.ErrFailed) {
		t.Fatalf("Step = %v, want %v", err, waltest.ErrFailed)
	}
	m.disk.FailSync = false
	if _, err := m.member.Step(); !errors.Is(err, waltest.ErrFailed) {
		t.Errorf("Step after that = %v, want the same", err)
	}
}

// The log stays short, and what it has dropped is in the store.
func TestTheLogIsCompacted(t *testing.T) {
	w := newWorld(t, 1, 1)
	m := w.machines[0]
	for range 400 {
		w.propose(m)
		if size := m.member.log.Size(); size > 8<<10 {
			t.Fatalf("the log has %d bytes", size)
		}
	}
	for range 20 {
		w.crash(m)
		w.start(m)
		w.settle()
	}
}

// What arrives from the network is an error or a message, and never a panic of this package.
func FuzzDecodeMessage(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0x08, 0x07, 0x10, 0x01, 0x18, 0x02})
	f.Add([]byte(fmt.Sprint(rand.New(rand.NewPCG(1, 1)).Uint64())))
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := quorum.DecodeMessage(text)
		if err != nil {
			return
		}
		again, err := m.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := quorum.DecodeMessage(again); err != nil {
			t.Fatalf("encoded again: %v", err)
		}
		m.Snapshot()
	})
}

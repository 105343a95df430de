// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/cryptotest"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/wal"
	"weft.dev/weft/volmgr/quorum/wal/waltest"
)

// store keeps, for each key, the numbers of the proposals that wrote it: keys are set, as in
// the manager's store, and the value shows whether one was lost, or applied twice.
type store struct {
	now, synced content
	since       []content // after each Apply since the last Sync
	staged      *content
	applies     func(index, number uint64)
}

type content struct {
	Index uint64
	Keys  map[string]uint64 // the last proposal that wrote each key
}

func (c content) clone() content { return content{c.Index, maps.Clone(c.Keys)} }

func newStore(applies func(index, number uint64)) *store {
	return &store{applies: applies, now: content{Keys: map[string]uint64{}}, synced: content{Keys: map[string]uint64{}}}
}

// record is what an entry holds: one key, or two.
type record struct {
	Number uint64
	Keys   []string
	Pad    []byte
}

func (s *store) Applied() (uint64, error) { return s.now.Index, nil }

func (s *store) Apply(entries []quorum.Entry, at quorum.Position) error {
	s.now = s.now.clone()
	for _, e := range entries {
		var r record
		if err := json.Unmarshal(e.Data, &r); err != nil {
			return err
		}
		s.applies(e.Index, r.Number)
		for _, key := range r.Keys {
			s.now.Keys[key] = r.Number
		}
	}
	s.now.Index = at.Index
	s.since = append(s.since, s.now)
	return nil
}

func (s *store) Sync() error {
	s.synced, s.since = s.now, nil
	return nil
}

func (s *store) Content() (io.ReadCloser, error) {
	text, err := json.Marshal(s.now)
	return io.NopCloser(bytes.NewReader(text)), err
}

func (s *store) Stage(from io.Reader, _ uint64) error {
	s.staged = &content{}
	return json.NewDecoder(from).Decode(s.staged)
}

func (s *store) Staged() (uint64, error) {
	if s.staged == nil {
		return 0, nil
	}
	return s.staged.Index, nil
}

func (s *store) Adopt(at quorum.Position) error {
	if s.staged == nil {
		return errors.New("nothing is staged")
	}
	s.now, s.staged = s.staged.clone(), nil
	s.now.Index = at.Index
	return s.Sync()
}

// afterCut is what a crash leaves: of each transaction since the last Sync, all or nothing,
// whatever became of those before it.
func (s *store) afterCut(random *rand.Rand) *store {
	after := newStore(s.applies)
	after.synced, after.staged = s.synced.clone(), s.staged
	before := s.synced
	for _, next := range s.since {
		if random.IntN(2) == 0 {
			for key, number := range next.Keys {
				if before.Keys[key] != number {
					after.synced.Keys[key] = number
				}
			}
			after.synced.Index = next.Index
		}
		before = next
	}
	after.now = after.synced.clone()
	return after
}

// machine runs a member, unless it is down.
type machine struct {
	id     quorum.ID
	disk   *waltest.Disk
	killed bool // when CutAt comes
	store  *store
	member *Member // nil while it is down
	until  int     // time at which it starts again, or goes on
	paused bool
	gone   bool // for good

	tickets quorum.Ticket // given since it started: each start gives the same ones
}

// flight is a message under way.
type flight struct {
	at      int
	order   int
	text    []byte
	content []byte
	lost    bool // on the way; who sends a snapshot notices
}

// proposal is what a client knows of one.
type proposal struct {
	number   uint64
	keys     []string
	asked    int // on one clock with answered and with reads
	answered int // 0 means not yet
	err      error
	index    uint64 // 0 means that nobody has applied it
}

type read struct {
	asked int
}

// world is a quorum in virtual time, in which everything is drawn from one seed.
type world struct {
	t        *testing.T
	random   *rand.Rand
	trace    hash.Hash
	now      int // in ticks
	machines []*machine
	nextID   quorum.ID
	net      []flight
	order    int
	cut      map[[2]quorum.ID]bool
	faults   bool

	proposals []*proposal
	byTicket  map[*Member]map[quorum.Ticket]*proposal
	reads     map[*Member]map[quorum.Ticket]read
	applied   map[uint64]uint64 // number of the proposal at each index
	counts    map[string]int
}

var cluster = block.ClusterID{UUID: block.UUID{1}}

func newWorld(t *testing.T, seed uint64, size int) *world {
	cryptotest.SetGlobalRandom(t, seed) // Raft draws its timeouts from there
	w := &world{t: t, random: rand.New(rand.NewPCG(seed, 1)), trace: sha256.New(), cut: map[[2]quorum.ID]bool{}, applied: map[uint64]uint64{}, counts: map[string]int{},
		byTicket: map[*Member]map[quorum.Ticket]*proposal{}, reads: map[*Member]map[quorum.Ticket]read{}}
	founder := w.machine()
	if err := Found(founder.disk, founder.store, w.owner(founder), "m1", 5); err != nil {
		t.Fatal(err)
	}
	w.start(founder)
	for range size - 1 {
		w.join()
	}
	w.until("all members vote", func() bool { return len(w.members().Voters()) == size })
	return w
}

func (w *world) owner(m *machine) wal.Owner {
	return wal.Owner{Cluster: cluster, Member: uint64(m.id)}
}

func (w *world) machine() *machine {
	w.nextID++
	m := &machine{id: w.nextID, disk: waltest.New(), store: newStore(w.applies)}
	w.machines = append(w.machines, m)
	return m
}

// join starts a machine with an empty disk as a new member.
func (w *world) join() *machine {
	m := w.machine()
	if err := Join(m.disk, w.owner(m)); err != nil {
		w.t.Fatal(err)
	}
	w.start(m)
	return m
}

func (w *world) start(m *machine) {
	var err error
	if m.member, err = Open(Config{Log: m.disk, Store: m.store, CompactAt: 4 << 10, Send: w.send}); err != nil {
		w.t.Fatalf("start %v: %v", m.id, err)
	}
	m.tickets = 0
	w.byTicket[m.member], w.reads[m.member] = map[quorum.Ticket]*proposal{}, map[quorum.Ticket]read{}
	w.step(m)
}

// send puts a message on its way, or loses it.
func (w *world) send(o Outgoing) {
	text, err := o.Encode()
	if err != nil {
		w.t.Fatal(err)
	}
	f := flight{text: text}
	if o.Content != nil {
		f.content, _ = io.ReadAll(o.Content)
		w.counts["snapshots"]++
	}
	w.trace.Write(text)
	copies := 1
	if w.faults {
		switch w.random.IntN(20) {
		case 0:
			f.lost = true
		case 1:
			copies = 2
		}
	}
	for range copies {
		f.at, f.order = w.now, w.order
		if w.faults && w.random.IntN(4) == 0 {
			f.at += w.random.IntN(6)
			if w.random.IntN(20) == 0 {
				f.at += w.random.IntN(60)
			}
		}
		w.order++
		w.net = append(w.net, f)
	}
}

// step steps a member through inputs. It crashes if its disk loses power.
func (w *world) step(m *machine, inputs ...quorum.Input) {
	answers, err := m.member.Step(inputs...)
	for _, a := range answers {
		w.answered(m, a)
	}
	if errors.Is(err, waltest.ErrCut) {
		w.crash(m)
		return
	}
	if err != nil {
		w.t.Fatalf("time %d, member %v: %v", w.now, m.id, err)
	}
}

// applies notes what a member applies: at each index all members apply the same, and each
// proposal has one index.
func (w *world) applies(index, number uint64) {
	if before, ok := w.applied[index]; ok && before != number {
		w.t.Fatalf("time %d: entry %d is proposal %d at one member and %d at another", w.now, index, before, number)
	}
	p := w.proposals[number-1]
	if p.index != 0 && p.index != index {
		w.t.Fatalf("time %d: proposal %d is entry %d and entry %d", w.now, number, p.index, index)
	}
	w.applied[index], p.index = number, index
}

// crash cuts a machine's power, or ends its process alone if that was to be killed: then nothing is
// lost that was written, and nothing becomes durable either.
func (w *world) crash(m *machine) {
	w.counts["crashes"]++
	delete(w.byTicket, m.member)
	delete(w.reads, m.member)
	m.member, m.paused = nil, false
	if m.killed {
		w.counts["kills"]++
		m.disk.CutAt, m.killed = 0, false
	} else {
		m.disk, m.store = m.disk.AfterCut(w.random), m.store.afterCut(w.random)
	}
	m.until = w.now + 5 + w.random.IntN(60)
}

func (w *world) answered(m *machine, a quorum.Answer) {
	if r, ok := w.reads[m.member][a.Ticket]; ok {
		delete(w.reads[m.member], a.Ticket)
		if a.Err == nil {
			w.checkRead(m, r)
		}
		return
	}
	p, ok := w.byTicket[m.member][a.Ticket]
	if !ok {
		return // a change of the members
	}
	delete(w.byTicket[m.member], a.Ticket)
	w.order++
	p.answered, p.err = w.order, a.Err
	switch {
	case a.Err == nil:
		w.counts["committed"]++
		if m.store.now.Keys[p.own()] != p.number {
			w.t.Fatalf("time %d: %v says that proposal %d is committed, and has not applied it", w.now, m.id, p.number)
		}
	case errors.Is(a.Err, quorum.ErrUnknown):
		w.counts["unknown"]++
	default:
		w.counts["not taken"]++
	}
}

// checkRead: what a read sees has all that was answered before it was asked.
func (w *world) checkRead(m *machine, r read) {
	w.counts["reads"]++
	for _, p := range w.proposals {
		if p.err == nil && p.answered > 0 && p.answered < r.asked && m.store.now.Keys[p.own()] != p.number {
			w.t.Fatalf("time %d: a read at %v, asked at %d, does not see proposal %d, answered at %d", w.now, m.id, r.asked, p.number, p.answered)
		}
	}
}

// own is the key that only this proposal writes.
func (p *proposal) own() string { return p.keys[0] }

func (w *world) propose(m *machine) {
	m.tickets++
	w.order++
	n := uint64(len(w.proposals) + 1)
	p := &proposal{number: n, asked: w.order, keys: []string{fmt.Sprintf("own/%d", n), fmt.Sprintf("shared/%d", w.random.IntN(5))}}
	w.proposals = append(w.proposals, p)
	w.byTicket[m.member][m.tickets] = p
	text, _ := json.Marshal(record{n, p.keys, make([]byte, w.random.IntN(200))})
	w.step(m, quorum.Propose{Ticket: m.tickets, Term: m.member.Node().Term(), Data: text})
}

func (w *world) read(m *machine) {
	m.tickets++
	w.order++
	w.reads[m.member][m.tickets] = read{w.order}
	w.step(m, quorum.Read{Ticket: m.tickets, Term: m.member.Node().Term()})
}

// leader is a member that says that it leads; several may at a time.
func (w *world) leader() *machine {
	var leaders []*machine
	for _, m := range w.machines {
		if m.member != nil && !m.paused {
			if role, _ := m.member.Node().Role(); role == quorum.Leader {
				leaders = append(leaders, m)
			}
		}
	}
	if len(leaders) == 0 {
		return nil
	}
	return leaders[w.random.IntN(len(leaders))]
}

// members are those that the leader knows, if there is one.
func (w *world) members() quorum.Members {
	if l := w.leader(); l != nil {
		return l.member.Node().Applied().Members
	}
	return nil
}

// administer does what an operator does: new machines are added and get their votes, lost
// ones are removed.
func (w *world) administer() {
	l := w.leader()
	if l == nil {
		return
	}
	members := l.member.Node().Applied().Members
	for _, m := range w.machines {
		have, there := members.Find(m.id)
		l.tickets++
		switch {
		case m.gone && there:
			w.step(l, quorum.Remove{Ticket: l.tickets, ID: m.id})
		case !m.gone && !there:
			w.step(l, quorum.AddLearner{Ticket: l.tickets, Member: quorum.Member{ID: m.id, Address: fmt.Sprintf("m%d", m.id)}})
		case !m.gone && !have.Voter:
			w.step(l, quorum.Promote{Ticket: l.tickets, ID: m.id})
		default:
			continue
		}
		return
	}
}

// tick lets one tick pass.
func (w *world) tick() {
	w.now++
	if w.faults {
		w.disturb()
	}
	for _, m := range w.machines {
		switch {
		case m.gone:
		case m.member == nil && w.now >= m.until:
			w.start(m)
		case m.paused && w.now >= m.until:
			m.paused = false
		case m.member != nil && !m.paused && w.random.IntN(12) > 0: // clocks differ a little
			w.step(m, quorum.Tick{})
		}
	}
	w.deliver()
	if w.random.IntN(8) == 0 {
		w.administer()
	}
	if l := w.leader(); l != nil && w.random.IntN(2) == 0 {
		w.propose(l)
	}
	if m := w.machines[w.random.IntN(len(w.machines))]; m.member != nil && !m.paused && w.random.IntN(4) == 0 {
		w.read(m)
	}
	w.deliver()
}

// deliver delivers what has arrived, and what that brings about at once.
func (w *world) deliver() {
	for rounds := 0; rounds < 200; rounds++ {
		i := slices.IndexFunc(w.net, func(f flight) bool { return f.at <= w.now })
		if i < 0 {
			return
		}
		f := w.net[i]
		w.net = slices.Delete(w.net, i, i+1)
		w.arrive(f)
	}
}

func (w *world) arrive(f flight) {
	message, err := quorum.DecodeMessage(f.text)
	if err != nil {
		w.t.Fatal(err)
	}
	i := slices.IndexFunc(w.machines, func(m *machine) bool { return m.id == message.To() })
	m := w.machines[i]
	arrives := m.member != nil && !f.lost && !w.cut[[2]quorum.ID{message.From(), message.To()}]
	if arrives && m.paused { // it waits in a socket
		f.at = m.until
		w.net = append(w.net, f)
		return
	}
	if f.content != nil {
		if arrives {
			if err := m.member.Stage(message, bytes.NewReader(f.content)); err != nil {
				w.t.Fatal(err)
			}
		}
		if from := w.machines[slices.IndexFunc(w.machines, func(m *machine) bool { return m.id == message.From() })]; from.member != nil && !from.paused {
			w.step(from, quorum.SnapshotSent{ID: message.To(), OK: arrives})
		}
	}
	if arrives && m.member != nil {
		w.step(m, quorum.Receive{Message: message})
	}
}

// disturb makes faults.
func (w *world) disturb() {
	m := w.machines[w.random.IntN(len(w.machines))]
	switch w.random.IntN(60) {
	case 0: // the power is cut in the middle of one of the next writes, or the process is killed there
		if m.member != nil {
			m.disk.CutAt = m.disk.Ops() + 1 + w.random.IntN(8)
			m.killed = w.random.IntN(2) == 0
		}
	case 1:
		other := w.machines[w.random.IntN(len(w.machines))]
		w.cut[[2]quorum.ID{m.id, other.id}] = true
	case 2: // all by itself
		for _, other := range w.machines {
			w.cut[[2]quorum.ID{m.id, other.id}] = true
			w.cut[[2]quorum.ID{other.id, m.id}] = true
		}
	case 3, 4, 5:
		clear(w.cut)
	case 6:
		if m.member != nil && !m.gone {
			m.paused, m.until = true, w.now+w.random.IntN(60)
			w.counts["pauses"]++
		}
	case 7:
		if l := w.leader(); l != nil {
			w.step(l, quorum.Transfer{})
			w.counts["transfers"]++
		}
	case 8:
		w.wipe(m)
	}
}

// wipe loses a machine's disk for good, and a new machine takes its place. All members must
// know of the last change before: while the quorum has two voters, and one of them does not
// know yet that it is committed that a third may vote, the loss of the other is the loss of
// the majority.
func (w *world) wipe(m *machine) {
	members := w.members()
	if m.gone || len(members) < 3 || w.random.IntN(4) > 0 {
		return
	}
	for _, other := range w.machines {
		if other.gone {
			continue
		}
		if other.member == nil || len(other.member.Node().Applied().Members.Voters()) != len(w.machines)-w.counts["wiped"] {
			return
		}
	}
	w.crash(m)
	m.gone = true
	w.counts["wiped"]++
	w.join()
}

// until lets time pass until something holds.
func (w *world) until(what string, holds func() bool) {
	w.t.Helper()
	for range 3000 {
		if holds() {
			return
		}
		w.tick()
	}
	for _, m := range w.machines {
		if m.member == nil {
			w.t.Logf("%v: gone %t, until %d", m.id, m.gone, m.until)
			continue
		}
		role, leader := m.member.Node().Role()
		w.t.Logf("%v: %v of term %d, follows %v, applied %v, paused %t", m.id, role, m.member.Node().Term(), leader, m.member.Node().Applied(), m.paused)
	}
	w.t.Fatalf("time %d: still not: %s; counts %v", w.now, what, w.counts)
}

// settle ends the faults, waits until all members agree, and checks the history.
func (w *world) settle() {
	w.faults = false
	clear(w.cut)
	for _, m := range w.machines {
		m.disk.CutAt = 0
	}
	before := w.counts["committed"]
	w.until("the quorum commits again", func() bool { return w.counts["committed"] > before+20 })
	w.until("all members agree", func() bool {
		var first *store
		for _, m := range w.machines {
			if m.gone {
				continue
			}
			if m.member == nil || m.paused {
				return false
			}
			if first == nil {
				first = m.store
			}
			if first.now.Index != m.store.now.Index || !maps.Equal(first.now.Keys, m.store.now.Keys) {
				return false
			}
		}
		return true
	})
	var all *store
	for _, m := range w.machines {
		if !m.gone {
			all = m.store
		}
	}
	for _, p := range w.proposals {
		there := all.now.Keys[p.own()] == p.number
		switch {
		case p.answered > 0 && p.err == nil && !there:
			w.t.Errorf("proposal %d was committed, and is lost", p.number)
		case there && (errors.Is(p.err, quorum.ErrNotLeading) || errors.Is(p.err, quorum.ErrBusy)):
			w.t.Errorf("proposal %d was not taken, and is there", p.number)
		}
	}
	w.checkOrder()
}

// checkOrder: what was answered before something else was asked for is before it in the log.
func (w *world) checkOrder() {
	type end struct {
		at   int
		ends bool
		p    *proposal
	}
	var ends []end
	for _, p := range w.proposals {
		if p.index > 0 {
			ends = append(ends, end{p.asked, false, p})
		}
		if p.answered > 0 && p.err == nil {
			ends = append(ends, end{p.answered, true, p})
		}
	}
	slices.SortFunc(ends, func(a, b end) int { return a.at - b.at })
	newest := &proposal{}
	for _, e := range ends {
		switch {
		case e.ends && e.p.index > newest.index:
			newest = e.p
		case !e.ends && e.p.index < newest.index:
			w.t.Errorf("proposal %d, asked at %d, is entry %d; proposal %d, answered at %d, is entry %d", e.p.number, e.p.asked, e.p.index, newest.number, newest.answered, newest.index)
		}
	}
}

func (w *world) sum() string {
	w.trace.Write(binary.LittleEndian.AppendUint64(nil, uint64(w.now)))
	return fmt.Sprintf("%x", w.trace.Sum(nil)[:8])
}

// run is a quorum under faults, and what became of it.
func run(t *testing.T, seed uint64, size, ticks int) (sum string, counts map[string]int) {
	w := newWorld(t, seed, size)
	w.faults = true
	for range ticks {
		w.tick()
	}
	w.settle()
	w.counts["proposals"] = len(w.proposals)
	return w.sum(), w.counts
}

// Members crash in the middle of writes, pause, and lose their disks; messages are lost, late
// and double; the network is cut, also one way; leadership is handed over. Nothing that was
// committed is lost or applied out of order, nothing that was refused takes effect, no read
// is stale, and afterwards all members agree.
func TestAQuorumUnderFaults(t *testing.T) {
	for _, size := range []int{1, 3, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			total := map[string]int{}
			for seed := range uint64(*runs) {
				_, counts := run(t, *seeds+seed, size, 1500)
				for what, n := range counts {
					total[what] += n
				}
				if t.Failed() {
					t.Fatalf("seed %d", *seeds+seed)
				}
			}
			t.Log(total)
		})
	}
}

var (
	runs  = flag.Int("runs", 12, "runs of the quorum under faults")
	seeds = flag.Uint64("seed", 1, "the first one's seed")
)

// One seed gives one history.
func TestAHistoryCanBeRepeated(t *testing.T) {
	var first string
	for _, which := range []string{"first", "again"} {
		t.Run(which, func(t *testing.T) {
			sum, counts := run(t, 3, 3, 600)
			if first == "" {
				first = sum
			}
			if sum != first {
				t.Errorf("the second run is %s, the first was %s; %v", sum, first, counts)
			}
		})
	}
}

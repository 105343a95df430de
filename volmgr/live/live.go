// SPDX-License-Identifier: Apache-2.0

// Package live keeps the I/O that agents have reported in the last minutes, in bounded memory. It
// is not part of the cluster's state: nothing of it is recorded or decided upon, and it is not
// kept in the manager's loop.
//
// An agent's reports are numbered. A report names only what had I/O in its time, so that what is
// idle takes no memory. The figures of a window are the sum of the last reports that make it up.
package live

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/figures/wire"
	"weft.dev/weft/proto/pb"
)

// Bounds of what is kept. An object with much I/O fills its bytes in less time than its agent
// fills its reports; then its figures go back less far.
const (
	ReportsMost = 150     // of an agent: five minutes
	BytesMost   = 8 << 10 // of a volume or drive
	LegMost     = 2 << 10 // of a leg
	ObjectsMost = 50_000  // of an agent
	AgentsMost  = 20_000

	// Silent is how long after its last report an agent's figures are of the past.
	Silent = 10 * time.Second
	forget = 5 * time.Minute
)

// ErrReport is the error of a report that cannot be read.
var ErrReport = errors.New("malformed figures")

// Source is an agent that reports figures.
type Source struct {
	Node string
	Kind pb.FiguresSource
}

// Kind is a kind of object.
type Kind uint8

// The kinds of objects.
const (
	Volume Kind = iota
	Leg
	Drive
)

// Object is what has figures.
type Object struct {
	Kind Kind
	ID   block.UUID
}

// Window is the I/O of an object in a stretch of time.
type Window struct {
	Figures figures.Figures
	Held    time.Duration
	Covers  time.Duration // 0: nothing is known
}

// Add adds the I/O of another object in the same time.
func (w *Window) Add(o Window) {
	w.Figures.Add(&o.Figures)
	w.Held, w.Covers = w.Held+o.Held, max(w.Covers, o.Covers)
}

// Book keeps figures. All methods may be called concurrently.
type Book struct {
	now func() time.Time

	mu     sync.Mutex
	agents map[Source]*agent
	over   chan struct{} // closed by Reset
}

// NewBook makes an empty Book.
func NewBook(now func() time.Time) *Book {
	return &Book{now: now, agents: map[Source]*agent{}, over: make(chan struct{})}
}

// Over is closed by the next Reset.
func (b *Book) Over() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.over
}

// Reset forgets everything.
func (b *Book) Reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.over)
	b.over, b.agents = make(chan struct{}), map[Source]*agent{}
}

// agent is what one agent has reported.
type agent struct {
	heard   time.Time
	number  uint32          // of the newest complete report; the first one is 1
	lengths []time.Duration // of the newest reports, oldest first
	objects map[Object]*series
}

// Take adds a message of an agent.
func (b *Book) Take(m *pb.FiguresReport) error {
	if _, err := block.ParseNodeName(m.GetNode()); err != nil {
		return fmt.Errorf("%w: %w", ErrReport, err)
	}
	if m.GetSource() == pb.FiguresSource_FIGURES_SOURCE_UNSPECIFIED || len(m.GetObjects()) > wire.MessageMost {
		return fmt.Errorf("%w: source %v, %d objects", ErrReport, m.GetSource(), len(m.GetObjects()))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	from := Source{m.GetNode(), m.GetSource()}
	a := b.agents[from]
	if a == nil {
		b.forgetLocked()
		if len(b.agents) >= AgentsMost {
			return fmt.Errorf("%w: %d agents report figures; no more are accepted", ErrReport, AgentsMost)
		}
		a = &agent{objects: map[Object]*series{}}
		b.agents[from] = a
	}
	for _, o := range m.GetObjects() {
		if err := a.take(o); err != nil {
			return err
		}
	}
	if !m.GetMore() {
		a.complete(time.Duration(m.GetNanoseconds()), b.now())
	}
	return nil
}

// forgetLocked forgets agents that have long been silent.
func (b *Book) forgetLocked() {
	for from, a := range b.agents {
		if b.now().Sub(a.heard) > forget {
			delete(b.agents, from)
		}
	}
}

// objectOf is the object of a message.
func objectOf(m *pb.ObjectFigures) (o Object, err error) {
	switch {
	case m.GetVolumeId() != "":
		id, err := block.ParseVolumeID(m.GetVolumeId())
		return Object{Volume, id.UUID}, err
	case m.GetLegId() != "":
		id, err := block.ParseLegID(m.GetLegId())
		return Object{Leg, id.UUID}, err
	}
	id, err := block.ParseDriveID(m.GetDriveId())
	return Object{Drive, id.UUID}, err
}

// take keeps the figures of one object for the report under way.
func (a *agent) take(m *pb.ObjectFigures) error {
	o, err := objectOf(m)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReport, err)
	}
	var check figures.Figures
	if err := wire.Add(&check, m); err != nil {
		return fmt.Errorf("%w: %w", ErrReport, err)
	}
	s := a.objects[o]
	if s == nil {
		if len(a.objects) >= ObjectsMost {
			return nil
		}
		s = &series{most: BytesMost}
		if o.Kind == Leg {
			s.most = LegMost
		}
		a.objects[o] = s
	}
	payload, err := proto.Marshal(&pb.ObjectFigures{Read: m.Read, Write: m.Write, Flush: m.Flush, Discard: m.Discard, Any: m.Any, HeldNanoseconds: m.HeldNanoseconds})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrReport, err)
	}
	s.add(a.number+1, payload)
	return nil
}

// complete ends the report under way.
func (a *agent) complete(length time.Duration, now time.Time) {
	a.number++
	a.heard = now
	a.lengths = append(a.lengths, length)
	if n := len(a.lengths); n > ReportsMost {
		a.lengths = append(a.lengths[:0], a.lengths[n-ReportsMost:]...)
	}
	if a.number%(ReportsMost/5) != 0 {
		return
	}
	for o, s := range a.objects {
		if s.newest+ReportsMost < a.number {
			delete(a.objects, o)
		}
	}
}

// Look returns the figures of an object, as one agent has reported them, in the last reports that
// together are as long as the window, or a little longer.
func (b *Book) Look(from Source, o Object, window time.Duration) (w Window) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.agents[from]
	if a == nil || b.now().Sub(a.heard) > Silent {
		return Window{}
	}
	return a.window(a.objects[o], window)
}

// All adds up the figures of all objects of a kind that one agent has reported.
func (b *Book) All(from Source, kind Kind, window time.Duration) (w Window) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.agents[from]
	if a == nil || b.now().Sub(a.heard) > Silent {
		return Window{}
	}
	w = a.window(nil, window)
	for o, s := range a.objects {
		if o.Kind == kind {
			w.Add(a.window(s, window))
		}
	}
	return w
}

// window adds up a series; nil is one without I/O.
func (a *agent) window(s *series, window time.Duration) (w Window) {
	first, whole := a.number+1, a.number-min(a.number, uint32(len(a.lengths)))
	if s != nil {
		whole = max(whole, s.whole)
	}
	for i := len(a.lengths) - 1; i >= 0 && w.Covers < window && first-1 > whole; i-- {
		w.Covers += a.lengths[i]
		first--
	}
	if s == nil {
		return w
	}
	var m pb.ObjectFigures
	s.each(func(number uint32, payload []byte) {
		if number < first || number > a.number {
			return
		}
		if proto.Unmarshal(payload, &m) == nil && wire.Add(&w.Figures, &m) == nil {
			w.Held += time.Duration(m.GetHeldNanoseconds())
		}
	})
	return w
}

// series is the I/O of one object: the number of a report, the length of what it says of the
// object, and that; and so on.
type series struct {
	most   int
	buf    []byte
	start  int
	newest uint32 // the newest report that names the object
	whole  uint32 // of the reports after this one all is known
}

const header = 6

// add adds what a report says. To make room, it forgets the oldest.
func (s *series) add(number uint32, payload []byte) {
	need := header + len(payload)
	if need > s.most {
		s.buf, s.start, s.whole = nil, 0, number // all before, and this one, are not known
		return
	}
	for len(s.buf)-s.start+need > s.most {
		s.drop()
	}
	for len(s.buf) > s.start && s.oldest()+ReportsMost <= number {
		s.drop()
	}
	if s.start > 0 && len(s.buf)+need > cap(s.buf) {
		s.buf = s.buf[:copy(s.buf, s.buf[s.start:])]
		s.start = 0
	}
	if len(s.buf)+need > cap(s.buf) {
		larger := make([]byte, len(s.buf), min(s.most, max(64, 2*(len(s.buf)+need))))
		copy(larger, s.buf)
		s.buf = larger
	}
	s.buf = binary.LittleEndian.AppendUint32(s.buf, number)
	s.buf = binary.LittleEndian.AppendUint16(s.buf, uint16(len(payload)))
	s.buf = append(s.buf, payload...)
	s.newest = number
}

func (s *series) oldest() uint32 { return binary.LittleEndian.Uint32(s.buf[s.start:]) }

// drop forgets the oldest.
func (s *series) drop() {
	s.whole = s.oldest()
	s.start += header + int(binary.LittleEndian.Uint16(s.buf[s.start+4:]))
}

func (s *series) each(do func(number uint32, payload []byte)) {
	for rest := s.buf[s.start:]; len(rest) > 0; {
		n := header + int(binary.LittleEndian.Uint16(rest[4:]))
		do(binary.LittleEndian.Uint32(rest), rest[header:n])
		rest = rest[n:]
	}
}

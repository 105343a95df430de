// SPDX-License-Identifier: Apache-2.0

package reservation

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

var a, b, c = Host{1}, Host{2}, Host{3}

// with is a state with registered hosts; each host's key is its first byte.
func with(t *testing.T, hosts ...Host) *State {
	t.Helper()
	s := &State{}
	for _, h := range hosts {
		if err := s.Register(h, uint64(h[0])); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// TestWhoMayDoWhat is the table of NVM Express Base 2.0, figure "Command
// Behavior in the Presence of a Reservation": a holds, b is registered, c is neither.
func TestWhoMayDoWhat(t *testing.T) {
	for _, row := range []struct {
		kind              Type
		registrantsReads  bool
		registrantsWrites bool
		strangersReads    bool
		registrantsBecome bool // holders too
	}{
		{kind: WriteExclusive, registrantsReads: true, strangersReads: true},
		{kind: ExclusiveAccess},
		{kind: WriteExclusiveRegistrants, registrantsReads: true, registrantsWrites: true, strangersReads: true},
		{kind: ExclusiveAccessRegistrants, registrantsReads: true, registrantsWrites: true},
		{kind: WriteExclusiveAllRegistrants, registrantsReads: true, registrantsWrites: true, strangersReads: true, registrantsBecome: true},
		{kind: ExclusiveAccessAllRegistrants, registrantsReads: true, registrantsWrites: true, registrantsBecome: true},
	} {
		s := with(t, a, b)
		for _, h := range []Host{a, b, c} {
			if !s.MayRead(h) || !s.MayWrite(h) {
				t.Errorf("without a reservation host %d may not do everything", h[0])
			}
		}
		if err := s.Acquire(a, 1, row.kind); err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprint(s.MayRead(a), s.MayWrite(a), s.MayRead(b), s.MayWrite(b), s.MayRead(c), s.MayWrite(c), s.Holds(b))
		want := fmt.Sprint(true, true, row.registrantsReads, row.registrantsWrites, row.strangersReads, false, row.registrantsBecome)
		if got != want {
			t.Errorf("type %d: %s, want %s", row.kind, got, want)
		}
	}
}

func TestRegister(t *testing.T) {
	s := with(t, a)
	for _, step := range []struct {
		name string
		err  error
		want error
		key  uint64 // a's key afterwards
	}{
		{"the same key again", s.Register(a, 1), nil, 1},
		{"another key", s.Register(a, 9), ErrConflict, 1},
		{"no key", s.Register(b, 0), ErrInvalid, 1},
		{"replace with the wrong key", s.Replace(a, 5, 9, false), ErrConflict, 1},
		{"replace", s.Replace(a, 1, 9, false), nil, 9},
		{"replace, ignoring", s.Replace(a, 0, 7, true), nil, 7},
		{"replace of a stranger", s.Replace(b, 0, 2, false), ErrConflict, 7},
		{"replace of a stranger, ignoring", s.Replace(b, 0, 2, true), nil, 7},
	} {
		if !errors.Is(step.err, step.want) {
			t.Errorf("%s: %v, want %v", step.name, step.err, step.want)
		}
	}
	if k, _ := s.key(a); k != 7 || len(s.Registrants()) != 2 {
		t.Errorf("after all: %+v", s.Registrants())
	}
	if _, err := s.Unregister(c, 0, true); !errors.Is(err, ErrConflict) {
		t.Errorf("unregister of a stranger: %v", err)
	}
	if _, err := s.Unregister(a, 8, false); !errors.Is(err, ErrConflict) {
		t.Errorf("unregister with the wrong key: %v", err)
	}
	if _, err := s.Unregister(a, 8, true); err != nil || s.Generation() != 6 {
		t.Errorf("unregister, ignoring: %v, generation %d", err, s.Generation())
	}
}

func TestUnregisteringTheHolderReleases(t *testing.T) {
	for kind := WriteExclusive; kind <= ExclusiveAccessAllRegistrants; kind++ {
		s := with(t, a, b)
		s.Acquire(a, 1, kind)
		notices, err := s.Unregister(a, 1, false)
		if err != nil {
			t.Fatal(err)
		}
		stays := kind.all()
		if (s.Type() == kind) != stays {
			t.Errorf("type %d: after the first holder went the type is %d", kind, s.Type())
		}
		if told := len(notices) == 1 && notices[0] == (Notice{b, ReservationReleased}); told != (kind.shared() && !stays) {
			t.Errorf("type %d: notices %v", kind, notices)
		}
		s.Unregister(b, 2, false)
		if s.Type() != None || !s.Idle() {
			t.Errorf("type %d: with nobody left the type is %d", kind, s.Type())
		}
	}
}

func TestAcquire(t *testing.T) {
	s := with(t, a, b)
	for _, step := range []struct {
		name string
		err  error
		want error
	}{
		{"a stranger", s.Acquire(c, 3, WriteExclusive), ErrConflict},
		{"the wrong key", s.Acquire(a, 3, WriteExclusive), ErrConflict},
		{"no type", s.Acquire(a, 1, None), ErrInvalid},
		{"a type that there is not", s.Acquire(a, 1, 7), ErrInvalid},
		{"nobody has it", s.Acquire(a, 1, WriteExclusive), nil},
		{"again", s.Acquire(a, 1, WriteExclusive), nil},
		{"again, another type", s.Acquire(a, 1, ExclusiveAccess), ErrConflict},
		{"another host", s.Acquire(b, 2, WriteExclusive), ErrConflict},
	} {
		if !errors.Is(step.err, step.want) {
			t.Errorf("%s: %v, want %v", step.name, step.err, step.want)
		}
	}
}

func TestRelease(t *testing.T) {
	s := with(t, a, b)
	s.Acquire(a, 1, WriteExclusiveRegistrants)
	if n, err := s.Release(b, 2, WriteExclusiveRegistrants); err != nil || n != nil || s.Type() == None {
		t.Errorf("release by another registrant: %v, %v, type %d", n, err, s.Type())
	}
	if _, err := s.Release(a, 1, WriteExclusive); !errors.Is(err, ErrInvalid) {
		t.Errorf("release of another type: %v", err)
	}
	if _, err := s.Release(c, 3, WriteExclusiveRegistrants); !errors.Is(err, ErrConflict) {
		t.Errorf("release by a stranger: %v", err)
	}
	n, err := s.Release(a, 1, WriteExclusiveRegistrants)
	if err != nil || !slices.Equal(n, []Notice{{b, ReservationReleased}}) || s.Type() != None {
		t.Errorf("release: %v, %v", n, err)
	}
}

func TestClear(t *testing.T) {
	s := with(t, a, b, c)
	s.Acquire(a, 1, ExclusiveAccess)
	if _, err := s.Clear(b, 9); !errors.Is(err, ErrConflict) {
		t.Errorf("clear with the wrong key: %v", err)
	}
	n, err := s.Clear(b, 2)
	if err != nil || !s.Idle() || s.Type() != None || !slices.Equal(n, []Notice{{a, ReservationPreempted}, {c, ReservationPreempted}}) {
		t.Errorf("clear: %v, %v", n, err)
	}
}

func TestPreempt(t *testing.T) {
	for _, row := range []struct {
		name    string
		holder  *Host
		kind    Type
		by      Host
		key     uint64
		victim  uint64
		to      Type
		err     error
		gone    []Host
		notices []Notice
		after   Type
		holds   []Host
	}{
		{name: "the holder", holder: &a, kind: WriteExclusive, by: b, key: 2, victim: 1, to: ExclusiveAccess,
			gone: []Host{a}, notices: []Notice{{a, RegistrationPreempted}}, after: ExclusiveAccess, holds: []Host{b}},
		{name: "the holder of a shared type, whose others are told", holder: &a, kind: WriteExclusiveRegistrants, by: b, key: 2, victim: 1, to: ExclusiveAccess,
			gone: []Host{a}, notices: []Notice{{a, RegistrationPreempted}, {c, ReservationReleased}}, after: ExclusiveAccess, holds: []Host{b}},
		{name: "a registrant that does not hold", holder: &a, kind: WriteExclusive, by: b, key: 2, victim: 3, to: ExclusiveAccess,
			gone: []Host{c}, notices: []Notice{{c, RegistrationPreempted}}, after: WriteExclusive, holds: []Host{a}},
		{name: "oneself, to change the type", holder: &a, kind: WriteExclusive, by: a, key: 1, victim: 1, to: ExclusiveAccess,
			after: ExclusiveAccess, holds: []Host{a}},
		{name: "all of all registrants", holder: &a, kind: WriteExclusiveAllRegistrants, by: b, key: 2, victim: 0, to: WriteExclusive,
			gone: []Host{a, c}, notices: []Notice{{a, RegistrationPreempted}, {c, RegistrationPreempted}}, after: WriteExclusive, holds: []Host{b}},
		{name: "one of all registrants", holder: &a, kind: WriteExclusiveAllRegistrants, by: b, key: 2, victim: 1, to: WriteExclusive,
			gone: []Host{a}, notices: []Notice{{a, RegistrationPreempted}}, after: WriteExclusiveAllRegistrants, holds: []Host{b, c}},
		{name: "without a reservation", by: b, key: 2, victim: 1, to: WriteExclusive,
			gone: []Host{a}, notices: []Notice{{a, RegistrationPreempted}}, after: None},
		{name: "nobody", by: b, key: 2, victim: 77, to: WriteExclusive, err: ErrConflict},
		{name: "no key", holder: &a, kind: WriteExclusive, by: b, key: 2, victim: 0, to: WriteExclusive, err: ErrInvalid, after: WriteExclusive, holds: []Host{a}},
		{name: "with the wrong key", by: b, key: 1, victim: 1, to: WriteExclusive, err: ErrConflict},
		{name: "to no type", by: b, key: 2, victim: 1, to: None, err: ErrInvalid},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := with(t, a, b, c)
			if row.holder != nil {
				if err := s.Acquire(*row.holder, uint64(row.holder[0]), row.kind); err != nil {
					t.Fatal(err)
				}
			}
			gone, notices, err := s.Preempt(row.by, row.key, row.victim, row.to)
			if !errors.Is(err, row.err) || !slices.Equal(gone, row.gone) || !slices.Equal(notices, row.notices) || s.Type() != row.after {
				t.Errorf("gone %v, notices %v, type %d, %v", gone, notices, s.Type(), err)
			}
			for _, h := range []Host{a, b, c} {
				if s.Holds(h) != slices.Contains(row.holds, h) {
					t.Errorf("host %d holds: %v", h[0], s.Holds(h))
				}
			}
		})
	}
}

// TestAStateIsAlwaysSound makes random changes and checks the invariants after each.
func TestAStateIsAlwaysSound(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	hosts := []Host{{1}, {2}, {3}, {4}}
	for range 200 {
		s := &State{}
		for step := range 100 {
			h, key, other := hosts[r.IntN(4)], uint64(r.IntN(4)), uint64(r.IntN(4))
			kind := Type(r.IntN(8))
			before, was := s.Generation(), *s
			was.registrants = slices.Clone(s.registrants)
			err := random(r, s, h, key, other, kind)
			if err != nil && (s.Generation() != before || !same(&was, s)) {
				t.Fatalf("step %d: refused (%v), and changed", step, err)
			}
			sound(t, s, hosts)
		}
	}
}

func random(r *rand.Rand, s *State, h Host, key, other uint64, kind Type) error {
	var err error
	switch r.IntN(8) {
	case 0:
		err = s.Register(h, key)
	case 1:
		_, err = s.Unregister(h, key, r.IntN(2) == 0)
	case 2:
		err = s.Replace(h, key, other, r.IntN(2) == 0)
	case 3, 4:
		err = s.Acquire(h, key, kind)
	case 5, 6:
		_, _, err = s.Preempt(h, key, other, kind)
	case 7:
		if r.IntN(4) == 0 {
			_, err = s.Clear(h, key)
		} else {
			_, err = s.Release(h, key, kind)
		}
	}
	return err
}

func same(x, y *State) bool {
	return x.kind == y.kind && x.holder == y.holder && slices.Equal(x.registrants, y.registrants)
}

func sound(t *testing.T, s *State, hosts []Host) {
	t.Helper()
	holders := 0
	for _, h := range hosts {
		_, registered := s.key(h)
		if s.Holds(h) {
			holders++
			if !registered || !s.MayRead(h) || !s.MayWrite(h) {
				t.Fatalf("holder %d of %+v is not registered, or may not read and write", h[0], s)
			}
		}
		if s.MayWrite(h) && !s.MayRead(h) {
			t.Fatalf("host %d may write and not read: %+v", h[0], s)
		}
		if s.kind != None && !registered && s.MayWrite(h) {
			t.Fatalf("a stranger may write: %+v", s)
		}
	}
	if (s.kind == None) != (holders == 0) {
		t.Fatalf("%d holders of %+v", holders, s)
	}
	if s.kind != None && !s.kind.all() && holders != 1 {
		t.Fatalf("%d holders of %+v", holders, s)
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package reservation decides which host may do what to a namespace: NVM Express Base
// Specification 2.0, section 8.19. It is a pure state machine: no I/O, no clock, no lock.
//
//	            Register                Acquire
//	stranger ────────────▶ registrant ────────────▶ holder
//	    ▲   Unregister,        │  ▲      Release,       │
//	    └──── preempted, ◀─────┘  └─────── preempted ───┘
//	          cleared
//
// A namespace has one [State]. Hosts are told apart by their 128-bit host
// identifier. State is lost with the process (PTPL is not offered).
package reservation

import (
	"bytes"
	"errors"
	"slices"
)

// Host is a host identifier.
type Host [16]byte

// Type is the kind of a reservation (Base 2.0, figure "Reservation Type Encoding").
type Type uint8

// The types of reservations; None is the absence of one.
const (
	None Type = iota
	WriteExclusive
	ExclusiveAccess
	WriteExclusiveRegistrants
	ExclusiveAccessRegistrants
	WriteExclusiveAllRegistrants
	ExclusiveAccessAllRegistrants
)

// all reports whether every registrant holds a reservation of type t.
func (t Type) all() bool {
	return t == WriteExclusiveAllRegistrants || t == ExclusiveAccessAllRegistrants
}

// shared reports whether registrants may do what the holder may.
func (t Type) shared() bool { return t >= WriteExclusiveRegistrants }

// readsExcluded reports whether t also keeps other hosts from reading.
func (t Type) readsExcluded() bool {
	return t == ExclusiveAccess || t == ExclusiveAccessRegistrants || t == ExclusiveAccessAllRegistrants
}

func (t Type) valid() bool { return t >= WriteExclusive && t <= ExclusiveAccessAllRegistrants }

// The errors with which commands are refused.
var (
	ErrConflict = errors.New("reservation conflict")                   // Reservation Conflict, 83h
	ErrInvalid  = errors.New("invalid field in a reservation command") // Invalid Field in Command, 02h
)

// Registrant is a host with its key.
type Registrant struct {
	Host Host
	Key  uint64
}

// Event is an event reported to a registrant (Base 2.0, 5.16.1.22: reservation notification
// log page type).
type Event uint8

// The events.
const (
	RegistrationPreempted Event = iota + 1
	ReservationReleased
	ReservationPreempted
)

// Notice is an event for a host.
type Notice struct {
	Host  Host
	Event Event
}

// State is the registrants of a namespace and the holder of its reservation. The zero value
// has neither. It is not safe for concurrent use.
type State struct {
	generation  uint32
	kind        Type
	holder      Host         // unused if kind is None, or if all registrants hold it
	registrants []Registrant // in order of host
}

// Generation counts the changes (GEN of Reservation Report).
func (s *State) Generation() uint32 { return s.generation }

// Type is the type of the current reservation.
func (s *State) Type() Type { return s.kind }

// Registrants returns the registrants in order of host. The slice belongs to the State.
func (s *State) Registrants() []Registrant { return s.registrants }

// Idle reports that no host is registered, so that all hosts may do everything.
func (s *State) Idle() bool { return len(s.registrants) == 0 }

// Holds reports whether h holds the reservation.
func (s *State) Holds(h Host) bool {
	if s.kind.all() {
		_, ok := s.key(h)
		return ok
	}
	return s.kind != None && s.holder == h
}

// MayRead reports whether h may read, compare and verify.
func (s *State) MayRead(h Host) bool { return !s.kind.readsExcluded() || s.MayWrite(h) }

// MayWrite reports whether h may write, flush, zero and deallocate.
func (s *State) MayWrite(h Host) bool {
	if s.kind == None || s.Holds(h) {
		return true
	}
	_, registered := s.key(h)
	return s.kind.shared() && registered
}

// Register makes h a registrant. If h is one already, the same key changes nothing, and
// another key is ErrConflict: see Replace.
func (s *State) Register(h Host, key uint64) error {
	if key == 0 {
		return ErrInvalid
	}
	if old, ok := s.key(h); ok && old != key {
		return ErrConflict
	}
	s.set(h, key)
	s.generation++
	return nil
}

// Unregister ends h's registration; with ignore, whatever its key. A reservation that h
// held alone is released; one of all registrants is released with the last of them.
func (s *State) Unregister(h Host, key uint64, ignore bool) ([]Notice, error) {
	if old, ok := s.key(h); !ok || !ignore && old != key {
		return nil, ErrConflict
	}
	s.drop(h)
	s.generation++
	if s.kind == None || s.kind.all() && len(s.registrants) > 0 || !s.kind.all() && s.holder != h {
		return nil, nil
	}
	return s.releaseBy(h), nil
}

// Replace changes h's key. With ignore it also registers a host that is no registrant.
func (s *State) Replace(h Host, current, key uint64, ignore bool) error {
	if key == 0 {
		return ErrInvalid
	}
	if old, ok := s.key(h); !ignore && (!ok || old != current) {
		return ErrConflict
	}
	s.set(h, key)
	s.generation++
	return nil
}

// Acquire gives h the reservation if no host has it. If h already holds it with the same
// type, that is success.
func (s *State) Acquire(h Host, key uint64, t Type) error {
	if !t.valid() {
		return ErrInvalid
	}
	if !s.proves(h, key) {
		return ErrConflict
	}
	if s.kind != None {
		if s.kind == t && s.Holds(h) {
			return nil
		}
		return ErrConflict
	}
	s.kind, s.holder = t, h
	return nil
}

// Preempt unregisters every registrant whose key is victim. If that key is the
// holder's (or 0, for a reservation of all registrants), the reservation goes to
// h with type t, and h stays registered.
//
// gone lists the hosts that lost their registration. Preempt and Abort must end their
// outstanding commands.
//
// Branches: the cases that the specification (section 8.19) tells apart.
func (s *State) Preempt(h Host, key, victim uint64, t Type) (gone []Host, notices []Notice, err error) {
	if !t.valid() {
		return nil, nil, ErrInvalid
	}
	if !s.proves(h, key) {
		return nil, nil, ErrConflict
	}
	if s.kind.all() && victim == 0 {
		gone = s.expel(func(r Registrant) bool { return r.Host != h })
		return gone, s.takeover(h, t, gone), nil
	}
	if victim == 0 {
		return nil, nil, ErrInvalid
	}
	matches := func(r Registrant) bool { return r.Key == victim }
	if !slices.ContainsFunc(s.registrants, matches) {
		return nil, nil, ErrConflict
	}
	if held, ok := s.key(s.holder); s.kind != None && !s.kind.all() && ok && held == victim {
		gone = s.expel(func(r Registrant) bool { return matches(r) && r.Host != h })
		return gone, s.takeover(h, t, gone), nil
	}
	gone = s.expel(matches)
	s.generation++
	for _, g := range gone {
		if g != h {
			notices = append(notices, Notice{g, RegistrationPreempted})
		}
	}
	if s.kind.all() && len(s.registrants) == 0 {
		s.kind = None
	}
	return gone, notices, nil
}

// takeover gives the reservation to h after the hosts gone were expelled. It notifies those
// hosts and, if the type changes, also the others, whose reservation has ended.
func (s *State) takeover(h Host, t Type, gone []Host) (notices []Notice) {
	old := s.kind
	s.kind, s.holder = t, h
	s.generation++
	for _, g := range gone {
		notices = append(notices, Notice{g, RegistrationPreempted})
	}
	if old == t || !old.shared() {
		return notices
	}
	for _, r := range s.registrants {
		if r.Host != h {
			notices = append(notices, Notice{r.Host, ReservationReleased})
		}
	}
	return notices
}

// Release ends the reservation if h holds it; t must be its type. If h is a registrant but
// does not hold it, nothing happens.
func (s *State) Release(h Host, key uint64, t Type) ([]Notice, error) {
	if !s.proves(h, key) {
		return nil, ErrConflict
	}
	if !s.Holds(h) {
		return nil, nil
	}
	if s.kind != t {
		return nil, ErrInvalid
	}
	return s.releaseBy(h), nil
}

// Clear ends the reservation and all registrations.
func (s *State) Clear(h Host, key uint64) ([]Notice, error) {
	if !s.proves(h, key) {
		return nil, ErrConflict
	}
	var notices []Notice
	for _, r := range s.registrants {
		if r.Host != h {
			notices = append(notices, Notice{r.Host, ReservationPreempted})
		}
	}
	s.registrants, s.kind, s.holder = nil, None, Host{}
	s.generation++
	return notices, nil
}

// releaseBy ends the reservation and notifies the registrants that shared it.
func (s *State) releaseBy(h Host) (notices []Notice) {
	if s.kind.shared() {
		for _, r := range s.registrants {
			if r.Host != h {
				notices = append(notices, Notice{r.Host, ReservationReleased})
			}
		}
	}
	s.kind, s.holder = None, Host{}
	return notices
}

// proves reports whether h is a registrant and key is its key.
func (s *State) proves(h Host, key uint64) bool {
	old, ok := s.key(h)
	return ok && old == key
}

func (s *State) find(h Host) (int, bool) {
	return slices.BinarySearchFunc(s.registrants, h, func(r Registrant, h Host) int { return bytes.Compare(r.Host[:], h[:]) })
}

func (s *State) key(h Host) (uint64, bool) {
	i, ok := s.find(h)
	if !ok {
		return 0, false
	}
	return s.registrants[i].Key, true
}

func (s *State) set(h Host, key uint64) {
	i, ok := s.find(h)
	if !ok {
		s.registrants = slices.Insert(s.registrants, i, Registrant{Host: h})
	}
	s.registrants[i].Key = key
}

func (s *State) drop(h Host) {
	if i, ok := s.find(h); ok {
		s.registrants = slices.Delete(s.registrants, i, i+1)
	}
}

// expel ends the registrations selected by which and returns their hosts.
func (s *State) expel(which func(Registrant) bool) (gone []Host) {
	s.registrants = slices.DeleteFunc(s.registrants, func(r Registrant) bool {
		if !which(r) {
			return false
		}
		gone = append(gone, r.Host)
		return true
	})
	return gone
}

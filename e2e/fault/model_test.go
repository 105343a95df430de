// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/anishathalye/porcupine"
	"google.golang.org/grpc/codes"

	kept "weft.dev/weft/volmgr/cluster"
)

// This file holds what one manager that answers one call after the other may say of two volumes:
// the sequential specification against which histories of the API are checked.

// call is one attempt at a call, as it goes over the wire.
type call struct {
	kind   callKind
	volume int    // of the shelf; not for list and status
	size   uint64 // in MiB: to create, or to grow to
	label  int    // to set
	node   string // to attach to, or to detach from
}

type callKind int

const (
	callCreate callKind = iota
	callDelete
	callGrow
	callLabel
	callAttach
	callDetach
	callGet
	callList
	callStatus
)

func (k callKind) String() string {
	return [...]string{"create", "delete", "grow", "label", "attach", "detach", "get", "list", "status"}[k]
}

func (c call) reads() bool { return c.kind >= callGet }

func (c call) String() string {
	text := c.kind.String()
	if c.kind != callList && c.kind != callStatus {
		text += fmt.Sprintf(" %c", 'a'+c.volume)
	}
	switch c.kind {
	case callCreate, callGrow:
		text += fmt.Sprintf(" %dMiB", c.size)
	case callLabel:
		text += fmt.Sprintf(" %d", c.label)
	case callAttach, callDetach:
		text += " " + c.node
	}
	return text
}

// outcome is what the caller of an attempt knows.
type outcome int

const (
	done    outcome = iota
	refused         // nothing was changed
	unknown         // it may take effect at any time after it began, or never
)

// answer is what the caller of an attempt was told.
type answer struct {
	how    outcome
	reason string        // of a refusal
	shown  bool          // volume holds what the answer shows of the call's volume
	volume volume        // also of one that is not there, for get
	all    [shelf]volume // for list
	counts [2]int        // for status: volumes and attachments
	stale  bool          // of a manager that does not lead, which was asked for no more than that

	foreign string // a volume in a list that is none of the shelf's, or is there twice
}

func (a answer) String() string {
	switch {
	case a.how == unknown:
		return "no answer"
	case a.how == refused:
		return "refused: " + a.reason
	case a.shown:
		return a.volume.String()
	}
	return "done"
}

// shelf is how many volumes one history is about.
const shelf = 2

// volume is what a volume is; the zero volume is not there.
type volume struct {
	id        string // anyID as long as no answer has shown it
	size      uint64 // in MiB
	next      uint64 // the size that it grows to; size if it does not grow
	label     int    // the newest that was set; 0: none
	host      string // that has it; empty: none
	creating  bool
	leaving   bool // it is being deleted
	detaching bool // its host is asked to release it
}

const anyID = "?"

func (v volume) there() bool { return v.id != "" }

func (v volume) String() string {
	if !v.there() {
		return "none"
	}
	text := fmt.Sprintf("%.8s %d->%dMiB label %d", v.id, v.size, v.next, v.label)
	if v.host != "" {
		text += " on " + v.host
	}
	for what, is := range map[string]bool{" creating": v.creating, " leaving": v.leaving, " detaching": v.detaching} {
		if is {
			text += what
		}
	}
	return text
}

// settled lists what a volume can become by itself: targets and hosts carry out what was recorded.
func (v volume) settled() []volume {
	all := []volume{v}
	add := func(w volume) {
		if !slices.Contains(all, w) {
			all = append(all, w)
		}
	}
	for i := 0; i < len(all); i++ {
		w := all[i]
		if w.leaving {
			add(volume{})
		}
		if w.creating && !w.leaving {
			w.creating = false
			add(w)
		}
		if w.next != w.size {
			w.size = w.next
			add(w)
		}
		if w = all[i]; w.detaching {
			w.host, w.detaching = "", false
			add(w)
		}
	}
	return all
}

// after returns a volume after a call that was acknowledged; false if that call is refused.
func (v volume) after(c call) (volume, bool) {
	ready := v.there() && !v.creating && !v.leaving
	switch c.kind {
	case callCreate:
		if !v.there() {
			return volume{id: anyID, size: c.size, next: c.size, creating: true}, true
		}
		return v, !v.leaving && v.size == c.size && v.label == 0
	case callDelete:
		if !v.there() || v.leaving {
			return v, true
		}
		gone := v
		gone.leaving, gone.creating, gone.next = true, false, v.size
		return gone, v.host == ""
	case callGrow:
		grown := v
		if c.size > v.next {
			grown.next = c.size
		}
		return grown, ready && (c.size >= v.next || c.size == v.size)
	case callLabel:
		v.label = c.label
		return v, v.there()
	case callAttach:
		at := v
		at.host = c.node
		return at, ready && (v.host == "" || v.host == c.node && !v.detaching)
	case callDetach:
		v.detaching = v.detaching || v.host != "" && v.host == c.node
		return v, v.there()
	}
	return v, v.there()
}

// refuses reports whether a call may be refused for a reason.
func (v volume) refuses(c call, reason string) bool {
	_, may := v.after(c)
	switch reason {
	case codes.NotFound.String():
		return !v.there() && c.kind != callCreate && c.kind != callDelete
	case codes.AlreadyExists.String(): // with another size, or with labels
		return c.kind == callCreate && v.there() && !v.leaving && !may
	case codes.InvalidArgument.String():
		return c.kind == callGrow && c.size < v.next
	case kept.ReasonVolumeIsDeleting:
		return c.kind == callCreate && v.leaving
	case kept.ReasonAttached:
		return c.kind == callDelete && v.host != ""
	case kept.ReasonNotReady:
		return v.creating || v.leaving
	case kept.ReasonAttachedElse:
		return c.kind == callAttach && v.host != "" && v.host != c.node
	case kept.ReasonDetaching:
		return c.kind == callAttach && v.host == c.node && v.detaching
	}
	return may // but not now: no target answers, or there is no room
}

// shownAs returns a volume as it is if an answer shows it so; false if it is another.
func (v volume) shownAs(s volume) (volume, bool) {
	if v.id == anyID && s.there() {
		v.id = s.id
	}
	return v, v == s
}

// possible is what a volume may be, after what was answered: sorted, and each once.
type possible []volume

func (v volume) compare(w volume) int {
	order := func(a, b bool) int {
		switch {
		case a == b:
			return 0
		case b:
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(v.id, w.id), cmp.Compare(v.size, w.size), cmp.Compare(v.next, w.next), cmp.Compare(v.label, w.label),
		cmp.Compare(v.host, w.host), order(v.creating, w.creating), order(v.leaving, w.leaving), order(v.detaching, w.detaching))
}

// settled is what a volume may be after any time.
func (p possible) settled() (all possible) {
	for _, v := range p {
		all = append(all, v.settled()...)
	}
	return all.sorted()
}

func (p possible) sorted() possible {
	slices.SortFunc(p, volume.compare)
	return slices.Compact(p)
}

// step returns what a volume may be after a call, given what was answered; nothing if the answer
// cannot be.
func (p possible) step(c call, a answer) (all possible) {
	for _, v := range p.settled() {
		next, may := v.after(c)
		switch {
		case a.how == refused && v.refuses(c, a.reason):
			all = append(all, v)
		case a.how == unknown && may:
			all = append(all, v, next)
		case a.how == unknown:
			all = append(all, v)
		case a.how == done && may && a.shown:
			if shown, as := next.shownAs(a.volume); as {
				all = append(all, shown)
			}
		case a.how == done && may:
			all = append(all, next)
		}
	}
	return all.sorted()
}

// volumes is what the volumes of a shelf may be. That of one does not depend on that of another, but
// for a status, which counts them: it leaves all that it allows of each.
type volumes [shelf]possible

func (was volumes) step(c call, a answer) (next volumes, ok bool) {
	next = was
	switch c.kind {
	case callList:
		for i, p := range was {
			next[i] = p.step(call{kind: callGet, volume: i}, answer{shown: true, volume: a.all[i]})
			if !a.all[i].there() {
				next[i] = p.step(call{kind: callGet, volume: i}, answer{how: refused, reason: codes.NotFound.String()})
			}
		}
	case callStatus:
		next[0], next[1] = was[0].settled().counted(was[1].settled(), a.counts), was[1].settled().counted(was[0].settled(), a.counts)
	default:
		next[c.volume] = was[c.volume].step(c, a)
	}
	return next, !slices.ContainsFunc(next[:], func(p possible) bool { return len(p) == 0 })
}

// counted is what a volume may be if, with another one, there are so many volumes and attachments.
func (p possible) counted(other possible, counts [2]int) (all possible) {
	for _, v := range p {
		if slices.ContainsFunc(other, func(w volume) bool { return v.counts(w) == counts }) {
			all = append(all, v)
		}
	}
	return all
}

func (v volume) counts(w volume) (n [2]int) {
	for _, one := range []volume{v, w} {
		if one.there() {
			n[0]++
		}
		if one.host != "" {
			n[1]++
		}
	}
	return n
}

var modelSeed = maphash.MakeSeed()

// model is the specification for package porcupine.
var model = porcupine.Model{
	Init: func() any { return volumes{{{}}, {{}}} },
	Step: func(state, input, output any) (bool, any) {
		next, ok := state.(volumes).step(input.(call), output.(answer))
		return ok, next
	},
	Equal: func(a, b any) bool {
		x, y := a.(volumes), b.(volumes)
		return slices.Equal(x[0], y[0]) && slices.Equal(x[1], y[1])
	},
	Hash: func(state any) (sum uint64) {
		for i, p := range state.(volumes) {
			for _, v := range p {
				sum ^= maphash.Comparable(modelSeed, v) * uint64(2*i+1)
			}
		}
		return sum
	},
}

// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"weft.dev/weft/proto/block"
)

// Nvmet keeps the controller of a host that connects again through another portal. A write that was delayed
// there could then land after its retry on the new connection, and undo a newer one. So before a host connects
// through another portal, it asks that its export be replaced: the old one is unlinked, drained and removed, as
// for a fence, and made again under its old name. What arrives on the old connections finds no namespace any
// more.
//
// Nvmet gives controllers of both exports ids out of one set, and a host refuses to connect if it still has
// another controller with the id that it is given. So the new export has another range of ids. That is also how
// it is told from the old one, by Diff and after a restart of the agent.

// ControllerIDs is the range of ids that a subsystem gives to controllers.
type ControllerIDs struct{ Min, Max uint16 }

// The ranges of exports that have taken the place of another one.
var (
	LowIDs  = ControllerIDs{DefaultCntlidMin, DefaultCntlidMax / 2}
	HighIDs = ControllerIDs{DefaultCntlidMax/2 + 1, DefaultCntlidMax}
)

// IDs is the range of a subsystem's controllers.
func (s Subsystem) IDs() ControllerIDs { return ControllerIDs{s.CntlidMin, s.CntlidMax} }

// Successor reports whether it is the range of an export that has taken the place of another one.
func (c ControllerIDs) Successor() bool { return c == LowIDs || c == HighIDs }

// next is the range of an export that takes the place of one with this range.
func (c ControllerIDs) next() ControllerIDs {
	if c == HighIDs {
		return LowIDs
	}
	return HighIDs
}

// Why an export is not replaced; errors of Ask wrap them.
var (
	ErrNotExported = errors.New("it is not exported")
	ErrNotReady    = errors.New("what it exports could not be exported again now")
)

// Replacements are the exports that hosts have asked to be replaced. Its methods may be called concurrently.
type Replacements struct {
	wake func()

	mu    sync.Mutex
	asked map[block.NQN]*replacement
}

// replacement is the replacement of one export.
type replacement struct {
	next    ControllerIDs // zero: it has not begun
	linked  bool          // a host may have connected to the successor
	waiting []chan error
	later   []chan error // they have asked since then, and want another one
}

// NewReplacements returns an empty set. It calls wake, which must not block, when there is something to do:
// Begin, what Diff says, and Settle.
func NewReplacements(wake func()) *Replacements {
	return &Replacements{wake: wake, asked: map[block.NQN]*replacement{}}
}

// Ask has an export replaced, and waits until it is. If ctx ends first, one that has begun goes on, and no other
// one begins: by then the host may have connected in another way.
func (r *Replacements) Ask(ctx context.Context, n block.NQN) error {
	told := make(chan error, 1)
	r.mu.Lock()
	x := r.asked[n]
	switch {
	case x == nil:
		r.asked[n] = &replacement{waiting: []chan error{told}}
	case x.linked:
		x.later = append(x.later, told)
	default:
		x.waiting = append(x.waiting, told)
	}
	r.mu.Unlock()
	r.wake()
	var err error
	select {
	case err = <-told:
	case <-ctx.Done():
		err = context.Cause(ctx)
		r.leave(n, told)
	}
	if err != nil {
		return fmt.Errorf("replace export %s: %w", n, err)
	}
	return nil
}

// leave forgets somebody who waits for a replacement, and with the last one a replacement that has not begun.
func (r *Replacements) leave(n block.NQN, told chan error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x := r.asked[n]
	if x == nil {
		return
	}
	is := func(other chan error) bool { return other == told }
	x.waiting, x.later = slices.DeleteFunc(x.waiting, is), slices.DeleteFunc(x.later, is)
	if x.next == (ControllerIDs{}) && len(x.waiting) == 0 {
		delete(r.asked, n)
	}
}

// Begin begins what was asked for, given what is exported, and returns the new controller ids of all exports that
// are being replaced.
func (r *Replacements) Begin(exports Config) map[block.NQN]ControllerIDs {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[block.NQN]ControllerIDs{}
	for n, x := range maps.Clone(r.asked) {
		if x.next == (ControllerIDs{}) {
			old, exists := exports.Subsystem(n)
			if !exists {
				r.endLocked(n, ErrNotExported)
				continue
			}
			x.next = old.IDs().next()
		}
		all[n] = x.next
	}
	return all
}

// None reports whether nothing is being replaced.
func (r *Replacements) None() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.asked) == 0
}

// Settle tells the hosts whose exports have been replaced. Left are the steps from got to want, which are about to
// be carried out. One portal is enough: another one may be in trouble.
func (r *Replacements) Settle(got, want Config, left []Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, x := range maps.Clone(r.asked) {
		planned, wanted := want.Subsystem(n)
		made, exists := got.Subsystem(n)
		switch {
		case x.next == ControllerIDs{}:
		case !wanted:
			r.endLocked(n, ErrNotExported)
		case planned.IDs() != x.next:
			r.endLocked(n, ErrNotReady)
		case exists && made.IDs() == x.next && got.Linked(n) && made.hasAll(planned) && !touched(left, n):
			r.endLocked(n, nil)
		default:
			x.linked = x.linked || exists && made.IDs() == x.next && got.Linked(n) || links(left, n)
		}
	}
}

// hasAll reports whether a subsystem has all namespaces that it should have.
func (s Subsystem) hasAll(planned Subsystem) bool {
	return !slices.ContainsFunc(planned.Namespaces, func(ns Namespace) bool { return !slices.Contains(s.Namespaces, ns) })
}

// touched reports whether one of the steps changes a subsystem, apart from links to it.
func touched(steps []Step, n block.NQN) bool {
	return slices.ContainsFunc(steps, func(s Step) bool { return s.Object == subsystemPath(n) && !s.Alone })
}

// links reports whether one of the steps links a subsystem to a port.
func links(steps []Step, n block.NQN) bool {
	return slices.ContainsFunc(steps, func(s Step) bool { return s.Object == subsystemPath(n) && s.Alone })
}

// endLocked tells those who wait for a replacement, and goes on to the next one.
func (r *Replacements) endLocked(n block.NQN, err error) {
	x := r.asked[n]
	for _, told := range x.waiting {
		told <- err
	}
	delete(r.asked, n)
	if len(x.later) > 0 {
		r.asked[n] = &replacement{waiting: x.later}
		r.wake()
	}
}

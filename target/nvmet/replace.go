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
//
// The successor can also be the other part's of the node: an export in the kernel gives way to one of the agent's
// process, or the reverse. Then it begins once that is wanted of the agent too, and the host connects to the other
// part.

// ControllerIDs is the range of ids that a subsystem gives to controllers.
type ControllerIDs struct{ Min, Max uint16 }

// The ranges of exports that have taken the place of another one. An export that comes from the process has MidIDs: that
// of the process may have had HighIDs, or, after a restart of the agent, all; then it gives out the lowest first.
var (
	LowIDs  = ControllerIDs{DefaultCntlidMin, DefaultCntlidMax / 2}
	MidIDs  = ControllerIDs{DefaultCntlidMax/4 + 1, DefaultCntlidMax / 2}
	HighIDs = ControllerIDs{DefaultCntlidMax/2 + 1, DefaultCntlidMax}
)

// IDs is the range of a subsystem's controllers.
func (s Subsystem) IDs() ControllerIDs { return ControllerIDs{s.CntlidMin, s.CntlidMax} }

// Successor reports whether it is the range of an export that has taken the place of another one.
func (c ControllerIDs) Successor() bool { return c == LowIDs || c == MidIDs || c == HighIDs }

// next is the range of an export that takes the place of one with this range.
func (c ControllerIDs) next(by block.ServedBy) ControllerIDs {
	switch {
	case by == block.InKernel:
		return MidIDs
	case c == HighIDs && by == block.SamePart:
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
	asked map[successor]*replacement
}

// successor is an export and the part that is to serve it.
type successor struct {
	nqn block.NQN
	by  block.ServedBy
}

// Replacing is a replacement that has begun.
type Replacing struct {
	IDs ControllerIDs // of the successor
	By  block.ServedBy
}

// Parts says which part of the node has an export, and which is to have it. Both are SamePart where there is only
// one part, or the export is unknown.
type Parts func(block.NQN) (has, wanted block.ServedBy)

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
	return &Replacements{wake: wake, asked: map[successor]*replacement{}}
}

// Ask has an export replaced, and waits until it is. If ctx ends first, one that has begun goes on, and no other
// one begins: by then the host may have connected in another way.
func (r *Replacements) Ask(ctx context.Context, n block.NQN, by block.ServedBy) error {
	told := make(chan error, 1)
	to := successor{n, by}
	r.mu.Lock()
	x := r.asked[to]
	switch {
	case x == nil:
		r.asked[to] = &replacement{waiting: []chan error{told}}
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
		r.leave(to, told)
	}
	if err != nil {
		return fmt.Errorf("replace export %s: %w", n, err)
	}
	return nil
}

// leave forgets somebody who waits for a replacement, and with the last one a replacement that has not begun.
func (r *Replacements) leave(to successor, told chan error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x := r.asked[to]
	if x == nil {
		return
	}
	is := func(other chan error) bool { return other == told }
	x.waiting, x.later = slices.DeleteFunc(x.waiting, is), slices.DeleteFunc(x.later, is)
	if !x.begun() && len(x.waiting) == 0 {
		delete(r.asked, to)
	}
}

// Begin begins what was asked for, given what is exported and by which part, and returns all replacements that are
// under way. Of one export there is one at a time.
func (r *Replacements) Begin(exports Config, parts Parts) map[block.NQN]Replacing {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[block.NQN]Replacing{}
	for to, x := range r.asked {
		if x.begun() {
			all[to.nqn] = Replacing{x.next, to.by}
		}
	}
	for to, x := range maps.Clone(r.asked) {
		old, exists := exports.Subsystem(to.nqn)
		has, wanted := parts(to.nqn)
		_, under := all[to.nqn]
		switch {
		case under:
		case !exists:
			r.endLocked(to, ErrNotExported)
		case to.by != block.SamePart && wanted != to.by: // not yet, or not any more
		case to.by != block.SamePart && has == to.by:
			r.endLocked(to, nil) // it has changed hands before
		default:
			x.next = old.IDs().next(to.by)
			all[to.nqn] = Replacing{x.next, to.by}
		}
	}
	return all
}

func (x *replacement) begun() bool { return x.next != ControllerIDs{} }

// None reports whether nothing is being replaced.
func (r *Replacements) None() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.asked) == 0
}

// Settle tells the hosts whose exports have been replaced. Left are the steps from got to want, which are about to
// be carried out; undecided are exports that change hands and are not there in the other part yet. One portal is
// enough: another one may be in trouble.
func (r *Replacements) Settle(got, want Config, left []Step, undecided map[block.NQN]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for to, x := range maps.Clone(r.asked) {
		n := to.nqn
		planned, wanted := want.Subsystem(n)
		made, exists := got.Subsystem(n)
		switch {
		case !x.begun() || undecided[n]:
		case !wanted:
			r.endLocked(to, ErrNotExported)
		case planned.IDs() != x.next:
			r.endLocked(to, ErrNotReady)
		case exists && made.IDs() == x.next && got.Linked(n) && made.hasAll(planned) && !touched(left, n):
			r.endLocked(to, nil)
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
func (r *Replacements) endLocked(to successor, err error) {
	x := r.asked[to]
	for _, told := range x.waiting {
		told <- err
	}
	delete(r.asked, to)
	if len(x.later) > 0 {
		r.asked[to] = &replacement{waiting: x.later}
		r.wake()
	}
}

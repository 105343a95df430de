// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// Facts are what a plan is made from, as the managers tell it.
type Facts struct {
	To       string // the version that everything is to run
	Upgrade  *pb.Upgrade
	Managers []*pb.ManagerMember
	Nodes    []*pb.Node
	Volumes  []*pb.Volume
}

// Plan is the way to a version: one step for each manager and each agent, in order.
type Plan struct {
	To     string `json:"to"`
	Level  uint32 `json:"level"`  // the cluster's
	Newest uint32 `json:"newest"` // the newest that the manager that leads knows
	Steps  []Step `json:"steps"`
}

// Step is the upgrade of one manager or agent.
type Step struct {
	Kind    string   `json:"kind"`    // "manager", "target" or "initiator"
	Name    string   `json:"name"`    // a manager's id, or the agent's node
	Address string   `json:"address"` // of a manager
	Runs    string   `json:"runs"`    // the version that it was last seen with; empty: not known
	State   State    `json:"state"`
	Does    []string `json:"does"`   // what it takes, in order
	Blocks  []string `json:"blocks"` // why it must not begin now; empty: it may
	Leads   bool     `json:"leads"`  // of a manager
	// Of a manager that leads: the one that it hands over to, which is upgraded; empty: there is none.
	Successor string `json:"successor"`
	// Of a target: its next process takes over from it, and no leg is left out meanwhile.
	Reloads bool `json:"reloads"`
}

// State is how far a step is.
type State string

// The states. At most one step is next: the others wait for it.
const (
	Done     State = "done"
	UnderWay State = "under way" // it is away, or about to be
	Next     State = "next"
	Later    State = "later"
)

// Kinds of parts, as in UpgradePart.
const (
	manager   = "manager"
	target    = "target"
	initiator = "initiator"
)

// Make plans an upgrade. The order is: managers, the one that leads last; targets; initiators. Where
// hosts share a volume, managers come last, since their agents must understand a grant first
// (docs/compatibility.md). A step that is under way goes on before another one begins.
func Make(f Facts) Plan {
	p := Plan{To: f.To, Level: f.Upgrade.GetLevel(), Newest: f.Upgrade.GetNewest()}
	for _, part := range f.Upgrade.GetParts() {
		p.Steps = append(p.Steps, f.step(part))
	}
	order := []string{manager, target, initiator}
	if slices.ContainsFunc(f.Volumes, func(v *pb.Volume) bool { return len(v.GetAttachments()) > 1 }) {
		order = []string{target, initiator, manager}
	}
	slices.SortStableFunc(p.Steps, func(a, b Step) int {
		return cmp.Or(cmp.Compare(slices.Index(order, a.Kind), slices.Index(order, b.Kind)), compareBool(a.Leads, b.Leads), cmp.Compare(a.Address, b.Address), cmp.Compare(a.Name, b.Name))
	})
	for _, state := range []State{UnderWay, Later} {
		if i := slices.IndexFunc(p.Steps, func(s Step) bool { return s.State == state }); i >= 0 {
			if state == Later {
				p.Steps[i].State = Next
			}
			break
		}
	}
	return p
}

// compareBool puts false first.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// Next is the step to take: the one that is under way, else the first that is not done. It is nil if
// all are done.
func (p Plan) Next() *Step {
	for _, state := range []State{UnderWay, Next} {
		for i := range p.Steps {
			if p.Steps[i].State == state {
				return &p.Steps[i]
			}
		}
	}
	return nil
}

// Find returns the step of a part; nil if the part is gone.
func (p Plan) Find(kind, name string) *Step {
	for i := range p.Steps {
		if p.Steps[i].Kind == kind && p.Steps[i].Name == name {
			return &p.Steps[i]
		}
	}
	return nil
}

func (s *Step) isDone() bool { return s != nil && s.State == Done }

// Count is how many parts run the version.
func (p Plan) Count() (n int) {
	for _, s := range p.Steps {
		if s.State == Done {
			n++
		}
	}
	return n
}

// step describes the step of one part.
func (f Facts) step(part *pb.UpgradePart) Step {
	s := Step{Kind: part.GetKind(), Name: part.GetName(), Runs: part.GetVersion(), State: Later}
	switch s.Kind {
	case manager:
		f.ofManager(&s)
	case target:
		f.ofTarget(&s, part.GetHandsOver())
	default:
		f.ofInitiator(&s)
	}
	if s.State == Done {
		s.Does, s.Blocks = nil, nil
	}
	return s
}

// ofManager says what the upgrade of a manager takes. Most of those that vote have to answer meanwhile.
func (f Facts) ofManager(s *Step) {
	voters, answer := 0, 0
	away := ""
	for _, m := range f.Managers {
		if m.GetVoter() {
			voters++
			if m.GetProblem() == "" {
				answer++
			}
		}
		if m.GetId() == s.Name {
			s.Address, s.Leads, away = m.GetAddress(), m.GetLeader(), m.GetProblem()
		} else if m.GetVoter() && m.GetProblem() == "" && f.runs(manager, m.GetId()) == f.To {
			s.Successor = cmp.Or(s.Successor, m.GetId())
		}
	}
	switch {
	case away != "":
		s.State = UnderWay
	case s.Runs == f.To:
		s.State = Done
	case voters > 1 && answer-1 < voters/2+1:
		s.Blocks = append(s.Blocks, fmt.Sprintf("without manager %s, too few managers would answer to decide anything: %d of %d that vote answer", s.Name, answer, voters))
	}
	if !s.Leads {
		s.Successor = ""
	}
	switch {
	case s.Successor != "":
		s.Does = append(s.Does, "it hands over to manager "+s.Successor)
	case voters < 2:
		s.Does = append(s.Does, "volumes go on; attach, detach and rebuild wait until it is back")
	}
	s.Does = append(s.Does, f.install(*s), "it is back with "+f.To)
}

// ofTarget says what the upgrade of a target takes: nothing may depend on its legs alone, and no
// other node may be away.
func (f Facts) ofTarget(s *Step, handsOver bool) {
	n := f.node(s.Name)
	switch online := n.GetTarget().GetOnline(); {
	case !online || n.GetMaintainedUntil() != nil && s.Runs != f.To:
		s.State = UnderWay
	case s.Runs == f.To:
		s.State = Done
	}
	s.Reloads = handsOver && s.State == Later
	s.Blocks = append(f.away(s.Name), f.copies(s)...)
	if s.Reloads {
		s.Does = []string{f.install(*s), fmt.Sprintf("its next process takes over with %s; hosts keep its legs, and I/O waits for a moment", f.To)}
		return
	}
	s.Does = []string{"maintenance: hosts leave its legs out first, and no I/O waits for them", f.install(*s), fmt.Sprintf("it is back with %s, its maintenance ends, and its legs are in sync again", f.To)}
}

// ofInitiator says what the upgrade of an initiator takes. A leg that fails meanwhile waits for it.
func (f Facts) ofInitiator(s *Step) {
	n := f.node(s.Name)
	switch online := n.GetInitiator().GetOnline(); {
	case !online:
		s.State = UnderWay
	case s.Runs == f.To:
		s.State = Done
	}
	s.Blocks = append(f.away(""), f.copies(s)...)
	var uses []string
	for _, v := range f.Volumes {
		if usedOn(v, s.Name) {
			uses = append(uses, v.GetName())
		}
	}
	if len(uses) > 0 {
		s.Does = append(s.Does, "in user space the I/O of its devices waits for the next agent, so unmount those that cannot wait ("+some(uses)+"); in the kernel they go on")
	}
	s.Does = append(s.Does, f.install(*s), "it is back with "+f.To)
}

func (f Facts) install(s Step) string {
	where, service, verb := s.Name, s.Kind, "restart"
	if s.Kind == manager {
		where, service = "the machine of manager "+s.title(), "volmgr"
	}
	if s.Reloads {
		verb = "reload"
	}
	return fmt.Sprintf("you install %s on %s, and there: systemctl %s weft-%s", f.To, where, verb, service)
}

// away lists the targets other than one that are offline or under maintenance. Those of machines that
// an operator has confirmed to be off have no legs that anything depends on.
func (f Facts) away(but string) (all []string) {
	for _, n := range f.Nodes {
		t := n.GetTarget()
		switch {
		case n.GetName() == but || !t.GetKnown() || n.GetConfirmedDead():
		case n.GetMaintainedUntil() != nil:
			all = append(all, fmt.Sprintf("node %s is under maintenance until %s", n.GetName(), n.GetMaintainedUntil().AsTime().UTC().Format(time.RFC3339)))
		case !t.GetOnline():
			all = append(all, fmt.Sprintf("target %s is offline", n.GetName()))
		}
	}
	return all
}

// copies lists what speaks against a step among the copies of volumes: columns with one copy in sync
// that are to have more, legs that are not in sync, and volumes of one copy whose I/O would wait. What
// is away with a target that is being upgraded is no reason not to go on with it.
func (f Facts) copies(s *Step) (all []string) {
	for _, v := range f.Volumes {
		if v.GetState() == pb.VolumeState_VOLUME_STATE_DELETING {
			continue
		}
		one := v.GetLayout().GetCopies() == 1
		for column := range v.GetLayout().GetStripes() {
			legs := columnOf(v, column)
			in, out := split(legs)
			if one {
				if s.Kind == target && !s.Reloads && v.GetAttachment() != nil && slices.ContainsFunc(in, func(l *pb.Leg) bool { return l.GetNode() == s.Name }) {
					all = append(all, fmt.Sprintf("volume %s has a single copy on %s, and %s uses it: its I/O waits meanwhile", v.GetName(), s.Name, v.GetAttachment().GetNode()))
				}
				continue
			}
			if s.Kind == target && s.State == UnderWay {
				out = slices.DeleteFunc(out, func(l *pb.Leg) bool { return l.GetNode() == s.Name })
			}
			if len(out) == 0 {
				continue
			}
			text := fmt.Sprintf("leg %d.%d of volume %s on %s is %s", column, out[0].GetCopy(), v.GetName(), out[0].GetNode(), pb.Word(out[0].GetState()))
			if len(in) < 2 {
				text = fmt.Sprintf("column %d of volume %s has one copy in sync: %s", column, v.GetName(), text)
			}
			if v.GetAttachment() == nil && v.GetState() == pb.VolumeState_VOLUME_STATE_READY {
				text += "; a host copies it while the volume is detached, unless that is switched off, or once it is attached"
			}
			all = append(all, text)
		}
	}
	return all
}

// Waits says what a step that has begun still waits for, with these facts; empty: it is complete.
func (f Facts) Waits(s Step) string {
	switch s = f.step(f.part(s)); {
	case s.State == Done && s.Kind == target:
		if f.node(s.Name).GetMaintainedUntil() != nil {
			return fmt.Sprintf("the end of the maintenance of %s", s.Name)
		}
		for _, v := range f.Volumes {
			for _, l := range v.GetLegs() {
				if l.GetNode() == s.Name && v.GetAttachment() != nil && (l.GetState() == pb.LegState_LEG_STATE_STALE || l.GetState() == pb.LegState_LEG_STATE_REBUILDING) {
					return fmt.Sprintf("leg %d.%d of volume %s on %s, which is %s", l.GetColumn(), l.GetCopy(), v.GetName(), s.Name, pb.Word(l.GetState()))
				}
			}
		}
		return ""
	case s.State == Done:
		return ""
	case s.State == UnderWay && !f.answers(s):
		return fmt.Sprintf("%s %s, which is away, to be back with %s", s.Kind, s.Name, f.To)
	}
	return fmt.Sprintf("%s %s to be back with %s (it runs %s)", s.Kind, s.Name, f.To, cmp.Or(s.Runs, "a version that is not known"))
}

// answers reports whether the part of a step is there.
func (f Facts) answers(s Step) bool {
	switch s.Kind {
	case target:
		return f.node(s.Name).GetTarget().GetOnline()
	case initiator:
		return f.node(s.Name).GetInitiator().GetOnline()
	}
	for _, m := range f.Managers {
		if m.GetId() == s.Name {
			return m.GetProblem() == ""
		}
	}
	return true // it is the only one, and has said so
}

// part returns what is known now of a step's part.
func (f Facts) part(s Step) *pb.UpgradePart {
	for _, p := range f.Upgrade.GetParts() {
		if p.GetKind() == s.Kind && p.GetName() == s.Name {
			return p
		}
	}
	return &pb.UpgradePart{Kind: s.Kind, Name: s.Name}
}

func (f Facts) runs(kind, name string) string {
	return f.part(Step{Kind: kind, Name: name}).GetVersion()
}

func (f Facts) node(name string) *pb.Node {
	for _, n := range f.Nodes {
		if n.GetName() == name {
			return n
		}
	}
	return nil
}

// columnOf returns the legs of a column that are not about to go.
func columnOf(v *pb.Volume, column uint32) (legs []*pb.Leg) {
	for _, l := range v.GetLegs() {
		if l.GetColumn() == column && l.GetState() != pb.LegState_LEG_STATE_DELETING {
			legs = append(legs, l)
		}
	}
	return legs
}

// split divides legs into those in sync and the others.
func split(legs []*pb.Leg) (in, out []*pb.Leg) {
	for _, l := range legs {
		if l.GetState() == pb.LegState_LEG_STATE_IN_SYNC {
			in = append(in, l)
		} else {
			out = append(out, l)
		}
	}
	return in, out
}

// some joins the first of many names.
func some(names []string) string {
	const most = 8
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

func usedOn(v *pb.Volume, node string) bool {
	return slices.ContainsFunc(cli.AttachmentsOf(v), func(a *pb.Attachment) bool { return a.GetNode() == node })
}

// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
)

// manager is a volume manager at one moment: the real state machine, and the time that it has.
type manager struct {
	state *cluster.State
	now   time.Time
	facts
}

// facts are what the manager's records say of the volume.
type facts struct {
	epoch    block.Epoch
	granted  int8 // the host that may have the volume; -1: none
	state    cluster.AttachmentState
	holder   int8            // the host whose attachment it is, granted or not; -1: none
	inSync   uint8           // legs that hold every acknowledged write
	suspect  uint8           // of those, legs that may have lost a cache
	exported uint8           // legs that a host may be using
	revision [targets]uint64 // of the legs
	clean    bool
}

// asked is one input of the manager.
type asked struct {
	manager int32
	kind    askedKind
	node    int8
	arg     int32
}

type askedKind int8

const (
	targetSays askedKind = iota
	hostSays
	targetLost
	hostLost
	hostCalls
	operatorAttaches
	operatorDetaches
	operatorForces
	timePasses // arg: the agents that are linked
	restarts
)

// decided is the outcome of an input.
type decided struct {
	manager int32
	wake    uint8 // agents whose wanted state may have changed
	refused bool
}

// agentBit is the bit of an agent in a mask of agents: targets come first.
func targetBit(i int) uint8 { return 1 << i }
func hostBit(h int) uint8   { return 1 << (targets + h) }

// ask gives the manager an input. Equal inputs to equal managers are computed once.
func (r *rig) ask(a asked) decided {
	if d, known := r.decisions[a]; known {
		return d
	}
	m := r.managers.at(a.manager)
	s, now := m.state.Copy(), m.now
	d := decided{}
	step := func(in cluster.Input) {
		out, err := s.Step(now, in)
		d.refused = d.refused || err != nil
		for _, n := range out.Wake {
			d.wake |= r.bit(n)
		}
	}
	switch a.kind {
	case targetSays:
		step(cluster.TargetReported{Session: 1, Report: r.targetReports.at(a.arg)})
	case hostSays:
		step(cluster.InitiatorReported{Session: 1, Report: r.hostReports.at(a.arg)})
	case targetLost:
		step(cluster.TargetLost{Session: 1, Node: targetName(int(a.node))})
	case hostLost:
		step(cluster.InitiatorLost{Session: 1, Node: hostName(int(a.node))})
	case hostCalls:
		step(r.calls.at(a.arg).input)
	case operatorAttaches:
		step(cluster.Attach{Volume: volumeName, Node: hostName(int(a.node))})
	case operatorDetaches:
		step(cluster.Detach{Volume: volumeName})
	case operatorForces:
		step(cluster.Detach{Volume: volumeName, Force: true})
	case timePasses:
		now = now.Add(tick)
		r.repeat(step, uint8(a.arg))
		step(cluster.Tick{})
	case restarts:
		s = r.reload(s)
		step(cluster.BeginTerm{})
	}
	d.manager = r.manager(s, now)
	r.decisions[a] = d
	return d
}

// repeat has the linked agents say that they are still there.
func (r *rig) repeat(step func(cluster.Input), linked uint8) {
	for i := range r.Copies {
		if linked&targetBit(i) != 0 {
			step(cluster.TargetRepeated{Session: 1, Node: targetName(i)})
		}
	}
	for h := range r.Hosts {
		if linked&hostBit(h) != 0 {
			step(cluster.InitiatorRepeated{Session: 1, Node: hostName(h)})
		}
	}
}

// reload starts a manager on the records of another.
func (r *rig) reload(s *cluster.State) *cluster.State {
	loaded, err := cluster.Load(s.Records())
	if err != nil {
		panic(fmt.Sprintf("explore: load the records of a manager: %v", err))
	}
	return loaded
}

func (r *rig) bit(n block.NodeName) uint8 {
	for i := range r.Copies {
		if n == targetName(i) {
			return targetBit(i)
		}
	}
	for h := range r.Hosts {
		if n == hostName(h) {
			return hostBit(h)
		}
	}
	return 0
}

// manager numbers a manager.
func (r *rig) manager(s *cluster.State, now time.Time) int32 {
	return r.managers.number(encode(now, s), &manager{state: s, now: now, facts: r.factsOf(s)})
}

func (r *rig) factsOf(s *cluster.State) facts {
	f := facts{granted: -1, holder: -1}
	v, err := s.Volume(volumeName)
	if err != nil {
		return f // the rig is being set up
	}
	f.epoch, f.clean = v.Epoch, v.Clean
	for _, l := range v.Legs {
		i := r.targetOf(l.Node)
		f.revision[i] = l.Revision
		if l.State == cluster.LegInSync {
			f.inSync |= 1 << i
		}
		if l.Suspect {
			f.suspect |= 1 << i
		}
		if l.State == cluster.LegInSync && !l.Suspect || l.State == cluster.LegRebuilding {
			f.exported |= 1 << i
		}
	}
	if a := v.Attachment; a != nil {
		f.holder, f.state = r.hostOf(a.Node), a.State
		if a.State != cluster.Granting {
			f.granted = f.holder
		}
	}
	return f
}

func (r *rig) targetOf(n block.NodeName) int { return int(n[1] - '1') }

func (r *rig) hostOf(n block.NodeName) int8 { return int8(n[1] - '1') }

// waits lists what the manager says that the volume waits for.
func (m *manager) waits() []string {
	e, err := m.state.Explain(volumeName)
	if err != nil {
		return nil
	}
	return append(e.Waits, e.Actions...)
}

func (f facts) String() string {
	who := "detached"
	if f.holder >= 0 {
		who = string(hostName(int(f.holder))) + " " + strings.ToLower(string(f.state))
	}
	return fmt.Sprintf("epoch %d, %s, in sync%s", f.epoch, who, copies(f.inSync&^f.suspect))
}

func copies(mask uint8) (s string) {
	for i := range targets {
		if mask&(1<<i) != 0 {
			s += fmt.Sprintf(" t%d", i+1)
		}
	}
	return s
}

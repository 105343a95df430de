// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
)

// The bounds of every configuration.
const (
	targets = 3
	hosts   = 2
)

// Time passes in ticks. A host's window of 2 s passes in one, its lease of 8 s in three, the
// manager's of 10 s in four. Older than oldest is all the same to it.
const (
	tick   = 3 * time.Second
	oldest = 12 * time.Second
)

const (
	volumeName = "v"
	volumeSize = block.GiB
)

var clusterID = block.ClusterID{UUID: block.UUIDFromRandom([16]byte{0xce})}

// Config describes a cluster to explore: its size, and how often each event may happen. Events
// that are not listed may happen any number of times: agents find the manager again, machines
// start, links heal, and time passes while nothing else is left to do.
type Config struct {
	Name   string `json:",omitempty"`
	Copies int    `json:",omitempty"`
	Hosts  int    `json:",omitempty"`
	Cached bool   `json:",omitempty"` // drives have volatile caches

	Writes   int `json:",omitempty"` // by users
	Attaches int `json:",omitempty"` // by an operator
	Detaches int `json:",omitempty"`
	Forces   int `json:",omitempty"` // forced detaches
	Cuts     int `json:",omitempty"` // of a link between a host and a target
	Partings int `json:",omitempty"` // of an agent from the manager
	Crashes  int `json:",omitempty"` // of a target's machine
	Deaths   int `json:",omitempty"` // of a host's process
	Restarts int `json:",omitempty"` // of the manager
	// Lates bounds the messages, and turns of hosts, that come later than what follows. If it is
	// negative, there is no bound: all interleavings are visited.
	Lates      int `json:",omitempty"`
	Slownesses int `json:",omitempty"` // ticks that pass while something could still be done
}

// rig holds the values that worlds refer to by number, and what is known of their steps.
type rig struct {
	Config
	volume block.VolumeID
	layout block.Layout
	legs   [targets]block.LegID // by copy; copy i is on target i

	managers      pool[*manager]
	targets       pool[*target]
	hosts         pool[*host]
	targetWants   pool[cluster.TargetWanted]
	hostWants     pool[cluster.InitiatorWanted]
	targetReports pool[cluster.TargetReport]
	hostReports   pool[cluster.InitiatorReport]
	calls         pool[request]
	exports       pool[[]export]
	identities    pool[export]

	decisions map[asked]decided
	turns     map[looked]turned
	steps     map[stepped]int32
}

// stepped is a step of a target or a host that is neither a turn nor a decision.
type stepped struct {
	kind stepKind
	of   int32
	arg  int32
}

type stepKind int8

const (
	targetComplies stepKind = iota // arg: a wanted state
	targetReboots
	targetReport  // its report
	targetVisible // arg: a host; what it exports to it
	hostHears     // arg: a wanted state
	hostAnswered  // arg: a call
	hostRefused
	hostUnanswered
	hostRestarts
	hostPasses // arg: the legs that answer
	hostReport
	hostEqualized
	hostCopied  // arg: a copy
	wantsTarget // of a manager; arg: a target
	wantsHost   // of a manager; arg: a host
	hostLapsed
	hostIdentity // arg: a copy; the identity under which a host uses it
)

// step computes a step once.
func (r *rig) step(kind stepKind, of, arg int32, compute func() int32) int32 {
	s := stepped{kind, of, arg}
	if n, known := r.steps[s]; known {
		return n
	}
	n := compute()
	r.steps[s] = n
	return n
}

func (r *rig) target(t target) int32 { return r.targets.number(encode(noon, t), &t) }
func (r *rig) host(h host) int32     { return r.hosts.number(encode(noon, h), &h) }

func (r *rig) copyOf(leg block.LegID) int {
	for i := range r.Copies {
		if r.legs[i] == leg {
			return i
		}
	}
	panic(fmt.Sprintf("explore: leg %v is of no copy", leg))
}

// wantsOfTarget numbers what a manager wants of a target.
func (r *rig) wantsOfTarget(manager int32, i int) int32 {
	return r.step(wantsTarget, manager, int32(i), func() int32 {
		w := r.managers.at(manager).state.WantedTarget(targetName(i))
		return r.targetWants.number(encode(noon, w), w)
	})
}

func (r *rig) wantsOfHost(manager int32, h int) int32 {
	return r.step(wantsHost, manager, int32(h), func() int32 {
		w := r.managers.at(manager).state.WantedInitiator(hostName(h))
		return r.hostWants.number(encode(noon, w), w)
	})
}

func (r *rig) comply(t, wanted int32) int32 {
	return r.step(targetComplies, t, wanted, func() int32 { return r.target(r.targets.at(t).comply(r.targetWants.at(wanted))) })
}

func (r *rig) reboot(t int32) int32 {
	return r.step(targetReboots, t, 0, func() int32 { return r.target(r.targets.at(t).reboot()) })
}

func (r *rig) reportOfTarget(t int32) int32 {
	return r.step(targetReport, t, 0, func() int32 {
		x := r.targets.at(t).report()
		return r.targetReports.number(encode(noon, x), x)
	})
}

// visible numbers what a target exports to a host.
func (r *rig) visible(t int32, h int) int32 {
	return r.step(targetVisible, t, int32(h), func() int32 {
		var all []export
		for _, x := range r.targets.at(t).Exports {
			if x.Host == identityOf(h) {
				all = append(all, x)
			}
		}
		return r.exports.number(encode(noon, all), all)
	})
}

func (r *rig) hear(h, wanted int32) int32 {
	return r.step(hostHears, h, wanted, func() int32 { return r.host(r.hosts.at(h).hear(r.hostWants.at(wanted))) })
}

func (r *rig) answer(h, call int32, ok bool) int32 {
	kind := hostRefused
	if ok {
		kind = hostAnswered
	}
	return r.step(kind, h, call, func() int32 { return r.host(r.hosts.at(h).answered(r.calls.at(call), ok)) })
}

func (r *rig) unanswered(h int32) int32 {
	return r.step(hostUnanswered, h, 0, func() int32 { return r.host(r.hosts.at(h).unanswered()) })
}

func (r *rig) restartHost(h int32) int32 {
	return r.step(hostRestarts, h, 0, func() int32 { return r.host(r.hosts.at(h).restart()) })
}

func (r *rig) passHost(h int32, live uint8) int32 {
	return r.step(hostPasses, h, int32(live), func() int32 { return r.host(r.hosts.at(h).pass(live)) })
}

func (r *rig) reportOfHost(h int32) int32 {
	return r.step(hostReport, h, 0, func() int32 {
		x := r.hosts.at(h).report(r)
		return r.hostReports.number(encode(noon, x), x)
	})
}

// equalized is a host whose copies have been made equal.
func (r *rig) equalized(h int32) int32 {
	return r.step(hostEqualized, h, 0, func() int32 {
		own := *r.hosts.at(h)
		st := *own.Stack
		st.Equal, st.Equalizing = true, false
		for i := range st.Slots {
			st.Slots[i].Tracked = st.Slots[i].Tracked || st.Slots[i].inUse()
		}
		own.Stack = &st
		return r.host(own)
	})
}

// copied is a host that has copied all that a leg misses.
func (r *rig) copied(h int32, i int) int32 {
	return r.step(hostCopied, h, int32(i), func() int32 {
		own := *r.hosts.at(h)
		st := *own.Stack
		st.Slots[i].State = volume.CaughtUp
		own.Stack = &st
		return r.host(own)
	})
}

// identity numbers the identity under which a host uses a copy.
func (r *rig) identity(h int32, i int) int32 {
	return r.step(hostIdentity, h, int32(i), func() int32 {
		x := r.hosts.at(h).Stack.Slots[i]
		id := export{NQN: x.NQN, UUID: x.UUID}
		return r.identities.number(encode(noon, id), id)
	})
}

// newRig sets a cluster up until its first host serves the volume.
func newRig(c Config) (*rig, world) {
	for seed := byte(1); ; seed++ {
		r := &rig{Config: c, decisions: map[asked]decided{}, turns: map[looked]turned{}, steps: map[stepped]int32{}}
		if w, ok := r.setUp(seed); ok {
			return r, w
		}
	}
}

// setUp has the agents join and the volume created and attached. It fails if copy i is not placed
// on target i.
func (r *rig) setUp(seed byte) (world, bool) {
	s, _ := cluster.New(clusterID)
	must(s.Step(noon, cluster.BeginTerm{}))
	var all [targets]target
	for i := range r.Copies {
		all[i] = target{Index: i, Boot: 1, Cached: r.Cached}
		must(s.Step(noon, cluster.TargetReported{Session: 1, Report: all[i].report()}))
		must(s.Step(noon, cluster.AddDrive{Node: targetName(i), Device: "/dev/nvme0n1", Seed: cluster.Seed{1, byte(i)}}))
	}
	settle := func() {
		for range 3 {
			for i := range r.Copies {
				all[i] = all[i].comply(s.WantedTarget(targetName(i)))
				must(s.Step(noon, cluster.TargetReported{Session: 1, Report: all[i].report()}))
			}
		}
	}
	settle()
	must(s.Step(noon, cluster.CreateVolume{Name: volumeName, Size: volumeSize, Copies: r.Copies, Stripes: 1, Seed: cluster.Seed{2, seed}}))
	settle()
	v, err := s.Volume(volumeName)
	if err != nil {
		panic(err)
	}
	r.volume, r.layout = v.ID, v.Layout
	for _, l := range v.Legs {
		if l.Node != targetName(l.Copy) {
			return world{}, false
		}
		r.legs[l.Copy] = l.ID
	}
	w := world{next: 1}
	for h := range r.Hosts {
		x := newHost(h, 1)
		must(s.Step(noon, cluster.InitiatorReported{Session: 1, Report: x.report(r)}))
		w.host[h] = r.host(x)
		w.hostUp, w.hostLinked = w.hostUp|1<<h, w.hostLinked|1<<h
		w.hostSaid[h] = r.reportOfHost(w.host[h])
	}
	must(s.Step(noon, cluster.Attach{Volume: volumeName, Node: hostName(0)}))
	for i := range r.Copies {
		w.target[i] = r.target(all[i])
		w.targetUp, w.targetLinked = w.targetUp|1<<i, w.targetLinked|1<<i
		w.targetSaid[i] = r.reportOfTarget(w.target[i])
	}
	w.manager = r.manager(s, noon)
	w.targetDue, w.hostDue = w.targetLinked, w.hostLinked
	return r.begin(w), true
}

func must(_ cluster.Outcome, err error) {
	if err != nil {
		panic(fmt.Sprintf("explore: set up: %v", err))
	}
}

// begin lets all that is under way end, without a fault.
func (r *rig) begin(w world) world {
	w = r.normal(w)
	for range 1000 {
		n, there := r.pending(&w, ^uint16(0))
		if !there {
			w.cached = [hosts]uint8{} // the engine flushes its legs at once
			return w
		}
		w = r.deliver(w, n)
	}
	panic("explore: the cluster does not come to rest")
}

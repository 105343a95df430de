// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"
	"maps"
	"slices"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/evidence"
)

// host is a client at one moment: its agent and, in the same process, the volume. The real planner
// decides; what it orders is carried out on these values, as package initiator/userspace does on
// connections and the engine.
type host struct {
	Index, Boot      int
	Term, Generation uint64 // the newest order that it has acted on
	Acted            uint64 // what its last turn acted on
	Known            bool   // the manager has told this process something
	Wanted           *volume.Wanted
	Memory           memory
	GivenUp          map[block.Epoch]volume.Over // the last epoch that this process gave up
	Conns            [targets]block.NQN          // its connections; empty: none
	Pulses           [targets]pulse
	Stack            *stack
	Note             volume.Note // on its disk
	Refused          bool        // the manager did not make the last record that it asked for
	Pauses           bool        // so it does not ask again at once
	Said             said
}

// memory is volume.Memory with ages in place of times.
type memory struct {
	Epoch       block.Epoch
	Grant       uint64
	Clean, Gone bool
	Over        *volume.Over
	Used        bool
	Age         int8 // since the first look at this epoch, in ticks
	Stale       map[int]uint64
	InSync      map[int]uint64
	Asked       map[int]uint64          // the manager may have recorded them stale
	Secured     map[int]block.MemberSet // the copies that were flushed before these are given up
}

// pulse is how a leg answers under its present identity. Ages are in ticks.
type pulse struct {
	Identity block.UUID
	Met      bool // it has answered
	Silent   int8 // since when it does not answer; -1: it does
	Heard    int8 // when it last answered, whatever its identity
}

// stack is the volume in the host's engine.
type stack struct {
	Wanted                                   *volume.Wanted
	Slots                                    [targets]slot
	Equal, Equalizing, Device, Held, Flushed bool
}

// slot is the copy in a place.
type slot struct {
	State    volume.CopyState
	Revision uint64
	NQN      block.NQN
	UUID     block.UUID
	Tracked  bool // all that it misses is known
	Full     bool // its rebuild copies everything
	Whole    uint64
	Covered  bool // what may be only in its drive's cache is known
	Withheld bool // no write is acknowledged in which it takes part
}

func (s *slot) inUse() bool { return s.State.InUse() }

// said is the host's last report on the volume.
type said struct {
	Epoch  block.Epoch
	Grant  uint64
	Phase  volume.Phase
	InUse  uint8
	Waits  bool
	GaveUp *volume.Over
}

// Older is all the same to a host: its lease ends within three ticks, its patience with legs that
// it cannot connect within four.
const (
	never   = 3 // also the age of what was never heard
	patient = 4
)

func hostName(h int) block.NodeName { return [hosts]block.NodeName{"c1", "c2"}[h] }

func identityOf(h int) block.Host {
	return block.HostFromID(block.UUIDFromRandom([16]byte{0xc0, byte(h)}))
}

func newHost(index, boot int) host {
	h := host{Index: index, Boot: boot, Memory: newMemory(volume.Memory{})}
	for i := range h.Pulses {
		h.Pulses[i] = pulse{Silent: -1, Heard: never}
	}
	return h
}

func newMemory(m volume.Memory) memory {
	return memory{Epoch: m.Epoch, Grant: m.Grant, Clean: m.Clean, Gone: m.Gone, Over: m.Over, Stale: map[int]uint64{}, InSync: map[int]uint64{}, Asked: map[int]uint64{}, Secured: map[int]block.MemberSet{}}
}

func (h *host) boot() string { return fmt.Sprintf("c%d-boot-%d", h.Index+1, h.Boot) }

// restart returns the host after its process has ended. The note is on its disk.
func (h host) restart() host {
	next := newHost(h.Index, h.Boot+1)
	next.Term, next.Generation, next.Note = h.Term, h.Generation, h.Note
	return next
}

// pass returns the host a tick later. live are the legs that answer.
func (h host) pass(live uint8) host {
	for i := range h.Pulses {
		p := &h.Pulses[i]
		if live&(1<<i) != 0 {
			p.Heard, p.Silent = 0, -1
			continue
		}
		p.Heard = min(p.Heard+1, never)
		if p.Silent >= 0 {
			p.Silent = min(p.Silent+1, never)
		}
	}
	h.Pauses = false
	if h.Memory.Age = min(h.Memory.Age+1, patient); h.Stack != nil {
		h.Memory.Age = patient // it counts only until the volume is built
	}
	return h
}

// hear returns the host after a wanted state has arrived.
func (h host) hear(w cluster.InitiatorWanted) host {
	if w.Term < h.Term || w.Term == h.Term && w.Generation < h.Generation {
		return h
	}
	h.Term, h.Generation, h.Known, h.Wanted = w.Term, w.Generation, true, nil
	for i := range w.Attachments {
		if a := &w.Attachments[i]; a.BootID == h.boot() {
			h.Wanted = wantedOf(a)
		}
	}
	return h
}

// wantedOf is a wanted state as it arrives at the host's planner.
func wantedOf(a *cluster.WantedAttachment) *volume.Wanted {
	w := &volume.Wanted{
		Volume: a.Volume, Name: a.VolumeName, Size: a.Size, Layout: a.Layout, Epoch: a.Epoch, Grant: a.Grant,
		BootID: a.BootID, Equalize: a.Equalize, Detach: a.Detach,
	}
	for _, l := range a.Legs {
		w.Links = append(w.Links, volume.Link{
			Leg: l.Leg, Column: l.Column, Copy: l.Copy, Rebuilding: l.State == cluster.LegRebuilding, Revision: l.Revision,
			Node: string(l.Node), NQN: l.NQN, NSID: l.NSID, UUID: l.UUID, Portals: l.Portals, WriteThrough: l.WriteThrough,
			CopyAll: l.CopyAll, CopyAllSince: l.CopyAllSince, CacheLost: l.CacheLost, AllSince: l.AllSince, Reborn: l.Reborn, LeaveOut: l.LeaveOut,
		})
	}
	slices.SortFunc(w.Links, func(a, b volume.Link) int { return a.Copy - b.Copy })
	return w
}

// answered returns the host after the manager has answered its call. It has done what it was asked,
// or refused.
func (h host) answered(c request, ok bool) host {
	m := h.Memory
	m.Stale, m.InSync, m.Asked = maps.Clone(m.Stale), maps.Clone(m.InSync), maps.Clone(m.Asked)
	switch in := c.input.(type) {
	case cluster.RecordStale:
		for i, revision := range c.legs {
			if in.Epoch != m.Epoch {
				continue
			}
			delete(m.Asked, i)
			if ok {
				m.Stale[i] = revision
				delete(m.InSync, i)
			}
		}
	case cluster.RecordInSync:
		for i, revision := range c.legs {
			if ok && in.Epoch == m.Epoch {
				m.InSync[i] = revision
				delete(m.Stale, i)
			}
		}
	}
	h.Memory, h.Refused, h.Pauses = m, !ok, !ok
	return h
}

// unanswered returns the host after the answer to a call was lost.
func (h host) unanswered() host {
	h.Refused, h.Pauses = true, true
	return h
}

// report returns the report of the host's agent.
func (h *host) report(r *rig) cluster.InitiatorReport {
	x := cluster.InitiatorReport{
		Node: hostName(h.Index), BootID: h.boot(), Host: identityOf(h.Index), ClusterID: clusterID,
		Generation: h.Acted, Highest: cluster.Term{Cluster: clusterID, Number: h.Term},
	}
	if h.Note.Epoch != 0 {
		n := evidence.Note{Volume: r.volume, Epoch: h.Note.Epoch}
		for i := range r.Copies {
			if revision, ok := h.Note.Legs[r.legs[i]]; ok {
				n.Legs = append(n.Legs, evidence.NotedLeg{Leg: r.legs[i], Revision: revision})
			}
		}
		x.Evidence = append(x.Evidence, n)
	}
	if h.Said.Epoch == 0 {
		return x
	}
	a := cluster.AttachmentReport{Volume: r.volume, Epoch: h.Said.Epoch, Grant: h.Said.Grant, Phase: phases[h.Said.Phase], Tells: true}
	for i := range r.Copies {
		if h.Said.InUse&(1<<i) != 0 {
			a.InUse = append(a.InUse, r.legs[i])
		}
	}
	if h.Said.Waits {
		a.WaitingFor = "something"
	}
	if o := h.Said.GaveUp; o != nil {
		a.GaveUp = cluster.GaveUp{Why: o.Why, WritesLost: o.WritesLost, Reason: string(o.Reason)}
	}
	x.Attachments = []cluster.AttachmentReport{a}
	return x
}

var phases = map[volume.Phase]cluster.Phase{
	volume.Connecting: cluster.PhaseConnecting, volume.Equalizing: cluster.PhaseEqualizing, volume.Serving: cluster.PhaseServing,
	volume.Stalled: cluster.PhaseStalled, volume.Detaching: cluster.PhaseDetaching,
	volume.DetachedClean: cluster.PhaseDetachedClean, volume.DetachedUnclean: cluster.PhaseDetachedUnclean,
}

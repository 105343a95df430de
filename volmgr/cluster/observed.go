// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/backoff"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/keys"
)

// A state can be told as a whole, and read again elsewhere: as the records, and as what readers see
// of the rest, which agents report and no record holds. A support bundle holds both, so that a
// question about it gets the answer that the manager would have given. Nothing secret is in either:
// see Record.Tellable.

// ReasonBundled is the reason when another support bundle is being made, ReasonKept when one cannot do
// what was asked of it.
const (
	ReasonBundled = "BUNDLE_UNDER_WAY"
	ReasonKept    = "SUPPORT_BUNDLE"
)

// tellable says of each kind of record whether it is told. What is secret is not, nor what helps to
// guess a secret, nor what is about people. A new kind of record has to be added here.
var tellable = map[string]bool{
	"v": true, "n": true, "d": true, "p": true, "e": true, "m": true, "l": true, "r": true,
	"a": true,  // certificates, without keys
	"i": false, // who has joined: people, too
	"s": false, // the master of the keys
	"t": false, // tokens: hashes of secrets
	"u": false, // the audit: who asked for what, and from where
}

// Tellable reports whether a record may be shown to those who help the cluster's operators.
func (r Record) Tellable() bool {
	kind, _, _ := bytes.Cut([]byte(r.Key), []byte("/"))
	return tellable[string(kind)]
}

// observed is what readers see of a State and no record holds.
type observed struct {
	Now           time.Time                                 `json:"now"`
	Began         time.Time                                 `json:"began"`
	HasMaster     bool                                      `json:"has_master"` // of the keys; explanations say what follows from that
	ReplaceAfter  time.Duration                             `json:"replace_after"`
	Targets       map[block.NodeName]observedTarget         `json:"targets"`
	Initiators    map[block.NodeName]observedInitiator      `json:"initiators"`
	ForeignAgents []observedForeign                         `json:"foreign_agents"`
	Fences        map[block.VolumeID]observedFence          `json:"fences"`
	Trials        map[block.LegID]backoff.Times             `json:"trials"`
	Away          map[block.DriveID]time.Time               `json:"away"`
	Stopping      map[block.NodeName]observedStop           `json:"stopping"`
	Asked         map[block.VolumeID]map[block.LegID]string `json:"asked"`
	Uncopied      []observedUncopied                        `json:"uncopied,omitempty"`
}

type observedAgent struct {
	Open       bool        `json:"open"`
	Status     AgentStatus `json:"status"`
	OtherStore uint64      `json:"other_store,omitempty"`
	Term       uint64      `json:"term"`
}

type observedTarget struct {
	Agent    observedAgent                    `json:"agent"`
	Report   *TargetReport                    `json:"report"` // without the lists that follow
	Devices  []Device                         `json:"devices"`
	Drives   map[block.DriveID]DriveReport    `json:"drives"`
	Legs     []LegReport                      `json:"legs"`
	Admitted map[block.VolumeID]block.Epoch   `json:"admitted"`
	Exports  map[block.NQN][]block.LegID      `json:"exports"`
	Strays   map[block.DriveID][]image.Extent `json:"strays,omitempty"`
	Unknown  map[block.DriveID]block.Size     `json:"unknown,omitempty"`
}

type observedInitiator struct {
	Agent       observedAgent      `json:"agent"`
	Report      *InitiatorReport   `json:"report"`
	Attachments []AttachmentReport `json:"attachments"`
}

type observedForeign struct {
	Node    block.NodeName  `json:"node"`
	Agent   string          `json:"agent"`
	Cluster block.ClusterID `json:"cluster"`
	Seen    time.Time       `json:"seen"`
}

type observedFence struct {
	Epoch block.Epoch `json:"epoch"`
	First time.Time   `json:"first"`
}

// observedUncopied says why a column of a snapshot is not copied.
type observedUncopied struct {
	Volume block.VolumeID `json:"volume"`
	Column int            `json:"column"`
	Why    string         `json:"why"`
	Until  time.Time      `json:"until"`
}

type observedStop struct {
	Since time.Time `json:"since"`
	May   bool      `json:"may"`
}

// Observed is what readers see of s and no record holds, as JSON. LoadObserved reads it.
func (s *State) Observed() ([]byte, error) {
	o := observed{
		Now: s.now, Began: s.began, HasMaster: !s.master.IsZero(), ReplaceAfter: s.policy.ReplaceAfter, Trials: s.trials.All(), Away: s.away, Asked: s.asked,
		Targets: map[block.NodeName]observedTarget{}, Initiators: map[block.NodeName]observedInitiator{},
		Fences: map[block.VolumeID]observedFence{}, Stopping: map[block.NodeName]observedStop{},
	}
	for name, on := range s.targets {
		o.Targets[name] = on.observed()
	}
	for name, on := range s.initiators {
		o.Initiators[name] = on.observed()
	}
	for _, key := range s.sortedForeignAgents() {
		x := s.foreignAgents[key]
		o.ForeignAgents = append(o.ForeignAgents, observedForeign{key.node, key.agent, x.cluster, x.seen})
	}
	for id, f := range s.fences {
		o.Fences[id] = observedFence{f.epoch, f.first}
	}
	for c, x := range s.uncopied {
		o.Uncopied = append(o.Uncopied, observedUncopied{c.volume, c.column, x.why, x.until})
	}
	slices.SortFunc(o.Uncopied, func(a, b observedUncopied) int {
		return cmp.Or(bytes.Compare(a.Volume.UUID[:], b.Volume.UUID[:]), a.Column-b.Column)
	})
	for name, x := range s.stopping {
		o.Stopping[name] = observedStop{x.since, x.may}
	}
	text, err := json.MarshalIndent(o, "", " ")
	if err != nil {
		return nil, fmt.Errorf("tell what is observed: %w", err)
	}
	return text, nil
}

func (a *agent) observed() observedAgent {
	return observedAgent{a.open, a.status, a.otherStore, a.term}
}

func (o *observedAgent) agent() agent {
	return agent{open: o.Open, status: o.Status, otherStore: o.OtherStore, term: o.Term}
}

func (on *target) observed() observedTarget {
	o := observedTarget{
		Agent: on.agent.observed(), Report: on.report, Devices: on.devices, Drives: on.drives, Strays: on.strays, Unknown: on.unknown,
		Admitted: map[block.VolumeID]block.Epoch{}, Exports: map[block.NQN][]block.LegID{},
	}
	for _, l := range on.legs.All() {
		o.Legs = append(o.Legs, l)
	}
	slices.SortFunc(o.Legs, func(a, b LegReport) int { return bytes.Compare(a.Leg.UUID[:], b.Leg.UUID[:]) })
	for id, epoch := range on.admitted.All() {
		o.Admitted[id] = epoch
	}
	for nqn, legs := range on.exports.All() {
		o.Exports[nqn] = legs
	}
	return o
}

func (on *initiator) observed() observedInitiator {
	o := observedInitiator{Agent: on.agent.observed(), Report: on.report}
	for _, id := range sorted(on.attachments) {
		o.Attachments = append(o.Attachments, on.attachments[id])
	}
	return o
}

// LoadObserved returns the state that records and the result of Observed describe, for readers: as
// Fork does, it returns one that is not stepped. Tokens, the audit and the master are not in it.
// The records may be anybody's, so what they say of one another need not fit.
func LoadObserved(records []Record, text []byte) (*State, error) {
	s, err := Load(slices.DeleteFunc(slices.Clone(records), func(r Record) bool { return !r.Tellable() }))
	if err != nil {
		return nil, err
	}
	var o observed
	if err := json.Unmarshal(text, &o); err != nil {
		return nil, fmt.Errorf("load what was observed: %w", err)
	}
	if o.HasMaster {
		s.master = keys.Make([32]byte{}) // in its place; nothing that readers are told follows from its value
	}
	s.now, s.began, s.policy.ReplaceAfter = o.Now, o.Began, o.ReplaceAfter
	for name, x := range o.Targets {
		s.targets[name] = x.target(s)
	}
	for name, x := range o.Initiators {
		on := &initiator{by: s.by, agent: x.Agent.agent(), report: x.Report, attachments: map[block.VolumeID]AttachmentReport{}}
		for _, a := range x.Attachments {
			on.attachments[a.Volume] = a
		}
		s.initiators[name] = on
	}
	for _, x := range o.ForeignAgents {
		s.foreignAgents[agentKey{x.Node, x.Agent}] = foreignAgent{x.Cluster, x.Seen}
	}
	for id, f := range o.Fences {
		s.fences[id] = fence{f.Epoch, f.First}
	}
	for leg, times := range o.Trials {
		s.trials.Put(s.by, leg, times)
	}
	for _, x := range o.Uncopied {
		s.uncopied[columnOf{x.Volume, x.Column}] = uncopied{why: x.Why, until: x.Until}
	}
	for name, x := range o.Stopping {
		s.stopping[name] = stop{x.Since, x.May}
	}
	s.away, s.asked = o.Away, o.Asked
	return s.Fork(), nil
}

func (o *observedTarget) target(s *State) *target {
	on := &target{by: s.by, agent: o.Agent.agent(), report: o.Report, devices: o.Devices, drives: map[block.DriveID]DriveReport{}, strays: o.Strays, unknown: o.Unknown,
		compared: map[block.DriveID]uint64{}, relabelled: map[block.DriveID][]evidence.LegLabel{}}
	for id, d := range o.Drives {
		on.drives[id] = d
		for i := range d.Legs {
			tally(on.by, &on.labelled, d.Legs[i].Leg, 1)
		}
	}
	for _, l := range o.Legs {
		on.legs.Set(on.by, l.Leg, l)
	}
	for id, epoch := range o.Admitted {
		on.admitted.Set(on.by, id, epoch)
	}
	for nqn, legs := range o.Exports {
		on.export(nqn, legs)
	}
	return on
}

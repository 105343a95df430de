// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/backoff"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/keys"
)

// TargetReport is the whole observed state of a target agent's node.
type TargetReport struct {
	Node    block.NodeName
	Labels  map[string]string
	BootID  string
	Version string
	Level   block.Level // the newest that the agent knows; 0: one from before levels
	Kernel  string
	Portals []block.Portal
	// ProcessPortals are where the legs are that the kernel's target cannot serve; see Volume.portals.
	ProcessPortals []block.Portal
	ClusterID      block.ClusterID // zero if the node's drives belong to none yet
	Generation     uint64          // newest wanted generation that the agent has acted on
	Highest        Term            // highest term that it has acted on; zero: none, or an old version
	Devices        []Device
	Drives         []DriveReport
	Legs           []LegReport
	Admissions     []Admission
	Exports        []ExportReport
	Problems       []Problem
	Stopping       bool // its exports are about to end: see upkeep.go
	// KernelMaps: the kernel can map legs in trees that nobody writes; see Volume.InKernel.
	KernelMaps Ability
	// ProcessStops: those at ProcessPortals are; the kernel's stay.
	ProcessStops bool
	// Authenticates: whether it can demand that hosts prove their identity.
	Authenticates Ability
	Refusals      Refusals
	Integrity     bool // it can keep legs with checksums
	HandsOver     bool // its next process can take over from it
	Thin          bool // it serves mapped legs
	Snapshots     bool // it makes legs of others
	// PlainSnapshots: it can give a plain leg a tree, and take it away again.
	PlainSnapshots bool
	Copies         bool // it copies legs of snapshots from other targets
}

// Refusals are the connections whose hosts had to prove their identity to a target and did not,
// since its agent started.
type Refusals struct {
	Count uint64
	// Of the last one.
	NQN     block.NQN // of the subsystem
	Host    block.NQN // the name that it gave
	Address string
	Reason  string
}

// Ability says whether an agent can do something. The empty one is of a version that cannot.
type Ability string

// The abilities.
const (
	AbilityUnknown Ability = "UNKNOWN" // not known yet: as before
	AbilityNo      Ability = "NO"
	AbilityYes     Ability = "YES"
)

// changes reports whether an ability is known, and another than what was known before.
func (a Ability) changes(known bool) bool {
	return a != AbilityUnknown && (a == AbilityYes) != known
}

// Change says how a TargetReport relates to the last one of its session.
type Change struct {
	// Partial: Legs, Admissions and Exports of the report list only what has changed, and
	// Drives only drives of which something else than their labels has. Those have no Legs:
	// the labels that have changed are in Labels.
	Partial bool
	Labels  map[block.DriveID][]evidence.LegLabel
	Gone    Gone
}

// Gone lists what a partial report does not list and is not there any more.
type Gone struct {
	Legs       []block.LegID
	Drives     []block.DriveID
	Labels     map[block.DriveID][]block.LegID
	Admissions []block.VolumeID
	Exports    []block.NQN
}

// Term identifies the reign of one manager of a cluster.
type Term struct {
	Cluster block.ClusterID
	Number  uint64
}

// DriveReport is a drive with a Weft label, and the content of the label.
type DriveReport struct {
	Drive           block.DriveID
	Cluster         block.ClusterID
	Device          string
	Extents         uint32
	LabelGeneration uint64
	Error           string
	Incarnation     string // changes when writes that were not flushed may be lost
	Legs            []evidence.LegLabel
	Trees           []TreeReport
	Reserve         []image.Extent // that trees may get
}

// TreeReport is a tree on the label of its drive.
type TreeReport struct {
	Tree    block.UUID
	Extents []image.Extent
}

// cut reports whether the machine has booted, or the drive has a new incarnation, since the
// leg's label was written.
func (d *DriveReport) cut(l evidence.LegLabel, boot string) bool {
	known := l.Incarnation != "" && d.Incarnation != ""
	return l.Boot != boot || known && !block.SameIncarnation(l.Incarnation, d.Incarnation)
}

// LegSpace is what the data of a leg in a tree takes: what it reads as data, its own and what it shares, and
// what comes free if it alone is deleted.
type LegSpace struct{ Referenced, Freed block.Size }

// LegReport is a leg as its target sees it.
type LegReport struct {
	Leg    block.LegID
	Ready  bool // carved, zeroed, mapped
	Zeroed block.Size
	Size   block.Size // usable, also by the hosts that it is exported to
	Error  string
	// Of a mapped leg: what it takes, as of some seconds ago, and whether writes wait for space.
	Used  block.Size
	Full  bool
	Space *LegSpace // as of some minutes ago; nil: not known
	// Of a leg that is to lose its tree: what is not in its own extents yet.
	Returning block.Size
	// Of a leg that is to be flattened: whether it needs nothing of other volumes' legs, what is left to be
	// looked at, and what that waits for.
	Flat      bool
	FlatLeft  block.Size
	FlatWaits string
	// Of a leg that is copied from another target: what was written to it so far. Zeroed is up to where.
	Copied block.Size
	// Of a leg in a tree: why the kernel does not serve it in place of a process.
	KernelRefuses string
	// Of a leg in a tree of which records are lost: which. It takes no writes, and so much of it, at most, cannot
	// be read.
	Damage  string
	Unknown block.Size
}

// Admission is a target's promise that no host can write to a volume through its node at an
// epoch below Epoch, and that its labels say so.
type Admission struct {
	Volume block.VolumeID
	Epoch  block.Epoch
}

// ExportReport is one subsystem that a target has.
type ExportReport struct {
	NQN   block.NQN
	Ready bool
	Legs  []block.LegID
}

// TargetWanted is the whole wanted state of a target agent's node.
type TargetWanted struct {
	Term       uint64
	Generation uint64
	ClusterID  block.ClusterID
	Drives     []WantedDrive
	Legs       []WantedLeg
	Admissions []Admission
	Exports    []WantedExport
	MayStop    bool         // it is stopping, and no host uses a leg of it that it can do without
	Discovered []Discovered // what its discovery controller tells hosts, of the whole cluster
	Discovers  bool         // it has one, since there are hosts without an agent
	Space      []WantedSpace
}

// WantedSpace is the extents that the trees of a drive may have.
type WantedSpace struct {
	Drive   block.DriveID
	Extents []image.Extent
}

// WantedDrive is a drive to label or, with Remove, to erase. A drive that has its label is
// in use and no longer listed.
type WantedDrive struct {
	Drive      block.DriveID
	Device     string
	WWID       string
	Serial     string
	ForceErase string
	Remove     bool
}

// WantedLeg is a leg to carve and keep or, with Remove, to free.
type WantedLeg struct {
	Incarnation string // of the drive when the leg was last judged: in another one the leg is not used
	Leg         block.LegID
	Drive       block.DriveID
	Column      int
	Copy        int
	image.Image
	Size     block.Size
	Revision uint64
	Volume   evidence.VolumeLabel
	Remove   bool
	Blank    bool       // it has no data, and may be carved though the volume has some
	Tree     block.UUID // zero: it is plain, and has none over it
	Origin   LegOrigin  // zero: it begins as zeroes
	// Flatten: what it shares with other volumes' legs is to be copied, unless FlattenWait, and the target is
	// to say when it needs these no longer.
	Flatten, FlattenWait bool
	Process              bool // see Volume.inProcess
	InKernel             bool // see Volume.inKernel
}

// LegOrigin is the leg as which another one of its tree begins: frozen at some moment or, with Clone, as it
// is, since it is frozen. With Restore the other one has begun before, and becomes that. Wait: nothing is
// done but to record the new leg.
//
// With Copy the other leg, zero: none, is only what the new one begins as; the rest comes from there.
type LegOrigin struct {
	Leg                  block.LegID
	Clone, Restore, Wait bool
	Copy                 *CopySource
}

// CopySource is the leg that a copy is made of, as its target connects to it.
type CopySource struct {
	Portals []block.Portal
	NQN     block.NQN
	Host    block.Host
	Keys    block.Keys // zero: nobody proves anything
	NSID    uint32
	UUID    block.UUID
	Since   block.LegID // of the source's tree: it holds what the copy begins as; zero: zeroes
	Rate    block.Size  // a second; 0: no limit
}

// WantedExport is one subsystem to export.
type WantedExport struct {
	Volume     block.VolumeID
	Epoch      block.Epoch
	NQN        block.NQN
	Serial     string
	Host       block.Host
	Keys       block.Keys // zero: the host proves nothing
	ReadOnly   bool
	Namespaces []WantedNamespace
	Process    bool // see Volume.inProcess
	Paths      int  // how many controllers the host may have at a time; 0: one
}

// WantedNamespace is one leg inside a subsystem.
type WantedNamespace struct {
	NSID uint32
	Leg  block.LegID
	UUID block.UUID
}

// InitiatorReport is the whole observed state of an initiator agent's node.
type InitiatorReport struct {
	Node        block.NodeName
	Labels      map[string]string
	BootID      string
	Version     string
	Level       block.Level // as in TargetReport
	Kernel      string
	Host        block.Host
	ClusterID   block.ClusterID // zero if the machine belongs to none yet
	Generation  uint64
	Highest     Term // as in TargetReport
	Attachments []AttachmentReport
	Problems    []Problem
	Evidence    []evidence.Note
	// Authenticates: the host can prove its identity to targets.
	Authenticates bool
	// Heals is the process of the agent, if it can copy to a volume's legs without a device; else empty.
	Heals string
	// Freezes: the host can freeze file systems.
	Freezes bool
	// SeveralPaths: the host can use several paths to a leg at a time.
	SeveralPaths bool
}

// Phase is the progress of an attachment on its host.
type Phase string

// The phases.
const (
	PhaseConnecting      Phase = "CONNECTING"
	PhaseEqualizing      Phase = "EQUALIZING"
	PhaseServing         Phase = "SERVING"
	PhaseStalled         Phase = "STALLED"
	PhaseDetaching       Phase = "DETACHING"
	PhaseDetachedClean   Phase = "DETACHED_CLEAN"
	PhaseDetachedUnclean Phase = "DETACHED_UNCLEAN"
)

// AttachmentReport is how a host sees an attachment.
type AttachmentReport struct {
	Volume      block.VolumeID
	Epoch       block.Epoch
	Grant       uint64
	Phase       Phase
	Device      string
	WaitingFor  string
	Legs        []LegLink
	InUse       []block.LegID // legs that take part in I/O there, wanted or not
	Tells       bool          // the host tells InUse
	ResyncDone  block.Size
	ResyncTotal block.Size
	Size        block.Size              // of the device
	Number      string                  // of the device: "253:4"
	GaveUp      GaveUp                  // zero: it has not
	Scrub       *ScrubReport            // nil: none has begun
	Scrubs      bool                    // the host can compare copies
	Heals       *HealReport             // nil: there was none
	Copies      []CopyReport            // of the legs that it copies to
	Holds       map[string]HoldState    // of the wanted holds, by id
	Freezes     map[string]FreezeReport // likewise, of those that freeze
}

// GaveUp reports that a host has failed its device, or released it in another way than
// asked, and does not serve the volume again at that epoch.
type GaveUp struct {
	Why        string // for people
	WritesLost bool   // acknowledged writes may be lost
	Reason     string // its word; empty if the host did not give one
}

// LinkState is how well a host reaches a leg; empty if it is not known.
type LinkState string

// The states of a link.
const (
	LinkLive       LinkState = "LIVE"
	LinkConnecting LinkState = "CONNECTING"
	LinkLost       LinkState = "LOST"
	LinkAbsent     LinkState = "ABSENT"
)

// LegLink is how a host sees one leg.
type LegLink struct {
	Leg      block.LegID
	Revision uint64
	State    LinkState
	Device   string
	Error    string
}

// InitiatorWanted is the whole wanted state of an initiator agent's node.
type InitiatorWanted struct {
	Term        uint64
	Generation  uint64
	ClusterID   block.ClusterID
	Attachments []WantedAttachment
}

// WantedAttachment is a volume that the host is to serve or, with Detach, to release.
type WantedAttachment struct {
	Volume     block.VolumeID
	VolumeName block.VolumeName
	Size       block.Size
	Layout     block.Layout
	LegSize    block.Size
	Epoch      block.Epoch
	Grant      uint64
	Mode       AttachMode
	BootID     string
	Equalize   bool
	Detach     bool
	SinceEpoch block.Epoch // see Attachment.SinceEpoch
	Legs       []WantedLink
	Scrub      *WantedScrub // nil: none

	RebuildRate block.Size // see Volume.RebuildRate
	Thin        bool
	Heal        string // the process that is to copy to legs, without a device for users; empty: it is an attachment
	Holds       []WantedHold
	Prefers     Preference
}

// WantedHold asks a host to hold a volume's I/O while it is listed, but not for longer than Limit.
type WantedHold struct {
	ID    string
	Limit time.Duration
	// Freeze: freeze the file systems on its device, too. Prepare: so far, only write out what they have
	// in memory. Both only for hosts that report Freezes.
	Freeze, Prepare bool
}

// FreezeReport says whether the file systems are frozen for a hold that is HELD, or why that cannot be.
type FreezeReport struct {
	Frozen bool
	Error  string
}

// WantedLink is one leg, in sync or rebuilding, of an attachment.
type WantedLink struct {
	Leg          block.LegID
	Column       int
	Copy         int
	State        LegState
	Revision     uint64
	Node         block.NodeName
	NQN          block.NQN
	NSID         uint32
	UUID         block.UUID
	Portals      []block.Portal
	WriteThrough bool
	CopyAll      bool
	CopyAllSince uint64
	CacheLost    bool // see Leg
	AllSince     uint64
	Reborn       uint64
	LeaveOut     string // why the host shall leave it out; empty: it shall not
	Paths        int    // through how many portals at a time the host reaches it; 0: one
	// Keys and Host: what to prove, and as which host to connect; zero: nothing, as itself.
	Keys block.Keys
	Host block.Host
}

// target is what a node's target has said.
type target struct {
	by *cow.Writer // may change it in place
	agent
	report *TargetReport // the newest, without the lists that follow
	// refusedAt is when an event last told of refused hosts.
	refusedAt time.Time
	// refuses are the legs of which it has said since kernelRefuses looked that its kernel does not map them.
	refuses []block.LegID

	devices  []Device
	drives   map[block.DriveID]DriveReport // replaced by each report that changes it
	legs     cow.Map[block.LegID, LegReport]
	labelled cow.Map[block.LegID, int] // on how many labels
	admitted cow.Map[block.VolumeID, block.Epoch]
	exports  cow.Map[block.NQN, []block.LegID]
	exported cow.Map[block.LegID, int] // in how many exports

	// Of each drive, as the labels were when they were last compared with the records.
	strays   map[block.DriveID][]image.Extent // extents that labels list and no record has
	damaged  map[block.LegID]bool             // those in damaged trees
	unknown  map[block.DriveID]block.Size     // the most that legs without a record can take of the label
	compared map[block.DriveID]uint64         // the count of touches then
	// relabelled are the labels that have changed since.
	relabelled map[block.DriveID][]evidence.LegLabel
}

// observeLeg takes the report of a leg, and reports whether more or less may be servable.
func (on *target) observeLeg(l LegReport) (serving bool) {
	was := on.legs.Get(l.Leg)
	if l.KernelRefuses != "" && was.KernelRefuses == "" {
		on.refuses = append(on.refuses, l.Leg)
	}
	on.legs.Set(on.by, l.Leg, l)
	return on.noteDamage(l.Leg, l.Damage != "") || was.Error != l.Error
}

// noteDamage notes whether a leg is in a damaged tree, and reports whether that is new.
func (on *target) noteDamage(id block.LegID, damaged bool) (changed bool) {
	if on.damaged[id] == damaged {
		return false
	}
	on.damaged = maps.Clone(on.damaged)
	if on.damaged == nil {
		on.damaged = map[block.LegID]bool{}
	}
	if on.damaged[id] = true; !damaged {
		delete(on.damaged, id)
	}
	return true
}

// observe takes a report, whole or partial. It reports whether more or less may be servable
// than before.
func (on *target) observe(r *TargetReport, c *Change) (serving bool) {
	if c.Partial {
		on.drives = maps.Clone(on.drives)
	} else {
		*on = target{by: on.by, agent: on.agent, refusedAt: on.refusedAt, drives: map[block.DriveID]DriveReport{}, compared: map[block.DriveID]uint64{}, relabelled: map[block.DriveID][]evidence.LegLabel{}}
	}
	serving = !c.Partial || len(r.Drives) > 0 || len(c.Gone.Drives) > 0
	for _, l := range r.Legs {
		serving = on.observeLeg(l) || serving
	}
	for _, id := range c.Gone.Legs {
		serving = on.noteDamage(id, false) || serving
		serving = serving || on.legs.Get(id).Error != ""
		on.legs.Delete(on.by, id)
	}
	on.observeDrives(r, c)
	for _, a := range r.Admissions {
		on.admitted.Set(on.by, a.Volume, a.Epoch)
	}
	for _, id := range c.Gone.Admissions {
		on.admitted.Delete(on.by, id)
	}
	exports := map[block.NQN][]block.LegID{}
	for _, e := range r.Exports {
		exports[e.NQN] = append(exports[e.NQN], e.Legs...)
	}
	for _, nqn := range c.Gone.Exports {
		on.export(nqn, nil)
		on.exports.Delete(on.by, nqn)
	}
	for nqn, legs := range exports {
		on.export(nqn, legs)
	}
	return serving
}

// export notes the legs that a subsystem exports.
func (on *target) export(nqn block.NQN, legs []block.LegID) {
	for _, id := range on.exports.Get(nqn) {
		tally(on.by, &on.exported, id, -1)
	}
	for _, id := range legs {
		tally(on.by, &on.exported, id, 1)
	}
	on.exports.Set(on.by, nqn, legs)
}

// tally adds to a count, and drops it at 0.
func tally[K comparable](by *cow.Writer, counts *cow.Map[K, int], key K, n int) {
	if n += counts.Get(key); n > 0 {
		counts.Set(by, key, n)
		return
	}
	counts.Delete(by, key)
}

func (on *target) observeDrives(r *TargetReport, c *Change) {
	for _, d := range r.Drives {
		if c.Partial {
			d.Legs = on.drives[d.Drive].Legs
		}
		on.drives[d.Drive] = d
		for i := range d.Legs {
			if !c.Partial {
				tally(on.by, &on.labelled, d.Legs[i].Leg, 1)
			}
		}
	}
	changed := map[block.DriveID]map[block.LegID]bool{}
	for id, labels := range c.Labels {
		for i := range labels {
			put(changed, id, labels[i].Leg, true)
		}
	}
	for id, legs := range c.Gone.Labels {
		for _, leg := range legs {
			put(changed, id, leg, true)
		}
	}
	for id, legs := range changed {
		on.relabel(id, legs, c.Labels[id])
	}
	for _, id := range c.Gone.Drives {
		delete(on.drives, id)
	}
}

// relabel replaces the labels of some legs on a drive.
func (on *target) relabel(id block.DriveID, legs map[block.LegID]bool, with []evidence.LegLabel) {
	d := on.drives[id]
	d.Drive = id
	labels := make([]evidence.LegLabel, 0, len(d.Legs)+len(with))
	for i := range d.Legs {
		if leg := d.Legs[i].Leg; legs[leg] {
			tally(on.by, &on.labelled, leg, -1)
			continue
		}
		labels = append(labels, d.Legs[i])
	}
	for i := range with {
		tally(on.by, &on.labelled, with[i].Leg, 1)
	}
	d.Legs = append(labels, with...)
	on.drives[id] = d
	on.relabelled[id] = append(on.relabelled[id], with...)
}

// compare looks for what labels list and the records do not, on drives where either has
// changed since.
func (s *State) compare(on *target) {
	strays, unknown := maps.Clone(on.strays), maps.Clone(on.unknown)
	if strays == nil {
		strays, unknown = map[block.DriveID][]image.Extent{}, map[block.DriveID]block.Size{}
	}
	for id := range strays {
		if _, there := on.drives[id]; !there {
			delete(strays, id)
		}
	}
	for id := range unknown {
		if _, there := on.drives[id]; !there {
			delete(unknown, id)
		}
	}
	for id, d := range on.drives {
		same := s.stillMatches(on, id)
		on.compared[id] = s.touches
		delete(on.relabelled, id)
		if same {
			continue
		}
		delete(strays, id)
		delete(unknown, id)
		for i := range d.Legs {
			l := &d.Legs[i]
			recorded, known := s.onDrive[id][l.Leg]
			if more := image.Beyond(l.Extents, recorded); len(more) > 0 {
				strays[id] = append(strays[id], more...)
			}
			if !known {
				unknown[id] += labelRecord(l).Size()
			}
		}
	}
	on.strays, on.unknown = strays, unknown
}

// stillMatches reports whether a comparison of a drive's label with the records would find what
// the last one found. If all was in order, new records leave it so, and of the labels only those
// that have changed need a look.
func (s *State) stillMatches(on *target, id block.DriveID) bool {
	at, compared := on.compared[id]
	if !compared || s.removed[id] > at {
		return false
	}
	if _, relabelled := on.relabelled[id]; len(on.strays[id]) > 0 || on.unknown[id] > 0 {
		return s.touched[id] <= at && !relabelled
	}
	return !slices.ContainsFunc(on.relabelled[id], func(l evidence.LegLabel) bool {
		recorded, known := s.onDrive[id][l.Leg]
		return !known || len(image.Beyond(l.Extents, recorded)) > 0
	})
}

// Which agents may report. Agents of another cluster are refused, and so is a new node when
// too many nodes have no use: both are names that any client can invent, so both are bounded.

// ---- agents of another cluster ----

// foreignAgent is an agent of another cluster that reports to this manager: it was given a wrong
// address, or this manager runs at the address of the right one. Its reports are ignored,
// and it gets no wanted state.
type foreignAgent struct {
	cluster block.ClusterID
	seen    time.Time
}

// agentKey names the agent: "target" or "initiator" of a node.
type agentKey struct {
	node  block.NodeName
	agent string
}

const (
	// shownFor is how long a foreign agent that has stopped asking is still shown; agents ask
	// every 2 s.
	shownFor = 15 * time.Second

	// maxForeignAgents bounds the memory for names that any client can invent.
	maxForeignAgents = 1000
)

// foreign reports whether an agent belongs to another cluster; zero means that it belongs to
// none yet.
func (s *State) foreign(cluster block.ClusterID) bool {
	return !cluster.IsZero() && cluster != s.meta.ClusterID
}

// admit lets an agent of this cluster report: it is no longer foreign.
func (t *tx) admit(node block.NodeName, agent string) error {
	delete(t.s.foreignAgents, agentKey{node, agent})
	return t.makeRoom(node)
}

// refuseForeign refuses an agent of another cluster and remembers it for a while.
func (t *tx) refuseForeign(node block.NodeName, agent string, of block.ClusterID) *Error {
	key, own := agentKey{node, agent}, t.s.meta.ClusterID
	was, known := t.s.foreignAgents[key]
	if known || len(t.s.foreignAgents) < maxForeignAgents {
		t.s.foreignAgents[key] = foreignAgent{cluster: of, seen: t.now}
	}
	text := fmt.Sprintf("its %s agent belongs to cluster %v; this is %v", agent, of, own)
	if was.cluster != of {
		t.event(event.Trouble, event.AgentRefused, nodeObject(node), text+": it receives no instructions", "node", string(node), "agent", agent, "cluster", of.String())
	}
	return refused(ReasonOtherCluster, nodeObject(node), "%s", text).with("cluster", own.String())
}

// forgetForeignAgents forgets foreign agents that have stopped asking.
func (t *tx) forgetForeignAgents() {
	maps.DeleteFunc(t.s.foreignAgents, func(_ agentKey, x foreignAgent) bool { return t.now.Sub(x.seen) > shownFor })
}

// sortedForeignAgents returns all foreign agents, by node and agent.
func (s *State) sortedForeignAgents() []agentKey {
	return slices.SortedFunc(maps.Keys(s.foreignAgents), func(a, b agentKey) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.agent, b.agent))
	})
}

// refusedAgent says why an agent is refused; empty if it is not.
func (s *State) refusedAgent(key agentKey) string {
	x, ok := s.foreignAgents[key]
	if !ok {
		return ""
	}
	return fmt.Sprintf("belongs to cluster %v, not to this one", x.cluster)
}

// wrongAgents names, for each other cluster, its agents that report to this manager.
func (s *State) wrongAgents() (sentences []string) {
	agents := map[block.ClusterID][]string{}
	for _, key := range s.sortedForeignAgents() {
		id := s.foreignAgents[key].cluster
		agents[id] = append(agents[id], fmt.Sprintf("%s's %s", key.node, key.agent))
	}
	for _, id := range sorted(agents) {
		sentences = append(sentences, fmt.Sprintf("agents of cluster %v report to this manager and are refused (%s): check this manager's address and its store",
			id, some(agents[id], 8)))
	}
	return sentences
}

// ---- unused nodes ----

// Any client that can reach the manager can make nodes join, one for each name that it
// invents. So unused nodes are bounded: those without a drive, a leg, an attachment or an
// operator's label. Forgetting one loses nothing: it joins again when its agent reports.
const (
	MaxUnusedNodes = 5000
	// unusedFor is how long an unused node must be silent before a new node may replace it.
	// It also keeps a flood of names from pushing all other events out of the history.
	unusedFor = time.Hour
	// lookAgain is how long makeRoom refuses new nodes after it found none to forget, so
	// that it does not search for each.
	lookAgain = 5 * time.Second
)

// makeRoom makes sure that a node can join: it forgets the unused node that has been silent
// longest, or refuses.
func (t *tx) makeRoom(name block.NodeName) error {
	if t.s.nodes[name] != nil || len(t.s.nodes) < MaxUnusedNodes {
		return nil
	}
	if t.now.Before(t.s.full) {
		return tooManyNodes(name)
	}
	unused := t.s.unusedNodes()
	if len(unused) < MaxUnusedNodes {
		return nil
	}
	oldest := slices.MinFunc(unused, func(a, b block.NodeName) int {
		return cmp.Or(t.s.heard(a).Compare(t.s.heard(b)), cmp.Compare(a, b))
	})
	if t.now.Sub(t.s.heard(oldest)) < unusedFor {
		t.s.full = t.now.Add(lookAgain)
		return tooManyNodes(name)
	}
	t.event(event.Info, event.NodeRemoved, nodeObject(oldest), "removed: it was unused, and another node joins", "node", string(oldest))
	t.forget(oldest)
	return nil
}

func tooManyNodes(name block.NodeName) error {
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonTooManyNodes, Object: nodeObject(name),
		Text: fmt.Sprintf("%s cannot join: there are already %d nodes without a drive, an attachment or an operator's label", nodeObject(name), MaxUnusedNodes),
	}
	return e.hint("remove nodes that are gone with `weft node remove`; one that has been silent for %v is removed by itself", unusedFor)
}

func (s *State) unusedNodes() (names []block.NodeName) {
	named := map[block.NodeName]bool{} // hosts that may still have a volume
	for _, v := range s.volumes.All() {
		named[v.Holder] = true
		for _, l := range v.FormerHosts {
			named[l.Node] = true
		}
	}
	for name, n := range s.nodes {
		if len(s.drivesOn[name]) == 0 && s.onNode.Get(name).Len() == 0 && len(n.OperatorLabels) == 0 && !n.Stock && !named[name] {
			names = append(names, name)
		}
	}
	return names
}

// heard is when an agent of a node last reported; the first step of this process if none
// has since.
func (s *State) heard(name block.NodeName) time.Time {
	at := s.began
	if on := s.targets[name]; on != nil && on.status.Seen.After(at) {
		at = on.status.Seen
	}
	if on := s.initiators[name]; on != nil && on.status.Seen.After(at) {
		at = on.status.Seen
	}
	return at
}

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
	EvacuateAfter time.Duration                             `json:"evacuate_after"`
	Overcommit    float64                                   `json:"overcommit,omitzero"`
	Targets       map[block.NodeName]observedTarget         `json:"targets"`
	Initiators    map[block.NodeName]observedInitiator      `json:"initiators"`
	ForeignAgents []observedForeign                         `json:"foreign_agents"`
	Fences        map[block.VolumeID]observedFence          `json:"fences"`
	Trials        map[block.LegID]backoff.Times             `json:"trials"`
	Away          map[block.DriveID]time.Time               `json:"away"`
	Evacuations   map[block.DriveID]evacuation              `json:"evacuations,omitempty"`
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
	Since   time.Time `json:"since"`
	Process bool      `json:"process,omitempty"`
	May     bool      `json:"may"`
}

// Observed is what readers see of s and no record holds, as JSON. LoadObserved reads it.
func (s *State) Observed() ([]byte, error) {
	o := observed{
		Now: s.now, Began: s.began, HasMaster: !s.master.IsZero(), ReplaceAfter: s.policy.ReplaceAfter, EvacuateAfter: s.policy.EvacuateAfter, Overcommit: s.policy.Overcommit, Trials: s.trials.All(),
		Away: s.away, Evacuations: s.evacuations, Asked: s.asked,
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
		o.Stopping[name] = observedStop{x.since, x.process, x.may}
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
	s.now, s.began = o.Now, o.Began
	s.policy.ReplaceAfter, s.policy.EvacuateAfter, s.policy.Overcommit = o.ReplaceAfter, o.EvacuateAfter, o.Overcommit
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
		s.stopping[name] = stop{x.Since, x.Process, x.May}
	}
	s.away, s.evacuations, s.asked = o.Away, o.Evacuations, o.Asked
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
		on.noteDamage(l.Leg, l.Damage != "")
	}
	for id, epoch := range o.Admitted {
		on.admitted.Set(on.by, id, epoch)
	}
	for nqn, legs := range o.Exports {
		on.export(nqn, legs)
	}
	return on
}

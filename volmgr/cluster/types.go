// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/health"
	"weft.dev/weft/volmgr/image"
)

// Node is a machine that runs a target agent, an initiator agent, or both.
type Node struct {
	Name           block.NodeName    `json:"name"`
	OperatorLabels map[string]string `json:"operator_labels,omitempty"`
	AgentLabels    map[string]string `json:"agent_labels,omitempty"`
	Portals        []block.Portal    `json:"portals,omitempty"`
	ProcessPortals []block.Portal    `json:"process_portals,omitempty"` // see Volume.portals
	Host           block.Host        `json:"host,omitzero"`
	// ConfirmedDead: an operator has confirmed that the machine is off. Any report clears it.
	ConfirmedDead bool `json:"confirmed_dead,omitempty"`
	// The boots that volmgr has acted on. They are durable, so that a reboot
	// during a restart of volmgr is still seen.
	TargetBoot    string `json:"target_boot,omitempty"`
	InitiatorBoot string `json:"initiator_boot,omitempty"`
	// What its agents can prove, as they last reported: see Attachment.Proven.
	TargetAuthenticates bool `json:"target_authenticates,omitempty"`
	// KernelMaps: the kernel of its target can map legs in trees that nobody writes.
	KernelMaps             bool `json:"kernel_maps,omitempty"`
	InitiatorAuthenticates bool `json:"initiator_authenticates,omitempty"`
	// Stock: it has no initiator agent; its operator connects with Linux's own tools: see stock.go.
	Stock bool `json:"stock,omitempty"`
	// Refused is the count of its target's refusals of which an event tells.
	Refused uint64 `json:"refused,omitempty"`
	// Cordoned: no new legs. Draining: its legs are made again elsewhere. MaintainedUntil: its
	// absence until then is announced. See upkeep.go.
	Cordoned        bool      `json:"cordoned,omitempty"`
	Draining        bool      `json:"draining,omitempty"`
	MaintainedUntil time.Time `json:"maintained_until,omitzero"`

	// Derived, for readers.
	Labels    map[string]string `json:"-"` // the operator's over the agents', and "node"
	StopWaits []string          `json:"-"` // under maintenance: what has to happen before it may stop
	StopsIO   []string          `json:"-"` // under maintenance: volumes whose I/O waits while it is off
	Target    AgentStatus       `json:"-"`
	Initiator AgentStatus       `json:"-"`
}

// AgentStatus is what one agent has reported since volmgr started.
type AgentStatus struct {
	Known        bool // it has ever reported; for readers: to this manager or another one
	Online       bool
	BootID       string
	Seen         time.Time
	Silent       time.Duration // since Seen, while it is offline; derived, for readers
	Version      string
	Level        block.Level // the newest that it knows
	Kernel       string
	Generation   uint64
	Problems     []Problem
	HandsOver    bool   // of a target: its next process can take over from it
	Freezes      bool   // of an initiator: it can freeze file systems
	SeveralPaths bool   // of an initiator: it can use several paths to a leg at a time
	Refused      string // why its reports are ignored: it belongs to another cluster; derived, for readers
}

// Problem is something that an agent tries to do and cannot do yet.
type Problem struct {
	Object string // "leg <id>", "drive <id>", "export <nqn>", "attachment <volume id>", "paths <volume id>"
	Doing  string
	Cause  string
	Since  time.Time
}

// DriveState is where a drive is between AddDrive and its removal.
//
//	ADDING ──label reported──► READY ◄──seen again, usable──┐
//	   │                         │ ──not in the report──► MISSING
//	   │                         │ ──reported with error─► FAILED
//	   └──── EvictDrive ─────────┴──► REMOVING ──label gone──► (no record)
type DriveState string

// The states of a drive.
const (
	DriveAdding   DriveState = "ADDING"
	DriveReady    DriveState = "READY"
	DriveMissing  DriveState = "MISSING"
	DriveFailed   DriveState = "FAILED"
	DriveRemoving DriveState = "REMOVING"
	// DriveOffline appears only in views: a record keeps the state that the target last reported.
	DriveOffline DriveState = "OFFLINE"
	// DriveSuspect appears only in views too: a ready drive with signs of failing. It serves its
	// legs, and gets no new ones.
	DriveSuspect DriveState = "SUSPECT"
)

// Drive is a device that was added to the cluster.
type Drive struct {
	ID            block.DriveID  `json:"id"`
	Node          block.NodeName `json:"node"`
	Device        string         `json:"device"`
	Model         string         `json:"model,omitempty"`
	Serial        string         `json:"serial,omitempty"`
	WWID          string         `json:"wwid,omitempty"`
	Size          block.Size     `json:"size"`
	BlockSize     uint32         `json:"block_size,omitempty"`
	NUMANode      int32          `json:"numa_node"`
	VolatileCache bool           `json:"volatile_cache,omitempty"`
	// CacheChanged: its cache has come or gone since its target booted. Meanwhile flushes may have been left
	// out, or have done nothing.
	CacheChanged bool              `json:"cache_changed,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	ForceErase   string            `json:"force_erase,omitempty"`
	State        DriveState        `json:"state"`
	Reason       string            `json:"reason,omitempty"`
	Extents      uint32            `json:"extents,omitempty"` // 0 until its label was reported
	RemovedAt    uint64            `json:"removed_at,omitempty"`
	// Incarnation is the one that its target last reported. When it changes, data that
	// only the drive's cache held may be lost.
	Incarnation string `json:"incarnation,omitempty"`
	// Signs are those of failing that its readings have shown; see Suspect.
	Signs health.Record `json:"signs,omitzero"`
	// Leaving: its legs are made again elsewhere; see upkeep.go.
	Leaving DriveLeave `json:"leaving,omitempty"`
	// Full is the mark of noteFull that it has reached, in per cent; 0: none.
	Full int `json:"full,omitempty"`
	// Space is the extents that the trees of thin volumes may have, and Returning those that are
	// being taken back, since generation ReturnedAt; see space.go. Both are replaced, never changed in
	// place.
	Space      []image.Extent `json:"space,omitempty"`
	Returning  []image.Extent `json:"returning,omitempty"`
	ReturnedAt uint64         `json:"returned_at,omitempty"`

	Capacity  block.Size      `json:"-"`
	Allocated block.Size      `json:"-"` // by legs, and granted to trees
	Thin      block.Size      `json:"-"` // of that: granted to trees
	ThinUsed  block.Size      `json:"-"` // of that: what trees have
	Promised  block.Size      `json:"-"` // what its legs take if they are written whole
	Health    *health.Reading `json:"-"` // the newest; nil if there is none, or if its target is offline
}

// Device is one block device that a node's inventory found, ours or not.
type Device struct {
	Path          string
	Model         string
	Serial        string
	WWID          string
	Size          block.Size
	BlockSize     uint32
	NUMANode      int32
	Rotational    bool
	VolatileCache bool
	ReadOnly      bool
	Holders       []string
	Signatures    []string
	DriveID       block.DriveID   // zero if it carries no label of ours
	Cluster       block.ClusterID // of the label
	Refused       string
	Unread        string          // why its label and signatures could not be read
	Health        *health.Reading // of a drive; nil: none
}

// DefaultPool is the pool of volumes that name none. It always exists and holds
// every drive.
const DefaultPool = block.DefaultPool

// Pool is a set of drives that volumes may be placed on.
type Pool struct {
	Name     string            `json:"name"`
	Selector map[string]string `json:"selector,omitempty"`
	// Rebalance is the last one; nil: there was none.
	Rebalance *Rebalance `json:"rebalance,omitempty"`
	// Full is the mark of noteFull that it has reached, in per cent; 0: none.
	Full int `json:"full,omitempty"`

	Capacity  block.Size `json:"-"`
	Allocated block.Size `json:"-"`
	Promised  block.Size `json:"-"` // see Drive
	Drives    int        `json:"-"`
}

// LegState says whether a leg's content can be trusted.
//
//	CREATING ──every leg ready──► IN_SYNC ──RecordStale, eviction, reboot──► STALE
//	                                 ▲                                      │   ▲
//	                           RecordInSync                  attached, fenced,  lost, reboot,
//	                                 │                       drained, ready │   new grant, detach
//	                                 └────────────── REBUILDING ◄───────────┘   │
//	                                                     └──────────────────────┘
//	any ──DeleteVolume, or made again elsewhere──► DELETING ──reported absent──► (no record)
//
// Each step into STALE raises the leg's revision, and with it the identity under
// which it is exported.
type LegState string

// The states of a leg.
const (
	LegCreating   LegState = "CREATING"
	LegInSync     LegState = "IN_SYNC"
	LegStale      LegState = "STALE"
	LegRebuilding LegState = "REBUILDING"
	LegDeleting   LegState = "DELETING"
)

// Leg is one member of a column, on one drive.
type Leg struct {
	ID     block.LegID    `json:"id"`
	Column int            `json:"column"`
	Copy   int            `json:"copy"`
	Drive  block.DriveID  `json:"drive"`
	Node   block.NodeName `json:"node"`
	image.Image
	State      LegState  `json:"state"`
	Revision   uint64    `json:"revision"`
	StaleSince time.Time `json:"stale_since,omitzero"`
	// StaleAt is the generation in which the leg became stale. Its rebuild waits until its
	// target has acted on that generation, and so has drained the I/O that was in flight
	// under the old identity.
	StaleAt uint64 `json:"stale_at,omitempty"`
	Reason  string `json:"reason,omitempty"`
	// CopyAll: the leg may lack writes that it had acknowledged, so its rebuild copies all
	// of it and not only what a host's log lists.
	CopyAll bool `json:"copy_all,omitempty"`
	// CopyAllSince is the revision since which CopyAll holds. A host that began to copy all of
	// the leg at that revision or a later one, and knows what it misses since, need not begin
	// anew. 0: not known.
	CopyAllSince uint64 `json:"copy_all_since,omitempty"`
	// CacheLost: since revision AllSince, CopyAll holds only because the leg may have lost what its
	// drive's cache held; AllSince 0: since it was last in sync. A host that has tracked what it wrote
	// and did not flush copies no more than that and what the leg missed. Managers of earlier versions
	// drop both fields, and so have all of it copied.
	//
	// Of a suspect leg: that is what it will be once it is stale.
	CacheLost bool   `json:"cache_lost,omitempty"`
	AllSince  uint64 `json:"all_since,omitempty"`
	// Suspect: the leg is in sync by record, but its target rebooted and may have
	// lost writes that only a cache held; see suspect.go.
	Suspect bool `json:"suspect,omitempty"`
	// SuspectAt is the generation in which it became suspect. A target that has acted on
	// that generation cannot have lost its power in the same event.
	SuspectAt uint64 `json:"suspect_at,omitempty"`
	// Loss is the latest reason why the leg may have lost cached writes; empty: its target
	// rebooted.
	Loss string `json:"loss,omitempty"`
	// Reborn is the revision that the leg got when it last lost cached writes and was kept
	// in sync all the same; see suspect.go.
	Reborn uint64 `json:"reborn,omitempty"`
	// Rebuilt is when the last rebuild succeeded, for people. Failures counts the rebuilds
	// that failed since the leg was last good for a while. It sets the pause before the
	// next one, see package backoff.
	Rebuilt  time.Time `json:"rebuilt,omitzero"`
	Failures int       `json:"failures,omitempty"`
	// Place numbers the leg among its volume's legs on its node, from 1. Its namespace
	// gets that number, see nsid. 0 if the leg was carved before places were recorded.
	Place int `json:"place,omitempty"`
	// Blank: the leg was added to take the place of another one, and never held the volume's
	// data. Listed is the volume's generation since which labels list it.
	Blank  bool   `json:"blank,omitempty"`
	Listed uint64 `json:"listed,omitempty"`
	// Tree is the tree of a leg that shares one with other legs; zero: a mapped or based leg has one of
	// its own.
	Tree block.UUID `json:"tree,omitzero"`
	// Based: the leg is plain, and there is, or is to be, a tree over its extents, whose id is that of the
	// leg. Returning: it is to lose the tree. See space.go.
	Based     bool `json:"based,omitempty"`
	Returning bool `json:"returning,omitempty"`
	// Origin is the leg as which this one begins, until it is in the tree, or the one that it is made
	// again of; see snapshotcopies.go.
	Origin block.LegID `json:"origin,omitzero"`
	// Copying is of what a leg of a snapshot is being copied; nil: it is not. It is never changed in place.
	Copying *LegCopy `json:"copying,omitempty"`
	// Leave: an operator asked to move the leg.
	Leave bool `json:"leave,omitempty"`
	// Rebalanced: it leaves because its drive is among the fullest of its pool.
	Rebalanced bool `json:"rebalanced,omitempty"`
	// Retired is the volume's generation since which labels do not list the leg, which was made
	// again elsewhere; 0: they do. FreedAt is the generation in which its deletion began.
	Retired uint64 `json:"retired,omitempty"`
	FreedAt uint64 `json:"freed_at,omitempty"`
	// Draining is set on a leg that the manager made stale while it was well: its export of
	// this epoch stays, under the same revision, until the host has stopped using it.
	// DrainingAt is the generation in which that began.
	Draining   block.Epoch `json:"draining,omitempty"`
	DrainingAt uint64      `json:"draining_at,omitempty"`

	// Of a mapped leg, derived, for readers: see LegReport.
	Used  block.Size `json:"-"`
	Full  bool       `json:"-"`
	Space *LegSpace  `json:"-"`
}

// VolumeState says whether a volume's legs are being carved, exist, or are being freed.
//
//	CREATING ──every leg carved and zeroed──► READY ──DeleteVolume──► DELETING ──legs absent──► (no record)
type VolumeState string

// The states of a volume.
const (
	VolumeCreating VolumeState = "CREATING"
	VolumeReady    VolumeState = "READY"
	VolumeDeleting VolumeState = "DELETING"
)

// Health sums up the legs of a volume.
type Health string

// The healths of a volume, from best to worst.
const (
	Healthy     Health = "HEALTHY"
	Rebuilding  Health = "REBUILDING"
	Degraded    Health = "DEGRADED"
	Unavailable Health = "UNAVAILABLE"
)

// Volume is the block device that a user asked for.
type Volume struct {
	ID     block.VolumeID    `json:"id"`
	Name   block.VolumeName  `json:"name"`
	Size   block.Size        `json:"size"`
	Layout block.Layout      `json:"layout"`
	Pool   string            `json:"pool"`
	Spread string            `json:"spread"`
	Labels map[string]string `json:"labels,omitempty"`
	State  VolumeState       `json:"state"`
	// Thin: its legs are mapped, and take space only where they were written.
	Thin bool `json:"thin,omitempty"`
	// Snapshot says of what the volume is a snapshot; nil: it is none. CloneOf is the snapshot as which
	// the volume began, and Failed why a snapshot that is being deleted was not taken, or why the volume did
	// not go back to one when that was asked for last.
	Snapshot *SnapshotOf      `json:"snapshot,omitempty"`
	CloneOf  block.VolumeName `json:"clone_of,omitempty"`
	Failed   string           `json:"failed,omitempty"`
	// Flatten is that the volume was to be made independent of the snapshot as which it began; nil: it was
	// not. It is never changed in place.
	Flatten *Flatten `json:"flatten,omitempty"`
	// Restoring is how far the volume is on its way back to a snapshot; nil: it is not. It is never
	// changed in place.
	Restoring *Restoring `json:"restoring,omitempty"`
	// Sealed is when the volume was sealed, so that no host writes it any more; zero: it was not. SealedAt is
	// the volume's generation since which labels say so. See shared.go.
	Sealed   time.Time `json:"sealed,omitzero"`
	SealedAt uint64    `json:"sealed_at,omitempty"`
	// Epoch is that of the newest grant, handed out or not. Targets admit nothing below it.
	Epoch block.Epoch `json:"epoch"`
	// Clean: the in-sync legs of each column are identical and no host can write.
	Clean bool `json:"clean"`
	// Generation grows with each change of the in-sync sets.
	Generation uint64      `json:"generation"`
	Legs       []Leg       `json:"legs"`                 // by column, then copy
	Attachment *Attachment `json:"attachment,omitempty"` // exclusive
	// Shared are the attachments of a shared volume, all of one mode and at one
	// epoch; see shared.go. There are none if Attachment is set.
	Shared []Attachment `json:"shared,omitempty"`
	// InKernel are the targets whose kernels serve the legs in trees to the hosts in Shared, in place of a
	// process; see Volume.inKernel.
	InKernel []block.NodeName `json:"in_kernel,omitempty"`
	// Heal is a host that copies to the legs of the detached volume, and to nothing else; nil: none does.
	// It is no attachment: see copying.go. There is none if Attachment is set or Shared is not empty.
	Heal *Attachment `json:"heal,omitempty"`
	// Holder is the host of the last exclusive grant, if it has not reported a release.
	// It may read and write until the next grant is complete.
	Holder block.NodeName `json:"holder,omitempty"`
	// FormerHosts are hosts that shared the volume and have not reported a release. They may
	// read until a grant to write is complete.
	FormerHosts []FormerHost `json:"lingering,omitempty"`
	Created     time.Time    `json:"created"`
	// Restored: the record came from a backup and has not been compared with the labels of
	// the legs yet. A leg may have gone stale after the backup.
	Restored bool `json:"restored,omitempty"`
	// Backup is what the backup recorded of a volume that is Restored.
	Backup    *Backup `json:"backup,omitempty"`
	DeletedAt uint64  `json:"deleted_at,omitempty"` // generation of DeleteVolume
	// Formatted names the file system that was made on the volume, or is being made (see
	// Formatting). It is Raw if the volume may hold anything, empty if it was never written.
	Formatted string `json:"formatted,omitempty"`
	// ExpandingTo is the size that the legs grow to; 0 if no expansion is under way.
	ExpandingTo block.Size `json:"expanding_to,omitempty"`
	// Placed is the last place that a leg got which was made again elsewhere; 0: none was.
	Placed     int     `json:"placed,omitempty"`
	Scrub      *Scrub  `json:"scrub,omitempty"`       // the last one; never changed in place
	PastScrubs []Scrub `json:"past_scrubs,omitempty"` // those before it, newest first; never changed in place
	// ScrubEvery is how often a scrub begins by itself, 0: never, and ScrubRate its rate.
	// ScrubSince is when that was set.
	ScrubEvery time.Duration `json:"scrub_every,omitempty"`
	ScrubRate  block.Size    `json:"scrub_rate,omitempty"`
	ScrubSince time.Time     `json:"scrub_since,omitzero"`
	// Heals counts what did not match its checksum; nil: nothing. It is never changed in place.
	Heals *Heals `json:"heals,omitempty"`
	// RebuildRate is the most that its host copies to legs in a second, all of them together; 0:
	// no limit.
	RebuildRate block.Size `json:"rebuild_rate,omitempty"`
	// Paths is through how many portals at a time a host in the kernel reaches each leg; 0: one. See setPaths.
	Paths int `json:"paths,omitempty"`
	// Authentication is that of block.PropertyAuthentication; empty: its default. It counts for
	// grants that are handed out from now on.
	Authentication string `json:"authentication,omitempty"`
	// Rebuilds are those under way and the last ones, newest first; never changed in place.
	Rebuilds []LegRebuild `json:"rebuilds,omitempty"`

	Health        Health   `json:"-"`
	CopiesLeft    int      `json:"-"` // that can be served, of the column with fewest; of a code: losses that it survives, and one
	FenceWaitsFor []string `json:"-"` // see fenceWaits
}

// AttachMode says whether a volume is attached to one host or shared, and who may write.
type AttachMode string

// The attach modes.
const (
	AttachExclusive      AttachMode = "EXCLUSIVE"
	AttachSharedReadOnly AttachMode = "SHARED_READ_ONLY" // any number of hosts, which only read
	AttachSharedBlock    AttachMode = "SHARED_BLOCK"     // any number of hosts, which may all write; only for volumes of one copy
)

// AttachmentState is drawn in attach.go.
type AttachmentState string

// The states of an attachment.
const (
	Granting  AttachmentState = "GRANTING"
	Granted   AttachmentState = "GRANTED"
	Attached  AttachmentState = "ATTACHED"
	Detaching AttachmentState = "DETACHING"
)

// Attachment is a volume given to a host at one epoch.
type Attachment struct {
	Node     block.NodeName  `json:"node"`
	Host     block.Host      `json:"host"`
	Mode     AttachMode      `json:"mode"`
	Epoch    block.Epoch     `json:"epoch"`
	State    AttachmentState `json:"state"`
	BootID   string          `json:"boot_id"`
	Equalize bool            `json:"equalize,omitempty"` // set when the grant is handed out
	// Left: the host released the volume by itself, since it is shutting down. The grant
	// waits for its next boot.
	Left bool `json:"left,omitempty"`
	// GaveUp is the reason why the host gave up the grant before this one; empty if it
	// did not.
	GaveUp string `json:"gave_up,omitempty"`
	// FenceAt is the generation from which no target may export a shared volume to this
	// host; 0: they may. The exports to other hosts stay.
	FenceAt uint64 `json:"fence_at,omitempty"`
	// JoinedAt is the generation in which the host joined those that share the volume. A
	// host may rejoin an epoch that it had left: its reports count from JoinedAt on.
	JoinedAt uint64 `json:"joined_at,omitempty"`
	// KeptAt is the generation in which a detach was cancelled, until the host has acted on
	// it; 0: none was cancelled. An earlier report may still say that the host released
	// the volume.
	KeptAt uint64 `json:"kept_at,omitempty"`
	// Grant is the generation in which a grant of a shared epoch was handed out. It is part
	// of the names of its exports, so a host that is granted the volume again finds nothing
	// under the old names. 0: the epoch has one grant.
	Grant uint64    `json:"grant,omitempty"`
	Since time.Time `json:"since"`
	// Copies is how many the layout had when the grant was handed out, if that has changed
	// since: the host goes on with that layout. 0: it has not changed.
	Copies int `json:"copies,omitempty"`
	// SinceEpoch is the first epoch since which the host alone had the volume, and no leg has
	// lost cached writes; 0: one has, or hosts share it.
	SinceEpoch block.Epoch `json:"since_epoch,omitempty"`
	// Proven says which targets and this host prove their identities to one another: see wanted.go.
	Proven Proven `json:"proven,omitzero"`
	// Paths is that of the volume when the grant was made; it stays while the grant lasts.
	Paths int `json:"paths,omitempty"`
	// Run is the process of the host's agent that heals the volume; empty: it is an attachment.
	Run string `json:"run,omitempty"`
	// Stock: the host has no agent; see stock.go.
	Stock bool `json:"stock,omitempty"`
	// Portal is where a stock host connects, as long as its target has that; see stock.go.
	Portal block.Portal `json:"portal,omitzero"`
	Away   bool         `json:"away,omitempty"`
	// Prefers is kept by all grants until the volume is detached.
	Prefers Preference `json:"prefers,omitzero"`

	VolumeID    block.VolumeID   `json:"-"`
	VolumeName  block.VolumeName `json:"-"`
	Device      string           `json:"-"`
	Number      string           `json:"-"` // of the device: "253:4"
	Size        block.Size       `json:"-"` // of the device
	WaitingFor  string           `json:"-"`
	ResyncDone  block.Size       `json:"-"`
	ResyncTotal block.Size       `json:"-"`
	// AuthenticatesWith are the targets that prove their identities to the host, as it does to them.
	AuthenticatesWith []block.NodeName `json:"-"`
	// StockNQN is the subsystem that a stock host connects to.
	StockNQN block.NQN `json:"-"`
}

// Proven is fixed for each target before it is first told of the grant, since neither end can begin
// or cease to demand a proof while they are connected.
type Proven struct {
	// By is whether the host can prove its identity, and is wanted to. It is set when the grant is
	// handed out.
	By bool `json:"by,omitempty"`
	// Required: targets that cannot take part in it are not used.
	Required bool `json:"required,omitempty"`
	// At says for each target whether it demands the proof; never changed in place.
	At map[block.NodeName]bool `json:"at,omitempty"`
}

// FormerHost is a boot of a host that had a volume at an epoch. An empty Node stands for any
// host: the store that knew the hosts was lost.
type FormerHost struct {
	Node   block.NodeName `json:"node"`
	BootID string         `json:"boot_id"`
	Epoch  block.Epoch    `json:"epoch"`
	Mode   AttachMode     `json:"mode"`
}

// Status is a summary of the cluster that fits on one screen.
type Status struct {
	ClusterID          block.ClusterID
	Generation         uint64
	Capacity           block.Size
	Allocated          block.Size
	Nodes              int
	NodesOffline       int
	Drives             int
	DrivesNotReady     int
	Volumes            int
	VolumesDegraded    int
	VolumesUnavailable int
	Attachments        int
	Wrong              []string // one sentence each, worst first
}

// Explanation says why a volume is in its state, what it waits for and what to do.
type Explanation struct {
	Object  string
	Summary string
	Facts   []string
	Waits   []string
	Actions []string
}

// Kind classifies a refusal; each maps to one gRPC code.
type Kind int

// The kinds.
const (
	InvalidArgument    Kind = iota + 1 // Field is wrong
	NotFound                           // Object is not there
	AlreadyExists                      // Object is there and differs in Field
	FailedPrecondition                 // not now: Reason says why, Hint what to do
	ResourceExhausted                  // no space; Reason NO_SPACE
	Unimplemented                      // not served by this version
)

// Reasons that programs may branch on.
const (
	ReasonNoInSyncLeg      = "NO_IN_SYNC_LEG"
	ReasonEpochSuperseded  = "EPOCH_SUPERSEDED"
	ReasonNotAttached      = "NOT_ATTACHED"
	ReasonLastLeg          = "LAST_LEG"
	ReasonNotAsked         = "NOT_ASKED"
	ReasonRevisionMoved    = "REVISION_MOVED"
	ReasonLateRecord       = "LATE_RECORD"
	ReasonNotFenced        = "NOT_FENCED"
	ReasonAttached         = "ATTACHED"
	ReasonAttachedElse     = "ATTACHED_ELSEWHERE"
	ReasonDetaching        = "DETACHING"
	ReasonCopiesDiffer     = "COPIES_DIFFER"
	ReasonReadOnly         = "READ_ONLY"
	ReasonNotReady         = "NOT_READY"
	ReasonNoInitiator      = "NO_INITIATOR"
	ReasonNodeOnline       = "NODE_ONLINE"
	ReasonNodeOffline      = "NODE_OFFLINE"
	ReasonNodeInUse        = "NODE_IN_USE"
	ReasonDriveInUse       = "DRIVE_IN_USE"
	ReasonDeviceUnusable   = "DEVICE_UNUSABLE"
	ReasonForeignData      = "FOREIGN_DATA"
	ReasonPoolInUse        = "POOL_IN_USE"
	ReasonNoPool           = "NO_SUCH_POOL"
	ReasonNoSpace          = "NO_SPACE"
	ReasonDataLoss         = "DATA_LOSS"
	ReasonLegNotStale      = "LEG_NOT_STALE"
	ReasonInSyncLegExists  = "IN_SYNC_LEG_EXISTS"
	ReasonOtherCluster     = "OTHER_CLUSTER"
	ReasonOldTarget        = "OLD_TARGET"
	ReasonVolumeIsDeleting = "DELETING"
	ReasonNoReport         = "NO_REPORT"
	ReasonTooManyNodes     = "TOO_MANY_NODES"
	ReasonEventsGone       = "EVENTS_GONE"
	ReasonNoAuthentication = "NO_AUTHENTICATION"
	ReasonOldParts         = "OLD_PARTS"
)

// Error is a refusal. Text reads as "object or field: why"; the other fields hold what a
// program or a hint needs, and may be empty.
type Error struct {
	Kind     Kind
	Field    string // of the request, as the proto spells it
	Reason   string
	Object   string // "volume db1"
	Text     string
	Hint     string
	Metadata map[string]string
}

func (e *Error) Error() string { return e.Text }

func invalid(field, format string, args ...any) *Error {
	return &Error{Kind: InvalidArgument, Field: field, Text: field + ": " + fmt.Sprintf(format, args...)}
}

func notFound(object string) *Error {
	return &Error{Kind: NotFound, Object: object, Text: object + ": not found"}
}

// noPool refuses a request that names an unknown pool.
func noPool(name string) *Error {
	e := notFound("pool " + name)
	e.Reason = ReasonNoPool
	return e
}

// conflict refuses to create an object that exists with another value of one parameter.
func conflict(object, field string, have, asked any) *Error {
	if h, ok := have.(map[string]string); ok {
		have, asked = pairs(h), pairs(asked.(map[string]string))
	}
	return &Error{
		Kind: AlreadyExists, Object: object, Field: field,
		Text:     fmt.Sprintf("%s: already exists with %s %v, asked for %v", object, strings.TrimSuffix(strings.ReplaceAll(field, "_", " "), " bytes"), have, asked),
		Metadata: map[string]string{"field": field, "have": fmt.Sprint(have), "asked": fmt.Sprint(asked)},
	}
}

// pairs prints labels as key=value, in order.
func pairs(labels map[string]string) string {
	if len(labels) == 0 {
		return "none"
	}
	var all []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, key+"="+labels[key])
	}
	return strings.Join(all, ",")
}

func refused(reason, object, format string, args ...any) *Error {
	return &Error{Kind: FailedPrecondition, Reason: reason, Object: object, Text: object + ": " + fmt.Sprintf(format, args...)}
}

func (e *Error) hint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

func (e *Error) with(key, value string) *Error {
	if e.Metadata == nil {
		e.Metadata = map[string]string{}
	}
	e.Metadata[key] = value
	return e
}

// SPDX-License-Identifier: Apache-2.0

package event

// The kinds of events.
const (
	NodeJoined       = "node.joined"
	NodeRebooted     = "node.rebooted"
	NodeConfirmed    = "node.confirmed-dead"
	NodeCordoned     = "node.cordoned"
	NodeUncordoned   = "node.uncordoned"
	NodeMaintained   = "node.maintenance" // its absence is announced
	NodeRemoved      = "node.removed"
	TargetOnline     = "target.online"
	TargetStopping   = "target.stopping" // its exports are about to end, in order
	TargetOffline    = "target.offline"
	InitiatorOnline  = "initiator.online"
	InitiatorOffline = "initiator.offline"
	AgentRefused     = "agent.refused"    // it belongs to another cluster
	ManagerReplaced  = "manager.replaced" // an agent follows a later one
	DriveAdded       = "drive.added"
	DriveReady       = "drive.ready"
	DriveMissing     = "drive.missing"
	DriveFailed      = "drive.failed"
	DriveLabeled     = "drive.labeled"
	DriveCache       = "drive.cache"    // it has a volatile cache now, or none any more
	DriveReturned    = "drive.returned" // data that only its cache held may be lost
	DriveSuspect     = "drive.suspect"  // it shows signs of failing
	DriveWell        = "drive.well"     // it no longer does
	DriveLeaving     = "drive.leaving"  // its legs are made again elsewhere, or not any more
	DriveRemoving    = "drive.removing"
	DriveRemoved     = "drive.removed"
	PoolCreated      = "pool.created"
	PoolDeleted      = "pool.deleted"
	PoolRebalancing  = "pool.rebalancing"
	PoolRebalanced   = "pool.rebalanced"
	VolumeCreating   = "volume.creating"
	VolumeReady      = "volume.ready"
	VolumeUpdated    = "volume.updated"
	VolumeFormatted  = "volume.formatted"
	VolumeExpanding  = "volume.expanding"
	VolumeExpanded   = "volume.expanded"
	ScrubBegan       = "volume.scrubbing" // its host compares its copies
	ScrubFound       = "volume.scrub-found"
	ScrubRepair      = "volume.scrub-repair" // what became of a range that was found and was to be repaired
	ScrubPaused      = "volume.scrub-paused" // or it goes on
	ScrubEnded       = "volume.scrubbed"
	VolumeDeleting   = "volume.deleting"
	VolumeDeleted    = "volume.deleted"
	Granting         = "volume.granting"
	Granted          = "volume.granted"
	Attached         = "volume.attached"
	Detaching        = "volume.detaching"
	VolumeUnserved   = "volume.unavailable"
	VolumeServed     = "volume.available"
	DetachCancelled  = "volume.detach-cancelled"
	Detached         = "volume.detached"
	Left             = "volume.left"
	WritesLost       = "volume.writes-lost" // certainly or possibly: acknowledged but not flushed
	GaveUp           = "volume.gave-up"     // its host gave up the grant, and nothing is lost
	LegStale         = "leg.stale"
	LegEvicted       = "leg.evicted" // made stale by volmgr itself
	LegSuspect       = "leg.suspect" // in sync, but not served until a peer has reported
	LegBelieved      = "leg.believed"
	LegReborn        = "leg.reborn" // kept in sync though it may have lost cached writes; its host is told
	LegRebuilding    = "leg.rebuilding"
	LegInSync        = "leg.in-sync"
	LegAdded         = "leg.added"   // to take the place of one that leaves
	LegRetired       = "leg.retired" // made again elsewhere
	LegFreed         = "leg.freed"   // a retired leg is erased
	LegPromoted      = "leg.promoted"
	StoreRebuilt     = "store.rebuilt"
	StoreRestored    = "store.restored"
	VolumeChecked    = "volume.checked" // restored from a backup, and now compared with the labels
)

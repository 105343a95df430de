// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// Place is the position of a leg in a volume.
type Place struct{ Column, Copy int }

// Path is a way to a target: a subsystem at one of its portals. Loss is decided for each path,
// and then for the leg: a leg is lost when every path to it is.
type Path struct {
	Subsystem block.NQN
	Portal    block.Portal // zero: any portal
}

func (p Path) String() string {
	if p.Portal == (block.Portal{}) {
		return string(p.Subsystem)
	}
	return string(p.Subsystem) + " at " + p.Portal.String()
}

// Compare orders paths by what String prints.
func (p Path) Compare(q Path) int { return cmp.Compare(p.String(), q.String()) }

// PathState is the state of a path.
type PathState string

// The states of a path.
//
//	none ──► connecting ──► live ◄──► silent
//	           │               │         │
//	           ▼               ▼         ▼
//	         refused        released  ──► none
const (
	PathConnecting PathState = "connecting" // a first attempt is under way
	PathLive       PathState = "live"       // as far as the host can tell: the target may be mute
	PathSilent     PathState = "silent"     // reconnecting by itself; I/O sent on it waits
	PathRefused    PathState = "refused"    // the last attempt failed, and no connection exists
	PathReleased   PathState = "released"   // going away, no longer usable
)

// PathSeen is a path and its state.
type PathSeen struct {
	Path
	State PathState
	Turns int    // how often it has failed so, since it was last live, that another portal is to be tried first
	Error string // why it cannot be connected
	// Lingers: if the host has noticed that the connection is gone, ending the path can take a
	// minute. FailsFast: its I/O does not wait for that; it fails as soon as the host notices.
	Lingers, FailsFast bool

	// Only for a connection that was made:
	Silent time.Time // since when nothing has come back on it, or since it was moved here then; zero: something has
	// Moving: another connection to its target is being made in its place, or it is the new one; or one beside it is
	// being broken.
	Moving bool
	// Changes: it moves because its leg changes hands, and its target may be silent or refuse meanwhile.
	Changes bool
	// Only where [Capabilities] has Moves, too:
	Looks    int  // how often the host has looked since then; see EnoughLooks
	Answered bool // it has been live since it was connected or moved here
	Greeted  bool // while it is silent: something has come back since it was live, or was moved here
	// Replaces: this host's older controller is drained before the next one is answered, through
	// whatever portal: the target promises that, or the agent beside it.
	Replaces bool
	// Stays: it does not go back to the portal where it belongs, since that would put a path at risk that works.
	Stays bool
}

// EnoughLooks is how often a host has to have looked at a path to call it silent: one that was frozen cannot
// tell after fewer.
const EnoughLooks = 3

// Tried is the outcome of trying whether a portal can be reached.
type Tried struct {
	At      time.Time // of the outcome
	OK      bool
	Refused Refusals // zero if it did not refuse
}

// Refusals are refused attempts to connect to a portal, without any other outcome between them:
// its machine answers, and nobody listens there.
type Refusals struct{ First, Last time.Time }

// refusalsLast is how long a refusal counts while no other attempt is made.
const refusalsLast = time.Second

// Again adds a refusal.
func (r Refusals) Again(at time.Time) Refusals {
	if at.Sub(r.Last) > refusalsLast {
		r.First = at
	}
	r.Last = at
	return r
}

// made reports whether there is a connection to end.
func (p PathSeen) made() bool {
	return p.State == PathLive || p.State == PathSilent || p.State == PathReleased
}

// usable reports whether no further attempt is needed.
func (p PathSeen) usable() bool {
	return p.State == PathConnecting || p.State == PathLive || p.State == PathSilent
}

// WaySeen is how a leg answers on one path.
type WaySeen struct {
	Path
	Silent  time.Time // since when it has not answered; zero if it does
	Looks   int       // how often the host has looked since then
	Answers bool      // the last probe was answered
	Heard   time.Time // when the last answered probe was sent, on the lease clock
	Peer    bool      // something else behind the same portal has answered since it fell silent
	// Mute: since when its target has answered nothing at all, at any portal, though it was asked;
	// zero if it has, or if the host has not looked several times meanwhile.
	Mute time.Time
}

// LegSeen is a leg as its host sees it.
type LegSeen struct {
	Found  bool   // it has a namespace here, responding or not
	Device string // the namespace's name, for people; may be empty
	Live   bool   // connected, fit for use, and it has answered
	Size   block.Size
	Error  string // what is wrong with it
	Ways   []WaySeen
}

// silent is since when no path to the leg has answered; zero if one does.
func (l LegSeen) silent() (since time.Time) {
	for _, w := range l.Ways {
		if w.Silent.IsZero() {
			return time.Time{}
		}
		if w.Silent.After(since) {
			since = w.Silent
		}
	}
	return since
}

// Silence is how long the leg has not answered.
func (l LegSeen) Silence(now time.Time) time.Duration {
	since := l.silent()
	if since.IsZero() {
		return 0
	}
	return max(now.Sub(since), 1)
}

// lost reports whether every path to the leg has been silent for longer than window, and the
// host has looked several times meanwhile: a host that was frozen cannot tell.
func (l LegSeen) lost(now time.Time, window time.Duration) bool {
	return len(l.Ways) > 0 && !slices.ContainsFunc(l.Ways, func(w WaySeen) bool {
		return w.Silent.IsZero() || now.Sub(w.Silent) <= window || w.Looks < 3
	})
}

// mute reports whether the leg's target has answered nothing for longer than patience, on any
// path. That says more than a silent leg: a target answers keep alives while its drives are busy.
func (l LegSeen) mute(now time.Time, patience time.Duration) bool {
	return patience > 0 && len(l.Ways) > 0 && !slices.ContainsFunc(l.Ways, func(w WaySeen) bool {
		return w.Mute.IsZero() || now.Sub(w.Mute) <= patience
	})
}

// heard is when the leg last answered on any path, on the lease clock.
func (l LegSeen) heard() (at time.Time) {
	for _, w := range l.Ways {
		if w.Heard.After(at) {
			at = w.Heard
		}
	}
	return at
}

func (l LegSeen) answers() bool {
	return slices.ContainsFunc(l.Ways, func(w WaySeen) bool { return w.Answers })
}

// CopyState is the state of the copy in a place of the volume.
type CopyState string

// The states of a copy.
const (
	Absent     CopyState = ""           // no copy takes part in I/O
	InSync     CopyState = "in sync"    // it is read from
	Rebuilding CopyState = "rebuilding" // it gets all writes, and is still being copied to
	CaughtUp   CopyState = "caught up"  // it gets all writes and misses nothing, but is not read from yet
	Failed     CopyState = "failed"     // its rebuild failed; it takes no part any more
)

// InUse reports whether the copy gets writes.
func (s CopyState) InUse() bool { return s == InSync || s == Rebuilding || s == CaughtUp }

// CopySeen is a place of the volume, and the copy in it.
type CopySeen struct {
	State     CopyState
	Leg       block.LegID // the leg here now, or the last one
	Node      string      // the leg's node; empty: not known
	Subsystem block.NQN   // the subsystem of the leg in use
	Tracked   bool        // everything that it misses is known
	// LossCovered: with Tracked, also if it has lost its drive's cache since this host took it in:
	// what was written to it and not flushed counts as missed.
	LossCovered bool

	// Superseded: the manager has since replaced the identity under which it is in use.
	Superseded bool
	// Reborn: since the column took its leg in, the leg has lost its drive's cache, and still
	// counts as in sync. Unflushed: that cache may have held acknowledged writes; set also
	// where this is not known.
	Reborn, Unflushed bool

	Withheld bool // no write is acknowledged in which it takes part
	Full     bool // writes wait for space on it
	Short    bool // what is copied to it waits for space, and no user does

	Error string // an I/O error; the state is not changed by it
	Moved string // why the leg, though present, cannot be used as it is attached here

	// Busy: an I/O to it may not be answered yet. Oldest is how long the first of them has
	// waited, zero where that is not known.
	Busy   bool
	Oldest time.Duration

	Dirty block.Size // bytes to copy when its rebuild began; once it has caught up, without what held no data
	// Ahead: it is copied to before it takes part in I/O.
	Ahead bool
	// Done, Total and Speed are of its rebuild: bytes, and bytes in a second lately, 0: not known.
	Done, Total, Speed block.Size
	// Whole is the revision of the leg at which a copy of all of it began, since which all that it
	// misses is tracked; 0: none did, or that is not known.
	Whole uint64
	What  string // what its rebuild copies, and why, for people; empty: not known
	// Awaits says, for people, what its rebuild waits for before it begins; empty: nothing.
	Awaits string
}

func (c CopySeen) inUse() bool { return c.State.InUse() }

// ColumnSeen is one column of a volume.
type ColumnSeen struct {
	Exists  bool   // some part of it exists
	Built   bool   // it serves
	Failed  bool   // it fails all I/O
	Foreign string // why it must not be touched; empty if it may be
	Log     bool   // it has a log, which can track a copy
	Size    block.Size
	// CannotGrow: why it cannot reach the wanted size while it is attached.
	CannotGrow string
	Copies     []CopySeen // by copy
	Sources    int        // number of copies it reads from, identified or not
	Unknown    bool       // some of its copies cannot be identified

	Equalizing bool       // its copies may differ; no device may exist yet
	Left       block.Size // bytes left to copy, to the copy it tracks or between copies that may differ

	// Differs reports whether the column differs from what is wanted; an error says why it
	// cannot be changed to that. It has no side effects. Nil where [Capabilities] has no
	// Tables.
	Differs func(Column) (bool, error)
}

// Column describes a column as it should be.
type Column struct {
	Size     block.Size
	Copies   []Copy
	Equalize bool // make the copies equal first
	First    int  // the copy to read from, if possible
	Full     bool // the copy rebuilt now may miss more than is tracked
}

// Copy describes the copy that a place should hold.
type Copy struct {
	Leg   block.LegID
	State CopyState // Absent, InSync or Rebuilding
	Track bool      // Absent: track what it misses
	// Anew: attach the leg's present device, instead of keeping the one in use.
	Anew  bool
	Dirty block.Size // Rebuilding: bytes to copy when it began
	Whole string     // Rebuilding: why all of it is copied; empty: what it misses is tracked
}

// DeviceSeen is the block device.
type DeviceSeen struct {
	Exists bool
	Named  bool // it has its name, under which users find it
	Failed bool // it fails all I/O
	Ended  bool // somebody else took it away
	Size   block.Size
	Open   bool   // somebody has it open, as far as the host can tell
	Users  string // those users, for people
	// Refusal is why the last attempt to remove it failed.
	Refusal string
}

// Seen is the result of one look at a volume.
type Seen struct {
	Now         time.Time
	Clock       time.Time               // the time on the lease clock
	Legs        map[block.LegID]LegSeen // the wanted legs and those in use
	Paths       []PathSeen              // all paths of this volume, whatever the epoch
	Tried       map[Path]Tried          // portals that were tried beside the path in use
	Trying      map[Path]time.Time      // when the tries that are under way began
	Columns     []ColumnSeen
	Device      DeviceSeen
	ReadOnly    bool       // the volume that is here is read-only
	Size        block.Size // of the volume that is here
	Holdable    bool       // I/O can be held
	Held        bool       // I/O is held
	Holding     bool       // I/O is being suspended
	Quiet       bool       // no I/O of users is under way; says something only while I/O is held
	Repairing   time.Time  // since when a repair of copies that differ has the volume to itself; zero: none has
	Waits       bool       // an I/O is waiting for a leg
	Copying     bool       // the copies are being made equal
	Whole       string     // why they are compared whole; empty: they are not
	Flushed     bool       // flushed since the device was removed
	Done, Total block.Size // bytes copied
	Scrub       *ScrubSeen // nil: none has begun
	Heals       *HealsSeen // nil: there was none
	RebuildRate block.Size // as in Wanted

	// What the keeper adds: whether the manager answers now, as far as this host knows, its last
	// error when it was asked for a record, the legs noted in sync on this host's disk, and why
	// that note still names too many.
	Linked      bool
	RecordError string
	Noted       Note
	NoteError   string
	// Freezes are those for holds, by the hold's id. They are looked at after all else here.
	Freezes map[string]FreezeSeen
}

// Built reports whether anything of a volume is here.
func (s *Seen) Built() bool {
	return s.Device.Exists || slices.ContainsFunc(s.Columns, func(c ColumnSeen) bool { return c.Exists })
}

// InUse lists the legs that take part in the volume's I/O, or still have to answer some.
func (s *Seen) InUse() (legs []block.LegID) {
	for _, column := range s.Columns {
		for _, c := range column.Copies {
			if c.inUse() || c.State == Failed && c.Busy {
				legs = append(legs, c.Leg)
			}
		}
	}
	return legs
}

// Memory is what the host knows of a volume but cannot find out by looking. The fields exported
// to JSON outlive the agent if the volume does.
type Memory struct {
	Epoch block.Epoch `json:"epoch"`
	Grant uint64      `json:"grant,omitempty"`
	// Clean: when the device was closed, every leg had every write.
	Clean bool `json:"clean,omitempty"`
	// Gone: the device was closed, and nothing of the volume is left.
	Gone bool `json:"gone,omitempty"`
	// Over: why the volume is not taken up again at this epoch; nil if it may be.
	Over *Over `json:"over,omitempty"`
	// Holds are the holds that have begun, by id. An agent that finds one of an earlier agent
	// does not know when it began, so the hold has ended.
	Holds map[string]Began `json:"holds,omitempty"`

	Since   time.Time         `json:"-"` // the first look at this epoch
	Records Records           `json:"-"` // the manager's answers
	Used    bool              `json:"-"` // the volume was built
	Retried map[int]time.Time `json:"-"` // by column: when its errors were last cleared

	Suspects map[Path]Suspect `json:"-"` // portals that have fallen silent

	LeavingOut LeavingOut              `json:"-"`
	Secured    map[block.LegID]Secured `json:"-"` // by the leg that is given up
}

// Begin sets what is not kept across restarts, at the first look at an epoch.
func (m *Memory) Begin(now time.Time) {
	m.Since, m.Records = now, NewRecords()
	m.Retried, m.Suspects, m.Secured = map[int]time.Time{}, map[Path]Suspect{}, map[block.LegID]Secured{}
	if m.Holds == nil {
		m.Holds = map[string]Began{}
	}
}

// Granted is the memory of the grant that w wants, as it begins. Over is why this host gave up the
// epoch before; nil if it did not. Grants of a shared volume have one epoch, and each stands for
// itself.
func Granted(w *Wanted, over *Over) Memory {
	if w.Grant != 0 {
		over = nil
	}
	return Memory{Epoch: w.Epoch, Grant: w.Grant, Over: over, Gone: over != nil}
}

// Ended is what remains of the memory when nothing of its epoch is left: the outcome of a detach,
// which the manager asks for until it has it, or that the epoch was given up. Clean: every leg has
// every write.
func (m *Memory) Ended(w *Wanted, clean bool) Memory {
	switch {
	case w == nil:
	case m.Over != nil && m.Of(w) && w.Grant == 0:
		return Memory{Epoch: m.Epoch, Gone: true, Over: m.Over}
	case w.Detach && (m.Of(w) || m.Epoch == 0):
		return Memory{Epoch: w.Epoch, Grant: w.Grant, Gone: true, Clean: clean}
	}
	return Memory{}
}

// Of reports whether the memory belongs to the grant that w wants.
func (m *Memory) Of(w *Wanted) bool { return m.Epoch == w.Epoch && m.Grant == w.Grant }

// Times that no configuration changes.
const (
	ConnectPatience = 10 * time.Second // to wait for a leg in sync before it is recorded stale
	RetryLast       = 5 * time.Second  // to wait before a last copy with errors is tried again
	// Quiesce is for targets that keep the old controller of a host that connects again, such as
	// Linux's: the host ends a silent connection after its keep-alive timeout, the target after
	// twice that time at most, and what is in its drives has some time to leave them.
	Quiesce = 10 * time.Second
)

// Limits are the times that decisions depend on.
type Limits struct {
	Window time.Duration // silence after which a leg is lost
	Lease  time.Duration // silence after which reads stop
	// Mute: silence of a whole target after which its legs are lost; 0: the data path cannot tell
	// it from that of a leg. Refused: for how long all portals of a target refuse connections
	// before its legs are lost; 0: it cannot tell that.
	Mute, Refused time.Duration
	// Silence after which a path moves to another portal: FailOver where the target replaces the
	// old controller; Quiesce where only time shows that it is gone.
	FailOver, Quiesce time.Duration
	// Moving: silence after which a leg is lost while its path is being moved, if that is more than Window.
	Moving  time.Duration
	Stuck   time.Duration // that one I/O may take while its leg answers probes
	Connect time.Duration // to wait for a leg in sync while another is there
	Retry   time.Duration // until a last copy with errors is tried again
}

// Capabilities say what a data path can do.
type Capabilities struct {
	// Tables: a column is changed as a whole, in one step. The change waits for the I/O below,
	// so paths are cut first; it clears the errors of the copies; and one log tracks what one
	// copy misses. Columns and the device over them are built, grown, failed and removed
	// separately. Without Tables, copies are added and dropped one by one, and nothing waits.
	Tables bool
	// Outlives: the volume outlives the agent. A volume found here may be an earlier agent's,
	// and finding none does not prove that there was none.
	Outlives bool
	// KnowsUsers: the host can tell whether somebody has the device open. Otherwise only an
	// attempt to remove it shows that, but it can be removed by force, with errors for its
	// users.
	KnowsUsers bool
	// KnowsFlushed: the host can tell whether a leg that lost its cache lacks acknowledged
	// writes.
	KnowsFlushed bool
	// Withholds: the data path can keep writes from being acknowledged in which a leg takes part.
	Withholds bool
	// Paces: the data path can keep rebuilds below a rate.
	Paces bool
	// Multipath: the data path can use several paths to a leg.
	Multipath bool
	// Moves: the data path can move a path, with its I/O, to another portal of its target.
	Moves bool
	// Hears: the data path knows when anything comes back on a connection. Otherwise it knows what legs
	// answer, and their drives may hang while the connection is well.
	Hears bool
	// Rail is the network rail that this host prefers; empty: none.
	Rail string
	// Near are networks that this host prefers where its rail decides nothing: those of the card that
	// is nearest to a GPU.
	Near []netip.Prefix
	// Transports that paths can use; nil means all.
	Transports []block.Transport
}

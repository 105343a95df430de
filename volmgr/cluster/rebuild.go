// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// Rebuild makes a new state from the drives' labels and the hosts' notes, after the store
// and its backups were lost. The text says, line by line, what was found and what an
// operator has to check.
//
// The newest label of a volume is its definition. Package evidence decides which of its copies are
// in sync. Every volume comes up detached and not clean, at an epoch far above any that a
// target or host has seen. Pools are not on labels.
func Rebuild(now time.Time, targets []TargetReport, hosts []InitiatorReport) (*State, string, error) {
	return newRebuild(targets, hosts).rebuild(now, targets, hosts)
}

func (r *rebuild) rebuild(now time.Time, targets []TargetReport, hosts []InitiatorReport) (*State, string, error) {
	id, err := clusterOf(targets)
	if err != nil {
		return nil, "", err
	}
	r.now = now
	generation, term := uint64(0), uint64(0)
	for _, report := range targets {
		generation, term = max(generation, report.Generation), max(term, report.Highest.of(id))
	}
	for _, report := range hosts {
		generation, term = max(generation, report.Generation), max(term, report.Highest.of(id))
	}
	r.s.meta = meta{Schema: schema, ClusterID: id, Generation: generation + generationJump, FirstEvent: 1, NextEvent: 1}
	r.s.events = event.NewLog(nil, 1, 1)
	r.s.level = block.KnownLevel // it is a new store, with one manager: this program
	r.s.meta.replacing(now, term)
	r.s.pools[DefaultPool] = &Pool{Name: DefaultPool}
	r.volumes()
	r.restoreAgain()
	r.stretch()
	r.users(hosts)
	t := newTx(r.s, now)
	t.event(event.Trouble, event.StoreRebuilt, "cluster", fmt.Sprintf("from the labels of %d drives on %d nodes: %d volumes", len(r.s.drives), len(r.s.nodes), r.s.volumes.Len()))
	t.commit()
	return r.s, strings.Join(r.lines, "\n"), nil
}

// rebuild collects the content of labels and hosts' notes, and then makes volumes from it.
type rebuild struct {
	s         *State
	now       time.Time
	legs      map[block.LegID]placedLeg
	admitted  map[block.VolumeID]block.Epoch // the highest that a target reports
	inquiries map[block.VolumeID]*evidence.Inquiry
	labelled  map[block.DriveID][]image.Extent // extents of all legs that were found, used or not
	lines     []string
}

type placedLeg struct {
	evidence.Found
	drive *Drive
}

// sharedTree is the leg's tree, if that is not its own.
func (l *placedLeg) sharedTree() (id block.UUID) {
	if l.Tree != l.Leg.UUID && l.Kind == image.Mapped {
		id = l.Tree
	}
	return id
}

func newRebuild(targets []TargetReport, hosts []InitiatorReport) *rebuild {
	r := &rebuild{
		s: empty(), legs: map[block.LegID]placedLeg{}, admitted: map[block.VolumeID]block.Epoch{},
		inquiries: map[block.VolumeID]*evidence.Inquiry{}, labelled: map[block.DriveID][]image.Extent{},
	}
	for _, report := range targets {
		r.node(report)
	}
	for _, what := range Unread(targets) {
		r.say("not read, so its legs are left out: %s", what)
	}
	for _, id := range sorted(r.legs) {
		l := r.legs[id]
		q := r.inquiries[l.Volume.ID]
		if q == nil {
			q = evidence.New(nil)
			q.Admitted(r.admitted[l.Volume.ID])
			r.inquiries[l.Volume.ID] = q
		}
		q.Add(l.Found)
	}
	for id, q := range r.inquiries {
		q.Expect(q.Newest.Layout)
		for i := range hosts {
			hear(q, id, &hosts[i])
		}
	}
	return r
}

func (r *rebuild) say(format string, args ...any) {
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

// clusterOf returns the one cluster to which all reported drives belong.
func clusterOf(reports []TargetReport) (block.ClusterID, error) {
	found := map[block.ClusterID]bool{}
	for _, report := range reports {
		found[report.ClusterID] = true
		for _, d := range report.Drives {
			found[d.Cluster] = true
		}
	}
	delete(found, block.ClusterID{})
	switch ids := sorted(found); len(ids) {
	case 0:
		return block.ClusterID{}, refused(ReasonOtherCluster, "rebuild", "no drive carries a label of a cluster")
	case 1:
		return ids[0], nil
	default:
		return block.ClusterID{}, refused(ReasonOtherCluster, "rebuild", "the drives belong to different clusters: %v", ids)
	}
}

func (r *rebuild) node(report TargetReport) {
	r.s.nodes[report.Node] = &Node{
		Name: report.Node, AgentLabels: maps.Clone(report.Labels), Portals: report.Portals, ProcessPortals: report.ProcessPortals, TargetBoot: report.BootID,
	}
	for _, a := range report.Admissions {
		r.admitted[a.Volume] = max(r.admitted[a.Volume], a.Epoch)
	}
	for _, d := range report.Drives {
		if d.Error != "" {
			continue
		}
		if other := r.s.drives[d.Drive]; other != nil {
			r.say("drive %v is on both %s and %s: only the first is used", d.Drive, other.Node, report.Node)
			continue
		}
		drive := rebuiltDrive(report, d)
		r.s.drives[d.Drive] = drive
		r.s.indexDrive(nil, drive)
		for _, l := range d.Legs {
			r.labelled[d.Drive] = append(r.labelled[d.Drive], l.Extents...)
			r.leg(placedLeg{evidence.Found{LegLabel: l, Cut: d.cut(l, report.BootID), Volatile: drive.VolatileCache}, drive})
		}
	}
}

// Unread lists what targets have but could not read: drives with unreadable labels, drives
// that they see but have not opened, and devices that may be drives.
func Unread(targets []TargetReport) (all []string) {
	for _, report := range targets {
		opened := map[block.DriveID]bool{}
		for _, d := range report.Drives {
			opened[d.Drive] = true
			if d.Error != "" {
				all = append(all, fmt.Sprintf("drive %v on %s: %s", d.Drive, report.Node, d.Error))
			}
		}
		for _, dev := range report.Devices {
			switch {
			case dev.Unread != "":
				all = append(all, fmt.Sprintf("device %s on %s: %s", dev.Path, report.Node, dev.Unread))
			case !dev.DriveID.IsZero() && !opened[dev.DriveID]:
				all = append(all, fmt.Sprintf("drive %v on %s: %s carries its label but was not opened", dev.DriveID, report.Node, dev.Path))
			}
		}
	}
	return all
}

func rebuiltDrive(report TargetReport, d DriveReport) *Drive {
	drive := &Drive{ID: d.Drive, Node: report.Node, Device: d.Device, State: DriveReady, Extents: d.Extents, NUMANode: -1}
	drive.Space = image.Union(d.inTrees(), d.Reserve)
	for _, dev := range report.Devices {
		if dev.DriveID == d.Drive {
			drive.Model, drive.Serial, drive.WWID, drive.Size = dev.Model, dev.Serial, dev.WWID, dev.Size
			drive.BlockSize, drive.NUMANode, drive.VolatileCache = dev.BlockSize, dev.NUMANode, dev.VolatileCache
		}
	}
	return drive
}

func (r *rebuild) leg(l placedLeg) {
	id := l.Volume.ID
	r.admitted[id] = max(r.admitted[id], l.AdmittedEpoch, l.Volume.Epoch)
	if other, ok := r.legs[l.Leg]; ok {
		r.say("leg %v of volume %s is on both %s and %s: the one with the newer label is used", l.Leg, l.Volume.Name, other.drive.object(), l.drive.object())
		if other.Volume.Generation >= l.Volume.Generation {
			return
		}
	}
	r.legs[l.Leg] = l
}

// volumes makes the volumes, in order of their ids.
func (r *rebuild) volumes() {
	for _, id := range sorted(r.inquiries) {
		r.volume(r.inquiries[id])
	}
}

func (r *rebuild) volume(q *evidence.Inquiry) {
	best := q.Newest
	labels, formatted, authentication := fromDrives(best.Labels)
	size, _ := q.Size()
	if q.Top > 0 { // it was granted, and the label may be older than the grant
		formatted = orRaw(formatted)
	}
	v := &Volume{
		ID: best.ID, Name: best.Name, Size: size, Layout: best.Layout, Pool: best.Pool, Spread: best.Spread,
		Labels: labels, Formatted: formatted, Authentication: authentication, State: VolumeReady, Epoch: q.Top + epochJump, Generation: best.Generation + epochJump,
		Created: time.Unix(0, best.Created).UTC(),
	}
	v.adoptSeal(q.Newest)
	for _, id := range sorted(q.Legs) {
		l := r.legs[id]
		v.Legs = append(v.Legs, Leg{
			ID: l.Leg, Column: l.Column, Copy: l.Copy, Drive: l.drive.ID, Node: l.drive.Node, Image: l.Image, Tree: l.sharedTree(), Based: l.Based,
			State: LegStale, Revision: q.Highest + epochJump, StaleSince: r.now.UTC(),
		})
	}
	v.Thin = slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.mapped() })
	if of := best.Snapshot; !of.Volume.IsZero() {
		v.Snapshot = &SnapshotOf{Volume: of.Volume, Name: of.Name, Group: of.Group, Taken: time.Unix(0, of.Taken).UTC(), FSFrozen: of.FSFrozen}
	}
	for i := range v.Legs {
		if found := r.legs[v.Legs[i].ID]; v.IsSnapshot() && !found.Zeroed && !q.Unborn() {
			v.Legs[i].State, v.Legs[i].Reason = LegDeleting, "it was not completely copied"
		}
		if q.Replaced(v.Legs[i].ID) {
			v.Legs[i].State, v.Legs[i].Reason = LegDeleting, "it was given up"
		}
	}
	setPlaces(v.Legs) // safe: the new epoch changes all subsystem names
	if err := v.check(); err != nil {
		r.say("volume %s (%v) is left out: %v", v.Name, v.ID, err)
		return
	}
	if !r.fits(v) {
		return
	}
	slices.SortFunc(v.Legs, func(a, b Leg) int { return cmp.Or(cmp.Compare(a.Column, b.Column), cmp.Compare(a.Copy, b.Copy)) })
	for other := r.s.idOf(v.Name); r.s.volumes.Get(other) != nil; other = r.s.idOf(v.Name) {
		name := block.VolumeName(fmt.Sprintf("%.54s-%s", v.Name, v.ID.String()[:8]))
		r.say("volume %s (%v) has the same name as %v and is now called %s", v.Name, v.ID, other, name)
		v.Name = name
	}
	if v.Pool != DefaultPool {
		r.say("volume %s belongs to pool %s, which is not stored on labels: create the pool again", v.Name, v.Pool)
	}
	if best.ExpandingTo > v.Size {
		r.say("volume %s was being expanded to %v and has %v: expand it again", v.Name, best.ExpandingTo, v.Size)
	}
	r.judge(v, q)
	r.s.volumes.Set(r.s.by, v.ID, v)
	r.s.index(nil, v)
}

// fits refuses a volume with a leg that overlaps another or extends beyond its drive.
func (r *rebuild) fits(v *Volume) bool {
	for i, l := range v.Legs {
		taken := slices.Clone(r.s.extents[l.Drive])
		for _, o := range v.Legs[:i] {
			if o.Drive == l.Drive {
				taken = append(taken, o.Extents...)
			}
		}
		for _, x := range l.Extents {
			outside := uint64(x.Start)+uint64(x.Count) > uint64(r.s.drives[l.Drive].Extents)
			if outside || slices.ContainsFunc(taken, x.Overlaps) {
				r.say("volume %s (%v) is left out: extents %v of %v on drive %v belong to another leg", v.Name, v.ID, x, &l, l.Drive)
				return false
			}
		}
	}
	return true
}

// restoreAgain has volumes go back again that were going back to a snapshot.
func (r *rebuild) restoreAgain() {
	for _, id := range sortedIDs(r.s.volumes.Keys()) {
		to := r.inquiries[id].RestoringTo()
		if to.IsZero() {
			continue
		}
		old := r.s.volumes.Get(id)
		v := old.clone()
		v.restoreAgain(to, r.s.volumes.Get(to), r.now)
		r.s.volumes.Set(r.s.by, id, v)
		r.s.index(old, v)
		if v.Restoring != nil {
			r.say("volume %s was going back to %s, and goes back again", v.Name, v.Restoring.Name)
		}
	}
}

// stretch finds new extents for legs whose labels missed an expansion. The planned ones were
// only in the lost store.
func (r *rebuild) stretch() {
	for _, id := range sortedIDs(r.s.volumes.Keys()) {
		old := r.s.volumes.Get(id)
		v := old.clone()
		need := uint32(v.Layout.LegExtents(v.Size))
		for i := range v.Legs {
			l := &v.Legs[i]
			have := image.Count(l.Extents)
			if have >= need || l.mapped() {
				continue
			}
			taken, d := slices.Concat(r.s.carved(r.s.drives[l.Drive]), r.labelled[l.Drive]), r.s.drives[l.Drive]
			if room := image.Holes(taken, d.Extents); image.Count(room) < need-have {
				r.say("volume %s: %v is smaller than its volume and has no room to grow: it is made again elsewhere", v.Name, l)
				if l.Leave = v.replaceable(); l.Leave {
					r.s.volumes.Set(r.s.by, id, v)
					r.s.index(old, v)
					old, v = v, v.clone()
				}
				continue
			}
			l.Extents = image.Extend(l.Extents, taken, d.Extents, need-have)
			r.s.volumes.Set(r.s.by, id, v)
			r.s.index(old, v)
			old, v = v, v.clone()
		}
	}
}

// judge decides which legs of a volume are in sync.
func (r *rebuild) judge(v *Volume, q *evidence.Inquiry) {
	if q.Deleted() {
		v.delete()
		r.say("%s was being deleted: its deletion continues, and legs that snapshots or clones need stay until those are deleted", v.object())
		return
	}
	if q.Unborn() && (v.IsSnapshot() || slices.ContainsFunc(v.Legs, func(l Leg) bool { return !l.Tree.IsZero() })) {
		// The store knew what its legs were to begin as. An empty leg must not pass for that.
		v.delete()
		r.say("%s was not complete: it is deleted", v.object())
		return
	}
	if q.Unborn() && len(q.Legs) == v.Layout.Legs() {
		v.State, v.Clean = VolumeCreating, true
		for i := range v.Legs {
			v.Legs[i].State, v.Legs[i].StaleSince = LegCreating, time.Time{}
		}
		r.say("volume %s was being created: its creation continues", v.Name)
		return
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if !l.member() {
			continue
		}
		verdict := q.Judge(l.ID, l.Column)
		if l.Reason = verdict.Why; verdict.Good {
			l.good()
			l.Suspect = verdict.Suspect
		} else if r.wholeAlone(v, l, q) {
			l.good()
		}
	}
	v.Clean = v.IsSnapshot() || v.sealed() && q.Newest.Clean // nobody could write it
	v.Holder = q.Holder("")
	v.FormerHosts = unseenHosts(q)
	for c := range v.Layout.Stripes {
		r.sayColumn(v, q, c)
	}
	r.say("volume %s: %v, %d of %d legs in sync, detached at epoch %d%s", v.Name, v.Size, legsIn(v.inSync()), v.Layout.Legs(), v.Epoch, q.Basis())
}

// wholeAlone reports whether a leg of a snapshot is good although the label of another one was not found: no
// other can be newer, since a snapshot never changes.
func (r *rebuild) wholeAlone(v *Volume, l *Leg, q *evidence.Inquiry) bool {
	found := r.legs[l.ID]
	return v.ofItsMoment(&found.LegLabel) && q.Unopposed(l.ID, l.Column)
}

// delete has a volume that is made from labels deleted.
func (v *Volume) delete() {
	v.State = VolumeDeleting
	for i := range v.Legs {
		v.Legs[i].State, v.Legs[i].Reason, v.Legs[i].StaleSince = LegDeleting, "", time.Time{}
	}
}

// sayColumn reports a column whose copy an operator has to choose: the evidence for each
// copy, and the command that promotes it.
func (r *rebuild) sayColumn(v *Volume, q *evidence.Inquiry, column int) {
	legs := v.column(column)
	switch {
	case len(legs) == 0:
		r.say("volume %s: column %d has no leg: find its drives", v.Name, column)
		return
	case v.Layout.Group().Readable(v.inSync()[column]):
		return
	}
	r.say("volume %s: column %d: %d of %d legs found, the evidence proves none of them, so an operator has to choose one:", v.Name, column, len(legs), v.Layout.Group().Members)
	for _, l := range legs {
		r.say("  %v: %s", l, l.Reason)
		r.say("    to choose it: weft volume promote-stale %s %d.%d --accept-data-loss", v.Name, l.Column, l.Copy)
	}
	if host := q.Awaits(r.s.confirmedDead); host != "" {
		r.say("  host %s may have a note of which copies are good: start its agent and rebuild again before you start the manager", host)
	}
	if q.Absent(column) {
		r.say("  or find the other drives and rebuild again before you start the manager")
	}
}

// users names the devices that hosts have and that the manager will remove when it starts.
func (r *rebuild) users(hosts []InitiatorReport) {
	for _, report := range hosts {
		for _, a := range report.Attachments {
			if v := r.s.volumes.Get(a.Volume); v != nil && a.Device != "" {
				r.say("volume %s is in use on %s as %s: unmount it there before you start the manager, which removes the device", v.Name, report.Node, a.Device)
			}
		}
	}
}

func legsIn(sets []block.MemberSet) (total int) {
	for _, s := range sets {
		total += s.Len()
	}
	return total
}

// AwaitedHosts names the hosts that a Rebuild should wait for: by the labels they had a
// volume last, and they have not reported what they noted of it.
func AwaitedHosts(targets []TargetReport, hosts []InitiatorReport) []block.NodeName {
	r := newRebuild(targets, hosts)
	awaited := map[block.NodeName]bool{}
	for _, q := range r.inquiries {
		if host := q.Awaits(r.s.confirmedDead); host != "" {
			awaited[host] = true
		}
	}
	return slices.Sorted(maps.Keys(awaited))
}

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
)

// Rebuild makes a state anew from what the drives' labels say, for the day when
// the store and its backups are gone. The text says, line by line, what was
// found and what a person has to look at.
//
// Of a volume's labels the one with the highest generation is believed. Labels
// are written after the records they copy, so the newest record may have been on
// none of the drives that are here; therefore a column is believed only if all
// of its legs were found, and the found legs of any other are stale until an
// operator promotes one. Every volume comes up detached and not clean, at an
// epoch above any that a target admits. Pools are not on labels.
func Rebuild(now time.Time, reports []TargetReport) (*State, string, error) {
	r := &rebuild{s: empty(), now: now, legs: map[block.LegID]foundLeg{}, lastEpoch: map[block.VolumeID]block.Epoch{}, labelled: map[block.DriveID][]Extent{}}
	id, err := clusterOf(reports)
	if err != nil {
		return nil, "", err
	}
	generation := uint64(0)
	for _, report := range reports {
		generation = max(generation, report.Generation)
		r.node(report)
	}
	r.s.meta = meta{Schema: schema, ClusterID: id, Generation: generation + 1, FirstEvent: 1, NextEvent: 1}
	r.s.pools[DefaultPool] = &Pool{Name: DefaultPool}
	r.volumes()
	r.stretch()
	t := newTx(r.s, now)
	t.event(Trouble, EventStoreRebuilt, "cluster", fmt.Sprintf("from the labels of %d drives on %d nodes: %d volumes", len(r.s.drives), len(r.s.nodes), len(r.s.volumes)))
	t.commit()
	return r.s, strings.Join(r.lines, "\n"), nil
}

// rebuild collects what the labels say before it makes volumes of it.
type rebuild struct {
	s         *State
	now       time.Time
	legs      map[block.LegID]foundLeg
	lastEpoch map[block.VolumeID]block.Epoch // highest seen anywhere
	labelled  map[block.DriveID][]Extent     // of all legs that were found, used or not
	lines     []string
}

type foundLeg struct {
	LegLabel
	drive *Drive
}

func (r *rebuild) say(format string, args ...any) {
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

// clusterOf is the one cluster that the reported drives belong to.
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
		Name: report.Node, AgentLabels: maps.Clone(report.Labels), Portals: report.Portals, TargetBoot: report.BootID,
	}
	for _, a := range report.Admissions {
		r.lastEpoch[a.Volume] = max(r.lastEpoch[a.Volume], a.Epoch)
	}
	for _, d := range report.Drives {
		if d.Error != "" {
			r.say("drive %v on %s can not be read, its legs are not known: %s", d.Drive, report.Node, d.Error)
			continue
		}
		if other := r.s.drives[d.Drive]; other != nil {
			r.say("drive %v is seen on %s and on %s: only the first is used", d.Drive, other.Node, report.Node)
			continue
		}
		drive := rebuiltDrive(report, d)
		r.s.drives[d.Drive] = drive
		r.s.indexDrive(nil, drive)
		for _, l := range d.Legs {
			r.labelled[d.Drive] = append(r.labelled[d.Drive], l.Extents...)
			r.leg(foundLeg{l, drive})
		}
	}
}

func rebuiltDrive(report TargetReport, d DriveReport) *Drive {
	drive := &Drive{ID: d.Drive, Node: report.Node, Device: d.Device, State: DriveReady, Extents: d.Extents, NUMANode: -1}
	for _, dev := range report.Devices {
		if dev.DriveID == d.Drive {
			drive.Model, drive.Serial, drive.WWID, drive.Size = dev.Model, dev.Serial, dev.WWID, dev.Size
			drive.BlockSize, drive.NUMANode, drive.VolatileCache = dev.BlockSize, dev.NUMANode, dev.VolatileCache
		}
	}
	return drive
}

func (r *rebuild) leg(l foundLeg) {
	id := l.Volume.ID
	r.lastEpoch[id] = max(r.lastEpoch[id], l.AdmittedEpoch, l.Volume.Epoch)
	if other, ok := r.legs[l.Leg]; ok {
		r.say("leg %v of volume %s is on %s and on %s: the one with the newer label is used", l.Leg, l.Volume.Name, other.drive.object(), l.drive.object())
		if other.Volume.Generation >= l.Volume.Generation {
			return
		}
	}
	r.legs[l.Leg] = l
}

// volumes makes the volumes, in order of their ids.
func (r *rebuild) volumes() {
	byVolume := map[block.VolumeID][]foundLeg{}
	for _, id := range sorted(r.legs) {
		l := r.legs[id]
		byVolume[l.Volume.ID] = append(byVolume[l.Volume.ID], l)
	}
	for _, id := range sorted(byVolume) {
		r.volume(byVolume[id])
	}
}

func (r *rebuild) volume(legs []foundLeg) {
	best := slices.MaxFunc(legs, func(a, b foundLeg) int {
		return cmp.Or(cmp.Compare(a.Volume.Generation, b.Volume.Generation), cmp.Compare(a.Volume.Epoch, b.Volume.Epoch))
	}).Volume
	var found []LegLabel
	for _, l := range legs {
		found = append(found, l.LegLabel)
	}
	labels, formatted := fromDrives(best.Labels)
	if r.lastEpoch[best.ID] > 0 { // it was granted, and the label may be older than that
		formatted = orRaw(formatted)
	}
	v := &Volume{
		ID: best.ID, Name: best.Name, Size: grownOnDrives(best, found), Layout: best.Layout, Pool: best.Pool, Spread: best.Spread,
		Labels: labels, Formatted: formatted, State: VolumeReady, Epoch: r.lastEpoch[best.ID] + 1, Generation: best.Generation + 1,
		Created: time.Unix(0, best.Created).UTC(),
	}
	for _, l := range legs {
		v.Legs = append(v.Legs, Leg{
			ID: l.Leg, Column: l.Column, Copy: l.Copy, Drive: l.drive.ID, Node: l.drive.Node, Extents: l.Extents,
			State: LegStale, Revision: l.Revision + 1, StaleSince: r.now.UTC(),
		})
	}
	if err := v.check(); err != nil {
		r.say("volume %s (%v) is left out: %v", v.Name, v.ID, err)
		return
	}
	if !r.fits(v) {
		return
	}
	slices.SortFunc(v.Legs, func(a, b Leg) int { return cmp.Or(cmp.Compare(a.Column, b.Column), cmp.Compare(a.Copy, b.Copy)) })
	for other := r.s.byName[v.Name]; r.s.volumes[other] != nil; other = r.s.byName[v.Name] {
		name := block.VolumeName(fmt.Sprintf("%.54s-%s", v.Name, v.ID.String()[:8]))
		r.say("volume %s (%v) has the name of %v and is now called %s", v.Name, v.ID, other, name)
		v.Name = name
	}
	if v.Pool != DefaultPool {
		r.say("volume %s is of pool %s, which is not on labels: create it again", v.Name, v.Pool)
	}
	if best.ExpandingTo > v.Size {
		r.say("volume %s was being expanded to %v, which had not come to an end: it has %v; ask for it again", v.Name, best.ExpandingTo, v.Size)
	}
	r.judge(v, best, legs)
	r.s.volumes[v.ID] = v
	r.s.index(nil, v)
}

// fits refuses a volume whose legs lie over those of another, or outside of their drives.
func (r *rebuild) fits(v *Volume) bool {
	for i, l := range v.Legs {
		taken := slices.Concat(slices.Collect(maps.Values(r.s.onDrive[l.Drive]))...)
		for _, o := range v.Legs[:i] {
			if o.Drive == l.Drive {
				taken = append(taken, o.Extents...)
			}
		}
		for _, x := range l.Extents {
			outside := uint64(x.Start)+uint64(x.Count) > uint64(r.s.drives[l.Drive].Extents)
			if outside || slices.ContainsFunc(taken, x.overlaps) {
				r.say("volume %s (%v) is left out: extents %v of %v on drive %v are not its own", v.Name, v.ID, x, &l, l.Drive)
				return false
			}
		}
	}
	return true
}

// stretch finds extents for the legs that missed an expansion, in the place of
// those that only the lost store knew of.
func (r *rebuild) stretch() {
	for _, id := range sorted(r.s.volumes) {
		old := r.s.volumes[id]
		v := old.clone()
		need := uint32(v.Layout.LegExtents(v.Size))
		for i := range v.Legs {
			l := &v.Legs[i]
			have := count(l.Extents)
			if have >= need {
				continue
			}
			taken, d := slices.Concat(r.s.carved(r.s.drives[l.Drive]), r.labelled[l.Drive]), r.s.drives[l.Drive]
			if room := holes(taken, d.Extents); count(room) < need-have {
				r.say("volume %s: %v is smaller than its volume and has no room to grow: it can not be rebuilt", v.Name, l)
				continue
			}
			l.Extents = extend(l.Extents, taken, d.Extents, need-have)
			r.s.volumes[id] = v
			r.s.index(old, v)
			old, v = v, v.clone()
		}
	}
}

func (e Extent) overlaps(o Extent) bool {
	return e.Start < o.Start+o.Count && o.Start < e.Start+e.Count
}

// judge decides which legs of a volume are in sync.
func (r *rebuild) judge(v *Volume, best VolumeLabel, legs []foundLeg) {
	if best.Generation == 1 && len(best.InSync) == 0 && len(legs) == v.Layout.Legs() {
		v.State, v.Clean = VolumeCreating, true
		for i := range v.Legs {
			v.Legs[i].State, v.Legs[i].StaleSince = LegCreating, time.Time{}
		}
		r.say("volume %s was being created: it goes on", v.Name)
		return
	}
	found := make([]int, v.Layout.Stripes)
	for _, l := range v.Legs {
		found[l.Column]++
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		switch {
		case found[l.Column] < v.Layout.Copies:
			l.Reason = "the label of another leg of its column was not found and may be newer"
		case !slices.Contains(best.InSync, l.ID):
			l.Reason = "the newest label does not list it as in sync"
		default:
			l.good()
		}
	}
	in := v.inSync()
	for c := range v.Layout.Stripes {
		switch {
		case found[c] == 0:
			r.say("volume %s: column %d has no leg at all: find its drives", v.Name, c)
		case in[c] == 0:
			r.say("volume %s: column %d: %d of %d legs found, none can be believed: find the other drives and rebuild again, or `weft volume promote-stale %s LEG --accept-data-loss`", v.Name, c, found[c], v.Layout.Copies, v.Name)
		}
	}
	r.say("volume %s: %v, %d of %d legs in sync, detached at epoch %d", v.Name, v.Size, sum(in), v.Layout.Legs(), v.Epoch)
}

func sum(numbers []int) (total int) {
	for _, n := range numbers {
		total += n
	}
	return total
}

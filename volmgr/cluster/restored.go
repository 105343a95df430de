// SPDX-License-Identifier: Apache-2.0

package cluster

import (
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

// A restored state raises its numbers by these jumps. Grants, wanted states and revisions
// that the cluster made after the backup stay far below, so none of them can be mistaken
// for a new one. No manager commits as often as generationRate.
const (
	epochJump      = 1 << 20
	generationJump = 1 << 32
	generationRate = 1 << 16 // a second
)

// Restored turns the records of a backup into records that a manager can start from. The
// backup does not know what happened after it: which hosts were granted volumes, and which
// copies went stale. So every volume comes up detached and not clean, at an epoch far above
// any that a target can have admitted, with new identities for its legs, and none counts as
// never written. A backup that is restored twice jumps to the same numbers twice, so
// settleRestored raises them above what agents report. Only the generation and the term
// depend on the time too: the generation tells which store an agent follows, and the term
// decides which manager it obeys.
func Restored(now time.Time, records []Record) ([]Record, error) {
	s, err := Load(records)
	if err != nil {
		return nil, err
	}
	s.meta.Generation += generationJump + generationRate*uint64(max(0, now.Unix()))
	s.meta.replacing(now, s.meta.Term)
	t := newTx(s, now)
	for _, id := range sortedIDs(s.volumes.Keys()) {
		t.restored(t.volume(id))
	}
	for id := range s.tokens { // they may have been used since
		t.tokens.drop(id)
	}
	t.event(event.Trouble, event.StoreRestored, "cluster", fmt.Sprintf("from a backup: %d volumes are detached; each is served again once the labels of its legs have been read", s.volumes.Len()))
	t.commit()
	return s.Records(), nil
}

// Backup keeps those facts of a backup's volume that labels and hosts may know better.
type Backup struct {
	Epoch   block.Epoch    `json:"epoch"`
	Quiet   bool           `json:"quiet,omitempty"`
	Clean   bool           `json:"clean,omitempty"`
	Writer  block.NodeName `json:"writer,omitempty"`
	InSync  []block.LegID  `json:"in_sync,omitempty"`
	Suspect []block.LegID  `json:"suspect,omitempty"`
	// Generation is the first of the restored store: an agent that has reached it no longer
	// follows another store.
	Generation uint64 `json:"generation,omitempty"`
}

func (t *tx) restored(v *Volume) {
	switch {
	case !v.Restored:
		label := v.label()
		v.Backup = &Backup{label.Epoch, label.Quiet, label.Clean, label.Writer, label.InSync, label.Suspect, t.s.meta.Generation}
		for i := range v.Legs { // Backup has it, and a newer label may know the outcome
			v.Legs[i].Suspect = false
		}
	case v.Backup != nil: // the backup is of a store that was restored itself, and not settled
		backup := *v.Backup
		backup.Generation = t.s.meta.Generation
		v.Backup = &backup
	}
	v.Epoch += epochJump
	v.Clean = v.unwritten() // nobody could write it
	if v.taking() != nil {
		v.Snapshot = v.Snapshot.with(nil) // what was frozen since the backup is not known: see settleTaking
	}
	v.Formatted = orRaw(v.Formatted)
	if v.Attachment != nil {
		v.Holder, v.Attachment = v.Attachment.Node, nil
	}
	v.Heal = nil // it has written to no leg in sync
	v.endShared()
	v.Restored = v.State != VolumeDeleting
	for i := range v.Legs {
		l := &v.Legs[i]
		l.Revision += epochJump
		l.StaleAt = 0
		if l.Blank && l.Copying == nil { // or it came into sync after the backup, or was never carved
			l.Blank, l.Leave = false, true
		}
		if l.State == LegRebuilding {
			l.State, l.Reason, l.StaleSince = LegStale, "a restore interrupted its rebuild", t.now.UTC()
		}
	}
}

// inquire collects the evidence of labels and hosts about a restored volume.
func (s *State) inquire(v *Volume) *evidence.Inquiry {
	var known *evidence.VolumeLabel
	if b := v.Backup; b != nil {
		label := v.label()
		label.Epoch, label.Quiet, label.Clean, label.Writer, label.InSync, label.Suspect = b.Epoch, b.Quiet, b.Clean, b.Writer, b.InSync, b.Suspect
		known = &label
	}
	q := evidence.New(known)
	for i := range v.Legs {
		l := &v.Legs[i]
		on := s.targets[l.Node]
		if on == nil {
			continue
		}
		q.Admitted(on.admitted.Get(v.ID))
		report := on.drives[l.Drive]
		for _, label := range report.Legs {
			if label.Leg == l.ID {
				drive := s.drives[l.Drive]
				q.Add(evidence.Found{LegLabel: label, Cut: report.cut(label, on.status.BootID), Volatile: drive == nil || drive.VolatileCache})
			}
		}
	}
	q.Expect(v.Layout)
	for _, name := range slices.Sorted(maps.Keys(s.initiators)) {
		if r := s.initiators[name].report; r != nil {
			hear(q, v.ID, r)
		}
	}
	return q
}

// hear adds to the evidence what a host reports of a volume.
func hear(q *evidence.Inquiry, id block.VolumeID, r *InitiatorReport) {
	var epochs []block.Epoch
	for _, a := range r.Attachments {
		if a.Volume == id {
			epochs = append(epochs, a.Epoch)
		}
	}
	var notes []evidence.Note
	for _, n := range r.Evidence {
		if n.Volume == id {
			notes = append(notes, n)
		}
	}
	q.Hear(r.Node, epochs, notes)
}

// unseenHosts stands for hosts that may share a rebuilt volume unseen.
func unseenHosts(q *evidence.Inquiry) []FormerHost {
	if !q.SharedUnseen() {
		return nil
	}
	return []FormerHost{{Epoch: q.Top, Mode: AttachSharedReadOnly}}
}

// settleRestored compares a restored volume with the labels of its legs and with the note of
// its last host, once all of them have been read or are confirmed dead. Until then the
// volume cannot be attached, and its targets get no wanted state for it, so that they leave
// the labels unchanged. Package evidence decides which copies are believed.
func (t *tx) settleRestored(id block.VolumeID) {
	v := t.peek(id)
	if !v.Restored || len(t.s.unseen(v)) > 0 {
		return
	}
	q := t.s.inquire(v)
	if host := q.Awaits(t.confirmedDead); host != "" {
		t.awaitHost(host)
		return
	}
	v = t.volume(id)
	v.Restored, v.Backup = false, nil
	t.outnumber(v, q)
	if v.State == VolumeCreating && q.Unborn() {
		return
	}
	v.State = VolumeReady
	t.adopt(v, q)
	for i := range v.Legs {
		l := &v.Legs[i]
		// The backup may be from before the first snapshot, or after the last one.
		if based, names, known := t.s.based(l); known && (based || names) && !l.mapped() {
			l.Based = true
		}
		if l.member() {
			t.resume(v, l.ID, q)
		}
	}
	v.Holder = q.Holder(v.Holder)
	v.Generation++
	if v.adoptSeal(q.Newest); v.sealed() && t.level < sealLevel {
		// The cluster was at that level when the volume was sealed. A manager that is older would have it
		// written.
		t.raise(sealLevel, fmt.Sprintf("by its labels, %s is sealed", v.object()), Seed{})
	}
	v.restoreAgain(q.RestoringTo(), t.peek(q.RestoringTo()), t.now)
	t.volumeEvent(v, event.Info, event.VolumeChecked, "its record was compared with the labels on the drives"+q.Basis())
}

// awaitHost adds a record for a host that is waited for, so that it can be confirmed dead
// even if it joined after the backup.
func (t *tx) awaitHost(host block.NodeName) {
	if t.nodes.peek(host) == nil {
		t.node(host)
	}
}

// resume gives a leg of a restored volume the state that the inquiry found.
func (t *tx) resume(v *Volume, id block.LegID, q *evidence.Inquiry) {
	l := v.leg(id)
	switch verdict := q.Judge(id, l.Column); {
	case verdict.Good:
		l.good()
		l.Suspect = verdict.Suspect || l.Suspect && !verdict.Final
	case l.State == LegInSync && q.Unopposed(id, l.Column) && t.s.complete(v, l):
		// The label that is missing may be of a leg of a snapshot that no record has. None can be newer: it never changes.
		l.good()
	case l.State == LegStale:
		l.Reason = verdict.Why
	default:
		t.stale(v, id, event.LegStale, verdict.Why)
	}
}

// outnumber raises a volume's numbers above all that agents have reported of it. It raises
// them far above, since an order of an earlier manager may still be under way. Targets
// refuse lower numbers, and hosts take them for ones that they knew before.
func (t *tx) outnumber(v *Volume, q *evidence.Inquiry) {
	if v.Epoch <= q.Top {
		v.Epoch = q.Top + epochJump
	}
	for i := range v.Legs {
		if l := &v.Legs[i]; l.Revision <= q.Highest {
			l.Revision = q.Highest + epochJump
		}
	}
	for _, l := range q.Labels() {
		v.Generation = max(v.Generation, l.Volume.Generation)
	}
}

// outlast handles an agent that reports a generation which this store has not reached: the
// agent has acted for another store. It raises the generation above the reported one, and
// the agent's generations count as 0 until it has acted on a wanted state of this store.
func (t *tx) outlast(on *agent, reported uint64) uint64 {
	if reported > t.s.meta.Generation {
		on.otherStore, t.raised = reported, true
		t.gen = max(t.gen, reported+1)
	}
	if reported <= on.otherStore {
		return 0
	}
	return reported
}

// adopt applies expansions that happened after the backup and are on the labels. A leg that
// missed one gets its extents now or, if its drive has no room, when the volume is expanded
// again.
func (t *tx) adopt(v *Volume, q *evidence.Inquiry) {
	for _, label := range q.Labels() {
		if l := v.leg(label.Leg); label.Continues(l.Image) {
			l.Extents = slices.Clone(label.Extents)
		}
	}
	size, proven := q.Size()
	if !proven {
		return
	}
	v.Size, v.ExpandingTo = max(v.Size, size), 0
	if extents, err := t.s.growth(v, v.Size); err == nil {
		for i := range v.Legs {
			v.Legs[i].Extents = extents[i]
		}
	}
}

// settleLonger gives a leg the extents that its drive's label lists, if the record has
// fewer: the drive was away when a store older than its label was settled.
func (t *tx) settleLonger(id block.VolumeID) {
	for _, l := range t.peek(id).Legs {
		on := t.s.targets[l.Node]
		if on == nil || len(on.strays[l.Drive]) == 0 {
			continue
		}
		for _, label := range on.drives[l.Drive].Legs {
			if label.Leg == l.ID && image.Count(label.Extents) > image.Count(l.Extents) && label.Continues(l.Image) {
				t.volume(id).leg(l.ID).Extents = slices.Clone(label.Extents)
			}
		}
	}
}

// unseen lists the legs of a volume whose drives have not been read since the start and are
// not confirmed dead. A report counts only once its target has acted on this manager's
// orders: before that it may still carry out those of an earlier one.
func (s *State) unseen(v *Volume) (legs []*Leg) {
	for i := range v.Legs {
		l := &v.Legs[i]
		if s.confirmedDead(l.Node) || !l.member() {
			continue
		}
		d, ok := s.driveReport(l)
		if !ok || d.Error != "" || v.Backup != nil && s.targets[l.Node].status.Generation < v.Backup.Generation {
			legs = append(legs, l)
		}
	}
	return legs
}

// restoredWaits says what a restored volume waits for.
func (s *State) restoredWaits(v *Volume) (waits []string) {
	var names []string
	for _, l := range s.unseen(v) {
		names = append(names, l.String())
	}
	if len(names) > 0 {
		waits = append(waits, "the labels of "+some(names, 8))
	}
	if host := s.inquire(v).Awaits(s.confirmedDead); host != "" {
		waits = append(waits, fmt.Sprintf("host %s, which had the volume last, to report which copies are good", host))
	}
	return waits
}

// stillRestored is the refusal of a request until a restored volume has been compared.
func (s *State) stillRestored(v *Volume) error {
	return refused(ReasonNotReady, v.object(), "restored from a backup; it waits for %s", strings.Join(s.restoredWaits(v), ", and for ")).
		hint("bring the machines back; run `weft node confirm-dead` for one that is gone for good")
}

func (s *State) driveReport(l *Leg) (DriveReport, bool) {
	on := s.targets[l.Node]
	if on == nil {
		return DriveReport{}, false
	}
	d, ok := on.drives[l.Drive]
	return d, ok
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/drivepolicy"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/health"
	"weft.dev/weft/volmgr/image"
)

func (d *Drive) object() string { return fmt.Sprintf("drive %s on %s", d.Device, d.Node) }

// AddDrive adds a device that the node's inventory shows. Result: Drive.
type AddDrive struct {
	Node       block.NodeName
	Device     string
	Labels     map[string]string
	ForceErase string // exactly what the refusal named
	Seed       Seed
}

func (in AddDrive) apply(t *tx) (view, error) {
	if t.s.nodes[in.Node] == nil {
		return nil, notFound(nodeObject(in.Node))
	}
	if err := checkLabels("labels", in.Labels); err != nil {
		return nil, err
	}
	devices, err := t.s.Devices(in.Node)
	if err != nil {
		return nil, err
	}
	dev, ok := findDevice(devices, in.Device)
	if !ok {
		return nil, notFound(fmt.Sprintf("device %s on node %s", in.Device, in.Node)).hint("`weft drive devices %s` lists what is there", in.Node)
	}
	if d := t.s.taken(in.Node, dev, devices); d != nil {
		if d.State == DriveRemoving {
			return nil, refused(ReasonDriveInUse, d.object(), "being removed").hint("wait until `weft drive list` no longer shows it")
		}
		if !maps.Equal(d.Labels, in.Labels) {
			return nil, conflict(d.object(), "labels", d.Labels, in.Labels)
		}
		return driveResult(d.ID), nil
	}
	if err := t.s.usable(in, dev); err != nil {
		return nil, err
	}
	if t.drives.peek(block.DriveID{UUID: in.Seed.id(0)}) != nil {
		return nil, invalid("seed", "drive %v exists: the seed was used before", in.Seed.id(0))
	}
	t.setPolicies(t.policies.Return(drivepolicy.IdentityOf(dev.WWID, dev.Serial)))
	return driveResult(t.addDrive(in, dev, "").ID), nil
}

// addDrive records a drive on a device that is usable. policy is the one that takes it in; empty: an
// operator does.
func (t *tx) addDrive(in AddDrive, dev Device, policy string) *Drive {
	d := &Drive{
		ID: block.DriveID{UUID: in.Seed.id(0)}, Node: in.Node, Device: dev.Path, Model: dev.Model, Serial: dev.Serial,
		WWID: dev.WWID, Size: dev.Size, BlockSize: dev.BlockSize, NUMANode: dev.NUMANode, VolatileCache: dev.VolatileCache,
		Labels: maps.Clone(in.Labels), ForceErase: in.ForceErase, State: DriveAdding,
	}
	t.drives.set(d.ID, d)
	t.event(event.Info, event.DriveAdded, d.object(), "its label is being written", "node", string(d.Node), "drive", d.ID.String(), "force_erase", d.ForceErase, "policy", policy)
	return d
}

// CreateDrivePolicy lets devices of targets become drives by themselves. Result: drivepolicy.Policy.
type CreateDrivePolicy struct{ Policy drivepolicy.Policy }

func (in CreateDrivePolicy) apply(t *tx) (view, error) {
	p := in.Policy
	if field, err := p.Check(); err != nil {
		return nil, invalid(field, "%v", err)
	}
	if err := errors.Join(checkLabels("nodes", p.Nodes), checkLabels("labels", p.Labels)); err != nil {
		return nil, err
	}
	if err := t.needs("r", "policies for drives"); err != nil {
		return nil, err
	}
	result := func(*State) any { return p }
	if t.policies.Has(p) {
		return result, nil
	}
	if old := t.policies.Get(p.Name); old != nil {
		return nil, conflict("drive policy "+p.Name, "policy", old.String(), p.String()).hint("`weft drive policy delete %s` first", p.Name)
	}
	if len(t.policies.All()) >= drivepolicy.Most {
		return nil, &Error{Kind: ResourceExhausted, Text: fmt.Sprintf("there are %d policies for drives; no more are kept", drivepolicy.Most), Hint: "`weft drive policy delete` some"}
	}
	t.setPolicies(t.policies.With(p))
	t.event(event.Info, event.DrivePolicyCreated, "drive policy "+p.Name, "devices that it selects become drives when nothing is on them")
	for _, name := range slices.Sorted(maps.Keys(t.s.targets)) {
		t.takeIn(name, t.s.targets[name])
	}
	return result, nil
}

// DeleteDrivePolicy ends a policy. The drives that it has taken stay. Result: nil.
type DeleteDrivePolicy struct{ Name string }

func (in DeleteDrivePolicy) apply(t *tx) (view, error) {
	if t.policies.Get(in.Name) != nil {
		t.setPolicies(t.policies.Without(in.Name))
		t.event(event.Info, event.DrivePolicyDeleted, "drive policy "+in.Name, "")
	}
	return nil, nil
}

// DrivePolicies are the policies, by name.
func (s *State) DrivePolicies() []drivepolicy.Policy { return s.policies.All() }

func (t *tx) setPolicies(p *drivepolicy.Set) {
	if p.Empty() {
		p = nil
	}
	t.policies = p
}

// takeIn adds the devices of a node that policies take. What an operator would have to force, no
// policy takes: the rules are those of AddDrive.
func (t *tx) takeIn(name block.NodeName, on *target) {
	n := t.nodes.peek(name)
	if t.policies.Empty() || n == nil || on == nil || !on.status.Online {
		return
	}
	for _, dev := range on.devices {
		in := AddDrive{Node: name, Device: dev.Path}
		if dev.Unread != "" || dev.Refused != "" || len(dev.Signatures) > 0 || t.s.usable(in, dev) != nil {
			continue
		}
		id := drivepolicy.IdentityOf(dev.WWID, dev.Serial)
		p := t.policies.For(drivepolicy.Device{Model: dev.Model, Size: dev.Size, Identity: id}, n.label, t.s.seen(id), t.isDrive(dev, id))
		if p == nil {
			continue
		}
		in.Labels, in.Seed = p.Labels, t.seedOf(name, id)
		t.addDrive(in, dev, p.Name)
	}
}

// seen counts the devices of all nodes with an identity.
func (s *State) seen(id drivepolicy.Identity) (count int) {
	for _, on := range s.targets {
		for _, dev := range on.devices {
			if drivepolicy.IdentityOf(dev.WWID, dev.Serial) == id {
				count++
			}
		}
	}
	return count
}

// isDrive reports whether there is a drive with a device's label or identity, on any node and in any
// state.
func (t *tx) isDrive(dev Device, id drivepolicy.Identity) bool {
	same := func(d *Drive) bool {
		return d != nil && (d.ID == dev.DriveID || drivepolicy.IdentityOf(d.WWID, d.Serial) == id)
	}
	for key, d := range t.s.drives {
		if _, changed := t.drives.upper[key]; !changed && same(d) {
			return true
		}
	}
	for _, d := range t.drives.upper {
		if same(d) {
			return true
		}
	}
	return false
}

// seedOf draws the id of a drive that a policy takes from what is unique to this step.
func (t *tx) seedOf(node block.NodeName, id drivepolicy.Identity) Seed {
	text := fmt.Appendf([]byte("drive"), "/%s/%s/", node, id)
	text = append(text, t.s.meta.ClusterID.UUID[:]...)
	return sha256.Sum256(binary.BigEndian.AppendUint64(text, t.gen))
}

// SetDriveLabels replaces the labels of a drive. Legs that it holds stay. Result: Drive.
type SetDriveLabels struct {
	Drive  block.DriveID
	Labels map[string]string
}

func (in SetDriveLabels) apply(t *tx) (view, error) {
	d := t.s.drives[in.Drive]
	if d == nil {
		return nil, notFound("drive " + in.Drive.String())
	}
	if err := checkLabels("labels", in.Labels); err != nil {
		return nil, err
	}
	if maps.Equal(d.Labels, in.Labels) {
		return driveResult(d.ID), nil
	}
	t.drives.edit(d.ID).Labels = maps.Clone(in.Labels)
	t.event(event.Info, event.DriveLabeled, d.object(), pairs(in.Labels), "node", string(d.Node), "drive", d.ID.String())
	return driveResult(d.ID), nil
}

func driveResult(id block.DriveID) view {
	return func(s *State) any { return s.driveView(s.drives[id]) }
}

func findDevice(devices []Device, path string) (Device, bool) {
	for _, d := range devices {
		if d.Path == path {
			return d, true
		}
	}
	return Device{}, false
}

// taken finds the drive record of a device: by the Weft label on it or, before there is
// one, by its WWID and serial. The /dev name decides only for files and loop devices, which
// have neither, and for partitions, which share those of their disk.
func (s *State) taken(node block.NodeName, dev Device, devices []Device) *Drive {
	if d := s.drives[dev.DriveID]; d != nil {
		return d
	}
	for _, d := range s.drives {
		if d.Node != node || d.State != DriveAdding {
			continue
		}
		if d.WWID != dev.WWID || d.Serial != dev.Serial {
			continue
		}
		there, ok := findDevice(devices, d.Device)
		another := ok && there.WWID == dev.WWID && there.Serial == dev.Serial
		if d.Device == dev.Path || d.WWID+d.Serial != "" && !another {
			return d
		}
	}
	return nil
}

// EraseWord returns the text that AddDrive.ForceErase must have to erase a device's data;
// empty if the device has none.
func EraseWord(dev Device) string {
	word := strings.Join(dev.Signatures, ", ")
	if word == "" && !dev.DriveID.IsZero() {
		word = fmt.Sprintf("weft drive %v of cluster %v", dev.DriveID, dev.Cluster)
	}
	return word
}

// usable refuses a device that is in use, or that holds data which ForceErase does not name.
func (s *State) usable(in AddDrive, dev Device) error {
	object := fmt.Sprintf("device %s on %s", dev.Path, in.Node)
	word := EraseWord(dev)
	switch {
	case carriesLabel(dev) && in.ForceErase != word:
		return s.foreignDrive(in, dev, word)
	case len(dev.Holders) > 0:
		return refused(ReasonDeviceUnusable, object, "in use: %s", strings.Join(dev.Holders, ", ")).
			hint("stop the program that uses it; --force-erase does not apply").with("holders", strings.Join(dev.Holders, ", "))
	case dev.ReadOnly:
		return refused(ReasonDeviceUnusable, object, "read-only")
	case dev.Refused != "" && (word == "" || !strings.Contains(dev.Refused, word)):
		return refused(ReasonDeviceUnusable, object, "%s", dev.Refused) // erasing would not help
	case word != "" && in.ForceErase == "":
		return refused(ReasonForeignData, object, "holds %s", word).
			hint("to erase it: `weft drive add %s %s --force-erase %s`", in.Node, dev.Path, quote(word)).with("force_erase", word)
	case in.ForceErase != word:
		return refused(ReasonForeignData, object, "holds %s, not %q", orNothing(word), in.ForceErase).with("force_erase", word)
	case dev.Size < block.LeastDrive:
		return refused(ReasonDeviceUnusable, object, "%v is too small: at least %v are needed", dev.Size, block.LeastDrive)
	}
	return nil
}

// quote returns s as one shell word.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

// EvictDrive removes a drive from the cluster, once its legs were made again elsewhere. A second
// request removes a drive that failed while its label was being erased. Result: nil.
type EvictDrive struct{ Drive block.DriveID }

func (in EvictDrive) apply(t *tx) (view, error) {
	d := t.s.drives[in.Drive]
	if d == nil || d.State == DriveRemoving && !t.lostDrive(d) {
		return nil, nil
	}
	if t.removeDrive(d) {
		return nil, nil
	}
	if err := t.s.movable(d.object(), t.s.legsOn(d.Node, d.ID), t.s.onlyLeft); err != nil {
		return nil, err
	}
	if d.Leaving != LeaveEvict {
		t.leaveDrive(d, LeaveEvict)
	}
	return nil, nil
}

// driveError is the error that the target reports of a drive; empty if there is none.
func (s *State) driveError(d *Drive) string {
	if on := s.targets[d.Node]; on != nil {
		return on.drives[d.ID].Error
	}
	return ""
}

// usersOf names the volumes with legs on a drive. Legs that are being deleted count only
// with deleting, that is if the drive can still free them.
func (s *State) usersOf(d *Drive, deleting bool) (names []string) {
	for _, id := range sortedIDs(s.onNode.Get(d.Node).Keys()) {
		v := s.volumes.Get(id)
		for _, l := range v.Legs {
			if l.Drive == d.ID && (deleting || l.State != LegDeleting) {
				names = append(names, string(v.Name))
				break
			}
		}
	}
	return names
}

// drivesReported updates the state of a node's drives from its newest report.
func (t *tx) drivesReported(name block.NodeName, on *target) {
	for _, d := range t.s.recordedDrives(name) {
		r, seen := on.drives[d.ID]
		state, reason := driveState(d, r, seen, on, t.s.meta.ClusterID)
		switch {
		case d.State == DriveRemoving:
			t.removingWaits(d, on)
			if !seen && on.status.Generation >= d.RemovedAt {
				t.drives.drop(d.ID)
				t.event(event.Info, event.DriveRemoved, d.object(), "its label is erased", "node", string(name), "drive", d.ID.String())
			}
		case state != d.State:
			fresh := t.drives.edit(d.ID)
			fresh.State, fresh.Reason, fresh.ForceErase = state, reason, ""
			fresh.where(r, seen)
			severity, kind := driveEvent(state)
			t.event(severity, kind, fresh.object(), strings.TrimPrefix(because(reason), ": "), "node", string(name), "drive", d.ID.String())
		case reason != d.Reason || seen && (d.Extents != r.Extents || d.Device != r.Device):
			fresh := t.drives.edit(d.ID)
			fresh.Reason = reason
			fresh.where(r, seen)
		}
	}
}

// cachesReported records what a node reports of its drives' caches. It runs after a boot was
// judged by the earlier record. A new volatile cache counts at once, and hosts flush it from
// then on. The end of a volatile cache counts only from the next boot on: until then the
// drive may still hold acknowledged writes in it, and a boot that loses them is judged.
func (t *tx) cachesReported(name block.NodeName, on *target, booted bool) {
	for _, dev := range on.devices {
		d, volatile := t.drives.peek(dev.DriveID), dev.VolatileCache
		if d == nil || d.Node != name {
			continue
		}
		if changed := !booted && (d.CacheChanged || d.VolatileCache != volatile); changed != d.CacheChanged {
			t.drives.edit(d.ID).CacheChanged = changed
		}
		if d.VolatileCache == volatile || !volatile && !booted {
			continue
		}
		d = t.drives.edit(d.ID)
		d.VolatileCache = volatile
		severity, text := event.Info, "it no longer has a volatile cache"
		if volatile {
			severity, text = event.Warning, "it has a volatile cache: hosts flush it, and unflushed data may be lost when its target reboots"
		}
		t.event(severity, event.DriveCache, d.object(), text, "node", string(name), "drive", d.ID.String(), "volatile", fmt.Sprint(volatile))
	}
}

// removingWaits records why a drive is not erased yet.
func (t *tx) removingWaits(d *Drive, on *target) {
	reason := on.drives[d.ID].Error
	if p, ok := on.problem("drive " + d.ID.String()); ok {
		reason = p.Doing + ": " + p.Cause
	}
	if d.Reason != reason {
		t.drives.edit(d.ID).Reason = reason
	}
}

func (d *Drive) where(r DriveReport, seen bool) {
	if seen {
		d.Device, d.Extents = r.Device, r.Extents
	}
}

// driveState returns the state and reason that a report gives a drive that is not being
// removed.
func driveState(d *Drive, r DriveReport, seen bool, on *target, id block.ClusterID) (DriveState, string) {
	switch {
	case !seen && d.State == DriveAdding:
		p, _ := on.problem("drive " + d.ID.String())
		return DriveAdding, strings.TrimPrefix(p.Doing+": "+p.Cause, ": ")
	case !seen:
		return DriveMissing, missingBecause(d, on)
	case r.Cluster != (block.ClusterID{}) && r.Cluster != id:
		return DriveFailed, fmt.Sprintf("its label belongs to cluster %v", r.Cluster)
	case r.Error != "":
		return DriveFailed, r.Error
	}
	return DriveReady, ""
}

// missingBecause says why a drive is missing: its device cannot be read, has lost its label,
// has moved to another path, or is not there.
func missingBecause(d *Drive, on *target) string {
	dev, ok := findDevice(on.devices, d.Device)
	if ok && dev.Unread != "" {
		return fmt.Sprintf("node %s cannot read %s: %s", d.Node, d.Device, dev.Unread)
	}
	if ok && dev.DriveID.IsZero() && dev.WWID == d.WWID && dev.Serial == d.Serial {
		return fmt.Sprintf("node %s sees %s without its label%s", d.Node, d.Device, because(dev.Refused))
	}
	if i := slices.IndexFunc(on.devices, func(dev Device) bool { return dev.DriveID == d.ID }); i >= 0 {
		return fmt.Sprintf("node %s sees it as %s but has not opened it yet: the device may not respond", d.Node, on.devices[i].Path)
	}
	return fmt.Sprintf("node %s does not see it", d.Node)
}

func driveEvent(state DriveState) (event.Severity, string) {
	switch state {
	case DriveMissing:
		return event.Trouble, event.DriveMissing
	case DriveFailed:
		return event.Trouble, event.DriveFailed
	}
	return event.Info, event.DriveReady
}

// Suspect says why a drive is suspect: it shows signs of failing, by the rule of package health.
// Empty: it does not. Such a drive serves its legs and gets no new ones. If it stays so, it is
// evacuated: see below.
func (d *Drive) Suspect() string { return d.Signs.Why() }

// drivesJudged notes what a node's newest report says of the health of its drives.
func (t *tx) drivesJudged(name block.NodeName, on *target) {
	readings, slow := on.readings()
	for _, d := range t.s.recordedDrives(name) {
		d := t.drives.peek(d.ID)
		if d == nil {
			continue // removed by this report
		}
		signs := d.Signs.Next(readings[d.ID], slow[d.ID], t.now)
		if signs == d.Signs {
			continue
		}
		was := d.Suspect()
		d = t.drives.edit(d.ID)
		d.Signs = signs
		switch why := d.Suspect(); {
		case why == was:
		case why == "":
			t.event(event.Info, event.DriveWell, d.object(), "it shows no sign of failing any more", "node", string(name), "drive", d.ID.String())
		default:
			t.event(event.Warning, event.DriveSuspect, d.object(), why, "node", string(name), "drive", d.ID.String())
		}
	}
}

// readings are the newest ones of a node's drives, and what each says of those that are slower
// than their peers.
func (on *target) readings() (map[block.DriveID]health.Reading, map[block.DriveID]string) {
	readings, slow := map[block.DriveID]health.Reading{}, map[block.DriveID]string{}
	var ids []block.DriveID
	var timings []health.Timing
	for _, dev := range on.devices {
		if dev.Health != nil && !dev.DriveID.IsZero() {
			readings[dev.DriveID] = *dev.Health
			ids = append(ids, dev.DriveID)
			timings = append(timings, health.Timing{Model: dev.Model, IOs: dev.Health.IOs, Bytes: dev.Health.Bytes, Latency: dev.Health.Latency})
		}
	}
	for i, why := range health.Outliers(timings) {
		slow[ids[i]] = why
	}
	return readings, slow
}

// readingOf is the newest reading of a drive's health; nil if there is none, or if its target is
// offline.
func (s *State) readingOf(d *Drive) *health.Reading {
	if !s.targetOnline(d.Node) {
		return nil
	}
	devices := s.targets[d.Node].devices
	if i := slices.IndexFunc(devices, func(dev Device) bool { return dev.DriveID == d.ID }); i >= 0 {
		return devices[i].Health
	}
	return nil
}

// A foreign drive carries a Weft label, but the store has no record of it. It may hold
// volumes of another cluster, or of this one if the store was lost or is older than the
// drive. So no hint tells how to erase it.

// carriesLabel reports whether a device carries a Weft label, readable or not.
func carriesLabel(dev Device) bool {
	return !dev.Cluster.IsZero() || slices.ContainsFunc(dev.Signatures, func(s string) bool { return strings.HasPrefix(s, "weft drive") })
}

// isNew reports whether the cluster has no drives and no volumes.
func (s *State) isNew() bool { return len(s.drives) == 0 && s.volumes.Len() == 0 }

// foreignDrive refuses a device with a Weft label, and says which cluster owns it.
func (s *State) foreignDrive(in AddDrive, dev Device, word string) *Error {
	e := refused(ReasonForeignData, fmt.Sprintf("device %s on %s", dev.Path, in.Node), "holds %s", word).with("force_erase", word)
	switch {
	case dev.Cluster.IsZero():
		return e.hint("it may be in use by a working cluster: check before you erase it; see `weft drive add --help`")
	case dev.Cluster == s.meta.ClusterID:
		return e.hint("%s", unknownHere)
	case s.isNew():
		return e.hint("%s", storeLost)
	}
	return e.hint("%s", givenBackThere)
}

// Hints about foreign drives.
const (
	storeLost      = "this manager's store is new: if it replaced a lost one, stop the manager and rebuild the lost one with `weft volmgr rebuild-from-drives`"
	unknownHere    = "unknown to this cluster's store: the drive was evicted while out of reach, or the store is from an older backup; in that case use `weft volmgr rebuild-from-drives`"
	givenBackThere = "to release it, run `weft drive evict` in that cluster"
)

// wrongDrives reports the foreign drives on online nodes, by cluster.
func (s *State) wrongDrives() (sentences []string) {
	counts, nodes := map[block.ClusterID]int{}, map[block.ClusterID][]string{}
	for _, n := range s.Nodes() {
		on := s.targets[n.Name]
		if on == nil || !on.status.Online {
			continue
		}
		for _, dev := range on.devices {
			if dev.Cluster.IsZero() || s.drives[dev.DriveID] != nil {
				continue
			}
			counts[dev.Cluster]++
			if !slices.Contains(nodes[dev.Cluster], string(n.Name)) {
				nodes[dev.Cluster] = append(nodes[dev.Cluster], string(n.Name))
			}
		}
	}
	for _, id := range sorted(counts) {
		whose, what := fmt.Sprintf("cluster %v, not to this one", id), givenBackThere
		switch {
		case id == s.meta.ClusterID:
			whose, what = "this cluster", unknownHere
		case s.isNew():
			what = storeLost
		}
		sentences = append(sentences, fmt.Sprintf("drives on %s (%d) belong to %s: %s", some(nodes[id], 8), counts[id], whose, what))
	}
	return sentences
}

// A drive's label has room for the records of some thousand legs. The largest size that a
// leg's record can reach is reserved when the leg is placed, and again when its volume grows
// or gets labels. So even a full label can record a new epoch, which is the fence, and every
// in-sync set.

// record describes a leg's record at its largest. It always has room for a file system's
// name, which may be added to the labels at any time.
func (v *Volume) record(l *Leg) block.LegRecord {
	r := recordOf(v.Layout, v.kept(), string(v.Name), v.Pool, v.Spread)
	if r.Runs = len(l.Extents); l.mapped() || l.Based {
		r.Text += block.MappedText
	}
	if v.IsSnapshot() {
		r.Text += block.SnapshotText + len(v.Snapshot.Name)
	}
	if v.sealed() {
		r.Labels, r.Text = r.Labels+1, r.Text+len(sealedLabel)+len(time.RFC3339)
	}
	return r
}

func recordOf(layout block.Layout, labels map[string]string, names ...string) block.LegRecord {
	r := block.LegRecord{Legs: layout.MostLegs(), Runs: 1, Labels: len(labels) + 1, Text: len(formattedLabel) + mostFormatted}
	for _, name := range names {
		r.Text += len(name)
	}
	for key, value := range labels {
		r.Text += len(key) + len(value)
	}
	return r
}

// record is the same for a leg of the requested volume, with its extents in one piece.
func (in CreateVolume) record(layout block.Layout) block.LegRecord {
	r := recordOf(layout, in.Labels, string(in.Name), in.Pool, in.Spread)
	if in.Thin {
		r.Text += block.MappedText
	}
	return r
}

// labelRecord is the same for a leg that is on a label.
func labelRecord(l *evidence.LegLabel) block.LegRecord {
	v := &l.Volume
	r := recordOf(v.Layout, v.Labels, string(v.Name), v.Pool, v.Spread)
	if r.Runs = len(l.Extents); l.Kind == image.Mapped || !l.Tree.IsZero() {
		r.Text += block.MappedText
	}
	if !v.Snapshot.Volume.IsZero() {
		r.Text += block.SnapshotText + len(v.Snapshot.Name)
	}
	return r
}

// labelRoom is the room on a drive's label that is left for the records of more legs.
func (s *State) labelRoom(d *Drive) block.Size {
	taken := s.recorded.Get(d.ID)
	if on := s.targets[d.Node]; on != nil {
		taken += on.unknown[d.ID]
	}
	return block.LabelRoom - min(taken, block.LabelRoom)
}

// lacksRoom returns a drive whose label has no room to change a volume from now to next; nil
// if there is none.
func (s *State) lacksRoom(now, next *Volume) *Drive {
	more := map[block.DriveID]int64{}
	for i := range next.Legs {
		more[next.Legs[i].Drive] += int64(next.record(&next.Legs[i]).Size())
	}
	for i := range now.Legs {
		more[now.Legs[i].Drive] -= int64(now.record(&now.Legs[i]).Size())
	}
	for _, id := range sorted(more) {
		if d := s.drives[id]; d != nil && more[id] > 0 && more[id] > int64(s.labelRoom(d)) {
			return d
		}
	}
	return nil
}

// labelFull refuses a change of a volume because a drive's label has no room for it.
func (s *State) labelFull(v *Volume, d *Drive, field string) error {
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Field: field, Object: v.object(),
		Text: fmt.Sprintf("%s: the label of %s, which describes its %d legs, has no room for this change: %s of %s are left",
			v.object(), d.object(), len(s.onDrive[d.ID]), s.labelRoom(d).Short(), block.LabelRoom.Short()),
	}
	return e.hint("delete volumes with legs there, or remove labels from them")
}

// Drives and pools are nearly full from these marks on, in per cent, and are not any more fullSlack
// below, so that a leg that comes and goes is not an event each time.
const (
	fullWarning = 85
	fullTrouble = 95
	fullSlack   = 5
)

// fullLook is how often noteFull looks.
const fullLook = 10 * time.Second

// fullMark is the highest of the marks that a use has reached; 0: none. before is the mark that was
// noted last.
func fullMark(before int, used, capacity block.Size) int {
	if capacity == 0 {
		return 0
	}
	for _, mark := range []int{fullTrouble, fullWarning} {
		least := mark
		if before >= mark {
			least = mark - fullSlack
		}
		if float64(used) >= float64(capacity)*float64(least)/100 {
			return mark
		}
	}
	return 0
}

// noteFull writes an event when a drive or a pool has become nearly full, and when it is not any
// more. The mark is recorded, so a restart of the manager makes no event.
func (t *tx) noteFull() {
	s := t.s
	if t.now.Sub(s.lookedAtSpace) < fullLook {
		return
	}
	s.lookedAtSpace = t.now
	for _, id := range s.sortedDrives() {
		d := s.driveView(s.drives[id])
		if mark := fullMark(d.Full, d.Allocated, d.Capacity); mark != d.Full {
			t.drives.edit(id).Full = mark
			t.filled(event.DriveFilled, event.DriveRoom, s.drives[id].object(), d.Full, mark, d.Allocated, d.Capacity, "node", string(d.Node), "drive", id.String())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.pools)) {
		p := s.poolView(s.pools[name])
		if mark := fullMark(p.Full, p.Allocated, p.Capacity); mark != p.Full {
			t.pools.edit(name).Full = mark
			t.filled(event.PoolFilled, event.PoolRoom, "pool "+name, p.Full, mark, p.Allocated, p.Capacity, "pool", name)
		}
	}
}

// filled writes the event of a mark that was reached or left.
func (t *tx) filled(nearly, room, object string, before, mark int, used, capacity block.Size, attributes ...string) {
	text := fmt.Sprintf("legs take %d%%: %s of %s", int(float64(used)/float64(capacity)*100), used.Short(), capacity.Short())
	switch {
	case mark < before && mark == 0:
		t.event(event.Info, room, object, text, attributes...)
	case mark < fullTrouble:
		t.event(event.Warning, nearly, object, text, attributes...)
	default:
		t.event(event.Trouble, nearly, object, text, attributes...)
	}
}

// ---- suspect drives ----

// A drive that has been suspect for longer than the policy allows is evacuated. One leg after the other,
// its column gets a leg more than it needs, in another failure domain than all that it has. Once that
// leg is in sync, one can be given up, and of those that can, the one on the suspect drive is: see
// superfluous. A suspicion can be false, so an evacuation takes care that nobody is worse off for it:
//
//   - a leg on a suspect drive never leaves as one on a lost drive does: it is given up only if as many
//     others as the column needs are in sync, each in a failure domain of its own;
//   - one leg of a drive moves at a time, of a volume in good order that can be copied now, and
//     mostEvacuated drives are evacuated at a time. If the volume gets out of order before the copy
//     begins, or if that does not go on, the next leg has its turn;
//   - legs that share space with snapshots or clones stay: alone they would take more space, and
//     copies of snapshots would wait for them. An operator can drain the drive;
//   - while more drives are suspect than mostSuspect allows, no further leg moves: so many do not
//     fail at once, and what they have in common, such as a hot room, does not end by copying;
//   - what an operator does comes first: nothing moves from a drive that is drained or evicted, or
//     whose node is cordoned, drained or under maintenance.
//
// An evacuation is only a wish: it places the additional leg and, while it has that in hand, keeps it until
// it is in sync. Everything else follows from the records, by the rules for a column with a leg too many.
// Once the drive is well, or another manager begins to lead, these give up a leg that is not in sync: nothing
// is recorded, and the clocks start anew. They are monotonic: no wall clock matters.
//
//	         suspect for EvacuateAfter
//	(suspect) ────────────────────────► EVACUATING ──────► ENDED  no leg is left that could be moved
//	                                      ▲     │
//	                                      │     ▼
//	                                    HELD or WAITS, with the reason
//
//	from anywhere: the drive is no longer suspect (forgotten)

const (
	// evacuationLook is how often evacuateDrives looks.
	evacuationLook = 10 * time.Second
	// mostEvacuated is how many drives of the cluster are evacuated at a time.
	mostEvacuated = 2
	// evacuationPatience is how long a leg's copy may not go on before another leg has its turn.
	evacuationPatience = 10 * time.Minute
	// evacuationRest is how long such a leg is then left alone.
	evacuationRest = time.Hour
	// evacuationPause is how long a drive is left alone of which no leg could move.
	evacuationPause = time.Minute
	// mostLookedThrough is how many drives are searched for a leg in one look, and mostUnplaced for how
	// many legs of one a place is sought in vain: everything else waits meanwhile.
	mostLookedThrough = 2
	mostUnplaced      = 4
)

// mostSuspect is how many of some drives may be suspect at a time without a common cause.
func mostSuspect(drives int) int { return max(2, drives/10) }

// evacuationStage is how far the evacuation of a suspect drive is.
type evacuationStage string

// The stages. The empty one: it has not begun. One that waits does so for others, not for what is its own.
const (
	evacuating      evacuationStage = "EVACUATING"
	evacuationHeld  evacuationStage = "HELD"
	evacuationWaits evacuationStage = "WAITS"
	evacuationEnded evacuationStage = "ENDED"
)

// evacuation is what the manager remembers of a suspect drive; it is never changed in place.
type evacuation struct {
	Since time.Time       `json:"since"` // since when it is suspect
	Stage evacuationStage `json:"stage,omitempty"`
	Why   string          `json:"why,omitempty"` // it is held or waits, or what is left at its end
	Moved int             `json:"moved,omitempty"`
	// Leg is made again elsewhere now; zero: none.
	Volume block.VolumeID `json:"volume,omitzero"`
	Leg    block.LegID    `json:"leg,omitzero"`

	begun  bool                      // the copy of Leg has begun
	copied block.Size                // how far it has come
	going  time.Time                 // when it went on last
	pause  time.Time                 // until then no leg is sought
	again  map[block.LegID]time.Time // from when on legs that were tried may be again; others come first
}

// evacuated reports whether a leg is made again elsewhere since its drive is suspect.
func (s *State) evacuated(l *Leg) bool { return s.evacuations[l.Drive].Leg == l.ID }

// evacuateDrives starts and stops the clocks of suspect drives and takes the next step of each
// evacuation.
func (t *tx) evacuateDrives() {
	s := t.s
	if s.policy.EvacuateAfter <= 0 || t.now.Sub(s.lookedSuspect) < evacuationLook {
		return
	}
	s.lookedSuspect = t.now
	common := t.noteCommonCause()
	s.evacuations = t.followEvacuations(common)
	busy, looked := 0, 0
	for _, e := range s.evacuations {
		busy += rank(!e.Leg.IsZero())
	}
	for _, d := range t.longSuspect() {
		e := s.evacuations[d.ID]
		stage, why := evacuating, ""
		own, others := t.nodes.peek(d.Node).shunned(), common
		if busy >= mostEvacuated {
			others = cmp.Or(common, fmt.Sprintf("%d other drives are evacuated first", mostEvacuated))
		}
		switch {
		case !e.Leg.IsZero():
		case e.Stage == evacuationEnded && own+others != "":
			continue
		case own != "":
			stage, why = evacuationHeld, own
		case others != "":
			stage, why = evacuationWaits, others
		case looked == mostLookedThrough || t.now.Before(e.pause):
			continue
		default:
			e, stage, why = t.evacuateNext(d, e)
			looked++
			busy += rank(!e.Leg.IsZero())
		}
		s.evacuations[d.ID] = t.enterStage(d, e, stage, why)
	}
}

// noteCommonCause says that more drives are suspect than are likely to fail at once; empty if not. That
// this begins is one event, however many drives wait for its end.
func (t *tx) noteCommonCause() (why string) {
	suspect := 0
	for id := range t.s.drives {
		if d := t.drives.peek(id); d != nil && d.Suspect() != "" && d.Leaving == "" && !t.longAway(id) {
			suspect++
		}
	}
	if most := mostSuspect(len(t.s.drives)); suspect > most {
		why = fmt.Sprintf("more than %d of the drives are suspect at once, which points to a common cause", most)
	}
	if why != "" && !t.s.commonCause {
		t.event(event.Warning, event.EvacuationHeld, "cluster", "no further leg of a suspect drive is made again elsewhere: "+why)
	}
	t.s.commonCause = why != ""
	return why
}

// longAway reports whether a drive has been away for longer than a machine takes to start: what it last
// said of itself does not count any more.
func (t *tx) longAway(id block.DriveID) bool {
	since, away := t.s.away[id]
	return away && t.now.Sub(since) >= DefaultReplaceAfter
}

// emptied reports whether an operator empties a drive: all its legs leave then anyway.
func (t *tx) emptied(d *Drive) bool {
	n := t.nodes.peek(d.Node)
	return d.Leaving != "" || n == nil || n.Draining
}

// inUse reports whether a drive serves its legs.
func (s *State) inUse(d *Drive) bool { return d.State == DriveReady && s.targetOnline(d.Node) }

// longSuspect returns the drives in use that have been suspect for longer than the policy allows, the
// longest first.
func (t *tx) longSuspect() (due []*Drive) {
	s := t.s
	for id, e := range s.evacuations {
		if d := t.drives.peek(id); t.now.Sub(e.Since) >= s.policy.EvacuateAfter && s.inUse(d) && !t.emptied(d) {
			due = append(due, d)
		}
	}
	slices.SortFunc(due, func(a, b *Drive) int {
		return cmp.Or(s.evacuations[a.ID].Since.Compare(s.evacuations[b.ID].Since), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
	})
	return due
}

// followEvacuations returns what is known of each drive that is suspect.
func (t *tx) followEvacuations(common string) map[block.DriveID]evacuation {
	next := map[block.DriveID]evacuation{}
	for _, id := range t.s.sortedDrives() {
		d := t.drives.peek(id)
		if d == nil {
			continue
		}
		e, known := t.s.evacuations[id]
		if d.Suspect() == "" {
			if e.Stage == evacuating || e.Stage == evacuationHeld {
				t.evacuationEvent(d, event.EvacuationEnded, fmt.Sprintf("it is not suspect any more, and keeps the legs that it has; %s", madeElsewhere(e.Moved)))
			}
			continue
		}
		if !known {
			e.Since = t.now
		}
		if !e.Leg.IsZero() {
			e = t.followLeg(e, common != "" || t.emptied(d) || t.nodes.peek(d.Node).shunned() != "" || !t.s.inUse(d))
		}
		next[id] = e
	}
	return next
}

// followLeg looks after the leg that is made again elsewhere: whether that is done, or others have their
// turn. A copy that has begun goes on whatever happens, as long as it does go on.
func (t *tx) followLeg(e evacuation, stops bool) evacuation {
	v := t.peek(e.Volume)
	if v == nil || !v.usable() {
		return e.later(t.now)
	}
	l := v.leg(e.Leg)
	if l == nil || !l.member() {
		e.Moved++
		return e.later(t.now)
	}
	e.begun = e.begun || legOf{v, l}.begun()
	if !v.legTooMany() || !e.begun && (stops || !t.inOrder(v)) {
		return e.later(t.now)
	}
	if copied := t.s.copiedSoFar(v); copied > e.copied {
		e.copied, e.going = copied, t.now
	}
	if t.now.Sub(e.going) >= evacuationPatience {
		return e.later(t.now.Add(evacuationRest))
	}
	return e
}

// giveWay stops the copying to the new leg of a column while a leg that was lost is to be copied to: it
// misses changes only, and the new one was not needed for redundancy.
func (t *tx) giveWay(id block.VolumeID) {
	v := t.peek(id)
	for _, l := range v.Legs {
		column := v.column(l.Column)
		lost := func(o *Leg) bool {
			return o.State == LegStale && !o.Blank && t.leaving(o) == "" && t.s.rebuildWaitsFor(v, o) == ""
		}
		if l.Blank && l.State == LegRebuilding && slices.ContainsFunc(column, t.s.evacuated) && slices.ContainsFunc(column, lost) {
			t.stale(t.volume(id), l.ID, event.LegStale, "another leg of its column is copied to first")
			t.drain(t.volume(id), l.ID)
		}
	}
}

// later is e while no leg is made again; the one that was may be tried again from a time on.
func (e evacuation) later(from time.Time) evacuation {
	e.again = maps.Clone(e.again)
	if e.again == nil {
		e.again = map[block.LegID]time.Time{}
	}
	e.again[e.Leg] = from
	e.Volume, e.Leg = block.VolumeID{}, block.LegID{}
	return e
}

// noPlaceElsewhere is why an evacuation is held back if the drives lack room.
const noPlaceElsewhere = "there is no place elsewhere for the legs that are left"

// evacuateNext has the next leg of a drive made again elsewhere. Without one it says why there is none.
func (t *tx) evacuateNext(d *Drive, e evacuation) (evacuation, evacuationStage, string) {
	legs, kept := t.evacuees(d, e)
	if len(legs) == 0 {
		e.pause = t.now.Add(evacuationPause)
		return e, evacuationEnded, kept
	}
	unplaced, why := 0, "of the volumes that have legs on it, none is in good order and can be copied now"
	for _, at := range legs {
		v, l := at.volume, at.leg
		if unplaced == mostUnplaced || t.now.Before(e.again[l.ID]) || !t.mayMove(v, l) {
			continue
		}
		e.Volume, e.Leg, e.begun, e.copied, e.going = v.ID, l.ID, false, 0, t.now
		t.s.evacuations[d.ID] = e // the new leg says why it is added
		if t.addLeg(v.ID, l.Column, "") == nil {
			return e, evacuating, ""
		}
		delete(t.s.crowded, v.ID) // a leg that is lost may have more places
		e = e.later(t.now)
		unplaced++
		why = noPlaceElsewhere
	}
	e.pause = t.now.Add(evacuationPause)
	return e, evacuationHeld, why
}

// evacuees are the legs on a drive that can move, in the order in which they do: first those that were
// not tried lately. kept says what stays.
func (t *tx) evacuees(d *Drive, e evacuation) (move []legOf, kept string) {
	single, sharing := 0, 0
	for id, legs := range t.s.legsOn(d.Node, d.ID) {
		for _, l := range legs {
			switch v := t.peek(id); {
			case v == nil:
			case v.oneCopy():
				single++
			case t.s.sharesSpace(v, l):
				sharing++
			default:
				move = append(move, legOf{v, l})
			}
		}
	}
	slices.SortFunc(move, func(a, b legOf) int {
		return cmp.Or(e.again[a.leg.ID].Compare(e.again[b.leg.ID]), bytes.Compare(a.leg.ID.UUID[:], b.leg.ID.UUID[:]))
	})
	return move, keptLegs(d, single, sharing)
}

// keptLegs says how many legs stay on a drive.
func keptLegs(d *Drive, single, sharing int) string {
	var all []string
	if single > 0 {
		all = append(all, fmt.Sprintf("it keeps %s of volumes of one copy, which are not moved", plural(single, "leg")))
	}
	if sharing > 0 {
		all = append(all, fmt.Sprintf("it keeps %s that share space with snapshots or clones; `weft drive drain %s` moves these", plural(sharing, "leg"), d.ID))
	}
	return cmp.Or(strings.Join(all, "; "), "none of its legs is left")
}

// oneCopy reports whether the volume has one copy of its data, so that its legs are not moved.
func (v *Volume) oneCopy() bool { return v.Layout.Slots() <= v.Layout.Group().Members }

// sharesSpace reports whether a leg is of a snapshot or of a volume with snapshots, or is in a tree with
// legs of clones.
func (s *State) sharesSpace(v *Volume, l *Leg) bool {
	if v.IsSnapshot() || s.snapshots.Get(v.ID) > 0 {
		return true
	}
	for id := range s.inTree.Get(l.tree()).Keys() {
		if id != v.ID {
			return true
		}
	}
	return false
}

// mayMove reports whether a leg may begin to move: its volume is in good order, has all its legs and no
// more, has a number for one more, and is copied now.
func (t *tx) mayMove(v *Volume, l *Leg) bool {
	return v.usable() && !v.changing() && !v.lacksLegs() && !v.legTooMany() && v.noSlot(l.Column) == nil && !t.s.crowded[v.ID] &&
		t.inOrder(v) && t.copiedNow(v)
}

// inOrder reports whether all legs of a volume are in sync, and stay, but for one that is new.
func (t *tx) inOrder(v *Volume) bool {
	return !slices.ContainsFunc(v.Legs, func(l Leg) bool {
		switch {
		case l.State == LegDeleting: // a drive that is lost may never free it
			return false
		case l.Blank && l.member():
			return false
		}
		return !l.member() || !l.trusted() || !t.s.servable(&l) || t.leaving(&l) != ""
	})
}

// copiedNow reports whether one more leg of a volume is copied now, or as soon as there is one.
func (t *tx) copiedNow(v *Volume) bool {
	s := t.s
	if v.copier() != nil || len(v.Shared) > 0 {
		return s.noCopier(v) == ""
	}
	return s.policy.HealAfter > 0 && t.level >= healLevel && s.unhealable(v) == "" && s.anyHealer(v)
}

// enterStage notes where the evacuation of a drive stands. A change is an event, unless it waits for
// others: so may many drives at once.
func (t *tx) enterStage(d *Drive, e evacuation, stage evacuationStage, why string) evacuation {
	if e.Stage == stage && e.Why == why {
		return e
	}
	was := e.Stage
	e.Stage, e.Why = stage, why
	switch {
	case stage == evacuating:
		t.evacuationEvent(d, event.DriveEvacuating, fmt.Sprintf("its legs are made again elsewhere, one at a time, since it has been suspect for more than %v: %s", t.s.policy.EvacuateAfter, d.Suspect()))
	case stage == evacuationHeld:
		t.evacuationEvent(d, event.EvacuationHeld, fmt.Sprintf("it has been suspect for more than %v, and no further leg of it is made again elsewhere: %s", t.s.policy.EvacuateAfter, why))
	case stage == evacuationEnded && was != "": // else there was nothing to move
		t.evacuationEvent(d, event.EvacuationEnded, fmt.Sprintf("%s; %s", madeElsewhere(e.Moved), why))
	}
	return e
}

func (t *tx) evacuationEvent(d *Drive, kind, text string) {
	t.event(event.Info, kind, d.object(), text, "node", string(d.Node), "drive", d.ID.String())
}

func madeElsewhere(n int) string {
	if n == 1 {
		return "1 leg was made again elsewhere"
	}
	return fmt.Sprintf("%d legs were made again elsewhere", n)
}

// ---- for people ----

// evacuationWords say where the evacuation of a drive stands; empty if there is nothing to say.
func (s *State) evacuationWords(d *Drive) string {
	e, known := s.evacuations[d.ID]
	n := s.nodes[d.Node]
	if !known || !s.inUse(d) || d.Leaving != "" || n != nil && n.Draining {
		return ""
	}
	switch e.Stage {
	case evacuating:
		return fmt.Sprintf("being evacuated: %s moved so far", plural(e.Moved, "leg"))
	case evacuationHeld, evacuationWaits:
		return "not evacuated: " + e.Why
	case evacuationEnded:
		return "evacuated: " + e.Why
	}
	return fmt.Sprintf("to be evacuated from %s on if it is still suspect", e.Since.Add(s.policy.EvacuateAfter).UTC().Format(time.RFC3339))
}

// explainDrive adds that a leg's drive is suspect, what becomes of the leg, and what to do.
func (s *State) explainDrive(e *Explanation, v *Volume, l *Leg) {
	d := s.drives[l.Drive]
	if d == nil || d.Suspect() == "" {
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("%s, which holds %v, is suspect: %s", d.object(), l, d.Suspect()))
	words := s.evacuationWords(d)
	if words != "" {
		e.Facts = append(e.Facts, fmt.Sprintf("%s is %s", d.object(), words))
	}
	e.Actions = append(e.Actions, fmt.Sprintf("replace %s before it fails; `weft drive list --health` shows what it reports", d.object()))
	drain := fmt.Sprintf("have all legs of the drive made again elsewhere now: weft drive drain %s", d.ID)
	switch {
	case v.oneCopy():
		e.Facts = append(e.Facts, fmt.Sprintf("%s has one copy, so %v is not moved", v.object(), l))
		if !v.IsSnapshot() {
			e.Actions = append(e.Actions, fmt.Sprintf("give it another copy, `weft volume set %s --copies 2`, or copy what it holds to a new volume", v.Name))
		}
	case d.Leaving != "" || !l.member() || s.evacuated(l):
	case words != "" && s.sharesSpace(v, l):
		e.Facts = append(e.Facts, fmt.Sprintf("%v shares space with snapshots or clones, so it is not moved before the drive is drained", l))
		e.Actions = append(e.Actions, drain)
	case s.evacuations[d.ID].Why == noPlaceElsewhere:
		e.Actions = append(e.Actions, fmt.Sprintf("add a drive in pool %s with `weft drive add`, on a node in a failure domain without a copy, so that its legs have a place", v.Pool), drain)
	default:
		e.Actions = append(e.Actions, drain)
	}
}

// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// What can be wrong with a label.
var (
	ErrNoLabel      = errors.New("no label of ours")
	ErrCorrupt      = errors.New("corrupt label")
	ErrNewer        = errors.New("label of a newer format")
	ErrOtherSize    = errors.New("label of a device of another size")
	ErrOtherCluster = errors.New("label of another cluster")
	ErrUnfinished   = errors.New("unfinished label")
	ErrOverwritten  = errors.New("overwritten by another program")
	ErrFull         = errors.New("no room on the label")
)

// Label is the record that a drive carries. Its parts are the contract's own messages, checked when
// read and when written.
type Label struct {
	Generation uint64 // grows with each write
	Cluster    block.ClusterID
	Drive      block.DriveID
	Size       block.Size     // of the whole device
	Legs       []*pb.LegLabel // by leg id; no two share an extent
	// Trees are those of mapped legs, by id, and Reserve what they may get; see space.go.
	Trees   []*pb.TreeLabel
	Reserve []*pb.Extent
	// Pinned: the kernel may read pieces of trees by itself, which stay where they are meanwhile. A program that does
	// not know of that must not touch the drive.
	Pinned bool
	// Incarnation grows each time acknowledged writes may have been lost.
	Incarnation uint32

	unfinished bool // the previous content of the device may still be there
}

// Leg is the record of a leg, nil if the drive does not hold it.
func (l *Label) Leg(id block.LegID) *pb.LegLabel {
	for _, leg := range l.Legs {
		if leg.LegId == id.String() {
			return leg
		}
	}
	return nil
}

// PutLeg adds a leg, or replaces its record. Extents must be free and inside the drive; an existing
// leg may get more extents behind its own, which are then to be zeroed. Progress is never undone:
// zeroed extents stay zeroed, a leg that is going back stays so, the admitted epoch is at least that of
// the volume's legs on this drive, and a lower revision or an older volume is refused.
func (l *Label) PutLeg(record *pb.LegLabel) error {
	record = proto.CloneOf(record)
	at := slices.IndexFunc(l.Legs, func(leg *pb.LegLabel) bool { return leg.LegId == record.LegId })
	for _, leg := range l.Legs {
		if leg.Volume.GetVolumeId() == record.Volume.GetVolumeId() {
			record.AdmittedEpoch = max(record.AdmittedEpoch, leg.AdmittedEpoch)
		}
	}
	if at < 0 {
		if err := l.plant(record); err != nil {
			return err
		}
		l.Legs = append(l.Legs, record)
		return l.settle()
	}
	if err := checkSuccessor(l.Legs[at], record); err != nil {
		return fmt.Errorf("put leg %s: %w", record.LegId, err)
	}
	old := l.Legs[at]
	if old.Zeroed {
		setZeroed(record, zeroedExtents(old))
	}
	record.GoingBack = old.GoingBack
	l.Legs[at] = record
	return l.settle()
}

// checkSuccessor says why next cannot replace old.
func checkSuccessor(old, next *pb.LegLabel) error {
	switch {
	case !ImageOf(next).Extends(ImageOf(old)):
		return errors.New("its extents do not begin with those on the label")
	case old.GetTreeId() != next.GetTreeId():
		return fmt.Errorf("it is in tree %q", old.GetTreeId())
	case old.Volume.GetVolumeId() != next.Volume.GetVolumeId():
		return fmt.Errorf("it belongs to volume %s", old.Volume.GetVolumeId())
	case next.Revision < old.Revision:
		return fmt.Errorf("revision %d is older than %d on the label", next.Revision, old.Revision)
	}
	return checkNotOlder(old.Volume, next.Volume)
}

// CountExtents is how many extents runs have.
func CountExtents(extents []*pb.Extent) (n uint64) {
	for _, e := range extents {
		n += uint64(e.GetCount())
	}
	return n
}

// Zeroed is how much of a leg, from its beginning, has been zeroed or holds its data. The rest may
// still hold data of another leg.
func Zeroed(leg *pb.LegLabel) block.Size {
	return block.Size(zeroedExtents(leg)) * ImageOf(leg).extentData()
}

// Whole reports whether a leg is completely zeroed or holds its data; a mapped one, whether it is in
// its tree.
func Whole(leg *pb.LegLabel) bool {
	if Mapped(leg) {
		return leg.GetZeroed()
	}
	return zeroedExtents(leg) == CountExtents(leg.GetExtents())
}

func zeroedExtents(leg *pb.LegLabel) uint64 {
	switch {
	case !leg.GetZeroed():
		return 0
	case leg.GetZeroedExtents() != 0:
		return uint64(leg.GetZeroedExtents())
	}
	return CountExtents(leg.GetExtents())
}

// setZeroed records that the first n extents of a leg are zeroed.
func setZeroed(leg *pb.LegLabel, n uint64) {
	leg.Zeroed, leg.ZeroedExtents = true, uint32(n)
	if !Mapped(leg) && n == CountExtents(leg.Extents) {
		leg.ZeroedExtents = 0
	}
}

// checkNotOlder guards against a manager that was restored from an old store: newer knowledge on
// the drives must not be lost.
func checkNotOlder(old, next *pb.VolumeLabel) error {
	if next.GetEpoch() < old.GetEpoch() || next.GetGeneration() < old.GetGeneration() {
		return fmt.Errorf("volume %s at epoch %d, generation %d is older than epoch %d, generation %d on the label",
			old.GetVolumeId(), next.GetEpoch(), next.GetGeneration(), old.GetEpoch(), old.GetGeneration())
	}
	return nil
}

// ErrNeeded: snapshots or clones read what is in the extents of a leg, which cannot be freed before them.
var ErrNeeded = errors.New("snapshots or clones need what is in its extents")

// RemoveLeg frees the extents of a leg; it is not an error if the leg is not there. Those of a tree go
// to the reserve with its last leg. A leg under the tree of others is not removed: ErrNeeded; see RemoveBase.
func (l *Label) RemoveLeg(id block.LegID) error {
	if leg := l.Leg(id); leg != nil && Based(leg) && !l.Alone(leg) {
		return ErrNeeded
	}
	l.removeLeg(id)
	return nil
}

// RemoveBase is RemoveLeg for a leg under the tree of others, none of whom needs what is in its extents. The tree
// keeps its id, which is that of the leg.
func (l *Label) RemoveBase(id block.LegID) error {
	if leg := l.Leg(id); leg != nil && !Based(leg) {
		return fmt.Errorf("leg %v: not a based one", id)
	}
	l.removeLeg(id)
	return nil
}

func (l *Label) removeLeg(id block.LegID) {
	l.Legs = slices.DeleteFunc(l.Legs, func(leg *pb.LegLabel) bool { return leg.LegId == id.String() })
	l.uproot()
}

// Admit raises the admitted epoch of all legs of a volume to at least epoch.
func (l *Label) Admit(volume block.VolumeID, epoch block.Epoch) {
	for leg := range l.legsOf(volume.String()) {
		leg.AdmittedEpoch = max(leg.AdmittedEpoch, uint64(epoch))
	}
}

// SetVolume replaces the definition of a volume in all its legs. A definition with a lower epoch or
// generation than the label's is refused.
func (l *Label) SetVolume(volume *pb.VolumeLabel) error {
	for leg := range l.legsOf(volume.GetVolumeId()) {
		if err := checkNotOlder(leg.Volume, volume); err != nil {
			return fmt.Errorf("set volume of leg %s: %w", leg.LegId, err)
		}
		leg.Volume = proto.CloneOf(volume)
	}
	return nil
}

func (l *Label) legsOf(volume string) func(yield func(*pb.LegLabel) bool) {
	return func(yield func(*pb.LegLabel) bool) {
		for _, leg := range l.Legs {
			if leg.Volume.GetVolumeId() == volume && !yield(leg) {
				return
			}
		}
	}
}

// settle sorts the legs and checks the label.
func (l *Label) settle() error {
	slices.SortFunc(l.Legs, func(a, b *pb.LegLabel) int { return strings.Compare(a.GetLegId(), b.GetLegId()) })
	sortTrees(l.Trees)
	return l.check()
}

// check says why l must not be written to a drive.
func (l *Label) check() error {
	extents := Extents(l.Size)
	switch {
	case l.Cluster.IsZero():
		return errors.New("label: no cluster id")
	case l.Drive.IsZero():
		return errors.New("label: no drive id")
	case extents == 0:
		return fmt.Errorf("label: size %v holds no extent", l.Size)
	}
	runs, err := l.checkTrees()
	if err != nil {
		return err
	}
	for i, leg := range l.Legs {
		if err := checkRecord(leg); err != nil {
			return fmt.Errorf("leg %q: %w", leg.GetLegId(), err)
		}
		if i > 0 && l.Legs[i-1].LegId >= leg.LegId {
			return fmt.Errorf("leg %s: out of order or twice", leg.LegId)
		}
		runs = append(runs, runsNamed("leg "+leg.LegId, leg.Extents)...)
	}
	return checkRuns(runs, extents)
}

func checkRecord(leg *pb.LegLabel) error {
	if _, err := block.ParseLegID(leg.GetLegId()); err != nil {
		return err
	}
	if _, err := block.ParseVolumeID(leg.GetVolume().GetVolumeId()); err != nil {
		return fmt.Errorf("its volume: %w", err)
	}
	if err := ImageOf(leg).Check(); err != nil {
		return err
	}
	if Mapped(leg) {
		if len(leg.GetExtents()) > 0 {
			return errors.New("mapped, with extents of its own")
		}
		return nil
	}
	if len(leg.GetExtents()) == 0 {
		return errors.New("no extents")
	}
	if n := zeroedExtents(leg); n > CountExtents(leg.Extents) {
		return fmt.Errorf("%d extents zeroed, it has %d", n, CountExtents(leg.Extents))
	}
	return nil
}

// Layout returns a volume's layout from its definition, unchecked.
func Layout(l *pb.Layout) block.Layout {
	return block.Layout{
		Stripes: int(l.GetStripes()), Copies: int(l.GetCopies()), Chunk: block.Size(l.GetChunkBytes()),
		Data: int(l.GetData()), Parity: int(l.GetParity()), Integrity: l.GetIntegrity(),
	}
}

// reserved is the room that the records can ever need, whatever happens to their volumes.
func (l *Label) reserved() (sum block.Size) {
	for _, leg := range l.Legs {
		sum += reserved(leg)
	}
	return sum + l.spaceRoom()
}

func reserved(leg *pb.LegLabel) block.Size {
	v := leg.GetVolume()
	legs := Layout(v.GetLayout()).MostLegs()
	r := block.LegRecord{
		Legs: max(legs, len(v.GetInSyncLegs())+len(v.GetSuspectLegs())+len(v.GetOtherLegs())), Runs: len(leg.GetExtents()), Labels: len(v.GetLabels()),
		Text: len(v.GetName()) + len(v.GetPool()) + len(v.GetSpread()),
	}
	if Mapped(leg) || leg.GetTreeId() != "" {
		r.Text += block.MappedText
	}
	if of := v.GetSnapshot(); of != nil {
		r.Text += block.SnapshotText + len(of.GetVolumeName())
	}
	for key, value := range v.GetLabels() {
		r.Text += len(key) + len(value)
	}
	return r.Size()
}

// checkRoom refuses to reserve more room than a label has. A change that stays within what was
// reserved is never refused; above all, an epoch always fits.
func (l *Label) checkRoom(last *Label) error {
	if n := l.reserved(); n > block.LabelRoom && n > last.reserved() {
		return fmt.Errorf("%w: its %d legs can grow to %s of %s", ErrFull, len(l.Legs), n.Short(), block.LabelRoom.Short())
	}
	return nil
}

func (l *Label) clone() *Label {
	c := *l
	c.Legs = make([]*pb.LegLabel, len(l.Legs))
	for i, leg := range l.Legs {
		c.Legs[i] = proto.CloneOf(leg)
	}
	c.Trees, c.Reserve = nil, nil
	for _, t := range l.Trees {
		c.Trees = append(c.Trees, proto.CloneOf(t))
	}
	for _, e := range l.Reserve {
		c.Reserve = append(c.Reserve, proto.CloneOf(e))
	}
	return &c
}

// equal compares all but the generation.
func (l *Label) equal(o *Label) bool {
	return l.sameIdentity(o) && l.unfinished == o.unfinished && l.Incarnation == o.Incarnation &&
		slices.EqualFunc(l.Legs, o.Legs, func(a, b *pb.LegLabel) bool { return proto.Equal(a, b) }) &&
		slices.EqualFunc(l.Trees, o.Trees, func(a, b *pb.TreeLabel) bool { return proto.Equal(a, b) }) &&
		l.Pinned == o.Pinned && slices.EqualFunc(l.Reserve, o.Reserve, func(a, b *pb.Extent) bool { return proto.Equal(a, b) })
}

func (l *Label) sameIdentity(o *Label) bool {
	return l.Cluster == o.Cluster && l.Drive == o.Drive && l.Size == o.Size
}

// The geometry of a drive, fixed since format version 1.
const (
	slotSize    = 4 * block.MiB
	areaSize    = 2 * slotSize // at each end
	firstExtent = areaSize
	// labelMax leaves the last MiB of each slot unwritten. At the end of the device that is where
	// other programs keep their signatures (a backup GPT, md, DRBD, ZFS), so anything found there
	// is not ours.
	labelMax = slotSize - block.MiB
)

// tailArea is the offset of the second pair of slots: 8 MiB before the end, which is rounded down
// to 1 MiB.
func tailArea(size block.Size) block.Size { return size/block.MiB*block.MiB - areaSize }

// Extents is how many extents a device of size bytes has; 0 if it is too small.
func Extents(size block.Size) int {
	if size < MinSize {
		return 0
	}
	return int(min((tailArea(size)-firstExtent)/block.ExtentSize, math.MaxUint32))
}

// MinSize is the smallest device that holds an extent between its labels.
const MinSize = 2*areaSize + block.ExtentSize

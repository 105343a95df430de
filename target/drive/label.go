// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"cmp"
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

// Label is what a drive says of itself. The records are the contract's own
// messages, checked on the way in and on the way out.
type Label struct {
	Generation uint64 // grows with each write
	Cluster    block.ClusterID
	Drive      block.DriveID
	Size       block.Size     // of the whole device
	Legs       []*pb.LegLabel // by leg id; no two share an extent
	// Incarnation grows when it turned out that acknowledged writes may be lost.
	Incarnation uint32

	unfinished bool // what was on the device before may still be there
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

// PutLeg adds a leg, or replaces its record. Extents must be free and inside
// the drive; a leg that is there may get more of them behind those that it has,
// which are to be zeroed. What was reached stays reached: what is zeroed stays so,
// the admitted epoch is at least that of the volume's legs on this drive, and a
// lower revision or an older volume is refused.
func (l *Label) PutLeg(record *pb.LegLabel) error {
	record = proto.CloneOf(record)
	at := slices.IndexFunc(l.Legs, func(leg *pb.LegLabel) bool { return leg.LegId == record.LegId })
	for _, leg := range l.Legs {
		if leg.Volume.GetVolumeId() == record.Volume.GetVolumeId() {
			record.AdmittedEpoch = max(record.AdmittedEpoch, leg.AdmittedEpoch)
		}
	}
	if at < 0 {
		l.Legs = append(l.Legs, record)
		return l.settle()
	}
	if err := checkSuccessor(l.Legs[at], record); err != nil {
		return fmt.Errorf("put leg %s: %w", record.LegId, err)
	}
	if old := l.Legs[at]; old.Zeroed {
		setZeroed(record, zeroedExtents(old))
	}
	l.Legs[at] = record
	return l.settle()
}

// checkSuccessor says why next cannot take the place of old.
func checkSuccessor(old, next *pb.LegLabel) error {
	switch {
	case !Extends(next.GetExtents(), old.GetExtents()):
		return errors.New("its extents do not begin with those on the label")
	case old.Volume.GetVolumeId() != next.Volume.GetVolumeId():
		return fmt.Errorf("it belongs to volume %s", old.Volume.GetVolumeId())
	case next.Revision < old.Revision:
		return fmt.Errorf("revision %d is older than %d on the label", next.Revision, old.Revision)
	}
	return checkNotOlder(old.Volume, next.Volume)
}

// Extends reports whether next begins with the extents of old, in their order,
// however they are cut into runs.
func Extends(next, old []*pb.Extent) bool {
	have, want := Segments(next, block.Size(countExtents(old))*block.ExtentSize), Segments(old, 0)
	return countExtents(next) >= countExtents(old) && slices.Equal(have, want)
}

func countExtents(extents []*pb.Extent) (n uint64) {
	for _, e := range extents {
		n += uint64(e.GetCount())
	}
	return n
}

// Zeroed is how much of a leg, from its beginning, has been zeroed or holds its
// data. What is behind that may be what another leg left there.
func Zeroed(leg *pb.LegLabel) block.Size { return block.Size(zeroedExtents(leg)) * block.ExtentSize }

// Whole reports whether all of a leg is zeroed or holds its data.
func Whole(leg *pb.LegLabel) bool { return zeroedExtents(leg) == countExtents(leg.GetExtents()) }

func zeroedExtents(leg *pb.LegLabel) uint64 {
	switch {
	case !leg.GetZeroed():
		return 0
	case leg.GetZeroedExtents() != 0:
		return uint64(leg.GetZeroedExtents())
	}
	return countExtents(leg.GetExtents())
}

// setZeroed notes that the first n extents of a leg are zeroed.
func setZeroed(leg *pb.LegLabel, n uint64) {
	leg.Zeroed, leg.ZeroedExtents = true, uint32(n)
	if n == countExtents(leg.Extents) {
		leg.ZeroedExtents = 0
	}
}

// checkNotOlder guards against a manager that came back with an old store: what
// the drives know better must not be lost.
func checkNotOlder(old, next *pb.VolumeLabel) error {
	if next.GetEpoch() < old.GetEpoch() || next.GetGeneration() < old.GetGeneration() {
		return fmt.Errorf("volume %s at epoch %d, generation %d is older than epoch %d, generation %d on the label",
			old.GetVolumeId(), next.GetEpoch(), next.GetGeneration(), old.GetEpoch(), old.GetGeneration())
	}
	return nil
}

// RemoveLeg frees the extents of a leg; one that is not there is already free.
func (l *Label) RemoveLeg(id block.LegID) {
	l.Legs = slices.DeleteFunc(l.Legs, func(leg *pb.LegLabel) bool { return leg.LegId == id.String() })
}

// Admit raises the admitted epoch of all legs of a volume to at least epoch.
func (l *Label) Admit(volume block.VolumeID, epoch block.Epoch) {
	for leg := range l.legsOf(volume.String()) {
		leg.AdmittedEpoch = max(leg.AdmittedEpoch, uint64(epoch))
	}
}

// SetVolume replaces the definition of a volume in all its legs. One with a
// lower epoch or generation than the label has is refused.
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

// settle brings the legs into the label's order and checks all.
func (l *Label) settle() error {
	slices.SortFunc(l.Legs, func(a, b *pb.LegLabel) int { return strings.Compare(a.GetLegId(), b.GetLegId()) })
	return l.check()
}

// check says what makes l not a label that may stand on a drive.
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
	type run struct {
		start, end uint64
		leg        string
	}
	var runs []run
	for i, leg := range l.Legs {
		if err := checkRecord(leg); err != nil {
			return fmt.Errorf("leg %q: %w", leg.GetLegId(), err)
		}
		if i > 0 && l.Legs[i-1].LegId >= leg.LegId {
			return fmt.Errorf("leg %s: out of order or twice", leg.LegId)
		}
		for _, e := range leg.Extents {
			end := uint64(e.GetStart()) + uint64(e.GetCount())
			if e.GetCount() == 0 || end > uint64(extents) {
				return fmt.Errorf("leg %s: extents %d+%d: the drive has %d", leg.LegId, e.GetStart(), e.GetCount(), extents)
			}
			runs = append(runs, run{uint64(e.GetStart()), end, leg.LegId})
		}
	}
	slices.SortFunc(runs, func(a, b run) int { return cmp.Compare(a.start, b.start) })
	for i := 1; i < len(runs); i++ {
		if a, b := runs[i-1], runs[i]; b.start < a.end {
			return fmt.Errorf("leg %s: extent %d is taken by leg %s", b.leg, b.start, a.leg)
		}
	}
	return nil
}

func checkRecord(leg *pb.LegLabel) error {
	if _, err := block.ParseLegID(leg.GetLegId()); err != nil {
		return err
	}
	if _, err := block.ParseVolumeID(leg.GetVolume().GetVolumeId()); err != nil {
		return fmt.Errorf("its volume: %w", err)
	}
	if len(leg.GetExtents()) == 0 {
		return errors.New("no extents")
	}
	if n := zeroedExtents(leg); n > countExtents(leg.Extents) {
		return fmt.Errorf("%d extents zeroed, it has %d", n, countExtents(leg.Extents))
	}
	return nil
}

// reserved is what the records can come to take, whatever becomes of their volumes.
func (l *Label) reserved() (sum block.Size) {
	for _, leg := range l.Legs {
		sum += reserved(leg)
	}
	return sum
}

func reserved(leg *pb.LegLabel) block.Size {
	v := leg.GetVolume()
	legs := int(v.GetLayout().GetStripes() * v.GetLayout().GetCopies())
	r := block.LegRecord{
		Legs: max(legs, len(v.GetInSyncLegs())+len(v.GetSuspectLegs())), Runs: len(leg.GetExtents()), Labels: len(v.GetLabels()),
		Text: len(v.GetName()) + len(v.GetPool()) + len(v.GetSpread()),
	}
	for key, value := range v.GetLabels() {
		r.Text += len(key) + len(value)
	}
	return r.Size()
}

// checkRoom refuses to take more room than a label has. What needs no more than was
// reserved is never refused: above all, no epoch.
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
	return &c
}

// equal compares all but the generation.
func (l *Label) equal(o *Label) bool {
	return l.sameIdentity(o) && l.unfinished == o.unfinished && l.Incarnation == o.Incarnation &&
		slices.EqualFunc(l.Legs, o.Legs, func(a, b *pb.LegLabel) bool { return proto.Equal(a, b) })
}

func (l *Label) sameIdentity(o *Label) bool {
	return l.Cluster == o.Cluster && l.Drive == o.Drive && l.Size == o.Size
}

// The geometry of a drive, fixed by format version 1.
const (
	slotSize    = 4 * block.MiB
	areaSize    = 2 * slotSize // at each end
	firstExtent = areaSize
	// labelMax leaves the last MiB of each slot unwritten: at the end of the
	// device that is where others keep what they know it by (a backup GPT, md,
	// DRBD, ZFS), so whatever is found there is not ours.
	labelMax = slotSize - block.MiB
)

// tailArea is where the second pair of slots begins: 8 MiB before the end,
// which is rounded down to 1 MiB.
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

// Segment is a run of bytes of a device.
type Segment struct{ Offset, Length block.Size }

// Segments are the byte ranges of the drive that hold the first size bytes of a
// leg, in the leg's order, adjacent ones merged; size 0 means all of it.
func Segments(extents []*pb.Extent, size block.Size) []Segment {
	left := size
	if size == 0 {
		left = math.MaxUint64
	}
	var segments []Segment
	for _, e := range extents {
		offset := firstExtent + block.Size(e.GetStart())*block.ExtentSize
		length := min(block.Size(e.GetCount())*block.ExtentSize, left)
		left -= length
		n := len(segments)
		switch {
		case length == 0:
		case n > 0 && segments[n-1].Offset+segments[n-1].Length == offset:
			segments[n-1].Length += length
		default:
			segments = append(segments, Segment{offset, length})
		}
	}
	return segments
}

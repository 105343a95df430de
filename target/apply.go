// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/userspace"
)

// disk is the part of a drive that the agent uses; *drive.Drive.
type disk interface {
	Label() *drive.Label
	Update(func(*drive.Label) error) error
	Rewrite() error
	ZeroLeg(ctx context.Context, id block.LegID, progress func(done block.Size)) error
	Erase() error
	Close() error
}

// planted is a disk whose mapped legs can be served.
type planted interface {
	Trees() map[string]userspace.TreeSeen
	Prepare(leg block.LegID, revision uint64, size block.Size, from userspace.Origin) error
	Plant(leg block.LegID, tree string, size block.Size) error
	Settle(leg block.LegID, rate block.Size) error
	Unbase(leg block.LegID) error
	Fell(leg block.LegID) error
	Flatten(volume block.VolumeID, tree string, rate block.Size) error
	StopFlattening(volume block.VolumeID, tree string) error
	GrowTree(tree string, extents int) error
	ShrinkTree(tree string, keep block.Size) error
	Keep(tree string) error
	Copy(leg block.LegID, revision uint64, size block.Size, base block.LegID, fill func(to block.Device, room func() block.Size) error) error
	FreeLeg(leg block.LegID) error
	Ranges(leg, since block.LegID, off, end int64, most int) ([]block.Range, int64, error)
}

// hardware is the part of the node's devices that the agent uses.
type hardware interface {
	Scan(ctx context.Context) ([]*pb.Device, error)
	Open(path string) (disk, error)
	Format(path string, cluster block.ClusterID, id block.DriveID, force string) error
	Number(path string) (block.DeviceNumber, error)
	// Sequence changes whenever a disk, another or the same one, is attached under a number.
	Sequence(n block.DeviceNumber) string
	// Smart may take as long as the drive takes to answer. Nil: it has no such log.
	Smart(path string) (*pb.SmartLog, error)
	IOs(path string) drive.IOs
}

// mapper is the part of the device mapper that the agent uses; *dm.Client.
type mapper interface {
	Devices(prefix string) ([]dm.State, error)
	Do(dm.Step) error
}

// tools carry out orders. They may be used from many goroutines.
type tools struct {
	hardware hardware
	mapper   func() (mapper, error)
	drives   *openDrives
	names    naming
	progress func(block.LegID, progress) // of zeroing and copying
	dial     dialer                      // to other targets; nil: as the machine does
	boot     string                      // of this machine
}

// do carries out one order to its end.
//
// Branches: one for each kind of order.
func (t tools) do(ctx context.Context, o order) error {
	switch o := o.(type) {
	case formatDrive:
		return t.formatDrive(ctx, o)
	case eraseDrive:
		return t.eraseDrive(o)
	case putLeg:
		return t.putLeg(o)
	case freeLeg:
		return t.freeLeg(o)
	case prepareLeg:
		return t.planted(o.drive, func(d planted) error { return d.Prepare(o.leg, o.revision, o.size, o.from) })
	case baseLeg:
		return t.planted(o.drive, o.do)
	case flattenLegs:
		return t.planted(o.drive, o.do)
	case copyLeg:
		return t.copyLeg(ctx, o)
	case grantSpace:
		return t.update(o.drive, func(l *drive.Label) error { return l.SetGrant(o.extents) })
	case growTree:
		return t.planted(o.drive, func(d planted) error { return d.GrowTree(o.tree, o.more) })
	case shrinkTree:
		return t.planted(o.drive, func(d planted) error { return d.ShrinkTree(o.tree, keepFree) })
	case keepTree:
		return t.planted(o.drive, func(d planted) error { return d.Keep(o.tree) })
	case admit:
		return t.update(o.drive, func(l *drive.Label) error { l.Admit(o.volume, o.epoch); return nil })
	case noteLoss:
		return t.update(o.drive, func(l *drive.Label) error { l.Incarnation = max(l.Incarnation, o.incarnation); return nil })
	case zeroLeg:
		return t.zeroLeg(ctx, o)
	case mapLeg:
		m, err := t.mapper()
		if err != nil {
			return err
		}
		if both, ok := m.(bothMappers); ok && o.process {
			return both.process.Do(o.step)
		}
		return m.Do(o.step)
	case nameLeg:
		return t.names.Set(o.leg, o.node)
	}
	return fmt.Errorf("unknown order %T", o)
}

// update writes a label. A drive whose label cannot be written is unusable until it can; see
// openDrives.tryBroken.
func (t tools) update(id block.DriveID, change func(*drive.Label) error) error {
	d, release, err := t.drives.take(id)
	if err != nil {
		return err
	}
	defer release()
	err = d.Update(change)
	t.drives.judge(id, err)
	return err
}

// planted does something with a drive that has trees.
func (t tools) planted(id block.DriveID, do func(planted) error) error {
	d, release, err := t.drives.take(id)
	if err != nil {
		return err
	}
	defer release()
	p, ok := d.(planted)
	if !ok {
		return errNoTrees
	}
	err = do(p)
	t.drives.judge(id, err)
	return err
}

// errNoTrees: only package userspace serves mapped legs.
var errNoTrees = errors.New("the kernel's data path serves no thin volumes")

func (t tools) putLeg(o putLeg) error { return t.putLegs([]order{o}) }

// putLegs changes the records of legs of one drive in one write of its label: all of them, or none.
func (t tools) putLegs(all []order) error {
	return t.update(all[0].(putLeg).drive, func(l *drive.Label) error {
		for _, o := range all {
			if err := t.put(l, o.(putLeg)); err != nil {
				return err
			}
		}
		return nil
	})
}

// put changes the record of a leg on a label.
func (t tools) put(l *drive.Label, o putLeg) error {
	if cause := unrooted(o.leg, l); cause != "" { // it would get a tree of its own
		return errors.New(cause)
	}
	old := legRecord(l, o.leg.id)
	again := o.leg.restores() && old.GetRevision() < o.leg.GetRevision()
	if err := l.PutLeg(newRecord(old, o, t.boot)); err != nil || !again {
		return err
	}
	return l.Unprepared(o.leg.id)
}

// freeLeg takes turns with what opens trees, where there are any.
func (t tools) freeLeg(o freeLeg) error {
	err := t.planted(o.drive, func(d planted) error { return d.FreeLeg(o.leg) })
	if !errors.Is(err, errNoTrees) {
		return err
	}
	return t.update(o.drive, func(l *drive.Label) error { return l.RemoveLeg(o.leg) })
}

// formatDrive also opens the drive, so that the next observation finds it.
func (t tools) formatDrive(ctx context.Context, o formatDrive) error {
	if err := t.format(o); err != nil {
		return err
	}
	t.drives.replaced(o.device, o.id)
	ctx, cancel := context.WithTimeout(ctx, scanFor)
	defer cancel()
	return t.drives.refresh(ctx)
}

// format keeps a refresh from opening the device: the label is written more than once, and a drive
// opened in between would take the last write for another program's.
func (t tools) format(o formatDrive) error {
	if !t.drives.begin(o.device) {
		return errors.New("the device is being opened")
	}
	defer t.drives.end(o.device)
	return t.hardware.Format(o.device, o.cluster, o.id, o.force)
}

func (t tools) eraseDrive(o eraseDrive) error {
	d, release, err := t.drives.take(o.id)
	if err != nil {
		return err
	}
	defer release()
	if err := d.Erase(); err != nil {
		t.drives.judge(o.id, err)
		return err
	}
	t.drives.drop(o.id)
	return nil
}

func (t tools) zeroLeg(ctx context.Context, o zeroLeg) error {
	d, release, err := t.drives.take(o.drive)
	if err != nil {
		return err
	}
	defer release()
	err = d.ZeroLeg(ctx, o.leg, func(done block.Size) { t.progress(o.leg, progress{upTo: done}) })
	if ctx.Err() == nil {
		t.drives.judge(o.drive, err)
	}
	return err
}

// newRecord returns the new record of a leg. It starts from the record on the drive at that moment,
// so what only the drive knows (zeroed, admitted) is kept. The boot and the drive's incarnation are
// current: the manager knew them when it sent the definition.
func newRecord(old *pb.LegLabel, o putLeg, boot string) *pb.LegLabel {
	w := o.leg
	r := &pb.LegLabel{
		LegId: w.GetLegId(), Column: w.GetColumn(), Copy: w.GetCopy(), Extents: w.GetExtents(), Image: w.GetImage(), TreeId: w.GetTreeId(),
		Revision: w.GetRevision(), Volume: proto.CloneOf(w.GetVolume()),
		// The fence of the volume's other legs on this drive applies to this leg too.
		AdmittedEpoch: uint64(o.floor), BootId: boot, Incarnation: o.incarnation,
	}
	if !drive.Mapped(w) { // it gets a tree, and loses it, by steps of its own
		r.TreeId = old.GetTreeId()
		if drive.Based(w) || drive.Based(old) {
			r.Image = old.GetImage()
		}
	}
	if old != nil {
		r.Zeroed, r.AdmittedEpoch = old.GetZeroed(), old.GetAdmittedEpoch()
	}
	return r
}

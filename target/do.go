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
)

// disk is what the agent asks of a drive; *drive.Drive.
type disk interface {
	Label() *drive.Label
	Update(func(*drive.Label) error) error
	ZeroLeg(ctx context.Context, id block.LegID, progress func(done block.Size)) error
	Erase() error
	Close() error
}

// hardware is what the agent asks of the node's devices.
type hardware interface {
	Scan(ctx context.Context) ([]*pb.Device, error)
	Open(path string) (disk, error)
	Format(path string, cluster block.ClusterID, id block.DriveID, force string) error
	Number(path string) (block.DeviceNumber, error)
	// Sequence changes when another disk, or the same one again, comes to have a number.
	Sequence(n block.DeviceNumber) string
}

// mapper is what the agent asks of the device mapper; *dm.Client.
type mapper interface {
	Devices(prefix string) ([]dm.State, error)
	Do(dm.Step) error
}

// tools is what orders are done with. It may be used from many goroutines.
type tools struct {
	hardware hardware
	mapper   func() (mapper, error)
	shelf    *shelf
	names    naming
	progress func(block.LegID, block.Size) // of zeroing
	boot     string                        // of this machine
}

// do does one order, to its end.
func (t tools) do(ctx context.Context, o order) error {
	switch o := o.(type) {
	case formatDrive:
		return t.formatDrive(ctx, o)
	case eraseDrive:
		return t.eraseDrive(o)
	case putLeg:
		return t.update(o.drive, func(l *drive.Label) error { return l.PutLeg(newRecord(legRecord(l, o.leg.id), o, t.boot)) })
	case freeLeg:
		return t.update(o.drive, func(l *drive.Label) error { l.RemoveLeg(o.leg); return nil })
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
		return m.Do(o.step)
	case nameLeg:
		return t.names.Set(o.leg, o.node)
	}
	return fmt.Errorf("unknown order %T", o)
}

// update writes a label. A drive that cannot take it is of no use until somebody
// has seen to it.
func (t tools) update(id block.DriveID, change func(*drive.Label) error) error {
	d, release, err := t.shelf.take(id)
	if err != nil {
		return err
	}
	defer release()
	err = d.Update(change)
	t.shelf.judge(id, err)
	return err
}

// formatDrive also puts the drive on the shelf, so that it is seen to be there.
func (t tools) formatDrive(ctx context.Context, o formatDrive) error {
	if err := t.format(o); err != nil {
		return err
	}
	t.shelf.replaced(o.device, o.id)
	ctx, cancel := context.WithTimeout(ctx, scanFor)
	defer cancel()
	return t.shelf.refresh(ctx)
}

// format keeps a refresh from opening the device: the label is written more than
// once, and a drive that is opened in between would take the last of these writes
// for another program's.
func (t tools) format(o formatDrive) error {
	if !t.shelf.begin(o.device) {
		return errors.New("the device is being opened")
	}
	defer t.shelf.end(o.device)
	return t.hardware.Format(o.device, o.cluster, o.id, o.force)
}

func (t tools) eraseDrive(o eraseDrive) error {
	d, release, err := t.shelf.take(o.id)
	if err != nil {
		return err
	}
	defer release()
	if err := d.Erase(); err != nil {
		t.shelf.judge(o.id, err)
		return err
	}
	t.shelf.drop(o.id)
	return nil
}

func (t tools) zeroLeg(ctx context.Context, o zeroLeg) error {
	d, release, err := t.shelf.take(o.drive)
	if err != nil {
		return err
	}
	defer release()
	err = d.ZeroLeg(ctx, o.leg, func(done block.Size) { t.progress(o.leg, done) })
	if ctx.Err() == nil {
		t.shelf.judge(o.drive, err)
	}
	return err
}

// newRecord is what a leg's record becomes. It is made from the record that is
// there at that moment: what the drive knows better (zeroed, admitted) stays.
// The manager knew of this boot, and of the drive's incarnation, when it gave the
// definition.
func newRecord(old *pb.LegLabel, o putLeg, boot string) *pb.LegLabel {
	w := o.leg
	r := &pb.LegLabel{
		LegId: w.GetLegId(), Column: w.GetColumn(), Copy: w.GetCopy(), Extents: w.GetExtents(),
		Revision: w.GetRevision(), Volume: proto.CloneOf(w.GetVolume()),
		// The fence of the volume's other legs here is this one's too.
		AdmittedEpoch: uint64(o.floor), BootId: boot, Incarnation: o.incarnation,
	}
	if old != nil {
		r.Zeroed, r.AdmittedEpoch = old.GetZeroed(), old.GetAdmittedEpoch()
	}
	return r
}

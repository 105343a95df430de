// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/treecheck"
)

// sameCopies reads the legs directly from the drives, bypassing all of Weft. The in-sync legs
// of a column must be equal once nobody writes and the differences left by a crash are
// repaired. Thin legs are read through their trees, as the independent checker understands them.
func (c *cluster) sameCopies() {
	c.t.Helper()
	c.eventually("the same on all copies", c.compareCopies)
}

func (c *cluster) compareCopies(ctx context.Context) (err error) {
	c.every(func(u *user) {
		if wrong := c.compareCopiesOf(ctx, u.name); wrong != nil {
			err = fmt.Errorf("%s: %w", u.name, wrong)
		}
	})
	return err
}

func (c *cluster) compareCopiesOf(ctx context.Context, name block.VolumeName) error {
	v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: string(name)})
	if err != nil {
		return err
	}
	size := layoutOf(v).LegSize(block.Size(v.GetSizeBytes()))
	first := map[uint32]*pb.Leg{}
	for _, leg := range v.GetLegs() {
		if leg.GetState() != pb.LegState_LEG_STATE_IN_SYNC {
			continue
		}
		if first[leg.GetColumn()] == nil {
			first[leg.GetColumn()] = leg
			continue
		}
		if err := c.compareLegs(first[leg.GetColumn()], leg, size); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) compareLegs(a, b *pb.Leg, size block.Size) error {
	one, err := c.rawLeg(a, size)
	if err != nil {
		return err
	}
	other, err := c.rawLeg(b, size)
	if err != nil {
		return err
	}
	var p, q [256 << 10]byte
	for at := int64(0); at < int64(size); at += int64(len(p)) {
		n, err := io.ReadFull(one, p[:min(int64(len(p)), int64(size)-at)])
		if err == nil {
			_, err = io.ReadFull(other, q[:n])
		}
		if err != nil {
			return fmt.Errorf("read legs %d.%d and %d.%d: %w; %s; %s", a.GetColumn(), a.GetCopy(), b.GetColumn(), b.GetCopy(), err, c.labelled(a), c.labelled(b))
		}
		for i := 0; i < n; i += unit {
			if !bytes.Equal(p[i:i+unit], q[i:i+unit]) {
				return fmt.Errorf("column %d differs at unit %d of a leg: copy %d on %s (%s) and copy %d on %s (%s) are in sync",
					a.GetColumn(), (at+int64(i))/unit, a.GetCopy(), a.GetNode(), numbers(p[i:i+unit]), b.GetCopy(), b.GetNode(), numbers(q[i:i+unit]))
			}
		}
	}
	return nil
}

// numbers returns the write numbers at the start of a unit's sectors.
func numbers(p []byte) string {
	var all []uint64
	for i := 0; i < len(p); i += int(block.SectorSize) {
		all = append(all, binary.LittleEndian.Uint64(p[i:]))
	}
	return fmt.Sprint(slices.Compact(all))
}

// dataOf is where the first bytes of a leg are on its drive. No leg here has more data than one
// extent.
func (c *cluster) dataOf(l *pb.Leg, size block.Size) []drive.Segment {
	segments := drive.ImageOf(&pb.LegLabel{Extents: l.GetExtents()}).Segments(size)
	if c.integrity {
		segments[0].Offset += block.ExtentSize - block.CheckedData
	}
	return segments
}

// rawLeg returns a leg as its drive holds it.
func (c *cluster) rawLeg(l *pb.Leg, size block.Size) (io.Reader, error) {
	i := slices.IndexFunc(c.targets, func(h *targetHost) bool { return h.name == l.GetNode() })
	if i < 0 {
		return nil, fmt.Errorf("no target is %s", l.GetNode())
	}
	drive := c.targets[i].platter.file
	if c.thin || len(l.GetExtents()) == 0 {
		return thinLeg(l, drive)
	}
	if based, err := overBase(l, drive); based != nil || err != nil {
		return based, err
	}
	var parts []io.Reader
	for _, s := range c.dataOf(l, size) {
		parts = append(parts, io.NewSectionReader(drive, int64(s.Offset), int64(s.Length)))
	}
	return io.MultiReader(parts...), nil
}

// thinLeg returns a leg as the independent checker reads it from its tree, which must not be damaged.
func thinLeg(l *pb.Leg, drive *os.File) (io.Reader, error) {
	id, err := block.ParseUUID(l.GetId())
	if err != nil {
		return nil, err
	}
	tree, err := treeWith(drive, id)
	if err != nil {
		return nil, fmt.Errorf("leg %d.%d on %s: %w", l.GetColumn(), l.GetCopy(), l.GetNode(), err)
	}
	return tree.Content(drive, treecheck.FirstExtent, id)
}

// overBase is thinLeg of a leg with a tree over its extents; nil if it has none.
func overBase(l *pb.Leg, drive *os.File) (io.Reader, error) {
	trees, err := treesOn(drive)
	if err != nil {
		return nil, err
	}
	for i := range trees {
		for _, x := range trees[i].Layers {
			if x.Object.String() == l.GetId() && x.State != "doomed" {
				return trees[i].Content(drive, treecheck.FirstExtent, x.Object)
			}
		}
	}
	return nil, nil
}

// treeOn returns a tree of a drive. The tree of a volume that is no clone has the id of the leg.
func treeOn(drive *os.File, id block.UUID) (*treecheck.Tree, error) {
	return findTree(drive, id, func(t *treecheck.Tree) bool { return t.ID == id })
}

// treeWith returns the tree of a drive that has a leg or a snapshot.
func treeWith(drive *os.File, object block.UUID) (*treecheck.Tree, error) {
	return findTree(drive, object, func(t *treecheck.Tree) bool {
		return slices.ContainsFunc(t.Layers, func(l treecheck.Layer) bool { return l.Object == object && l.State != "doomed" })
	})
}

func findTree(drive *os.File, id block.UUID, is func(*treecheck.Tree) bool) (*treecheck.Tree, error) {
	trees, err := treesOn(drive)
	if err != nil {
		return nil, err
	}
	for i := range trees {
		if is(&trees[i]) {
			return &trees[i], nil
		}
	}
	return nil, fmt.Errorf("there is no tree of %v", id)
}

// treesOn returns the trees of a drive. None must be damaged.
func treesOn(drive *os.File) ([]treecheck.Tree, error) {
	info, err := drive.Stat()
	if err != nil {
		return nil, err
	}
	report, err := treecheck.Check(drive, info.Size(), treecheck.FirstExtent)
	if err != nil {
		return nil, err
	}
	for _, t := range report.Trees {
		for _, f := range t.Findings {
			if f.Damage {
				return nil, fmt.Errorf("tree %v: %s", t.ID, f.Text)
			}
		}
	}
	return report.Trees, nil
}

// layoutOf is a volume's layout.
func layoutOf(v *pb.Volume) block.Layout {
	l := v.GetLayout()
	return block.Layout{Stripes: int(l.GetStripes()), Copies: int(l.GetCopies()), Chunk: block.Size(l.GetChunkBytes())}
}

// labelled is what a leg's drive says of it.
func (c *cluster) labelled(l *pb.Leg) string {
	i := slices.IndexFunc(c.targets, func(h *targetHost) bool { return h.name == l.GetNode() })
	file := c.targets[i].platter.file
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	label, err := drive.ReadLabel(file, block.Size(info.Size()))
	if err != nil {
		return err.Error()
	}
	trees, err := treesOn(file)
	return fmt.Sprintf("%v, trees %v; on the drive %+v, %v", label.Leg(parseLeg(l.GetId())), label.Trees, trees, err)
}

func parseLeg(id string) block.LegID {
	leg, err := block.ParseLegID(id)
	if err != nil {
		panic(err)
	}
	return leg
}

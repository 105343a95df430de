// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
	"weft.dev/weft/volmgr/cluster"
)

// This file answers where a snapshot holds data, and where it differs from another one. The manager
// knows nothing of that by itself: it asks a target of each column, about the legs of both snapshots
// on one drive, and puts the answers together.

// rangesMost is how many ranges a target is asked for at a time, and about how many an answer has.
const rangesMost = 4096

// GetSnapshotRanges returns where a snapshot holds data, or where it differs from another one.
func (m *Manager) GetSnapshotRanges(ctx context.Context, r *pb.GetSnapshotRangesRequest) (*pb.GetSnapshotRangesResponse, error) {
	state, err := m.snapshot(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	of, since, err := compared(state, r)
	if err != nil {
		return nil, toStatus(err)
	}
	answer := &pb.GetSnapshotRangesResponse{SizeBytes: uint64(of.Size)}
	var columns []columnRanges
	for k := range of.Layout.Stripes {
		c, err := m.columnRanges(ctx, state, of, since, k, block.Size(r.GetOffset()))
		if err != nil {
			return nil, toStatus(err)
		}
		columns = append(columns, c)
	}
	found, next := ofVolume(of.Layout, of.Size, block.Size(r.GetOffset()), columns)
	for _, one := range found {
		answer.Ranges = append(answer.Ranges, &pb.ByteRange{Offset: uint64(one.Off), Bytes: uint64(one.End - one.Off)})
	}
	answer.NextOffset = uint64(next)
	return answer, nil
}

// compared returns the snapshots of a request; since is nil if there is one only.
func compared(state *cluster.State, r *pb.GetSnapshotRangesRequest) (of cluster.Volume, since *cluster.Volume, err error) {
	if of, err = readySnapshot(state, "snapshot", r.GetSnapshot()); err != nil {
		return of, nil, err
	}
	if r.GetOffset() > uint64(of.Size) || r.GetOffset()%uint64(block.MapUnit) != 0 {
		return of, nil, &cluster.Error{Kind: cluster.InvalidArgument, Field: "offset", Text: fmt.Sprintf("offset %d: must be a multiple of %v, at most %v", r.GetOffset(), block.MapUnit, of.Size)}
	}
	if r.GetSince() == "" {
		return of, nil, nil
	}
	base, err := readySnapshot(state, "since", r.GetSince())
	if err == nil && base.Snapshot.Volume != of.Snapshot.Volume {
		err = &cluster.Error{Kind: cluster.InvalidArgument, Text: fmt.Sprintf("snapshots %s and %s are of two volumes", base.Name, of.Name)}
	}
	if err == nil && base.Layout != of.Layout {
		err = &cluster.Error{Kind: cluster.FailedPrecondition, Reason: cluster.ReasonNotReady, Text: fmt.Sprintf("snapshots %s and %s are of volumes with other layouts", of.Name, base.Name)}
	}
	return of, &base, err
}

// readySnapshot returns a snapshot that is complete.
func readySnapshot(state *cluster.State, field, name string) (cluster.Volume, error) {
	v, err := state.Volume(name)
	switch {
	case err != nil:
		return v, err
	case !v.IsSnapshot():
		return v, &cluster.Error{Kind: cluster.InvalidArgument, Field: field, Text: fmt.Sprintf("%s: volume %s is no snapshot", field, v.Name)}
	case v.State != cluster.VolumeReady:
		return v, &cluster.Error{Kind: cluster.FailedPrecondition, Reason: cluster.ReasonNotReady, Text: fmt.Sprintf("snapshot %s is not complete, or is being deleted", v.Name)}
	}
	return v, nil
}

// columnRanges is what is known of one column: all of its ranges before next.
type columnRanges struct {
	found []block.Range // of a leg
	next  int64
}

// columnRanges asks about a column from where an offset of the volume is in it. It tries one copy after
// another.
func (m *Manager) columnRanges(ctx context.Context, state *cluster.State, of cluster.Volume, since *cluster.Volume, column int, offset block.Size) (columnRanges, error) {
	var why []string
	q := &pb.RangesQuestion{Offset: uint64(inColumn(of.Layout, column, offset)), EndOffset: uint64(of.Layout.LegSize(of.Size)), Most: rangesMost}
	for _, l := range of.Legs {
		if l.Column != column || l.State != cluster.LegInSync {
			continue
		}
		q.DriveId, q.LegId, q.SinceLegId = l.Drive.String(), l.ID.String(), ""
		if since != nil {
			i := slices.IndexFunc(since.Legs, func(b cluster.Leg) bool {
				return b.Column == column && b.Drive == l.Drive && b.State == cluster.LegInSync
			})
			if i < 0 {
				why = append(why, fmt.Sprintf("leg %d.%d on %s: snapshot %s has no copy on its drive", l.Column, l.Copy, l.Node, since.Name))
				continue
			}
			q.SinceLegId = since.Legs[i].ID.String()
		}
		c, err := m.askLeg(ctx, state, l, q)
		if err == nil {
			return c, nil
		}
		why = append(why, fmt.Sprintf("leg %d.%d on %s: %v", l.Column, l.Copy, l.Node, err))
	}
	if len(why) == 0 {
		why = []string{"it has no good copy"}
	}
	return columnRanges{}, &cluster.Error{Kind: cluster.FailedPrecondition, Reason: cluster.ReasonNoReport, Object: "snapshot " + string(of.Name),
		Text: fmt.Sprintf("snapshot %s: no target can tell of column %d: %s", of.Name, column, strings.Join(why, "; ")), Hint: "read all of the snapshot instead, or repeat the command when the targets are back"}
}

// askLeg asks a leg's target.
func (m *Manager) askLeg(ctx context.Context, state *cluster.State, l cluster.Leg, q *pb.RangesQuestion) (c columnRanges, err error) {
	n, err := state.Node(l.Node)
	if err != nil {
		return c, err
	}
	answer, err := m.support.askRanges(ctx, agentName{l.Node, targetWord}, n.Target, q)
	if err != nil {
		return c, err
	}
	last := q.GetOffset()
	for _, r := range answer.GetRanges() {
		end := r.GetOffset() + r.GetBytes()
		if r.GetOffset() < last || end <= r.GetOffset() || end > q.GetEndOffset() {
			return c, errors.New("its agent gave ranges that are not in order")
		}
		c.found, last = append(c.found, block.Range{Off: int64(r.GetOffset()), End: int64(end)}), end
	}
	if c.next = int64(answer.GetNextOffset()); answer.GetNextOffset() > q.GetEndOffset() || answer.GetNextOffset() < last || c.next == int64(q.GetOffset()) && q.GetOffset() != q.GetEndOffset() {
		return c, errors.New("its agent did not say how far its answer goes")
	}
	return c, nil
}

// inColumn is where the part of a column begins that is not before an offset of the volume.
func inColumn(l block.Layout, column int, offset block.Size) int64 {
	at := raid.Locate(l, offset)
	switch {
	case at.Column == column:
		return int64(at.Offset)
	case column > at.Column:
		return int64(at.Offset / l.Chunk * l.Chunk)
	}
	return int64((at.Offset/l.Chunk + 1) * l.Chunk)
}

// ofVolume is what the answers of all columns say of the volume from an offset on, and where that ends.
func ofVolume(l block.Layout, size, offset block.Size, columns []columnRanges) (found []block.Range, next int64) {
	next = int64(size)
	for k, c := range columns {
		if c.next < int64(l.LegSize(size)) {
			next = min(next, int64(raid.Offset(l, raid.Place{Column: k, Offset: block.Size(c.next)})))
		}
	}
	for k, c := range columns {
		for _, r := range c.found {
			found = appendOfColumn(found, l, k, r, next)
		}
	}
	slices.SortFunc(found, func(a, b block.Range) int { return int(min(max(a.Off-b.Off, math.MinInt32), math.MaxInt32)) })
	out := found[:0]
	for _, r := range found {
		r.Off = max(r.Off, int64(offset))
		switch n := len(out); {
		case r.Off >= r.End:
		case n > 0 && out[n-1].End == r.Off:
			out[n-1].End = r.End
		default:
			out = append(out, r)
		}
	}
	return out, next
}

// appendOfColumn adds the parts of the volume that a range of a column is, up to a limit.
func appendOfColumn(found []block.Range, l block.Layout, column int, r block.Range, limit int64) []block.Range {
	for at := r.Off; at < r.End; {
		n := r.End - at
		if l.Stripes > 1 {
			n = min(n, int64(l.Chunk)-at%int64(l.Chunk))
		}
		off := int64(raid.Offset(l, raid.Place{Column: column, Offset: block.Size(at)}))
		if off >= limit {
			return found
		}
		found, at = append(found, block.Range{Off: off, End: min(off+n, limit)}), at+n
	}
	return found
}

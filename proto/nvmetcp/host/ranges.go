// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"math"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// rangesPiece is the most bytes of one answer about ranges: room for 4095 of them.
const rangesPiece = 64 << 10

// Allocated returns ranges of [off, end) that may hold data, in order. What it does not name before
// next reads as zeroes at some moment during the call; next is where the rest begins, end if there is
// none. One call is about 65535 blocks at most. A controller that does not know the command gives an
// error that is [block.ErrUnsupported].
func (n *Namespace) Allocated(ctx context.Context, off, end int64) (found []block.Range, next int64, err error) {
	s, a := n.controller.session.Load(), n.state.Load()
	if s == nil || !n.present() {
		return nil, off, fmt.Errorf("find the data of %v: %w", n, errLost)
	}
	if s.about.OACS&nvmetcp.OACSGetLBAStatus == 0 {
		return nil, off, fmt.Errorf("find the data of %v: %w", n, block.ErrUnsupported)
	}
	if end <= int64(a.Geometry.Size) { // more cannot be asked for, but all to the end of the namespace
		end = min(end, off+int64(math.MaxUint16)<<a.shift)
	}
	g := nvmetcp.GetLBAStatus{NSID: a.NSID, Action: nvmetcp.LBAAllocated, Start: uint64(off) >> a.shift, Length: a.rangesLength(end - off)}
	g.Blocks = uint16((uint64(end) >> a.shift) - g.Start)
	return n.ranges(ctx, g.Command(), off, end, int(g.Length))
}

// Differing is Allocated for the ranges that may differ from a snapshot, which is named by its leg on
// the same drive. What it does not name is equal. A controller or a namespace without snapshots gives
// an error that is [block.ErrUnsupported], and [nvmetcp.InvalidField] says that this one is not there.
func (n *Namespace) Differing(ctx context.Context, since block.UUID, off, end int64) (found []block.Range, next int64, err error) {
	a := n.state.Load()
	g := nvmetcp.GetDifferences{NSID: a.NSID, Start: uint64(off) >> a.shift, Since: since, Length: uint32(a.rangesLength(end - off))}
	return n.ranges(ctx, g.Command(), off, end, int(g.Length))
}

// rangesLength is how long an answer about n bytes can be, in bytes: every second MapUnit has data.
func (a *namespaceState) rangesLength(n int64) uint64 {
	most := min(int64(rangesPiece), a.maxIO)
	return uint64(min(most, nvmetcp.LBAStatusHeaderSize+nvmetcp.LBARangeSize*(n/(2*int64(block.MapUnit))+1)))
}

// ranges sends a command that is answered with an LBAStatusList, and checks the answer.
func (n *Namespace) ranges(ctx context.Context, cmd nvmetcp.Command, off, end int64, length int) (found []block.Range, next int64, err error) {
	a := n.state.Load()
	if b := int64(1) << a.shift; off < 0 || off >= end || end > int64(a.Geometry.Size) || off%b != 0 || end%b != 0 {
		return nil, off, fmt.Errorf("%s, %d to %d of %v: %w", nvmetcp.CommandName(&cmd, true), off, end, n, block.ErrRange)
	}
	data := make([]byte, length)
	if err := n.adminCommand(ctx, cmd, data); err != nil {
		return nil, off, err
	}
	list, err := nvmetcp.ParseLBAStatusList(data)
	if err == nil {
		found, next, err = list.In(off, end, a.shift)
	}
	if err != nil {
		return nil, off, fmt.Errorf("%s, %v: %w", nvmetcp.CommandName(&cmd, true), n, err)
	}
	return found, next, nil
}

// submitMap answers an OpMap. It does not wait for a connection: an error says that there is none.
func (n *Namespace) submitMap(io *block.IO) {
	if err := n.Geometry().CheckMap(io); err != nil {
		io.Complete(err)
		return
	}
	n.controller.outstanding.Add(1)
	n.controller.use()
	go func() {
		ctx, cancel := context.WithTimeout(n.controller.ctx, mapWithin)
		defer cancel()
		err := n.mapRange(ctx, io)
		io.Complete(err)
		n.controller.left()
	}()
}

// mapWithin bounds how long an OpMap waits. The range is kept from its users meanwhile.
const mapWithin = 5 * time.Second

func (n *Namespace) mapRange(ctx context.Context, io *block.IO) error {
	clear(io.Data)
	for at, end := io.Off, io.Off+io.Len; at < end; {
		found, next, err := n.Allocated(ctx, at, end)
		if err != nil {
			return err
		}
		for _, r := range found {
			block.MarkMap(io.Data, r.Off-io.Off, r.End-io.Off)
		}
		at = next
	}
	return nil
}

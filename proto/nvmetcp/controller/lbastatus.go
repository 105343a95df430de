// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"io/fs"
	"math"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// Mapper may be implemented by the Device of a namespace that knows where it holds data. Of other
// Devices, hosts are told that they hold data everywhere. Both methods return at most so many ranges
// of [off, end), in order, and where the rest of the range begins. What they do not name before that
// place was as they promise at some moment during the call. They may take a second.
type Mapper interface {
	// Allocated names the ranges that may hold data; the others read as zeroes.
	Allocated(off, end int64, most int) (found []block.Range, next int64, err error)
	// Differing names the ranges that may differ from a snapshot; the others are equal. The error is
	// an fs.ErrNotExist if the snapshot is not known.
	Differing(since block.UUID, off, end int64, most int) (found []block.Range, next int64, err error)
}

// mapsAtOnce is how many Mappers a target asks at a time: each keeps a processor busy.
const mapsAtOnce = 2

// getLBAStatus answers a Get LBA Status command, for LBAAllocated alone.
func (c *conn) getLBAStatus(r *request, a *association) {
	g := nvmetcp.ParseGetLBAStatus(&r.cmd)
	if g.Action != nvmetcp.LBAAllocated {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	blocks := uint64(g.Blocks)
	if blocks == 0 {
		blocks = math.MaxUint64
	}
	c.findRanges(r, a, g.Length, g.Start, blocks)
}

// findRanges answers for so many blocks from start on, or to the namespace's end, with an
// LBAStatusList of at most length bytes.
func (c *conn) findRanges(r *request, a *association, length, start, blocks uint64) {
	r.ns = a.sub.namespace(r.cmd.NSID())
	switch {
	case r.ns == nil:
		r.finish(nvmetcp.InvalidNamespace | dnr)
		return
	case length < nvmetcp.LBAStatusHeaderSize+nvmetcp.LBARangeSize || length > uint64(c.t.cfg.MDTS):
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	s := r.ns.shape.Load()
	if start >= s.blocks || blocks != math.MaxUint64 && blocks > s.blocks-start {
		r.finish(nvmetcp.LBAOutOfRange | dnr)
		return
	}
	r.io.Op, r.io.Off, r.io.Len = block.OpRead, int64(start<<s.shift), int64(min(blocks, s.blocks-start)<<s.shift)
	c.answer(r, int(length), (*request).askMapper)
}

// askMapper asks the namespace's Device beside what else the connection does. The command is none of
// those that a fence waits for: it does not reach the medium.
func (r *request) askMapper() {
	c := r.c
	c.inside.Add(1)
	go func() {
		defer c.leave()
		c.t.mapping <- struct{}{}
		defer func() { <-c.t.mapping }()
		status := r.admit()
		if status == abandoned {
			return
		}
		var list nvmetcp.LBAStatusList
		if status == nvmetcp.Success {
			list, status = r.ranges()
		}
		if status != nvmetcp.Success {
			r.finish(status)
			return
		}
		r.respond(list.Append(nil))
	}()
}

// ranges asks the Device.
func (r *request) ranges() (list nvmetcp.LBAStatusList, status nvmetcp.Status) {
	most := (len(r.data) - nvmetcp.LBAStatusHeaderSize) / nvmetcp.LBARangeSize
	off, end := r.io.Off, r.io.Off+r.io.Len
	found, next, err := []block.Range{{Off: off, End: end}}, end, error(nil)
	m, knows := r.ns.cfg.Device.(Mapper)
	differing := r.cmd.Opcode() == nvmetcp.AdminGetDifferences
	switch {
	case differing && !knows:
		return list, nvmetcp.InvalidOpcode | dnr
	case differing:
		found, next, err = m.Differing(nvmetcp.ParseGetDifferences(&r.cmd).Since, off, end, most)
	case knows:
		found, next, err = m.Allocated(off, end, most)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return list, nvmetcp.InvalidField | dnr
	case err != nil:
		return list, statusOfError(err, block.OpRead)
	}
	return listOf(found, next == end, r.ns.shape.Load().shift, most), nvmetcp.Success
}

// listOf is the list of ranges in blocks. A range with more blocks than an entry can name becomes
// several; what there is no room for is left to the next command.
func listOf(found []block.Range, all bool, shift uint, most int) nvmetcp.LBAStatusList {
	l := nvmetcp.LBAStatusList{Condition: nvmetcp.LBAStatusMore}
	for _, f := range found {
		first, end := uint64(f.Off)>>shift, (uint64(f.End)+1<<shift-1)>>shift
		for first < end {
			if len(l.Ranges) == most {
				return l
			}
			n := min(end-first, math.MaxUint32)
			l.Ranges = append(l.Ranges, nvmetcp.LBARange{Start: first, Blocks: uint32(n)})
			first += n
		}
	}
	if all {
		l.Condition = nvmetcp.LBAStatusAll
	}
	return l
}

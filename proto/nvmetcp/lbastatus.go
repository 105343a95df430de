// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"errors"
	"fmt"

	"weft.dev/weft/proto/block"
)

// This file has the commands that say which blocks of a namespace hold data. For that, the standard
// has Get LBA Status. For the blocks that differ from an earlier state of the namespace it has
// nothing, so Weft has a command of its own, whose answer has the same form.

// LBAStatusAction says what Get LBA Status reports (NVM, ATYPE).
type LBAStatusAction uint8

// LBAAllocated reports the allocated blocks. The other actions report blocks that cannot be read.
const LBAAllocated LBAStatusAction = 0x02

// GetLBAStatus is a Get LBA Status command (NVM, 4.2.1).
type GetLBAStatus struct {
	NSID   uint32
	Action LBAStatusAction
	Start  uint64 // the first block
	Blocks uint16 // how many are looked at; 0: all to the end of the namespace
	Length uint64 // bytes of the answer, a multiple of 4, at least 4
}

// Command makes the command.
func (g GetLBAStatus) Command() Command {
	var c Command
	c.SetOpcode(AdminGetLBAStatus)
	c.SetNSID(g.NSID)
	c.SetSGL(Transport(uint32(g.Length)))
	c.SetSLBA(g.Start)
	c.SetCDW(12, uint32(g.Length/4-1))
	c.SetCDW(13, uint32(g.Blocks)|uint32(g.Action)<<24)
	return c
}

// ParseGetLBAStatus reads a Get LBA Status command. The room for the answer is given by the command's
// SGL.
func ParseGetLBAStatus(c *Command) GetLBAStatus {
	return GetLBAStatus{NSID: c.NSID(), Action: LBAStatusAction(c[55]), Start: c.SLBA(), Blocks: le.Uint16(c[52:]), Length: (uint64(c.CDW(12)) + 1) * 4}
}

// GetDifferences is Weft's own command: it asks for the blocks of a namespace that may differ from a
// snapshot. The answer is an LBAStatusList, as long as the command's SGL says.
type GetDifferences struct {
	NSID   uint32
	Start  uint64     // the first block that is looked at; the last is the last of the namespace
	Since  block.UUID // of the snapshot's leg, which is on the same drive as the namespace
	Length uint32     // bytes of the answer
}

// Command makes the command.
func (g GetDifferences) Command() Command {
	var c Command
	c.SetOpcode(AdminGetDifferences)
	c.SetNSID(g.NSID)
	c.SetSGL(Transport(g.Length))
	c.SetSLBA(g.Start)
	copy(c[48:], g.Since[:])
	return c
}

// ParseGetDifferences reads a GetDifferences command.
func ParseGetDifferences(c *Command) GetDifferences {
	return GetDifferences{NSID: c.NSID(), Start: c.SLBA(), Since: block.UUID(c[48:64]), Length: c.SGL().Length}
}

// LBAStatusCondition says whether an LBAStatusList is complete (CMPC).
type LBAStatusCondition uint8

// The conditions. After LBAStatusMore, the rest begins behind the last range.
const (
	LBAStatusMore LBAStatusCondition = 1
	LBAStatusAll  LBAStatusCondition = 2
)

// LBARange is an entry of an LBAStatusList.
type LBARange struct {
	Start  uint64
	Blocks uint32
	Status uint8 // 0 in answers to LBAAllocated
}

// LBAStatusList is the answer to GetLBAStatus and GetDifferences (NVM, figure 112).
type LBAStatusList struct {
	Condition LBAStatusCondition
	Ranges    []LBARange
}

// The lengths of an LBAStatusList without its ranges, and of each of these.
const (
	LBAStatusHeaderSize = 8
	LBARangeSize        = 16
)

// Append adds the list to b.
func (l LBAStatusList) Append(b []byte) []byte {
	b, o := grow(b, LBAStatusHeaderSize+LBARangeSize*len(l.Ranges))
	le.PutUint32(o, uint32(len(l.Ranges)))
	o[4] = byte(l.Condition)
	for i, r := range l.Ranges {
		p := o[LBAStatusHeaderSize+LBARangeSize*i:]
		le.PutUint64(p, r.Start)
		le.PutUint32(p[8:], r.Blocks)
		p[13] = r.Status
	}
	return b
}

// In returns the ranges of an answer about [off, end), in bytes and in order, and where the rest begins, end if there
// is none. A block has 1<<shift bytes. An answer that says nothing of what begins at off is an error.
func (l LBAStatusList) In(off, end int64, shift uint8) (found []block.Range, next int64, err error) {
	next = end
	if l.Condition != LBAStatusAll {
		if len(l.Ranges) == 0 {
			return nil, off, errors.New("answer without a range that is not complete")
		}
		last := l.Ranges[len(l.Ranges)-1]
		next = bytesOf(last.Start+uint64(last.Blocks), shift, end)
	}
	for _, r := range l.Ranges {
		one := block.Range{Off: max(bytesOf(r.Start, shift, end), off), End: bytesOf(r.Start+uint64(r.Blocks), shift, end)}
		if one.Off < one.End {
			found = append(found, one)
		}
	}
	if next <= off {
		return nil, off, fmt.Errorf("answer about what is before byte %d", off)
	}
	return found, next, nil
}

// bytesOf is where a block begins, at most end.
func bytesOf(lba uint64, shift uint8, end int64) int64 {
	if lba > uint64(end)>>shift {
		return end
	}
	return int64(lba << shift)
}

// ParseLBAStatusList is the inverse of Append. It refuses ranges that are empty or not in order.
func ParseLBAStatusList(b []byte) (l LBAStatusList, err error) {
	if len(b) < LBAStatusHeaderSize {
		return l, short("LBA status list", len(b), LBAStatusHeaderSize)
	}
	n := uint64(le.Uint32(b))
	if need := LBAStatusHeaderSize + LBARangeSize*n; need > uint64(len(b)) {
		return l, short("LBA status list", len(b), int(need))
	}
	l.Condition = LBAStatusCondition(b[4])
	next := uint64(0)
	for i := range int(n) {
		p := b[LBAStatusHeaderSize+LBARangeSize*i:]
		r := LBARange{Start: le.Uint64(p), Blocks: le.Uint32(p[8:]), Status: p[13]}
		end := r.Start + uint64(r.Blocks)
		if r.Start < next || end <= r.Start {
			return LBAStatusList{}, fmt.Errorf("range %d of an LBA status list has %d blocks from %d on, and the one before ends at %d", i, r.Blocks, r.Start, next)
		}
		l.Ranges, next = append(l.Ranges, r), end
	}
	return l, nil
}

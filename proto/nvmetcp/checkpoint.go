// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// This file has Weft's own command and log page, with numbers that the standard leaves to
// vendors: other controllers answer InvalidOpcode and InvalidLogPage. A controller keeps a
// list of the regions of a namespace that are written, and a checkpoint makes it forget
// those that the host knows to be on all copies; see package raid/checkpoint.

// Checkpoint is the AdminCheckpoint command, or the AdminBehind command with its data.
type Checkpoint struct {
	NSID   uint32
	Commit bool   // otherwise the checkpoint begins
	Token  uint64 // identifies the checkpoint; not 0
	Behind *Behind
}

// Behind is what a namespace lacks that is copied to. When a checkpoint begins, it has no ranges.
type Behind struct {
	Since  uint64     // see checkpoint.Behind
	Ranges [][2]int64 // offset and end, in bytes; at most MostBehind
}

// MostBehind is the largest number of ranges in a Behind.
const MostBehind = 255

const behindHeaderSize = 16

// Append adds the data of the AdminBehind command to b.
func (l Behind) Append(data []byte) []byte {
	data, o := grow(data, behindHeaderSize+16*len(l.Ranges))
	le.PutUint64(o, l.Since)
	le.PutUint64(o[8:], uint64(len(l.Ranges)))
	for i, r := range l.Ranges {
		le.PutUint64(o[behindHeaderSize+16*i:], uint64(r[0]))
		le.PutUint64(o[behindHeaderSize+16*i+8:], uint64(r[1]))
	}
	return data
}

// ParseBehind is the inverse of Append. It refuses ranges that are not in order.
func ParseBehind(b []byte) (l Behind, err error) {
	if len(b) < behindHeaderSize {
		return l, short("ranges that a copy lacks", len(b), behindHeaderSize)
	}
	n := le.Uint64(b[8:])
	if n > MostBehind || len(b) != behindHeaderSize+16*int(n) {
		return l, short("ranges that a copy lacks", len(b), behindHeaderSize+16*int(min(n, MostBehind+1)))
	}
	l.Since = le.Uint64(b)
	last := int64(0)
	for i := range int(n) {
		r := [2]int64{int64(le.Uint64(b[behindHeaderSize+16*i:])), int64(le.Uint64(b[behindHeaderSize+16*i+8:]))}
		if r[0] < last || r[1] <= r[0] {
			return Behind{}, fmt.Errorf("range %d that a copy lacks is %d to %d", i, r[0], r[1])
		}
		last = r[1]
		l.Ranges = append(l.Ranges, r)
	}
	return l, nil
}

// Command makes the command. The data of an AdminBehind command is Behind.Append's.
func (k Checkpoint) Command() Command {
	var c Command
	c.SetOpcode(AdminCheckpoint)
	c.SetSGL(Transport(0))
	if k.Behind != nil {
		c.SetOpcode(AdminBehind)
		c.SetSGL(InCapsule(uint32(behindHeaderSize + 16*len(k.Behind.Ranges))))
	}
	c.SetNSID(k.NSID)
	c.SetCDW(10, uint32(bit(k.Commit, 0)))
	le.PutUint64(c[48:], k.Token)
	return c
}

// ParseCheckpoint reads an AdminCheckpoint or AdminBehind command, without Behind.
func ParseCheckpoint(c *Command) Checkpoint {
	return Checkpoint{NSID: c.NSID(), Commit: c.CDW(10)&1 != 0, Token: le.Uint64(c[48:])}
}

// ReplaceCommand makes an AdminReplace command. If the subsystem is to change to another part, nothing happens
// before that is wanted of the node.
func ReplaceCommand(by block.ServedBy) Command {
	var c Command
	c.SetOpcode(AdminReplace)
	c.SetSGL(Transport(0))
	c.SetCDW(10, uint32(by))
	return c
}

// ReplacedBy is what an AdminReplace command was made with.
func ReplacedBy(c *Command) block.ServedBy { return block.ServedBy(c.CDW(10)) }

// WrittenHeaderSize is the length of a WrittenLog without its Regions.
const WrittenHeaderSize = 64

// WrittenLog is LogWritten: the regions of a namespace that were written since a
// checkpoint began.
type WrittenLog struct {
	Committed uint64   // token of the last checkpoint; 0: what was written is not known
	Begun     uint64   // token of a checkpoint that is not committed yet; 0: none
	Region    uint64   // bytes
	Words     uint64   // the length of Regions; a header says it alone
	Regions   []uint64 // a bit for each region
	BehindLen uint64   // of Behind as Append writes it, in bytes; a header says it alone
	Behind    *Behind  // what the namespace lacked at Committed; nil: nothing
}

// Size is the length of the whole log, in bytes. Words and BehindLen must be plausible.
func (w WrittenLog) Size() int { return WrittenHeaderSize + 8*int(w.Words) + int(w.BehindLen) }

// MostBehindLen is the largest BehindLen.
const MostBehindLen = behindHeaderSize + 16*MostBehind

// Append adds WrittenHeaderSize bytes, the Regions and Behind to b. Hosts of earlier versions read
// no further than the Regions.
func (w WrittenLog) Append(b []byte) []byte {
	var behind []byte
	if w.Behind != nil {
		behind = w.Behind.Append(nil)
		w.BehindLen = uint64(len(behind))
	}
	b, o := grow(b, WrittenHeaderSize+8*len(w.Regions))
	le.PutUint64(o, w.Committed)
	le.PutUint64(o[8:], w.Begun)
	le.PutUint64(o[16:], w.Region)
	le.PutUint64(o[24:], w.Words)
	for i, word := range w.Regions {
		le.PutUint64(o[WrittenHeaderSize+8*i:], word)
	}
	le.PutUint64(o[32:], w.BehindLen)
	return append(b, behind...)
}

// ParseWrittenLog is the inverse of Append. b is a header alone, or a whole log.
func ParseWrittenLog(b []byte) (WrittenLog, error) {
	if len(b) < WrittenHeaderSize {
		return WrittenLog{}, short("log of written regions", len(b), WrittenHeaderSize)
	}
	w := WrittenLog{Committed: le.Uint64(b), Begun: le.Uint64(b[8:]), Region: le.Uint64(b[16:]), Words: le.Uint64(b[24:]), BehindLen: le.Uint64(b[32:])}
	rest := b[WrittenHeaderSize:]
	if len(rest) == 0 {
		return w, nil
	}
	if w.Words > 1<<40 || w.BehindLen > MostBehindLen || len(b) != w.Size() {
		return WrittenLog{}, short("log of written regions", len(b), WrittenHeaderSize+int(min(w.Words, 1<<40))*8+int(min(w.BehindLen, MostBehindLen)))
	}
	for range w.Words {
		w.Regions = append(w.Regions, le.Uint64(rest))
		rest = rest[8:]
	}
	if len(rest) == 0 {
		return w, nil
	}
	behind, err := ParseBehind(rest)
	w.Behind = &behind
	return w, err
}

// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// This file has Weft's own command and log page, with numbers that the standard leaves to
// vendors: other controllers answer InvalidOpcode and InvalidLogPage. A controller keeps a
// list of the regions of a namespace that are written, and a checkpoint makes it forget
// those that the host knows to be on all copies; see package raid/checkpoint.

// Checkpoint is the AdminCheckpoint command.
type Checkpoint struct {
	NSID   uint32
	Commit bool   // otherwise the checkpoint begins
	Token  uint64 // identifies the checkpoint; not 0
}

// Command makes the command.
func (k Checkpoint) Command() Command {
	var c Command
	c.SetOpcode(AdminCheckpoint)
	c.SetNSID(k.NSID)
	c.SetSGL(Transport(0))
	c.SetCDW(10, uint32(bit(k.Commit, 0)))
	le.PutUint64(c[48:], k.Token)
	return c
}

// ParseCheckpoint reads an AdminCheckpoint command.
func ParseCheckpoint(c *Command) Checkpoint {
	return Checkpoint{NSID: c.NSID(), Commit: c.CDW(10)&1 != 0, Token: le.Uint64(c[48:])}
}

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
}

// Append adds WrittenHeaderSize bytes and the Regions to b.
func (w WrittenLog) Append(b []byte) []byte {
	b, o := grow(b, WrittenHeaderSize+8*len(w.Regions))
	le.PutUint64(o, w.Committed)
	le.PutUint64(o[8:], w.Begun)
	le.PutUint64(o[16:], w.Region)
	le.PutUint64(o[24:], w.Words)
	for i, word := range w.Regions {
		le.PutUint64(o[WrittenHeaderSize+8*i:], word)
	}
	return b
}

// ParseWrittenLog is the inverse of Append. b is a header alone, or a whole log.
func ParseWrittenLog(b []byte) (WrittenLog, error) {
	if len(b) < WrittenHeaderSize {
		return WrittenLog{}, short("log of written regions", len(b), WrittenHeaderSize)
	}
	w := WrittenLog{Committed: le.Uint64(b), Begun: le.Uint64(b[8:]), Region: le.Uint64(b[16:]), Words: le.Uint64(b[24:])}
	rest := b[WrittenHeaderSize:]
	if len(rest) == 0 {
		return w, nil
	}
	if w.Words != uint64(len(rest)/8) || len(rest)%8 != 0 {
		return WrittenLog{}, short("log of written regions", len(b), WrittenHeaderSize+int(min(w.Words, 1<<40))*8)
	}
	for len(rest) > 0 {
		w.Regions = append(w.Regions, le.Uint64(rest))
		rest = rest[8:]
	}
	return w, nil
}

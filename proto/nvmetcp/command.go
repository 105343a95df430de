// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// CommandSize and CompletionSize are the lengths of queue entries.
const (
	CommandSize    = 64
	CompletionSize = 16
)

// Command is a submission queue entry as it travels (Base, 3.3.3.1; Fabrics
// commands: Base, 6).
type Command [CommandSize]byte

// Opcode is byte 0. For a Fabrics command see also [Command.FabricsType].
func (c *Command) Opcode() Opcode { return Opcode(c[0]) }

// SetOpcode sets byte 0.
func (c *Command) SetOpcode(o Opcode) { c[0] = byte(o) }

// Flags is byte 1: FUSE (bits 1:0) and PSDT (bits 7:6).
func (c *Command) Flags() uint8 { return c[1] }

// Fused is 0 for a plain command, 1 and 2 for the first and second of a fused pair.
func (c *Command) Fused() uint8 { return c[1] & 3 }

// PSDT is 1 or 2 for a command that uses SGLs; fabrics allow nothing else.
func (c *Command) PSDT() uint8 { return c[1] >> 6 }

// CID is the command identifier, unique among a queue's outstanding commands.
func (c *Command) CID() uint16 { return le.Uint16(c[2:]) }

// SetCID sets the command identifier.
func (c *Command) SetCID(v uint16) { le.PutUint16(c[2:], v) }

// NSID is the namespace; AllNamespaces means all.
func (c *Command) NSID() uint32 { return le.Uint32(c[4:]) }

// SetNSID sets the namespace.
func (c *Command) SetNSID(v uint32) { le.PutUint32(c[4:], v) }

// FabricsType is byte 4 of a command whose opcode is OpFabrics.
func (c *Command) FabricsType() FabricsType { return FabricsType(c[4]) }

// CDW is command dword n, 0 to 15.
func (c *Command) CDW(n int) uint32 { return le.Uint32(c[4*n:]) }

// SetCDW sets command dword n, 0 to 15.
func (c *Command) SetCDW(n int, v uint32) { le.PutUint32(c[4*n:], v) }

// SGL is the descriptor of the command's data (DPTR).
func (c *Command) SGL() SGL {
	return SGL{Address: le.Uint64(c[24:]), Length: le.Uint32(c[32:]), Kind: SGLKind(c[39])}
}

// SetSGL sets it, and PSDT to say that there is one.
func (c *Command) SetSGL(s SGL) {
	c[1] = c[1]&0x3f | 1<<6
	le.PutUint64(c[24:], s.Address)
	le.PutUint32(c[32:], s.Length)
	c[36], c[37], c[38], c[39] = 0, 0, 0, byte(s.Kind)
}

// SLBA is the command's first logical block (CDW10 and 11).
func (c *Command) SLBA() uint64 { return le.Uint64(c[40:]) }

// SetSLBA sets the first logical block.
func (c *Command) SetSLBA(v uint64) { le.PutUint64(c[40:], v) }

// Blocks is the number of logical blocks of a command, 1 to 65536 (NLB of CDW12).
func (c *Command) Blocks() uint32 { return uint32(le.Uint16(c[48:])) + 1 }

// SetBlocks sets NLB; n is 1 to 65536.
func (c *Command) SetBlocks(n uint32) { le.PutUint16(c[48:], uint16(n-1)) }

// FUA reports whether a write must be durable, or a read must return durable data (CDW12,
// bit 30).
func (c *Command) FUA() bool { return c[51]&(1<<6) != 0 }

// SetFUA sets bit 30 of CDW12.
func (c *Command) SetFUA() { c[51] |= 1 << 6 }

// Deallocate is DEAC of Write Zeroes: the blocks may be deallocated (CDW12, bit 25).
func (c *Command) Deallocate() bool { return c[51]&(1<<1) != 0 }

// SetDeallocate sets bit 25 of CDW12.
func (c *Command) SetDeallocate() { c[51] |= 1 << 1 }

// DataDirection is the direction in which the command's data moves.
func (c *Command) DataDirection() Direction {
	if c.Opcode() == OpFabrics {
		return Direction(c[4] & 3)
	}
	return Direction(c[0] & 3)
}

// Direction is bits 1:0 of an opcode (Base, 3.3.3.1) or of a Fabrics command type.
type Direction uint8

// The directions of data.
const (
	NoData       Direction = 0
	ToController Direction = 1
	ToHost       Direction = 2
	BothWays     Direction = 3 // not used by any of our commands
)

// AllNamespaces is the NSID that stands for every namespace of a controller.
const AllNamespaces = 0xffffffff

// SGLKind is byte 15 of an SGL descriptor: type (bits 7:4) and subtype (bits 3:0).
type SGLKind uint8

// The descriptors that NVMe/TCP knows (TCP, 3.2; Base, 4.1.2).
const (
	SGLInCapsule SGLKind = 0x01 // data block, offset: data is in the capsule at Address
	SGLTransport SGLKind = 0x5a // transport data block: data travels in data PDUs
)

// SGL is a scatter gather list descriptor.
type SGL struct {
	Address uint64 // SGLInCapsule: the offset of data in the capsule's data
	Length  uint32 // bytes
	Kind    SGLKind
}

// InCapsule describes n bytes that follow the command in its capsule.
func InCapsule(n uint32) SGL { return SGL{Length: n, Kind: SGLInCapsule} }

// Transport describes n bytes that travel in data PDUs.
func Transport(n uint32) SGL { return SGL{Length: n, Kind: SGLTransport} }

// Completion is a completion queue entry as it travels (Base, 3.3.3.2).
type Completion [CompletionSize]byte

// Result is the command-specific result: dwords 0 and 1.
func (c *Completion) Result() uint64 { return le.Uint64(c[0:]) }

// SetResult sets dwords 0 and 1.
func (c *Completion) SetResult(v uint64) { le.PutUint64(c[0:], v) }

// DW0 is the command-specific result where it has only one dword.
func (c *Completion) DW0() uint32 { return le.Uint32(c[0:]) }

// SQHead is the controller's position in the submission queue; 0xffff without flow control.
func (c *Completion) SQHead() uint16 { return le.Uint16(c[8:]) }

// SetSQHead sets the controller's position in the submission queue.
func (c *Completion) SetSQHead(v uint16) { le.PutUint16(c[8:], v) }

// CID identifies the completed command.
func (c *Completion) CID() uint16 { return le.Uint16(c[12:]) }

// SetCID sets it.
func (c *Completion) SetCID(v uint16) { le.PutUint16(c[12:], v) }

// Status is the outcome.
func (c *Completion) Status() Status { return Status(le.Uint16(c[14:]) >> 1) }

// SetStatus sets the outcome. The phase bit stays 0: fabrics do not use it.
func (c *Completion) SetStatus(s Status) { le.PutUint16(c[14:], uint16(s)<<1) }

// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"bytes"
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
)

// ConnectDataSize is the length of Connect's data.
const ConnectDataSize = 1024

// DynamicController as Connect's CNTLID asks for any free controller (Base, 6.3).
const DynamicController = 0xffff

// Connect is the Connect command without its data (Base, 6.3).
type Connect struct {
	RecordFormat uint16
	QueueID      uint16        // 0: the admin queue
	QueueSize    uint32        // entries, 2 to 65536
	Attributes   uint8         // CATTR
	KATO         time.Duration // of the admin queue; 0: no keep alive; whole milliseconds
}

// The bits of Connect.Attributes.
const (
	ConnectNoFlowControl uint8 = 1 << 2 // SQHD is not used
)

// Command makes the command, with its data in the capsule.
func (c Connect) Command() Command {
	cmd := fabricsCommand(FabricsConnect)
	cmd.SetSGL(InCapsule(ConnectDataSize))
	le.PutUint16(cmd[40:], c.RecordFormat)
	le.PutUint16(cmd[42:], c.QueueID)
	le.PutUint16(cmd[44:], uint16(c.QueueSize-1))
	cmd[46] = c.Attributes
	le.PutUint32(cmd[48:], uint32(c.KATO/time.Millisecond))
	return cmd
}

// ParseConnect reads a Connect command.
func ParseConnect(cmd *Command) Connect {
	return Connect{
		RecordFormat: le.Uint16(cmd[40:]),
		QueueID:      le.Uint16(cmd[42:]),
		QueueSize:    uint32(le.Uint16(cmd[44:])) + 1,
		Attributes:   cmd[46],
		KATO:         time.Duration(le.Uint32(cmd[48:])) * time.Millisecond,
	}
}

// Offsets of the fields that the answer to an invalid Connect may name; see
// [ConnectInvalid].
const (
	ConnectFieldRecordFormat = 40  // of the command
	ConnectFieldQueueID      = 42  // of the command
	ConnectFieldQueueSize    = 44  // of the command
	ConnectFieldKATO         = 48  // of the command
	ConnectFieldHostID       = 0   // of the data
	ConnectFieldControllerID = 16  // of the data
	ConnectFieldSubsystem    = 256 // of the data
	ConnectFieldHost         = 512 // of the data
)

// ConnectInvalid is the result that accompanies ConnectInvalidParameters: the offset of the
// invalid field, in the data or in the command.
func ConnectInvalid(offset uint16, inData bool) uint64 {
	return uint64(offset) | uint64(bit(inData, 0))<<16
}

// ConnectData is the data of the Connect command.
type ConnectData struct {
	HostID       block.UUID
	ControllerID uint16 // DynamicController on the admin queue, the assigned one on I/O queues
	Subsystem    block.NQN
	Host         block.NQN
}

// Append adds ConnectDataSize bytes to b. Names longer than 223 bytes are cut;
// [block.ParseNQN] refuses them.
func (d ConnectData) Append(b []byte) []byte {
	b, out := grow(b, ConnectDataSize)
	copy(out, d.HostID[:])
	le.PutUint16(out[16:], d.ControllerID)
	putNQN(out[256:512], d.Subsystem)
	putNQN(out[512:768], d.Host)
	return b
}

// ParseConnectData is the inverse of Append. It checks only that names end within their
// fields and hold no control character.
func ParseConnectData(b []byte) (ConnectData, error) {
	if len(b) < ConnectDataSize {
		return ConnectData{}, short("connect data", len(b), ConnectDataSize)
	}
	d := ConnectData{HostID: block.UUID(b[:16]), ControllerID: le.Uint16(b[16:])}
	var err error
	if d.Subsystem, err = parseNQN(b[256:512]); err != nil {
		return d, fmt.Errorf("parse connect data: subsystem: %w", err)
	}
	if d.Host, err = parseNQN(b[512:768]); err != nil {
		return d, fmt.Errorf("parse connect data: host: %w", err)
	}
	return d, nil
}

// ConnectResult is the result of a successful Connect.
type ConnectResult struct {
	ControllerID  uint16
	AuthRequired  bool // ATR: the host must authenticate before anything else
	SecureChannel bool // ASCR: authentication and a secure channel are required
}

// Encode makes the result of the completion.
func (r ConnectResult) Encode() uint64 {
	return uint64(r.ControllerID) | uint64(bit(r.AuthRequired, 1))<<16 | uint64(bit(r.SecureChannel, 2))<<16
}

// ParseConnectResult is the inverse of Encode.
func ParseConnectResult(v uint64) ConnectResult {
	return ConnectResult{ControllerID: uint16(v), AuthRequired: v&(1<<17) != 0, SecureChannel: v&(1<<18) != 0}
}

func fabricsCommand(t FabricsType) Command {
	var cmd Command
	cmd.SetOpcode(OpFabrics)
	cmd[1] = 1 << 6 // SGL even without data, as Linux does it
	cmd[4] = byte(t)
	return cmd
}

// DisconnectCommand disconnects the I/O queue that carries it (Base, 6.4).
func DisconnectCommand() Command { return fabricsCommand(FabricsDisconnect) }

// PropertyGetCommand reads a property (Base, 6.6).
func PropertyGetCommand(p Property) Command {
	cmd := fabricsCommand(FabricsPropertyGet)
	cmd[40] = p.sizeCode()
	le.PutUint32(cmd[44:], uint32(p))
	return cmd
}

// PropertySetCommand writes a property (Base, 6.7).
func PropertySetCommand(p Property, value uint64) Command {
	cmd := fabricsCommand(FabricsPropertySet)
	cmd[40] = p.sizeCode()
	le.PutUint32(cmd[44:], uint32(p))
	le.PutUint64(cmd[48:], value)
	return cmd
}

// PropertyAccess is a Property Get or Set command.
type PropertyAccess struct {
	Property Property
	Size     int    // 4 or 8; 0 if the command has another value
	Value    uint64 // of Property Set
}

// ParseProperty reads a Property Get or Set command.
func ParseProperty(cmd *Command) PropertyAccess {
	a := PropertyAccess{Property: Property(le.Uint32(cmd[44:])), Value: le.Uint64(cmd[48:])}
	switch cmd[40] & 7 {
	case 0:
		a.Size, a.Value = 4, a.Value&0xffffffff
	case 1:
		a.Size = 8
	}
	return a
}

// AuthCommand is Authentication Send or Receive (Base, 6.1 and 6.2).
type AuthCommand struct {
	Receive  bool
	Protocol uint8  // SECP; AuthProtocol
	SPSP0    uint8  // 1
	SPSP1    uint8  // 1
	Length   uint32 // bytes to send (TL), or room for the answer (AL)
}

// AuthProtocol is the SECP of NVMe in-band authentication, with SPSP0 and SPSP1 of 1.
const AuthProtocol = 0xe9

// Command makes the command. inCapsule says that the data of a Send is in the capsule.
func (a AuthCommand) Command(inCapsule bool) Command {
	t := FabricsAuthSend
	if a.Receive {
		t = FabricsAuthRecv
	}
	cmd := fabricsCommand(t)
	if inCapsule {
		cmd.SetSGL(InCapsule(a.Length))
	} else {
		cmd.SetSGL(Transport(a.Length))
	}
	cmd[41], cmd[42], cmd[43] = a.SPSP0, a.SPSP1, a.Protocol
	le.PutUint32(cmd[44:], a.Length)
	return cmd
}

// ParseAuthCommand reads an Authentication Send or Receive command.
func ParseAuthCommand(cmd *Command) AuthCommand {
	return AuthCommand{
		Receive:  cmd.FabricsType() == FabricsAuthRecv,
		Protocol: cmd[43], SPSP0: cmd[41], SPSP1: cmd[42],
		Length: le.Uint32(cmd[44:]),
	}
}

// grow adds n zero bytes to b; added is the new part alone.
func grow(b []byte, n int) (whole, added []byte) {
	start := len(b)
	b = append(b, make([]byte, n)...)
	return b, b[start:]
}

// putNQN writes a name, cut to 223 bytes, and leaves the rest of out zero.
func putNQN(out []byte, n block.NQN) { copy(out[:223], n) }

// parseNQN reads a name up to the first zero byte.
func parseNQN(b []byte) (block.NQN, error) {
	end := bytes.IndexByte(b, 0)
	if end < 0 || end > 223 {
		return "", fmt.Errorf("name has no end within 223 bytes")
	}
	for _, c := range b[:end] {
		if c < ' ' || c == 0x7f {
			return "", fmt.Errorf("name holds control character %#02x", c)
		}
	}
	return block.NQN(b[:end]), nil
}

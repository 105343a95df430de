// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// Opcode is byte 0 of a command. Its meaning depends on the queue: 1 is Write on an I/O
// queue.
type Opcode uint8

// OpFabrics marks a Fabrics command on any queue; FabricsType says which.
const OpFabrics Opcode = 0x7f

// Opcodes on the admin queue (Base, figure 138).
const (
	AdminGetLogPage   Opcode = 0x02
	AdminIdentify     Opcode = 0x06
	AdminAbort        Opcode = 0x08
	AdminSetFeatures  Opcode = 0x09
	AdminGetFeatures  Opcode = 0x0a
	AdminAsyncEvent   Opcode = 0x0c
	AdminKeepAlive    Opcode = 0x18
	AdminFormatNVM    Opcode = 0x80
	AdminSecuritySend Opcode = 0x81
	AdminSecurityRecv Opcode = 0x82
	AdminSanitize     Opcode = 0x84
	AdminGetLBAStatus Opcode = 0x86
	AdminCheckpoint   Opcode = 0xc0 // Weft's own, see Checkpoint
	AdminBehind       Opcode = 0xc1 // the same for a leg that is copied to, with data for the controller
	// AdminGetDifferences is Weft's own, see GetDifferences.
	AdminGetDifferences Opcode = 0xc2
	// AdminReplace is Weft's own, to a controller that speaks for another target, such as the kernel's
	// (Controller.Replacer). The answer says that this host's controllers of the subsystem there have
	// ended, that their commands have left the devices, and that the host can connect there anew. CDW 10
	// is the block.ServedBy that is to serve it from then on.
	AdminReplace Opcode = 0xc3
)

// Opcodes on I/O queues (NVM, figure 16).
const (
	IOFlush               Opcode = 0x00
	IOWrite               Opcode = 0x01
	IORead                Opcode = 0x02
	IOWriteUncorrectable  Opcode = 0x04
	IOCompare             Opcode = 0x05
	IOWriteZeroes         Opcode = 0x08
	IODatasetManagement   Opcode = 0x09
	IOVerify              Opcode = 0x0c
	IOReservationRegister Opcode = 0x0d
	IOReservationReport   Opcode = 0x0e
	IOReservationAcquire  Opcode = 0x11
	IOReservationRelease  Opcode = 0x15
	IOCopy                Opcode = 0x19
)

// FabricsType is byte 4 of a Fabrics command (Base, figure 381).
type FabricsType uint8

// The Fabrics commands.
const (
	FabricsPropertySet FabricsType = 0x00
	FabricsConnect     FabricsType = 0x01
	FabricsPropertyGet FabricsType = 0x04
	FabricsAuthSend    FabricsType = 0x05
	FabricsAuthRecv    FabricsType = 0x06
	FabricsDisconnect  FabricsType = 0x08
)

// CommandName is the name of a command for logs and errors.
func CommandName(c *Command, admin bool) string {
	op := c.Opcode()
	if op == OpFabrics {
		return nameOr(fabricsNames[c.FabricsType()], "unknown Fabrics command")
	}
	if admin {
		return nameOr(adminNames[op], "unknown admin command")
	}
	return nameOr(ioNames[op], "unknown I/O command")
}

func nameOr(name, other string) string {
	if name == "" {
		return other
	}
	return name
}

var fabricsNames = map[FabricsType]string{
	FabricsPropertySet: "Property Set", FabricsConnect: "Connect", FabricsPropertyGet: "Property Get",
	FabricsAuthSend: "Authentication Send", FabricsAuthRecv: "Authentication Receive", FabricsDisconnect: "Disconnect",
}

var adminNames = map[Opcode]string{
	AdminGetLogPage: "Get Log Page", AdminIdentify: "Identify", AdminAbort: "Abort",
	AdminSetFeatures: "Set Features", AdminGetFeatures: "Get Features", AdminAsyncEvent: "Asynchronous Event Request",
	AdminKeepAlive: "Keep Alive", AdminFormatNVM: "Format NVM", AdminSecuritySend: "Security Send",
	AdminSecurityRecv: "Security Receive", AdminSanitize: "Sanitize", AdminCheckpoint: "Checkpoint", AdminBehind: "Checkpoint of a Copy",
	AdminGetLBAStatus: "Get LBA Status", AdminGetDifferences: "Get Differences", AdminReplace: "Replace",
}

var ioNames = map[Opcode]string{
	IOFlush: "Flush", IOWrite: "Write", IORead: "Read", IOWriteUncorrectable: "Write Uncorrectable",
	IOCompare: "Compare", IOWriteZeroes: "Write Zeroes", IODatasetManagement: "Dataset Management",
	IOVerify: "Verify", IOReservationRegister: "Reservation Register", IOReservationReport: "Reservation Report",
	IOReservationAcquire: "Reservation Acquire", IOReservationRelease: "Reservation Release", IOCopy: "Copy",
}

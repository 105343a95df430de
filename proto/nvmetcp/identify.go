// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import "strings"

// IdentifySize is the length of every Identify data structure.
const IdentifySize = 4096

// CNS selects the data structure that Identify returns (Base, figure 273).
type CNS uint8

// The structures that our controllers provide.
const (
	CNSNamespace            CNS = 0x00 // NVM command set
	CNSController           CNS = 0x01
	CNSActiveNamespaces     CNS = 0x02
	CNSDescriptors          CNS = 0x03
	CNSNamespaceOfSet       CNS = 0x05 // by I/O command set
	CNSControllerOfSet      CNS = 0x06
	CNSActiveOfSet          CNS = 0x07
	CNSIndependentNamespace CNS = 0x08
	CNSAllocatedNamespaces  CNS = 0x10
	CNSAllocatedNamespace   CNS = 0x11
	CNSNamespaceControllers CNS = 0x12
	CNSControllers          CNS = 0x13
	CNSCommandSets          CNS = 0x1c
)

// CommandSet is an I/O command set identifier (CSI).
type CommandSet uint8

// NVMCommandSet is the only command set that Weft supports.
const NVMCommandSet CommandSet = 0

// Identify is an Identify command (Base, 5.17).
type Identify struct {
	CNS          CNS
	NSID         uint32
	ControllerID uint16
	CommandSet   CommandSet
}

// Command makes the command.
func (i Identify) Command() Command {
	var c Command
	c.SetOpcode(AdminIdentify)
	c.SetNSID(i.NSID)
	c.SetSGL(Transport(IdentifySize))
	c.SetCDW(10, uint32(i.CNS)|uint32(i.ControllerID)<<16)
	c.SetCDW(11, uint32(i.CommandSet)<<24)
	return c
}

// ParseIdentify reads an Identify command.
func ParseIdentify(c *Command) Identify {
	return Identify{CNS: CNS(c[40]), NSID: c.NSID(), ControllerID: le.Uint16(c[42:]), CommandSet: CommandSet(c[47])}
}

// ControllerType is CNTRLTYPE.
type ControllerType uint8

// The controller types.
const (
	ControllerIO        ControllerType = 1
	ControllerDiscovery ControllerType = 2
	ControllerAdmin     ControllerType = 3
)

// Controller is the Identify Controller data structure (Base, figure 275), with the fields
// that apply to fabrics. All others are zero.
type Controller struct {
	VendorID, SubsystemVendorID uint16
	Serial                      string // at most 20 ASCII characters
	Model                       string // at most 40
	Firmware                    string // at most 8
	ArbitrationBurst            uint8  // RAB
	IEEE                        [3]byte
	CMIC                        uint8 // bit 1: several controllers; bit 3: ANA
	MDTS                        uint8 // largest data of a command: 2^n pages of CAP.MPSMIN; 0: no limit
	ControllerID                uint16
	Version                     Version
	OAES                        uint32 // the asynchronous events it supports; see EventConfig
	CTRATT                      uint32
	Type                        ControllerType
	CRDT                        [3]uint16 // retry delays, 100 ms
	OACS                        uint16
	AbortLimit                  uint8 // ACL, 0's based on the wire and here
	AERLimit                    uint8 // AERL, likewise
	FRMW                        uint8
	LPA                         uint8 // bit 1: supported and effects log; bit 2: extended data
	ELPE                        uint8 // error log entries, 0's based
	NPSS                        uint8
	KeepAliveGranularity        uint16 // KAS, 100 ms; 0: no keep alive
	ANATT                       uint8  // ANA transition time, seconds
	ANACAP                      uint8  // bits 0 to 4: the states that are reported; bit 6: groups do not change
	ANAGroupMax                 uint32
	ANAGroups                   uint32 // NANAGRPID
	SQES, CQES                  uint8  // entry sizes: bits 3:0 required, 7:4 maximum
	MaxCommands                 uint16 // MAXCMD; mandatory over fabrics
	Namespaces                  uint32 // NN: the largest NSID
	ONCS                        uint16
	Fuses                       uint16
	VWC                         uint8 // bit 0: volatile write cache; bits 2:1: 3 if Flush takes AllNamespaces
	AWUN, AWUPF, ACWU           uint16
	NWPC                        uint8
	SGLS                        uint32
	MaxNamespaces               uint32 // MNAN
	Subsystem                   string // SUBNQN, at most 223 characters
	IOCapsule                   uint32 // IOCCSZ, 16 bytes: a command and its in-capsule data
	IOResponse                  uint32 // IORCSZ, 16 bytes
	ICDOFF                      uint16 // where in-capsule data begins, 16 bytes; 0 over TCP
	FCATT                       uint8  // bit 0: static controllers
	MSDBD                       uint8  // maximum number of SGL data descriptors
	OFCS                        uint16 // bit 0: Disconnect

	// PerHost is Weft's own, in the vendor specific part: how many controllers of the
	// subsystem a host may have. A further one replaces the oldest, and is answered only when
	// the commands of that one have left the devices. 0: there is no such promise.
	PerHost uint16

	// Replacer is Weft's own, too: the controller speaks for another target of the same subsystem, and
	// answers AdminReplace.
	Replacer bool
}

// Where Weft's own fields are, and the mark before them: other targets may have something else there.
const (
	vendorOffset   = 3072
	vendorMark     = "weft"
	vendorPerHost  = vendorOffset + len(vendorMark) // 16 bits
	vendorReplacer = vendorPerHost + 2              // bit 0
)

// The bits of Controller fields.
const (
	CMICPorts       uint8 = 1 << 0
	CMICControllers uint8 = 1 << 1
	CMICANA         uint8 = 1 << 3

	CTRATT128BitHostID     uint32 = 1 << 0
	CTRATTTrafficKeepAlive uint32 = 1 << 6 // TBKAS: any command is a keep alive
	OACSSecurity           uint16 = 1 << 0
	OACSGetLBAStatus       uint16 = 1 << 9
	ONCSCompare            uint16 = 1 << 0
	ONCSWriteUncorrectable uint16 = 1 << 1
	ONCSDatasetManagement  uint16 = 1 << 2
	ONCSWriteZeroes        uint16 = 1 << 3
	ONCSSaveSelect         uint16 = 1 << 4
	ONCSReservations       uint16 = 1 << 5
	ONCSTimestamp          uint16 = 1 << 6
	ONCSVerify             uint16 = 1 << 7
	ONCSCopy               uint16 = 1 << 8
	FusesCompareAndWrite   uint16 = 1 << 0
	VWCPresent             uint8  = 1 << 0
	VWCFlushAll            uint8  = 3 << 1
	LPAPerNamespaceSmart   uint8  = 1 << 0
	LPAEffects             uint8  = 1 << 1
	LPAExtendedData        uint8  = 1 << 2
	SGLSSupported          uint32 = 1 // SGLs, without alignment
	SGLSKeyed              uint32 = 1 << 2
	SGLSOffset             uint32 = 1 << 20 // an offset instead of an address, as in a capsule
	SGLSTransport          uint32 = 1 << 21 // transport data blocks
	OFCSDisconnect         uint16 = 1 << 0
)

// Append adds IdentifySize bytes to b.
func (c *Controller) Append(b []byte) []byte {
	b, o := grow(b, IdentifySize)
	le.PutUint16(o[0:], c.VendorID)
	le.PutUint16(o[2:], c.SubsystemVendorID)
	putText(o[4:24], c.Serial)
	putText(o[24:64], c.Model)
	putText(o[64:72], c.Firmware)
	o[72] = c.ArbitrationBurst
	copy(o[73:76], c.IEEE[:])
	o[76], o[77] = c.CMIC, c.MDTS
	le.PutUint16(o[78:], c.ControllerID)
	le.PutUint32(o[80:], uint32(c.Version))
	le.PutUint32(o[92:], c.OAES)
	le.PutUint32(o[96:], c.CTRATT)
	o[111] = byte(c.Type)
	for i, d := range c.CRDT {
		le.PutUint16(o[128+2*i:], d)
	}
	le.PutUint16(o[256:], c.OACS)
	o[258], o[259], o[260], o[261], o[262], o[263] = c.AbortLimit, c.AERLimit, c.FRMW, c.LPA, c.ELPE, c.NPSS
	le.PutUint16(o[320:], c.KeepAliveGranularity)
	o[342], o[343] = c.ANATT, c.ANACAP
	le.PutUint32(o[344:], c.ANAGroupMax)
	le.PutUint32(o[348:], c.ANAGroups)
	o[512], o[513] = c.SQES, c.CQES
	le.PutUint16(o[514:], c.MaxCommands)
	le.PutUint32(o[516:], c.Namespaces)
	le.PutUint16(o[520:], c.ONCS)
	le.PutUint16(o[522:], c.Fuses)
	o[525] = c.VWC
	le.PutUint16(o[526:], c.AWUN)
	le.PutUint16(o[528:], c.AWUPF)
	o[531] = c.NWPC
	le.PutUint16(o[532:], c.ACWU)
	le.PutUint32(o[536:], c.SGLS)
	le.PutUint32(o[540:], c.MaxNamespaces)
	copy(o[768:768+223], c.Subsystem)
	le.PutUint32(o[1792:], c.IOCapsule)
	le.PutUint32(o[1796:], c.IOResponse)
	le.PutUint16(o[1800:], c.ICDOFF)
	o[1802], o[1803] = c.FCATT, c.MSDBD
	le.PutUint16(o[1804:], c.OFCS)
	if c.PerHost != 0 || c.Replacer {
		copy(o[vendorOffset:], vendorMark)
		le.PutUint16(o[vendorPerHost:], c.PerHost)
		o[vendorReplacer] = byte(bit(c.Replacer, 0))
	}
	return b
}

// ParseController is the inverse of Append.
func ParseController(b []byte) (Controller, error) {
	if len(b) < IdentifySize {
		return Controller{}, short("identify controller", len(b), IdentifySize)
	}
	c := Controller{
		VendorID: le.Uint16(b[0:]), SubsystemVendorID: le.Uint16(b[2:]),
		Serial: text(b[4:24]), Model: text(b[24:64]), Firmware: text(b[64:72]),
		ArbitrationBurst: b[72], IEEE: [3]byte(b[73:76]), CMIC: b[76], MDTS: b[77],
		ControllerID: le.Uint16(b[78:]), Version: Version(le.Uint32(b[80:])),
		OAES: le.Uint32(b[92:]), CTRATT: le.Uint32(b[96:]), Type: ControllerType(b[111]),
		CRDT: [3]uint16{le.Uint16(b[128:]), le.Uint16(b[130:]), le.Uint16(b[132:])},
		OACS: le.Uint16(b[256:]), AbortLimit: b[258], AERLimit: b[259], FRMW: b[260], LPA: b[261], ELPE: b[262], NPSS: b[263],
		KeepAliveGranularity: le.Uint16(b[320:]), ANATT: b[342], ANACAP: b[343],
		ANAGroupMax: le.Uint32(b[344:]), ANAGroups: le.Uint32(b[348:]),
		SQES: b[512], CQES: b[513], MaxCommands: le.Uint16(b[514:]), Namespaces: le.Uint32(b[516:]),
		ONCS: le.Uint16(b[520:]), Fuses: le.Uint16(b[522:]), VWC: b[525],
		AWUN: le.Uint16(b[526:]), AWUPF: le.Uint16(b[528:]), NWPC: b[531], ACWU: le.Uint16(b[532:]),
		SGLS: le.Uint32(b[536:]), MaxNamespaces: le.Uint32(b[540:]),
		Subsystem: string(untilZero(b[768 : 768+223])),
		IOCapsule: le.Uint32(b[1792:]), IOResponse: le.Uint32(b[1796:]), ICDOFF: le.Uint16(b[1800:]),
		FCATT: b[1802], MSDBD: b[1803], OFCS: le.Uint16(b[1804:]),
	}
	if string(b[vendorOffset:vendorPerHost]) == vendorMark {
		c.PerHost, c.Replacer = le.Uint16(b[vendorPerHost:]), b[vendorReplacer]&1 != 0
	}
	return c, nil
}

// putText fills out with s and spaces.
func putText(out []byte, s string) {
	for i := copy(out, s); i < len(out); i++ {
		out[i] = ' '
	}
}

// text reads what putText wrote; some controllers pad with zero bytes instead.
func text(b []byte) string { return strings.TrimRight(string(b), " \x00") }

func untilZero(b []byte) []byte {
	for i, c := range b {
		if c == 0 {
			return b[:i]
		}
	}
	return b
}

// NVMController is the command set specific Identify Controller data structure of the NVM
// command set (NVM, figure 114). Limits are powers of two, in units of the smallest page
// size; 0 means no limit is given.
type NVMController struct {
	VSL, WZSL, WUSL uint8  // Verify, Write Zeroes, Write Uncorrectable
	DMRL            uint8  // Dataset Management: ranges
	DMRSL           uint32 // blocks of one range
	DMSL            uint64 // blocks of all
}

// Append adds IdentifySize bytes to b.
func (c NVMController) Append(b []byte) []byte {
	b, o := grow(b, IdentifySize)
	o[0], o[1], o[2], o[3] = c.VSL, c.WZSL, c.WUSL, c.DMRL
	le.PutUint32(o[4:], c.DMRSL)
	le.PutUint64(o[8:], c.DMSL)
	return b
}

// ParseNVMController is the inverse of Append.
func ParseNVMController(b []byte) (NVMController, error) {
	if len(b) < IdentifySize {
		return NVMController{}, short("identify controller of the NVM command set", len(b), IdentifySize)
	}
	return NVMController{VSL: b[0], WZSL: b[1], WUSL: b[2], DMRL: b[3], DMRSL: le.Uint32(b[4:]), DMSL: le.Uint64(b[8:])}, nil
}

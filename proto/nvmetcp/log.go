// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// LogID names a log page (Base, figure 202).
type LogID uint8

// The log pages.
const (
	LogSupported         LogID = 0x00
	LogErrors            LogID = 0x01
	LogSmart             LogID = 0x02
	LogFirmware          LogID = 0x03
	LogChangedNamespaces LogID = 0x04
	LogEffects           LogID = 0x05
	LogANA               LogID = 0x0c
	LogDiscovery         LogID = 0x70
	LogReservations      LogID = 0x80
	LogWritten           LogID = 0xc0 // Weft's own, see WrittenLog
)

// The lengths of log pages and of their entries.
const (
	ErrorEntrySize           = 64
	SmartSize                = 512
	FirmwareSize             = 512
	ChangedNamespacesSize    = 4096
	EffectsSize              = 4096
	SupportedLogsSize        = 1024
	ReservationNotifySize    = 64
	maxChangedNamespaces     = ChangedNamespacesSize / 4
	tooManyChangedNamespaces = 0xffffffff
)

// GetLog is a Get Log Page command (Base, 5.16).
type GetLog struct {
	ID          LogID
	NSID        uint32
	Specific    uint8  // LSP
	RetainEvent bool   // RAE: the event stays masked
	Length      uint64 // bytes, a multiple of 4, at least 4
	Offset      uint64 // bytes, a multiple of 4
	IndexOffset bool   // OT: Offset is an index
	CommandSet  CommandSet
}

// ANAGroupsOnly is the Specific bit that leaves NSIDs out of LogANA (RGO).
const ANAGroupsOnly uint8 = 1

// Command makes the command.
func (g GetLog) Command() Command {
	var c Command
	dwords := g.Length/4 - 1
	c.SetOpcode(AdminGetLogPage)
	c.SetNSID(g.NSID)
	c.SetSGL(Transport(uint32(g.Length)))
	c.SetCDW(10, uint32(g.ID)|uint32(g.Specific&0x7f)<<8|uint32(bit(g.RetainEvent, 0))<<15|uint32(dwords&0xffff)<<16)
	c.SetCDW(11, uint32(dwords>>16)&0xffff)
	le.PutUint64(c[48:], g.Offset)
	c.SetCDW(14, uint32(bit(g.IndexOffset, 0))<<23|uint32(g.CommandSet)<<24)
	return c
}

// ParseGetLog reads a Get Log Page command. Length is at most 16 GiB; the room for the
// answer is given by the command's SGL.
func ParseGetLog(c *Command) GetLog {
	return GetLog{
		ID: LogID(c[40]), NSID: c.NSID(), Specific: c[41] & 0x7f, RetainEvent: c[41]&0x80 != 0,
		Length: (uint64(c.CDW(10)>>16) | uint64(c.CDW(11)&0xffff)<<16 + 1) * 4,
		Offset: le.Uint64(c[48:]), IndexOffset: c[58]&0x80 != 0, CommandSet: CommandSet(c[59]),
	}
}

// ErrorEntry is an entry of LogErrors (Base, figure 205); a Count of 0 marks an unused one.
type ErrorEntry struct {
	Count             uint64
	Queue, CID        uint16
	Status            Status
	ParameterLocation uint16
	LBA               uint64
	NSID              uint32
	Specific          uint64
}

// Append adds ErrorEntrySize bytes to b.
func (e ErrorEntry) Append(b []byte) []byte {
	b, o := grow(b, ErrorEntrySize)
	le.PutUint64(o, e.Count)
	le.PutUint16(o[8:], e.Queue)
	le.PutUint16(o[10:], e.CID)
	le.PutUint16(o[12:], uint16(e.Status)<<1)
	le.PutUint16(o[14:], e.ParameterLocation)
	le.PutUint64(o[16:], e.LBA)
	le.PutUint32(o[24:], e.NSID)
	le.PutUint64(o[32:], e.Specific)
	return b
}

// ParseErrorEntry is the inverse of Append.
func ParseErrorEntry(b []byte) (ErrorEntry, error) {
	if len(b) < ErrorEntrySize {
		return ErrorEntry{}, short("error log entry", len(b), ErrorEntrySize)
	}
	return ErrorEntry{
		Count: le.Uint64(b), Queue: le.Uint16(b[8:]), CID: le.Uint16(b[10:]), Status: Status(le.Uint16(b[12:]) >> 1),
		ParameterLocation: le.Uint16(b[14:]), LBA: le.Uint64(b[16:]), NSID: le.Uint32(b[24:]), Specific: le.Uint64(b[32:]),
	}, nil
}

// Smart is LogSmart (Base, figure 206). Counters of 16 bytes are cut to 8.
type Smart struct {
	Warnings            uint8
	Temperature         uint16 // kelvin
	Spare, SpareMinimum uint8  // per cent
	Used                uint8  // per cent of the expected life
	UnitsRead           uint64 // 1000 times 512 bytes, rounded up
	UnitsWritten        uint64
	Reads, Writes       uint64 // commands
	BusyMinutes         uint64
	PowerCycles         uint64
	PowerOnHours        uint64
	UnsafeShutdowns     uint64
	MediaErrors         uint64
	ErrorEntries        uint64
	WarningTempMinutes  uint32
	CriticalTempMinutes uint32
}

func (s *Smart) counters() []*uint64 {
	return []*uint64{&s.UnitsRead, &s.UnitsWritten, &s.Reads, &s.Writes, &s.BusyMinutes, &s.PowerCycles,
		&s.PowerOnHours, &s.UnsafeShutdowns, &s.MediaErrors, &s.ErrorEntries}
}

// Append adds SmartSize bytes to b.
func (s Smart) Append(b []byte) []byte {
	b, o := grow(b, SmartSize)
	o[0] = s.Warnings
	le.PutUint16(o[1:], s.Temperature)
	o[3], o[4], o[5] = s.Spare, s.SpareMinimum, s.Used
	for i, c := range s.counters() {
		le.PutUint64(o[32+16*i:], *c)
	}
	le.PutUint32(o[192:], s.WarningTempMinutes)
	le.PutUint32(o[196:], s.CriticalTempMinutes)
	return b
}

// ParseSmart is the inverse of Append.
func ParseSmart(b []byte) (Smart, error) {
	if len(b) < SmartSize {
		return Smart{}, short("SMART log", len(b), SmartSize)
	}
	s := Smart{Warnings: b[0], Temperature: le.Uint16(b[1:]), Spare: b[3], SpareMinimum: b[4], Used: b[5],
		WarningTempMinutes: le.Uint32(b[192:]), CriticalTempMinutes: le.Uint32(b[196:])}
	for i, c := range s.counters() {
		*c = le.Uint64(b[32+16*i:])
	}
	return s, nil
}

// Firmware is LogFirmware (Base, figure 207).
type Firmware struct {
	Active, Next uint8     // slots, 1 to 7; Next 0: the same as Active
	Slots        [7]string // at most 8 characters each
}

// Append adds FirmwareSize bytes to b.
func (f Firmware) Append(b []byte) []byte {
	b, o := grow(b, FirmwareSize)
	o[0] = f.Active&7 | f.Next&7<<4
	for i, s := range f.Slots {
		if s != "" {
			putText(o[8+8*i:16+8*i], s)
		}
	}
	return b
}

// ParseFirmware is the inverse of Append.
func ParseFirmware(b []byte) (Firmware, error) {
	if len(b) < FirmwareSize {
		return Firmware{}, short("firmware log", len(b), FirmwareSize)
	}
	f := Firmware{Active: b[0] & 7, Next: b[0] >> 4 & 7}
	for i := range f.Slots {
		f.Slots[i] = text(b[8+8*i : 16+8*i])
	}
	return f, nil
}

// ChangedNamespaces is LogChangedNamespaces.
type ChangedNamespaces struct {
	IDs     []uint32
	TooMany bool // more than 1024: read the whole namespace list
}

// Append adds ChangedNamespacesSize bytes to b.
func (c ChangedNamespaces) Append(b []byte) []byte {
	b, o := grow(b, ChangedNamespacesSize)
	if c.TooMany || len(c.IDs) > maxChangedNamespaces {
		le.PutUint32(o, tooManyChangedNamespaces)
		return b
	}
	for i, id := range c.IDs {
		le.PutUint32(o[4*i:], id)
	}
	return b
}

// ParseChangedNamespaces is the inverse of Append.
func ParseChangedNamespaces(b []byte) (ChangedNamespaces, error) {
	if len(b) < ChangedNamespacesSize {
		return ChangedNamespaces{}, short("changed namespaces log", len(b), ChangedNamespacesSize)
	}
	var c ChangedNamespaces
	for i := range maxChangedNamespaces {
		id := le.Uint32(b[4*i:])
		if id == tooManyChangedNamespaces {
			return ChangedNamespaces{TooMany: true}, nil
		}
		if id == 0 {
			break
		}
		c.IDs = append(c.IDs, id)
	}
	return c, nil
}

// Effect describes a command's effects, in LogEffects.
type Effect uint32

// The bits of an Effect.
const (
	EffectSupported         Effect = 1 << 0
	EffectContent           Effect = 1 << 1 // changes data
	EffectCapability        Effect = 1 << 2 // changes a namespace's capabilities
	EffectInventory         Effect = 1 << 3 // creates or removes namespaces
	EffectController        Effect = 1 << 4 // changes the controller's capabilities
	EffectAloneOnNamespace  Effect = 1 << 16
	EffectAloneOnController Effect = 2 << 16
)

// Effects is LogEffects (Base, figure 209), by opcode.
type Effects struct{ Admin, IO [256]Effect }

// Append adds EffectsSize bytes to b.
func (e *Effects) Append(b []byte) []byte {
	b, o := grow(b, EffectsSize)
	for i := range e.Admin {
		le.PutUint32(o[4*i:], uint32(e.Admin[i]))
		le.PutUint32(o[1024+4*i:], uint32(e.IO[i]))
	}
	return b
}

// ParseEffects is the inverse of Append.
func ParseEffects(b []byte) (Effects, error) {
	var e Effects
	if len(b) < EffectsSize {
		return e, short("effects log", len(b), EffectsSize)
	}
	for i := range e.Admin {
		e.Admin[i] = Effect(le.Uint32(b[4*i:]))
		e.IO[i] = Effect(le.Uint32(b[1024+4*i:]))
	}
	return e, nil
}

// SupportedLogs is LogSupported: bit 0 says that the page is supported, bit 1 that its
// offset may be an index.
type SupportedLogs [256]uint32

// Append adds SupportedLogsSize bytes to b.
func (s *SupportedLogs) Append(b []byte) []byte {
	b, o := grow(b, SupportedLogsSize)
	for i, v := range s {
		le.PutUint32(o[4*i:], v)
	}
	return b
}

// ParseSupportedLogs is the inverse of Append.
func ParseSupportedLogs(b []byte) (SupportedLogs, error) {
	var s SupportedLogs
	if len(b) < SupportedLogsSize {
		return s, short("supported log pages", len(b), SupportedLogsSize)
	}
	for i := range s {
		s[i] = le.Uint32(b[4*i:])
	}
	return s, nil
}

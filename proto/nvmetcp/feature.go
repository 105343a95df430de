// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// FeatureID names a feature (Base, figure 317).
type FeatureID uint8

// The features that apply to fabrics.
const (
	FeatureArbitration         FeatureID = 0x01
	FeaturePowerManagement     FeatureID = 0x02
	FeatureTemperature         FeatureID = 0x04
	FeatureErrorRecovery       FeatureID = 0x05
	FeatureVolatileWriteCache  FeatureID = 0x06
	FeatureQueues              FeatureID = 0x07
	FeatureWriteAtomicity      FeatureID = 0x0a
	FeatureAsyncEvents         FeatureID = 0x0b
	FeatureTimestamp           FeatureID = 0x0e
	FeatureKeepAlive           FeatureID = 0x0f
	FeatureHostBehavior        FeatureID = 0x16
	FeatureCommandSetProfile   FeatureID = 0x19
	FeatureHostID              FeatureID = 0x81
	FeatureReservationMask     FeatureID = 0x82
	FeatureReservationPersists FeatureID = 0x83
	FeatureWriteProtect        FeatureID = 0x84
)

// FeatureSelect chooses the value that Get Features returns.
type FeatureSelect uint8

// The values of SEL.
const (
	SelectCurrent   FeatureSelect = 0
	SelectDefault   FeatureSelect = 1
	SelectSaved     FeatureSelect = 2
	SelectSupported FeatureSelect = 3
)

// FeatureAccess is a Get or Set Features command.
type FeatureAccess struct {
	ID     FeatureID
	Select FeatureSelect // of Get Features
	Save   bool          // of Set Features
	NSID   uint32
	Value  uint32 // of Set Features: CDW11
	Length uint32 // bytes of the feature's data structure; 0: none
}

// GetCommand makes a Get Features command.
func (f FeatureAccess) GetCommand() Command {
	c := f.command(AdminGetFeatures)
	c.SetCDW(10, uint32(f.ID)|uint32(f.Select&7)<<8)
	return c
}

// SetCommand makes a Set Features command, with data in the capsule if there is any.
func (f FeatureAccess) SetCommand() Command {
	c := f.command(AdminSetFeatures)
	c.SetCDW(10, uint32(f.ID)|uint32(bit(f.Save, 0))<<31)
	c.SetCDW(11, f.Value)
	if f.Length > 0 {
		c.SetSGL(InCapsule(f.Length))
	}
	return c
}

func (f FeatureAccess) command(op Opcode) Command {
	var c Command
	c.SetOpcode(op)
	c.SetNSID(f.NSID)
	c.SetSGL(Transport(f.Length))
	return c
}

// ParseFeature reads a Get or Set Features command.
func ParseFeature(c *Command) FeatureAccess {
	return FeatureAccess{
		ID: FeatureID(c[40]), Select: FeatureSelect(c[41] & 7), Save: c[43]&0x80 != 0,
		NSID: c.NSID(), Value: c.CDW(11), Length: c.SGL().Length,
	}
}

// QueueCounts is the value of FeatureQueues: I/O queues of each kind, 1 to 65536. Over
// fabrics the two numbers are equal.
type QueueCounts struct{ Submission, Completion uint32 }

// Encode makes CDW11 of Set Features, and the result.
func (q QueueCounts) Encode() uint32 {
	return uint32(uint16(q.Submission-1)) | uint32(uint16(q.Completion-1))<<16
}

// ParseQueueCounts is the inverse of Encode.
func ParseQueueCounts(v uint32) QueueCounts {
	return QueueCounts{Submission: v&0xffff + 1, Completion: v>>16 + 1}
}

// The bits of FeatureAsyncEvents and of Controller.OAES; bits 7:0 are the
// critical warnings of SMART.
const (
	EventNamespaces uint32 = 1 << 8
	EventFirmware   uint32 = 1 << 9
	EventTelemetry  uint32 = 1 << 10
	EventANA        uint32 = 1 << 11
	EventDiscovery  uint32 = 1 << 31
)

// EventType and EventInfo describe an event (Base, figures 146 to 152).
type (
	EventType uint8
	EventInfo uint8
)

// The events.
const (
	EventTypeError  EventType = 0
	EventTypeSmart  EventType = 1
	EventTypeNotice EventType = 2
	EventTypeIO     EventType = 6

	NoticeNamespaces EventInfo = 0x00 // the namespaces in LogChangedNamespaces changed
	NoticeFirmware   EventInfo = 0x01
	NoticeTelemetry  EventInfo = 0x02
	NoticeANA        EventInfo = 0x03
	NoticeDiscovery  EventInfo = 0xf0

	IOReservationLog EventInfo = 0x00 // of EventTypeIO: LogReservations has an entry
)

// Event is the result of an Asynchronous Event Request.
type Event struct {
	Type EventType
	Info EventInfo
	Log  LogID // the log page to read; reading it rearms the event
}

// Encode makes dword 0 of the completion.
func (e Event) Encode() uint32 {
	return uint32(e.Type&7) | uint32(e.Info)<<8 | uint32(e.Log)<<16
}

// ParseEvent is the inverse of Encode.
func ParseEvent(v uint32) Event {
	return Event{Type: EventType(v & 7), Info: EventInfo(v >> 8), Log: LogID(v >> 16)}
}

// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// ReservationType is RTYPE (NVM, figure 66): who may read and write.
type ReservationType uint8

// The reservation types; 0 is no reservation.
const (
	WriteExclusive                ReservationType = 1
	ExclusiveAccess               ReservationType = 2
	WriteExclusiveRegistrants     ReservationType = 3
	ExclusiveAccessRegistrants    ReservationType = 4
	WriteExclusiveAllRegistrants  ReservationType = 5
	ExclusiveAccessAllRegistrants ReservationType = 6
)

// RegisterAction is RREGA, AcquireAction RACQA, ReleaseAction RRELA.
type (
	RegisterAction uint8
	AcquireAction  uint8
	ReleaseAction  uint8
)

// The actions of the reservation commands.
const (
	RegisterKey   RegisterAction = 0
	UnregisterKey RegisterAction = 1
	ReplaceKey    RegisterAction = 2

	Acquire         AcquireAction = 0
	Preempt         AcquireAction = 1
	PreemptAndAbort AcquireAction = 2

	Release ReleaseAction = 0
	Clear   ReleaseAction = 1
)

// PersistThroughPowerLoss is CPTPL.
type PersistThroughPowerLoss uint8

// The values of CPTPL.
const (
	PersistNoChange PersistThroughPowerLoss = 0
	PersistOff      PersistThroughPowerLoss = 2
	PersistOn       PersistThroughPowerLoss = 3
)

// ReservationRegister is the Reservation Register command with its data (NVM, 3.2.9).
type ReservationRegister struct {
	Action    RegisterAction
	IgnoreKey bool // IEKEY: CurrentKey is ignored
	Persist   PersistThroughPowerLoss
	Current   uint64
	New       uint64
}

// ReservationAcquire is the Reservation Acquire command with its data (NVM, 3.2.8).
type ReservationAcquire struct {
	Action    AcquireAction
	IgnoreKey bool
	Type      ReservationType
	Current   uint64
	Preempt   uint64
}

// ReservationRelease is the Reservation Release command with its data (NVM, 3.2.10).
type ReservationRelease struct {
	Action    ReleaseAction
	IgnoreKey bool
	Type      ReservationType
	Current   uint64
}

// The lengths of the commands' data.
const (
	ReservationRegisterSize = 16
	ReservationAcquireSize  = 16
	ReservationReleaseSize  = 8
)

// Command makes the command and its data, which is in the capsule.
func (r ReservationRegister) Command(nsid uint32) (Command, []byte) {
	dw10 := uint32(r.Action&7) | uint32(bit(r.IgnoreKey, 3)) | uint32(r.Persist&3)<<30
	return reservation(IOReservationRegister, nsid, dw10), le.AppendUint64(le.AppendUint64(nil, r.Current), r.New)
}

// Command makes the command and its data, which is in the capsule.
func (r ReservationAcquire) Command(nsid uint32) (Command, []byte) {
	dw10 := uint32(r.Action&7) | uint32(bit(r.IgnoreKey, 3)) | uint32(r.Type)<<8
	return reservation(IOReservationAcquire, nsid, dw10), le.AppendUint64(le.AppendUint64(nil, r.Current), r.Preempt)
}

// Command makes the command and its data, which is in the capsule.
func (r ReservationRelease) Command(nsid uint32) (Command, []byte) {
	dw10 := uint32(r.Action&7) | uint32(bit(r.IgnoreKey, 3)) | uint32(r.Type)<<8
	return reservation(IOReservationRelease, nsid, dw10), le.AppendUint64(nil, r.Current)
}

func reservation(op Opcode, nsid, dw10 uint32) Command {
	var c Command
	c.SetOpcode(op)
	c.SetNSID(nsid)
	c.SetCDW(10, dw10)
	n := uint32(ReservationRegisterSize)
	if op == IOReservationRelease {
		n = ReservationReleaseSize
	}
	c.SetSGL(InCapsule(n))
	return c
}

// ParseReservationRegister reads the command and its data.
func ParseReservationRegister(c *Command, data []byte) (ReservationRegister, error) {
	if len(data) < ReservationRegisterSize {
		return ReservationRegister{}, short("reservation register", len(data), ReservationRegisterSize)
	}
	return ReservationRegister{Action: RegisterAction(c[40] & 7), IgnoreKey: c[40]&8 != 0, Persist: PersistThroughPowerLoss(c[43] >> 6),
		Current: le.Uint64(data), New: le.Uint64(data[8:])}, nil
}

// ParseReservationAcquire reads the command and its data.
func ParseReservationAcquire(c *Command, data []byte) (ReservationAcquire, error) {
	if len(data) < ReservationAcquireSize {
		return ReservationAcquire{}, short("reservation acquire", len(data), ReservationAcquireSize)
	}
	return ReservationAcquire{Action: AcquireAction(c[40] & 7), IgnoreKey: c[40]&8 != 0, Type: ReservationType(c[41]),
		Current: le.Uint64(data), Preempt: le.Uint64(data[8:])}, nil
}

// ParseReservationRelease reads the command and its data.
func ParseReservationRelease(c *Command, data []byte) (ReservationRelease, error) {
	if len(data) < ReservationReleaseSize {
		return ReservationRelease{}, short("reservation release", len(data), ReservationReleaseSize)
	}
	return ReservationRelease{Action: ReleaseAction(c[40] & 7), IgnoreKey: c[40]&8 != 0, Type: ReservationType(c[41]),
		Current: le.Uint64(data)}, nil
}

// ReservationReport is the Reservation Report command (NVM, 3.2.11).
type ReservationReport struct {
	NSID     uint32
	Length   uint64 // room for the report in bytes, a multiple of 4
	Extended bool   // EDS: 128-bit host identifiers
}

// Command makes the command.
func (r ReservationReport) Command() Command {
	var c Command
	c.SetOpcode(IOReservationReport)
	c.SetNSID(r.NSID)
	c.SetCDW(10, uint32(r.Length/4-1))
	c.SetCDW(11, uint32(bit(r.Extended, 0)))
	c.SetSGL(Transport(uint32(r.Length)))
	return c
}

// ParseReservationReport reads the command.
func ParseReservationReport(c *Command) ReservationReport {
	return ReservationReport{NSID: c.NSID(), Length: (uint64(c.CDW(10)) + 1) * 4, Extended: c[44]&1 != 0}
}

// Registrant is one registered controller.
type Registrant struct {
	ControllerID uint16
	Holder       bool       // it holds the reservation
	HostID       block.UUID // only the first 8 bytes if not extended
	Key          uint64
}

// ReservationStatus is the data of a Reservation Report (NVM, figures 70 and 71).
type ReservationStatus struct {
	Generation  uint32
	Type        ReservationType
	Persists    bool
	Registrants []Registrant
}

// The lengths of the report's header and of each registrant.
const (
	reservationHeaderSize         = 24
	reservationExtendedHeaderSize = 64
	registrantSize                = 24
	registrantExtendedSize        = 64
)

// Append adds the report to b, with 128-bit host identifiers if extended.
func (r ReservationStatus) Append(b []byte, extended bool) []byte {
	size := reservationHeaderSize
	if extended {
		size = reservationExtendedHeaderSize
	}
	b, o := grow(b, size)
	le.PutUint32(o, r.Generation)
	o[4] = byte(r.Type)
	le.PutUint16(o[5:], uint16(len(r.Registrants)))
	o[9] = bit(r.Persists, 0)
	for _, g := range r.Registrants {
		b = g.append(b, extended)
	}
	return b
}

func (g Registrant) append(b []byte, extended bool) []byte {
	size := registrantSize
	if extended {
		size = registrantExtendedSize
	}
	b, o := grow(b, size)
	le.PutUint16(o, g.ControllerID)
	o[2] = bit(g.Holder, 0)
	if extended {
		le.PutUint64(o[8:], g.Key)
		copy(o[16:], g.HostID[:])
		return b
	}
	copy(o[8:16], g.HostID[:])
	le.PutUint64(o[16:], g.Key)
	return b
}

// ParseReservationStatus reads the registrants that b holds. total is how many the
// controller has; it is larger if they did not all fit.
func ParseReservationStatus(b []byte, extended bool) (status ReservationStatus, total int, err error) {
	head, each := reservationHeaderSize, registrantSize
	if extended {
		head, each = reservationExtendedHeaderSize, registrantExtendedSize
	}
	if len(b) < head {
		return status, 0, short("reservation status", len(b), head)
	}
	status = ReservationStatus{Generation: le.Uint32(b), Type: ReservationType(b[4]), Persists: b[9]&1 != 0}
	total = int(le.Uint16(b[5:]))
	b = b[head:]
	for n := total; n > 0 && len(b) >= each; n-- {
		g := Registrant{ControllerID: le.Uint16(b), Holder: b[2]&1 != 0}
		if extended {
			g.Key, g.HostID = le.Uint64(b[8:]), block.UUID(b[16:32])
		} else {
			copy(g.HostID[:], b[8:16])
			g.Key = le.Uint64(b[16:])
		}
		status.Registrants = append(status.Registrants, g)
		b = b[each:]
	}
	return status, total, nil
}

// ReservationEvent is an event in LogReservations (Base, figure 229).
type ReservationEvent uint8

// The events.
const (
	ReservationNone                  ReservationEvent = 0
	ReservationRegistrationPreempted ReservationEvent = 1
	ReservationReleased              ReservationEvent = 2
	ReservationPreempted             ReservationEvent = 3
)

// ReservationNotice is LogReservations.
type ReservationNotice struct {
	Count uint64
	Event ReservationEvent
	More  uint8 // notices that follow, at most 255
	NSID  uint32
}

// Append adds ReservationNotifySize bytes to b.
func (n ReservationNotice) Append(b []byte) []byte {
	b, o := grow(b, ReservationNotifySize)
	le.PutUint64(o, n.Count)
	o[8], o[9] = byte(n.Event), n.More
	le.PutUint32(o[12:], n.NSID)
	return b
}

// ParseReservationNotice is the inverse of Append.
func ParseReservationNotice(b []byte) (ReservationNotice, error) {
	if len(b) < ReservationNotifySize {
		return ReservationNotice{}, fmt.Errorf("reservation notice: %w", short("log", len(b), ReservationNotifySize))
	}
	return ReservationNotice{Count: le.Uint64(b), Event: ReservationEvent(b[8]), More: b[9], NSID: le.Uint32(b[12:])}, nil
}

// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"errors"
	"fmt"
	"strings"

	"weft.dev/weft/proto/block"
)

// Status is the outcome of a command (Base, 3.3.3.2.1) without the phase bit:
// status code (bits 7:0), its type (10:8), retry delay (12:11), more (13), do not
// retry (14). Success is 0; every other value is an error.
//
// errors.Is compares code and type only. It also maps a status to the errors of a block
// device: [block.ErrChecksum], [block.ErrFull], [block.ErrMedium], [block.ErrRange], [block.ErrReadOnly],
// [block.ErrUnsupported].
type Status uint16

// The bits above code and type.
const (
	DNR         Status = 1 << 14 // do not retry: the same command would fail again
	More        Status = 1 << 13 // the error log page has details
	StatusMask  Status = 0x7ff   // code and type
	statusDelay        = 11      // retry delay (CRD): see Delay
)

// Generic command status (type 0; Base, figure 94).
const (
	Success                 Status = 0x000
	InvalidOpcode           Status = 0x001
	InvalidField            Status = 0x002
	CIDConflict             Status = 0x003
	DataTransferError       Status = 0x004
	AbortedPowerLoss        Status = 0x005
	InternalError           Status = 0x006
	AbortRequested          Status = 0x007
	AbortedSQDeletion       Status = 0x008
	AbortedFailedFused      Status = 0x009
	AbortedMissingFused     Status = 0x00a
	InvalidNamespace        Status = 0x00b
	CommandSequenceError    Status = 0x00c
	InvalidSGLSegment       Status = 0x00d
	InvalidSGLCount         Status = 0x00e
	InvalidSGLLength        Status = 0x00f
	InvalidSGLMetadata      Status = 0x010
	InvalidSGLType          Status = 0x011
	InvalidPRPOffset        Status = 0x013
	AtomicWriteUnitExceeded Status = 0x014
	OperationDenied         Status = 0x015
	InvalidSGLOffset        Status = 0x016
	HostIDInconsistent      Status = 0x018
	KeepAliveExpired        Status = 0x019
	InvalidKeepAlive        Status = 0x01a
	AbortedPreempt          Status = 0x01b
	SanitizeFailed          Status = 0x01c
	SanitizeInProgress      Status = 0x01d
	InvalidSGLGranularity   Status = 0x01e
	NotSupportedInCMB       Status = 0x01f
	NamespaceWriteProtected Status = 0x020
	CommandInterrupted      Status = 0x021
	TransientTransportError Status = 0x022
	ProhibitedByLockdown    Status = 0x023
	AdminMediaNotReady      Status = 0x024
	LBAOutOfRange           Status = 0x080
	CapacityExceeded        Status = 0x081
	NamespaceNotReady       Status = 0x082
	ReservationConflict     Status = 0x083
	FormatInProgress        Status = 0x084
	InvalidKey              Status = 0x085
	NotEnoughResources      Status = 0x086
)

// Command-specific status (type 1; Base, figure 96; Fabrics: figure 99).
const (
	InvalidCompletionQueue       Status = 0x100
	InvalidQueueID               Status = 0x101
	InvalidQueueSize             Status = 0x102
	AbortLimitExceeded           Status = 0x103
	AsyncEventLimitExceeded      Status = 0x105
	InvalidLogPage               Status = 0x109
	InvalidFormat                Status = 0x10a
	FeatureNotSaveable           Status = 0x10d
	FeatureNotChangeable         Status = 0x10e
	FeatureNotNamespaceSpecific  Status = 0x10f
	CommandSetNotSupported       Status = 0x129
	CommandSetCombination        Status = 0x12b
	IdentifierUnavailable        Status = 0x116
	ConflictingAttributes        Status = 0x180 // of I/O commands
	InvalidProtectionInformation Status = 0x181
	WriteToReadOnlyRange         Status = 0x182
	CommandSizeLimitExceeded     Status = 0x183 // from Linux: an optional command that the medium does not support

	// Of Fabrics commands; the first four share codes with I/O commands.
	ConnectIncompatibleFormat Status = 0x180
	ConnectControllerBusy     Status = 0x181
	ConnectInvalidParameters  Status = 0x182
	ConnectRestartDiscovery   Status = 0x183
	ConnectInvalidHost        Status = 0x184
	ConnectInvalidQueueType   Status = 0x185
	DiscoverRestart           Status = 0x190
	AuthenticationRequired    Status = 0x191
)

// Media and data integrity errors (type 2) and path errors (type 3).
const (
	WriteFault             Status = 0x280
	UnrecoveredReadError   Status = 0x281
	GuardCheckError        Status = 0x282
	ApplicationTagError    Status = 0x283
	ReferenceTagError      Status = 0x284
	CompareFailure         Status = 0x285
	AccessDenied           Status = 0x286
	DeallocatedBlock       Status = 0x287
	InternalPathError      Status = 0x300
	ANAPersistentLoss      Status = 0x301
	ANAInaccessible        Status = 0x302
	ANATransition          Status = 0x303
	ControllerPathingError Status = 0x360
	HostPathingError       Status = 0x370
	HostAborted            Status = 0x371
)

// Code is code and type alone, without the other bits.
func (s Status) Code() Status { return s & StatusMask }

// SC is the status code, SCT its type.
func (s Status) SC() uint8 { return uint8(s) }

// SCT is the status code type: 0 generic, 1 command specific, 2 media, 3 path, 7 vendor.
func (s Status) SCT() uint8 { return uint8(s>>8) & 7 }

// DNR reports whether the same command sent again would fail again.
func (s Status) DNR() bool { return s&DNR != 0 }

// Delay is the status with a retry delay: 0 (none) to 3, for CRDT1 to CRDT3 of Identify.
func (s Status) Delay(n uint8) Status { return s&^(3<<statusDelay) | Status(n&3)<<statusDelay }

// RetryDelay is 0 (none given) to 3: which of CRDT1 to CRDT3 to wait.
func (s Status) RetryDelay() uint8 { return uint8(s>>statusDelay) & 3 }

// IsPath reports whether the path failed, so that another path may work (type 3).
func (s Status) IsPath() bool { return s.SCT() == 3 }

// Err is nil for Success, s otherwise.
func (s Status) Err() error {
	if s.Code() == Success {
		return nil
	}
	return s
}

// Retryable reports whether sending the same command again may help.
func (s Status) Retryable() bool {
	if s.DNR() {
		return false
	}
	switch s.Code() {
	case CommandInterrupted, TransientTransportError, NamespaceNotReady, AdminMediaNotReady, AbortRequested, AbortedPreempt,
		AbortedSQDeletion, InternalPathError, ANAInaccessible, ANATransition, ControllerPathingError, HostPathingError, HostAborted:
		return true
	}
	return false
}

func (s Status) Error() string {
	var b strings.Builder
	if name := statusNames[s.Code()]; name != "" {
		b.WriteString(name)
	} else {
		b.WriteString("unknown status")
	}
	fmt.Fprintf(&b, " (%#x/%#02x", s.SCT(), s.SC())
	if s.DNR() {
		b.WriteString(", do not retry")
	}
	b.WriteString(")")
	return b.String()
}

// Is makes errors.Is compare code and type, and maps to the errors of package block.
func (s Status) Is(target error) bool {
	if t, ok := target.(Status); ok {
		return t.Code() == s.Code()
	}
	err := s.blockError()
	return err != nil && errors.Is(err, target)
}

func (s Status) blockError() error {
	switch s.Code() {
	case LBAOutOfRange:
		return block.ErrRange
	case CapacityExceeded:
		return block.ErrFull
	case NamespaceWriteProtected:
		return block.ErrReadOnly
	case InvalidOpcode, CommandSizeLimitExceeded:
		return block.ErrUnsupported
	case GuardCheckError:
		return block.ErrChecksum
	case WriteFault, UnrecoveredReadError, ApplicationTagError, ReferenceTagError:
		return block.ErrMedium
	}
	return nil
}

var statusNames = map[Status]string{
	Success: "success", InvalidOpcode: "invalid opcode", InvalidField: "invalid field in command",
	CIDConflict: "command id conflict", DataTransferError: "data transfer error",
	AbortedPowerLoss: "aborted due to power loss", InternalError: "internal error",
	AbortRequested: "abort requested", AbortedSQDeletion: "aborted due to queue deletion",
	AbortedFailedFused: "aborted due to failed fused command", AbortedMissingFused: "aborted due to missing fused command",
	InvalidNamespace: "invalid namespace or format", CommandSequenceError: "command sequence error",
	InvalidSGLSegment: "invalid SGL segment descriptor", InvalidSGLCount: "invalid number of SGL descriptors",
	InvalidSGLLength: "data SGL length invalid", InvalidSGLMetadata: "metadata SGL length invalid",
	InvalidSGLType: "SGL descriptor type invalid", InvalidPRPOffset: "PRP offset invalid",
	AtomicWriteUnitExceeded: "atomic write unit exceeded", OperationDenied: "operation denied",
	InvalidSGLOffset: "SGL offset invalid", HostIDInconsistent: "host identifier inconsistent format",
	KeepAliveExpired: "keep alive timer expired", InvalidKeepAlive: "keep alive timeout invalid",
	AbortedPreempt: "aborted due to preempt and abort", SanitizeFailed: "sanitize failed",
	SanitizeInProgress: "sanitize in progress", InvalidSGLGranularity: "SGL data block granularity invalid",
	NotSupportedInCMB: "command not supported for queue in CMB", NamespaceWriteProtected: "namespace is write protected",
	CommandInterrupted: "command interrupted", TransientTransportError: "transient transport error",
	ProhibitedByLockdown: "command prohibited by lockdown", AdminMediaNotReady: "admin command media not ready",
	LBAOutOfRange: "LBA out of range", CapacityExceeded: "capacity exceeded", NamespaceNotReady: "namespace not ready",
	ReservationConflict: "reservation conflict", FormatInProgress: "format in progress",
	InvalidKey: "invalid key tag", NotEnoughResources: "not enough resources",

	InvalidCompletionQueue: "completion queue invalid", InvalidQueueID: "invalid queue identifier",
	InvalidQueueSize: "invalid queue size", AbortLimitExceeded: "abort command limit exceeded",
	AsyncEventLimitExceeded: "asynchronous event request limit exceeded", InvalidLogPage: "invalid log page",
	InvalidFormat: "invalid format", FeatureNotSaveable: "feature identifier not saveable",
	FeatureNotChangeable: "feature not changeable", FeatureNotNamespaceSpecific: "feature not namespace specific",
	CommandSetNotSupported: "I/O command set not supported", CommandSetCombination: "I/O command set combination rejected",
	IdentifierUnavailable: "namespace identifier unavailable",
	// I/O commands use the same codes with other meanings; the command decides.
	ConnectIncompatibleFormat: "conflicting attributes, or connect incompatible format",
	ConnectControllerBusy:     "invalid protection information, or connect controller busy",
	ConnectInvalidParameters:  "write to read only range, or connect invalid parameters",
	ConnectRestartDiscovery:   "command size limit exceeded, or connect restart discovery",
	ConnectInvalidHost:        "connect invalid host", ConnectInvalidQueueType: "connect invalid queue type",
	DiscoverRestart: "discover restart", AuthenticationRequired: "authentication required",

	WriteFault: "write fault", UnrecoveredReadError: "unrecovered read error",
	GuardCheckError: "end-to-end guard check error", ApplicationTagError: "end-to-end application tag check error",
	ReferenceTagError: "end-to-end reference tag check error", CompareFailure: "compare failure",
	AccessDenied: "access denied", DeallocatedBlock: "deallocated or unwritten logical block",
	InternalPathError: "internal path error", ANAPersistentLoss: "asymmetric access persistent loss",
	ANAInaccessible: "asymmetric access inaccessible", ANATransition: "asymmetric access transition",
	ControllerPathingError: "controller pathing error", HostPathingError: "host pathing error",
	HostAborted: "command aborted by host",
}

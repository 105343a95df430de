// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Kind classifies a refusal; each maps to one gRPC code.
type Kind int

// The kinds.
const (
	InvalidArgument    Kind = iota + 1 // Field is wrong
	NotFound                           // Object is not there
	AlreadyExists                      // Object is there and differs in Field
	FailedPrecondition                 // not now: Reason says why, Hint what to do
	ResourceExhausted                  // no space; Reason NO_SPACE
	Unimplemented                      // not served by this version
)

// Reasons that programs may branch on.
const (
	ReasonNoInSyncLeg      = "NO_IN_SYNC_LEG"
	ReasonEpochSuperseded  = "EPOCH_SUPERSEDED"
	ReasonNotAttached      = "NOT_ATTACHED"
	ReasonLastLeg          = "LAST_LEG"
	ReasonNotAsked         = "NOT_ASKED"
	ReasonRevisionMoved    = "REVISION_MOVED"
	ReasonLateRecord       = "LATE_RECORD"
	ReasonNotFenced        = "NOT_FENCED"
	ReasonAttached         = "ATTACHED"
	ReasonAttachedElse     = "ATTACHED_ELSEWHERE"
	ReasonDetaching        = "DETACHING"
	ReasonCopiesDiffer     = "COPIES_DIFFER"
	ReasonReadOnly         = "READ_ONLY"
	ReasonNotReady         = "NOT_READY"
	ReasonNoInitiator      = "NO_INITIATOR"
	ReasonNodeOnline       = "NODE_ONLINE"
	ReasonNodeOffline      = "NODE_OFFLINE"
	ReasonNodeInUse        = "NODE_IN_USE"
	ReasonDriveInUse       = "DRIVE_IN_USE"
	ReasonDeviceUnusable   = "DEVICE_UNUSABLE"
	ReasonForeignData      = "FOREIGN_DATA"
	ReasonPoolInUse        = "POOL_IN_USE"
	ReasonNoPool           = "NO_SUCH_POOL"
	ReasonNoSpace          = "NO_SPACE"
	ReasonDataLoss         = "DATA_LOSS"
	ReasonLegNotStale      = "LEG_NOT_STALE"
	ReasonInSyncLegExists  = "IN_SYNC_LEG_EXISTS"
	ReasonOtherCluster     = "OTHER_CLUSTER"
	ReasonOldTarget        = "OLD_TARGET"
	ReasonVolumeIsDeleting = "DELETING"
	ReasonNoReport         = "NO_REPORT"
	ReasonTooManyNodes     = "TOO_MANY_NODES"
	ReasonEventsGone       = "EVENTS_GONE"
	ReasonNoAuthentication = "NO_AUTHENTICATION"
	ReasonOldParts         = "OLD_PARTS"
)

// Error is a refusal. Text reads as "object or field: why"; the other fields hold what a
// program or a hint needs, and may be empty.
type Error struct {
	Kind     Kind
	Field    string // of the request, as the proto spells it
	Reason   string
	Object   string // "volume db1"
	Text     string
	Hint     string
	Metadata map[string]string
}

func (e *Error) Error() string { return e.Text }

func invalid(field, format string, args ...any) *Error {
	return &Error{Kind: InvalidArgument, Field: field, Text: field + ": " + fmt.Sprintf(format, args...)}
}

func notFound(object string) *Error {
	return &Error{Kind: NotFound, Object: object, Text: object + ": not found"}
}

// noPool refuses a request that names an unknown pool.
func noPool(name string) *Error {
	e := notFound("pool " + name)
	e.Reason = ReasonNoPool
	return e
}

// conflict refuses to create an object that exists with another value of one parameter.
func conflict(object, field string, have, asked any) *Error {
	if h, ok := have.(map[string]string); ok {
		have, asked = pairs(h), pairs(asked.(map[string]string))
	}
	return &Error{
		Kind: AlreadyExists, Object: object, Field: field,
		Text:     fmt.Sprintf("%s: already exists with %s %v, asked for %v", object, strings.TrimSuffix(strings.ReplaceAll(field, "_", " "), " bytes"), have, asked),
		Metadata: map[string]string{"field": field, "have": fmt.Sprint(have), "asked": fmt.Sprint(asked)},
	}
}

// pairs prints labels as key=value, in order.
func pairs(labels map[string]string) string {
	if len(labels) == 0 {
		return "none"
	}
	var all []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, key+"="+labels[key])
	}
	return strings.Join(all, ",")
}

func refused(reason, object, format string, args ...any) *Error {
	return &Error{Kind: FailedPrecondition, Reason: reason, Object: object, Text: object + ": " + fmt.Sprintf(format, args...)}
}

func (e *Error) hint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

func (e *Error) with(key, value string) *Error {
	if e.Metadata == nil {
		e.Metadata = map[string]string{}
	}
	e.Metadata[key] = value
	return e
}

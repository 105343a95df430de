// SPDX-License-Identifier: Apache-2.0

package pb

import (
	"strconv"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// A volume manager refuses an agent of another cluster with this reason, and with
// its own cluster's id as metadata.
const (
	ReasonOtherCluster = "OTHER_CLUSTER"
	ClusterKey         = "cluster"
)

// A volume manager that does not lead answers with code UNAVAILABLE and this reason. It
// has done nothing of what was asked. The leader's address is in the metadata if it is
// known.
const (
	ReasonNotLeader = "NOT_LEADER"
	LeaderKey       = "leader"
)

// ReasonOutcomeUnknown is the reason of an answer, with code UNAVAILABLE, to a call of which it
// is not known whether it was recorded. The caller repeats it.
const ReasonOutcomeUnknown = "OUTCOME_UNKNOWN"

// OutcomeUnknown reports whether err is that answer.
func OutcomeUnknown(err error) bool {
	_, unknown := refusedFor(err, ReasonOutcomeUnknown, "")
	return unknown
}

// ReasonLateRecord is the reason of a FAILED_PRECONDITION answer to a request that was overtaken: see
// RecordStaleRequest. Nothing was recorded. The metadata says what the next request has to have: the
// term of the manager, and a number above the one that it has answered.
const (
	ReasonLateRecord = "LATE_RECORD"
	LateRecordTerm   = "term"
	LateRecordNumber = "number"
)

// LateRecord returns the term and the number in that answer; false if err says something else.
func LateRecord(err error) (term, number uint64, late bool) {
	text, late := refusedFor(err, ReasonLateRecord, LateRecordTerm)
	term, _ = strconv.ParseUint(text, 10, 64) // 0 says nothing: the caller tries again later
	text, _ = refusedFor(err, ReasonLateRecord, LateRecordNumber)
	number, _ = strconv.ParseUint(text, 10, 64)
	return term, number, late
}

// ReasonNoPool is the reason of a NOT_FOUND answer to a request that names an unknown pool.
const ReasonNoPool = "NO_SUCH_POOL"

// NotLeader reports whether err is that answer, and the leader's address, which may be
// empty.
func NotLeader(err error) (leader string, refused bool) {
	return refusedFor(err, ReasonNotLeader, LeaderKey)
}

// OtherCluster is the cluster of a volume manager that has refused an agent since
// the agent is of another one; false if err says something else.
func OtherCluster(err error) (cluster string, refused bool) {
	return refusedFor(err, ReasonOtherCluster, ClusterKey)
}

func refusedFor(err error, reason, key string) (value string, refused bool) {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == reason {
			return info.GetMetadata()[key], true
		}
	}
	return "", false
}

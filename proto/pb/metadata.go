// SPDX-License-Identifier: Apache-2.0

package pb

// RequestKey is the key of gRPC metadata by which a caller tells the volume manager
// which request of its own a call is made for. It goes into the logs of both, and
// nothing else is made of it.
const RequestKey = "weft-request"

// ReadKey is the key of gRPC metadata by which a caller says how fresh what it reads has
// to be. Without it, a read is linearizable: it sees everything that was answered before
// it began. With ReadStale, a manager that does not lead may answer from what it has, so
// a read may miss the newest changes. One manager alone always answers the first way.
const (
	ReadKey          = "weft-read"
	ReadLinearizable = "linearizable"
	ReadStale        = "stale"
)

// The keys of the header of an answer that a manager gave from what it has, since it does not lead:
// the entry up to which that goes and its term, and the time since the manager that leads was last
// heard there, as Go writes durations. What was recorded since then may be missing, and what was
// still on its way.
const (
	ReadTermKey  = "weft-read-term"
	ReadIndexKey = "weft-read-index"
	ReadAgeKey   = "weft-read-age"
)

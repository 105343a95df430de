// SPDX-License-Identifier: Apache-2.0

package pb

import (
	"strconv"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// EventsGone reports whether err says that events which a watch was to go on with are
// not kept any more, and which is the first one that is.
func EventsGone(err error) (first uint64, gone bool) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetReason() == "EVENTS_GONE" {
			first, err := strconv.ParseUint(info.GetMetadata()["first_seq"], 10, 64)
			return first, err == nil
		}
	}
	return 0, false
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
)

// refusals is the one table from the manager's reasons for a FailedPrecondition to codes. Reasons
// that pass by themselves get codes that are not final, so that a CO tries again soon and does not
// conclude that nothing is under way.
var refusals = map[string]codes.Code{
	"NOT_READY":          codes.Unavailable, // being created, or restored and not yet compared
	"NO_IN_SYNC_LEG":     codes.Unavailable, // its targets are down
	"DETACHING":          codes.Aborted,
	"DELETING":           codes.Aborted,
	"ATTACHED_ELSEWHERE": codes.FailedPrecondition,
	"ATTACHED":           codes.FailedPrecondition,
	"NO_INITIATOR":       codes.FailedPrecondition,
	"NODE_OFFLINE":       codes.FailedPrecondition,
}

// fromManager turns the manager's answer to a call into the driver's.
//
// The manager's Internal, or an unknown code, does not say what goes on there, so it must not make
// the CO believe that nothing is under way.
func fromManager(doing string, err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	code, text := s.Code(), s.Message()
	switch code {
	case codes.InvalidArgument:
		if parameter, ok := block.ParameterOf(fieldOf(s)); ok {
			text = fmt.Sprintf("parameters: %s: %s", parameter, text)
		}
	case codes.FailedPrecondition:
		if mapped, ok := refusals[infoOf(s).GetReason()]; ok {
			code = mapped
		}
		if hint := infoOf(s).GetMetadata()["hint"]; code == codes.FailedPrecondition && hint != "" {
			text += "; " + hint // an operator has to act
		}
	case codes.Unavailable:
		text = "volume manager: " + text
	case codes.OK, codes.NotFound, codes.AlreadyExists, codes.ResourceExhausted, codes.OutOfRange, codes.Unimplemented,
		codes.Aborted, codes.Canceled, codes.DeadlineExceeded:
	default:
		code, text = codes.Unavailable, fmt.Sprintf("volume manager: %v: %s", s.Code(), text)
	}
	return status.Errorf(code, "%s: %s", doing, text)
}

// infoOf is nil if the manager's answer holds only a code and a text.
func infoOf(s *status.Status) *errdetails.ErrorInfo {
	for _, detail := range s.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

func fieldOf(s *status.Status) string {
	for _, detail := range s.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok && len(bad.FieldViolations) > 0 {
			return bad.FieldViolations[0].Field
		}
	}
	return ""
}

// waitEnded is the answer when the caller's time is up, or the driver stops, during a wait. Neither
// code is final.
func waitEnded(ctx context.Context, doing, waitingFor string) error {
	code := codes.Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		code = codes.DeadlineExceeded
	}
	return status.Errorf(code, "%s: still waiting for %s", doing, waitingFor)
}

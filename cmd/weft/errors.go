// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The exit codes; exitCodesText tables them for operators.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitExists      = 4
	exitRefused     = 5
	exitNoSpace     = 6
	exitUnreachable = 7
	exitTimedOut    = 8
	exitInterrupted = 130 // 128 + SIGINT, as shells do
)

// exitCode is the one place where exit codes are decided.
func exitCode(err error) int {
	if _, ok := errors.AsType[usageError](err); ok {
		return exitUsage
	}
	if _, ok := errors.AsType[timedOutError](err); ok || errors.Is(err, context.DeadlineExceeded) {
		return exitTimedOut
	}
	if errors.Is(err, errInterrupted) {
		return exitInterrupted
	}
	switch status.Code(err) {
	case codes.OK:
		return exitDone
	case codes.InvalidArgument, codes.OutOfRange:
		return exitUsage
	case codes.NotFound:
		return exitNotFound
	case codes.AlreadyExists:
		return exitExists
	case codes.FailedPrecondition:
		return exitRefused
	case codes.ResourceExhausted:
		return exitNoSpace
	case codes.Unavailable:
		return exitUnreachable
	}
	return exitFailed
}

// usageError is a command line that can not be carried out as written.
type usageError struct {
	err  error
	hint string
}

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// timedOutError is a wait that --timeout has ended. What was asked for is
// recorded all the same, and goes on.
type timedOutError struct{ waitingFor, hint string }

func (e timedOutError) Error() string { return "timed out waiting for " + e.waitingFor }

// unreachable turns a call that nobody answered into UNAVAILABLE with the
// address in the text; other errors and nil are returned as they are.
func unreachable(address string, err error) error {
	switch s := status.Convert(err); {
	case s.Code() == codes.DeadlineExceeded:
		return status.Errorf(codes.Unavailable, "volume manager at %s: no answer in time", address)
	case s.Code() == codes.Unavailable && len(s.Details()) == 0:
		return status.Errorf(codes.Unavailable, "volume manager at %s: %s", address, rootCause(s.Message()))
	}
	return err
}

// rootCause takes gRPC's wrapping ("connection error: desc = \"transport: Error
// while dialing: dial tcp …\"") off the cause that an operator can act on.
func rootCause(message string) string {
	if _, after, ok := strings.Cut(message, "transport: "); ok {
		message = strings.TrimSuffix(after, `"`)
	}
	return strings.TrimPrefix(message, "Error while dialing: ")
}

// report is what an error says to people and, with -o json, to programs.
type report struct {
	Error  string            `json:"error"`
	Hints  []string          `json:"hints,omitempty"`
	Reason string            `json:"reason,omitempty"`
	Fields map[string]string `json:"fields,omitempty"` // what is wrong, by flag
	Code   int               `json:"exit_code"`
}

func newReport(err error) report {
	r := report{Error: err.Error(), Code: exitCode(err)}
	if usage, ok := errors.AsType[usageError](err); ok {
		r.hint(usage.hint)
		return r
	}
	if wait, ok := errors.AsType[timedOutError](err); ok {
		r.hint(wait.hint)
		return r
	}
	s, ok := status.FromError(err)
	if !ok {
		return r
	}
	r.Error = s.Message()
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.BadRequest:
			r.addFields(d)
		case *errdetails.ErrorInfo:
			r.Reason = d.GetReason()
			r.hint(d.GetMetadata()["hint"])
			r.hint(reasonHint(d))
		}
	}
	if r.Code == exitUnreachable {
		r.hint("is it running there? set --manager or WEFT_MANAGER to its address")
	}
	return r
}

func (r *report) hint(text string) {
	if text != "" && len(r.Hints) == 0 {
		r.Hints = append(r.Hints, text)
	}
}

// addFields names request fields by the flag that sets them.
func (r *report) addFields(d *errdetails.BadRequest) {
	r.Fields = map[string]string{}
	for _, v := range d.GetFieldViolations() {
		flag := flagOf(v.GetField())
		text := strings.TrimPrefix(v.GetDescription(), v.GetField()+": ")
		r.Error = strings.Replace(r.Error, v.GetField()+": ", flag+": ", 1)
		r.Fields[flag] = text
		if !strings.Contains(r.Error, text) {
			r.Error += fmt.Sprintf("; %s: %s", flag, text)
		}
	}
}

// flagOf names a field of a request as the command line does.
func flagOf(field string) string {
	switch field {
	case "name", "volume":
		return "VOLUME"
	case "leg_id":
		return "LEG"
	case "drive_id":
		return "DRIVE"
	case "device":
		return "DEVICE"
	case "size_bytes":
		return "--size"
	case "chunk_bytes":
		return "--chunk-size"
	case "labels":
		return "--label"
	}
	return "--" + strings.ReplaceAll(field, "_", "-")
}

// reasonHint is the next step where the manager names none: volumes can be explained.
func reasonHint(d *errdetails.ErrorInfo) string {
	volume, ok := strings.CutPrefix(d.GetMetadata()["object"], "volume ")
	if !ok || d.GetReason() == "" {
		return ""
	}
	return fmt.Sprintf("run %q", "weft explain volume "+volume)
}

func printError(w io.Writer, f format, err error) {
	r := newReport(err)
	if f == formatJSON {
		b, _ := json.Marshal(r) // strings and ints only
		fmt.Fprintf(w, "%s\n", b)
		return
	}
	fmt.Fprintf(w, "weft: error: %s\n", r.Error)
	for _, hint := range r.Hints {
		fmt.Fprintf(w, "weft: hint: %s\n", hint)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
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
	if _, ok := errors.AsType[refusedError](err); ok {
		return exitRefused
	}
	if _, ok := errors.AsType[unreachableError](err); ok {
		return exitUnreachable
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

// hinted is an error of this command that says what can be done about it.
type hinted interface {
	error
	nextSteps() []string
}

// usageError is a command line that cannot be carried out as written.
type usageError struct {
	err  error
	hint string
}

func (e usageError) Error() string       { return e.err.Error() }
func (e usageError) Unwrap() error       { return e.err }
func (e usageError) nextSteps() []string { return []string{e.hint} }

// unreachableError is somebody other than a volume manager who does not answer.
type unreachableError struct {
	err  error
	hint string
}

func (e unreachableError) Error() string       { return e.err.Error() }
func (e unreachableError) Unwrap() error       { return e.err }
func (e unreachableError) nextSteps() []string { return []string{e.hint} }

// refusedError is something that is not done, with the ways on of which an
// operator has to choose one.
type refusedError struct {
	err   error
	hints []string
}

func (e refusedError) Error() string       { return e.err.Error() }
func (e refusedError) Unwrap() error       { return e.err }
func (e refusedError) nextSteps() []string { return e.hints }

// timedOutError is a wait that --timeout has ended. What was asked for is
// recorded all the same, and goes on.
type timedOutError struct{ waitingFor, hint string }

func (e timedOutError) Error() string       { return "timed out waiting for " + e.waitingFor }
func (e timedOutError) nextSteps() []string { return []string{e.hint} }

// interruptedError says that a signal ended a wait, and for what: empty if the manager
// had not answered yet. The request itself is recorded, and is carried out.
type interruptedError struct{ waitingFor, hint string }

func (e interruptedError) Error() string {
	if e.waitingFor == "" {
		return errInterrupted.Error()
	}
	return "interrupted while waiting for " + e.waitingFor
}
func (e interruptedError) Unwrap() error       { return errInterrupted }
func (e interruptedError) nextSteps() []string { return []string{e.hint} }

// argumentError is an error of a call whose field "name" is this argument.
type argumentError struct {
	name string
	err  error
}

func (e argumentError) Error() string { return e.err.Error() }
func (e argumentError) Unwrap() error { return e.err }

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
	if strings.HasSuffix(message, "produced zero addresses") { // gRPC's resolver
		return "its host name cannot be resolved here"
	}
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
	if own, ok := errors.AsType[hinted](err); ok {
		for _, text := range own.nextSteps() {
			if text != "" {
				r.Hints = append(r.Hints, text)
			}
		}
		return r
	}
	name := "VOLUME"
	if argument, ok := errors.AsType[argumentError](err); ok {
		name, err = argument.name, argument.err
	}
	s, ok := status.FromError(err)
	if !ok {
		return r
	}
	r.Error = s.Message()
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.BadRequest:
			r.addFields(d, name)
		case *errdetails.ErrorInfo:
			r.Reason = d.GetReason()
			r.hint(d.GetMetadata()["hint"])
			r.hint(reasonHint(d))
		}
	}
	if r.Code == exitUnreachable {
		r.hint(unreachableHint(r.Error))
	}
	return r
}

// unreachableHint tells the ends that do not understand one another's TLS from a
// manager that is not there. The words are those of Go's TLS and of gRPC.
func unreachableHint(message string) string {
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(message, w) })
	}
	switch {
	case has("first record does not look like a TLS handshake"):
		return "that manager does not use TLS: omit --tls-ca, --tls-cert, --tls-key and WEFT_TLS_*, or start it with them"
	case has("certificate required", "bad certificate", "unknown certificate authority"):
		return "that manager rejects this certificate: --tls-cert and --tls-key must be signed by the authority in its --tls-ca"
	case has("x509:"):
		return "the manager's certificate is not trusted: --tls-ca must be the authority that signed it, and the certificate must be for the name in --manager"
	case has("error reading server preface"):
		return "another program answers there, or the manager uses TLS: then set --tls-ca, --tls-cert and --tls-key"
	}
	if has("broken pipe", "connection reset") { // the refusal may be lost behind it
		return "the other end closes the connection: is it a manager with TLS that rejects this certificate?"
	}
	return "is it running there? set --manager or WEFT_MANAGER to its address"
}

func (r *report) hint(text string) {
	if text != "" && len(r.Hints) == 0 {
		r.Hints = append(r.Hints, text)
	}
}

// addFields names request fields by the flag that sets them.
func (r *report) addFields(d *errdetails.BadRequest, name string) {
	r.Fields = map[string]string{}
	for _, v := range d.GetFieldViolations() {
		flag := flagOf(v.GetField())
		if v.GetField() == "name" {
			flag = name
		}
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
	case "volume":
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

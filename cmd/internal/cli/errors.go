// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"weft.dev/weft/proto/block"
)

// The exit codes; ExitCodesText tables them for operators.
const (
	ExitDone        = 0
	ExitFailed      = 1
	ExitUsage       = 2
	ExitNotFound    = 3
	ExitExists      = 4
	ExitRefused     = 5
	ExitNoSpace     = 6
	ExitUnreachable = 7
	ExitTimedOut    = 8
	ExitInterrupted = 130 // 128 + SIGINT, as shells do
)

// ExitCodesText explains the exit codes to operators.
const ExitCodesText = `Exit codes of weft:

    0  done
    1  failed
    2  wrong usage: the command line or a value in it
    3  not found
    4  already exists with other parameters
    5  refused: in the present state, or to this user
    6  no space
    7  the volume manager cannot be reached
    8  timed out waiting; the request stands
  130  interrupted

Treat any other code as a failure. With -o json the error on stderr is an object
with the keys error, hints, reason, fields and exit_code.
`

// ExitCode is the one place where exit codes are decided.
func ExitCode(err error) int {
	if _, ok := errors.AsType[UsageError](err); ok {
		return ExitUsage
	}
	if _, ok := errors.AsType[timedOutError](err); ok || errors.Is(err, context.DeadlineExceeded) {
		return ExitTimedOut
	}
	if errors.Is(err, ErrInterrupted) {
		return ExitInterrupted
	}
	if _, ok := errors.AsType[RefusedError](err); ok {
		return ExitRefused
	}
	if _, ok := errors.AsType[UnreachableError](err); ok {
		return ExitUnreachable
	}
	switch status.Code(err) {
	case codes.OK:
		return ExitDone
	case codes.InvalidArgument, codes.OutOfRange:
		return ExitUsage
	case codes.NotFound:
		return ExitNotFound
	case codes.AlreadyExists:
		return ExitExists
	case codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated:
		return ExitRefused
	case codes.ResourceExhausted:
		return ExitNoSpace
	case codes.Unavailable:
		return ExitUnreachable
	}
	return ExitFailed
}

// ErrInterrupted is the cause of a context that SIGINT or SIGTERM has ended.
var ErrInterrupted = errors.New("interrupted")

// hinted is an error of this command with a hint for the operator.
type hinted interface {
	error
	nextSteps() []string
}

// UsageError is an invalid command line.
type UsageError struct {
	Err  error
	Hint string
}

func (e UsageError) Error() string       { return e.Err.Error() }
func (e UsageError) Unwrap() error       { return e.Err }
func (e UsageError) nextSteps() []string { return []string{e.Hint} }

// UnreachableError means that a peer other than a volume manager does not answer.
type UnreachableError struct {
	Err  error
	Hint string
}

func (e UnreachableError) Error() string       { return e.Err.Error() }
func (e UnreachableError) Unwrap() error       { return e.Err }
func (e UnreachableError) nextSteps() []string { return []string{e.Hint} }

// RefusedError is a refused action, with the alternatives from which an operator has to choose.
type RefusedError struct {
	Err   error
	Hints []string
}

func (e RefusedError) Error() string       { return e.Err.Error() }
func (e RefusedError) Unwrap() error       { return e.Err }
func (e RefusedError) nextSteps() []string { return e.Hints }

// AdvisedError is a failure with a hint.
type AdvisedError struct {
	Err   error
	Hints []string
}

func (e AdvisedError) Error() string       { return e.Err.Error() }
func (e AdvisedError) Unwrap() error       { return e.Err }
func (e AdvisedError) nextSteps() []string { return e.Hints }

// LateError is the cause of a context whose --timeout has passed.
type LateError struct {
	After time.Duration
	Hint  string
}

func (e LateError) Error() string       { return fmt.Sprintf("not within %v", e.After) }
func (e LateError) Unwrap() error       { return context.DeadlineExceeded }
func (e LateError) nextSteps() []string { return []string{e.Hint} }

// timedOutError is a wait that --timeout has ended. The request is recorded and still carried out.
type timedOutError struct{ waitingFor, hint string }

func (e timedOutError) Error() string       { return "timed out waiting for " + e.waitingFor }
func (e timedOutError) nextSteps() []string { return []string{e.hint} }

// interruptedError is a wait that a signal has ended; waitingFor is empty if the manager had not
// answered yet. The request is recorded and still carried out.
type interruptedError struct{ waitingFor, hint string }

func (e interruptedError) Error() string {
	if e.waitingFor == "" {
		return ErrInterrupted.Error()
	}
	return "interrupted while waiting for " + e.waitingFor
}
func (e interruptedError) Unwrap() error       { return ErrInterrupted }
func (e interruptedError) nextSteps() []string { return []string{e.hint} }

// ArgumentError is an error of a call whose field "name" is this argument.
type ArgumentError struct {
	Name string
	Err  error
}

func (e ArgumentError) Error() string { return e.Err.Error() }
func (e ArgumentError) Unwrap() error { return e.Err }

// unreachable turns a call without any answer into UNAVAILABLE with the address in the text; other
// errors and nil are returned as they are.
func unreachable(address string, err error) error {
	switch s := status.Convert(err); {
	case s.Code() == codes.DeadlineExceeded:
		return status.Errorf(codes.Unavailable, "volume manager at %s: no answer in time", address)
	case s.Code() == codes.Unavailable && len(s.Details()) == 0:
		return status.Errorf(codes.Unavailable, "volume manager at %s: %s", address, rootCause(s.Message()))
	}
	return err
}

// dialed matches the words that Go's net package puts before the cause of a failed connection.
var dialed = regexp.MustCompile(`^dial (tcp|unix) \S+ (connect: )?`)

// rootCause strips the wrapping of gRPC and Go ("connection error: desc = \"transport: Error while
// dialing: dial tcp 192.0.2.1:4480: connect: …\"") from the cause that an operator can act on.
func rootCause(message string) string {
	if strings.HasSuffix(message, "produced zero addresses") { // gRPC's resolver
		return "its host name cannot be resolved here"
	}
	for _, wrapping := range []string{`connection error: desc = "`, "transport: "} {
		if _, after, ok := strings.Cut(message, wrapping); ok {
			message = strings.TrimSuffix(after, `"`)
		}
	}
	return dialed.ReplaceAllString(strings.TrimPrefix(message, "Error while dialing: "), "")
}

// Report is an error as shown to people and, with -o json, to programs.
type Report struct {
	Error  string            `json:"error"`
	Hints  []string          `json:"hints,omitempty"`
	Reason string            `json:"reason,omitempty"`
	Fields map[string]string `json:"fields,omitempty"` // the fault of each flag
	Code   int               `json:"exit_code"`
}

// plain is the text of an error without the words of gRPC.
func plain(err error) string {
	inner, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err)
	if !ok {
		return err.Error()
	}
	return strings.Replace(err.Error(), inner.Error(), inner.GRPCStatus().Message(), 1)
}

// NewReport makes a report of a command's error.
func NewReport(err error) Report {
	r := Report{Error: plain(err), Code: ExitCode(err)}
	if own, ok := errors.AsType[hinted](err); ok {
		for _, text := range own.nextSteps() {
			if text != "" {
				r.Hints = append(r.Hints, text)
			}
		}
		return r
	}
	name := "VOLUME"
	if argument, ok := errors.AsType[ArgumentError](err); ok {
		name, err = argument.Name, argument.Err
	}
	s, ok := status.FromError(err)
	if !ok {
		return r
	}
	r.Error = plain(err)
	object := r.Error // of an error of our own, which begins with what it is about
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.BadRequest:
			r.addFields(d, name)
		case *errdetails.ErrorInfo:
			r.Reason = d.GetReason()
			object = cmp.Or(d.GetMetadata()["object"], object)
			r.hint(d.GetMetadata()["hint"])
			r.hint(reasonHint(d))
		}
	}
	if r.Code == ExitNotFound {
		r.hint(listHint(object))
	}
	if r.Code == ExitUnreachable {
		r.hint(unreachableHint(r.Error))
	}
	return r
}

// unreachableHint tells a TLS mismatch between the two ends from a manager that does not run. It
// knows the wording of Go's TLS and of gRPC.
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
	if has("broken pipe", "connection reset") { // such an error may hide the refusal
		return "the other end closes the connection: is it a manager with TLS that rejects this certificate?"
	}
	return "is it running there? set --manager or WEFT_MANAGER to its address"
}

func (r *Report) hint(text string) {
	if text != "" && len(r.Hints) == 0 {
		r.Hints = append(r.Hints, text)
	}
}

// addFields names request fields by the flags that set them.
func (r *Report) addFields(d *errdetails.BadRequest, name string) {
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

// flagOf translates a request's field to the command line's flag.
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
	case "seconds":
		return "--for"
	case "snapshot": // of weft volume restore
		return "--to"
	case "snapshots":
		return "VOLUME"
	case "scrub_every_seconds":
		return "--scrub-every"
	case "rebuild_bytes_per_second":
		return "--rebuild-rate"
	case "bytes_per_second":
		return "--rate"
	case "min_size_bytes":
		return "--min-size"
	case "max_size_bytes":
		return "--max-size"
	}
	if strings.HasPrefix(field, "snapshots[") {
		return "VOLUME@NAME"
	}
	if flag, ok := block.FlagOf(field); ok {
		return "--" + flag
	}
	return "--" + strings.ReplaceAll(field, "_", "-")
}

// reasonHint is the next step where the manager names none: a volume can be explained.
func reasonHint(d *errdetails.ErrorInfo) string {
	volume, ok := strings.CutPrefix(d.GetMetadata()["object"], "volume ")
	if !ok || d.GetReason() == "" {
		return ""
	}
	return fmt.Sprintf("run %q", "weft explain volume "+volume)
}

// listHint names the command that lists the existing objects when one was not found.
func listHint(object string) string {
	kind, name, _ := strings.Cut(object, " ")
	if kind == "volume" && IsSnapshotName(name) {
		kind = "snapshot"
	}
	switch kind {
	case "volume", "snapshot", "node", "drive", "pool":
		return fmt.Sprintf("`weft %s list` lists the %ss that exist", kind, kind)
	}
	return ""
}

// PrintError prints an error: for people, or as JSON if -o json was given.
func PrintError(w io.Writer, f Format, err error) {
	r := NewReport(err)
	if f == FormatJSON {
		b, _ := json.Marshal(r) // it has only strings and integers
		fmt.Fprintf(w, "%s\n", b)
		return
	}
	fmt.Fprintf(w, "weft: error: %s\n", r.Error)
	for _, hint := range r.Hints {
		fmt.Fprintf(w, "weft: hint: %s\n", hint)
	}
}

// Interrupted reports whether err is merely the result of a signal.
func Interrupted(ctx context.Context, err error) bool {
	return errors.Is(context.Cause(ctx), ErrInterrupted) && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled)
}

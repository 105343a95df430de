// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
)

func answer(t *testing.T, code codes.Code, text string, details ...protoadapt.MessageV1) error {
	t.Helper()
	s, err := status.New(code, text).WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return s.Err()
}

func TestErrorsAreToldWithHintsAndExitCodes(t *testing.T) {
	info := func(reason string, metadata map[string]string) *errdetails.ErrorInfo {
		return &errdetails.ErrorInfo{Reason: reason, Domain: "weft.dev", Metadata: metadata}
	}
	field := func(name, text string) *errdetails.BadRequest {
		return &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: name, Description: text}}}
	}
	for _, test := range []struct {
		err  error
		want string
		json string
		code int
	}{{
		err:  answer(t, codes.NotFound, "volume db1: not found"),
		want: "weft: error: volume db1: not found\nweft: hint: `weft volume list` lists the volumes that exist\n",
		json: `{"error":"volume db1: not found","hints":["` + "`weft volume list`" + ` lists the volumes that exist"],"exit_code":3}`, code: 3,
	}, {
		err:  fmt.Errorf("log in: %w", answer(t, codes.FailedPrecondition, "the token was used")),
		want: "weft: error: log in: the token was used\n",
		json: `{"error":"log in: the token was used","exit_code":5}`, code: 5,
	}, {
		err:  answer(t, codes.InvalidArgument, "seconds: 200h0m0s; a token is good for 168h0m0s at most", field("seconds", "seconds: 200h0m0s; a token is good for 168h0m0s at most")),
		want: "weft: error: --for: 200h0m0s; a token is good for 168h0m0s at most\n",
		json: `{"error":"--for: 200h0m0s; a token is good for 168h0m0s at most","fields":{"--for":"200h0m0s; a token is good for 168h0m0s at most"},"exit_code":2}`, code: 2,
	}, {
		err:  answer(t, codes.NotFound, "device /dev/sdb on node t1: not found", info("", map[string]string{"hint": "look there"})),
		want: "weft: error: device /dev/sdb on node t1: not found\nweft: hint: look there\n",
		json: `{"error":"device /dev/sdb on node t1: not found","hints":["look there"],"exit_code":3}`, code: 3,
	}, {
		err:  answer(t, codes.InvalidArgument, "size_bytes: must be at least 1MiB", field("size_bytes", "size_bytes: must be at least 1MiB")),
		want: "weft: error: --size: must be at least 1MiB\n",
		json: `{"error":"--size: must be at least 1MiB","fields":{"--size":"must be at least 1MiB"},"exit_code":2}`, code: 2,
	}, {
		err:  answer(t, codes.InvalidArgument, "volume db1: two things are wrong", field("copies", "must be 1 to 3")),
		want: "weft: error: volume db1: two things are wrong; --copies: must be 1 to 3\n",
		json: `{"error":"volume db1: two things are wrong; --copies: must be 1 to 3","fields":{"--copies":"must be 1 to 3"},"exit_code":2}`, code: 2,
	}, {
		err:  answer(t, codes.FailedPrecondition, "drive /dev/sdb: holds ext4", info("FOREIGN_DATA", map[string]string{"hint": "add --force-erase ext4"})),
		want: "weft: error: drive /dev/sdb: holds ext4\nweft: hint: add --force-erase ext4\n",
		json: `{"error":"drive /dev/sdb: holds ext4","hints":["add --force-erase ext4"],"reason":"FOREIGN_DATA","exit_code":5}`, code: 5,
	}, {
		err:  answer(t, codes.FailedPrecondition, "volume db1: column 0 has no in-sync leg", info("NO_IN_SYNC_LEG", map[string]string{"object": "volume db1"})),
		want: "weft: error: volume db1: column 0 has no in-sync leg\nweft: hint: run \"weft explain volume db1\"\n",
		json: `{"error":"volume db1: column 0 has no in-sync leg","hints":["run \"weft explain volume db1\""],"reason":"NO_IN_SYNC_LEG","exit_code":5}`, code: 5,
	}, {
		err:  answer(t, codes.AlreadyExists, "volume db1: already exists"),
		want: "weft: error: volume db1: already exists\n",
		json: `{"error":"volume db1: already exists","exit_code":4}`, code: 4,
	}, {
		err:  answer(t, codes.ResourceExhausted, "volume db1: no space"),
		want: "weft: error: volume db1: no space\n",
		json: `{"error":"volume db1: no space","exit_code":6}`, code: 6,
	}, {
		err:  unreachable("m1:4480", answer(t, codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 192.0.2.1:4480: connect: connection refused"`)),
		want: "weft: error: volume manager at m1:4480: connection refused\nweft: hint: is it running there? set --manager or WEFT_MANAGER to its address\n",
		json: `{"error":"volume manager at m1:4480: connection refused","hints":["is it running there? set --manager or WEFT_MANAGER to its address"],"exit_code":7}`, code: 7,
	}, {
		err:  unreachable("unix:/run/m", answer(t, codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial unix /run/m: connect: no such file or directory"`)),
		want: "weft: error: volume manager at unix:/run/m: no such file or directory\nweft: hint: is it running there? set --manager or WEFT_MANAGER to its address\n",
		json: `{"error":"volume manager at unix:/run/m: no such file or directory","hints":["is it running there? set --manager or WEFT_MANAGER to its address"],"exit_code":7}`, code: 7,
	}, {
		err:  unreachable("m1:4480", answer(t, codes.Unavailable, `connection error: desc = "error reading server preface: EOF"`)),
		want: "weft: error: volume manager at m1:4480: error reading server preface: EOF\nweft: hint: another program answers there, or the manager uses TLS: then set --tls-ca, --tls-cert and --tls-key\n",
		json: `{"error":"volume manager at m1:4480: error reading server preface: EOF","hints":["another program answers there, or the manager uses TLS: then set --tls-ca, --tls-cert and --tls-key"],"exit_code":7}`, code: 7,
	}, {
		err:  timedOutError{waitingFor: "node t1", hint: "repeat"},
		want: "weft: error: timed out waiting for node t1\nweft: hint: repeat\n",
		json: `{"error":"timed out waiting for node t1","hints":["repeat"],"exit_code":8}`, code: 8,
	}, {
		err:  UsageError{Err: errors.New("VOLUME: missing"), Hint: "usage: x"},
		want: "weft: error: VOLUME: missing\nweft: hint: usage: x\n",
		json: `{"error":"VOLUME: missing","hints":["usage: x"],"exit_code":2}`, code: 2,
	}, {
		err:  fmt.Errorf("part: %w", ErrInterrupted),
		want: "weft: error: part: interrupted\n",
		json: `{"error":"part: interrupted","exit_code":130}`, code: 130,
	}, {
		err:  answer(t, codes.Internal, "broken"),
		want: "weft: error: broken\n",
		json: `{"error":"broken","exit_code":1}`, code: 1,
	}} {
		var text, program bytes.Buffer
		PrintError(&text, FormatTable, test.err)
		PrintError(&program, FormatJSON, test.err)
		if text.String() != test.want || strings.TrimSpace(program.String()) != test.json {
			t.Errorf("%v prints\n%s%swant\n%s%s", test.err, text.String(), program.String(), test.want, test.json)
		}
		if got := ExitCode(test.err); got != test.code {
			t.Errorf("exitCode(%v) = %d, want %d", test.err, got, test.code)
		}
	}
	if got := ExitCode(nil); got != 0 {
		t.Errorf("exitCode(nil) = %d, want 0", got)
	}
}

func TestEveryExitCodeIsInTheHelp(t *testing.T) {
	for _, code := range []int{ExitDone, ExitFailed, ExitUsage, ExitNotFound, ExitExists, ExitRefused, ExitNoSpace, ExitUnreachable, ExitTimedOut, ExitInterrupted} {
		if !strings.Contains(ExitCodesText, fmt.Sprintf("\n%5d  ", code)) {
			t.Errorf("exit code %d is not in the help", code)
		}
	}
}

func TestOnlyASignalMakesAnErrorAnInterruption(t *testing.T) {
	stopped, stop := context.WithCancelCause(t.Context())
	stop(ErrInterrupted)
	for _, test := range []struct {
		ctx  context.Context
		err  error
		want bool
	}{
		{stopped, context.Canceled, true},
		{stopped, status.Error(codes.Canceled, "context canceled"), true},
		{stopped, status.Error(codes.NotFound, "volume db1: not found"), false},
		{stopped, nil, false},
		{t.Context(), context.Canceled, false},
	} {
		if got := Interrupted(test.ctx, test.err); got != test.want {
			t.Errorf("interrupted(%v, %v) = %v, want %v", context.Cause(test.ctx), test.err, got, test.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestACommandThatFailsTellsHow(t *testing.T) {
	o := Operator{Program: "/bin/sh", Manager: "m1:4480"}
	out, err := o.Try(t.Context(), "-c", "echo $WEFT_MANAGER; echo why >&2; exit 3")
	var failed *CommandError
	if !errors.As(err, &failed) || failed.Code != 3 || failed.Stderr != "why\n" || !strings.HasSuffix(err.Error(), "exit code 3: why") {
		t.Errorf("a command that fails = %v, want a CommandError with code 3 and its output", err)
	}
	if out != "m1:4480\n" {
		t.Errorf("it printed %q, want the given manager", out)
	}
	if out, err := o.Try(t.Context(), "-c", "echo done"); out != "done\n" || err != nil {
		t.Errorf("a command that succeeds = %q, %v", out, err)
	}
	if _, err := (Operator{Program: "/nowhere/weft"}).Try(t.Context(), "status"); err == nil || errors.As(err, &failed) {
		t.Errorf("a missing program = %v, want another kind of error", err)
	}
}

func TestStateHasWhatFailedToo(t *testing.T) {
	state := Operator{Program: "/bin/echo"}.State(t.Context())
	if d := cmp.Diff("$ weft status\nstatus\n$ weft volume list\nvolume list\n$ weft attachment list\nattachment list\n$ weft event list\nevent list\n", state); d != "" {
		t.Errorf("State (-want +got):\n%s", d)
	}
	if state := (Operator{Program: "/bin/false"}).State(t.Context()); strings.Count(state, "exit code 1") != 4 {
		t.Errorf("State of a cluster that does not answer = %q, want each command's error", state)
	}
}

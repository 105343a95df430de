// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestTheNewestLinesOfALogAreKept(t *testing.T) {
	var out bytes.Buffer
	o := Options{LogFormat: "text", LogLevel: "info"}
	log, err := o.Logger(&out)
	if err != nil {
		t.Fatal(err)
	}
	log.Info("first")
	if got := string(o.Recent.Lines()); got != out.String() || !strings.Contains(got, "msg=first") {
		t.Errorf("kept %q of the log %q", got, out.String())
	}
	for i := range 40_000 {
		fmt.Fprintf(o.Recent, "line %d, which is about as long as a line of a log is\n", i)
	}
	lines := strings.Split(strings.TrimSpace(string(o.Recent.Lines())), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "line 39999,") {
		t.Errorf("the newest line is %q", last)
	}
	if size := len(o.Recent.Lines()); size > recentMost || size < recentMost/2 {
		t.Errorf("%d bytes are kept, want at most %d, and not much less", size, recentMost)
	}
	for _, l := range lines {
		if !strings.HasPrefix(l, "line ") || !strings.HasSuffix(l, " is") {
			t.Fatalf("line %q was cut", l)
		}
	}
	var none *Recent
	if _, err := io.WriteString(none, "x\n"); err != nil || none.Lines() != nil {
		t.Errorf("nobody keeps %q, %v", none.Lines(), err)
	}
}

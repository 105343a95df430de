// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Suite is the Go tests of a package, to run as root in a machine.
type Suite struct {
	Package string // "./target/nvmet", from the module's root
	Run     string // which tests, as go test -run; "" is all
	Env     []string
	Args    []string      // flags of the test program, such as -test.short
	Limit   time.Duration // of all tests together; default 5 minutes

	// MaySkip lists the tests that may skip themselves in the guest, with the reasons. Any
	// other skip is a failure: it would hide a regression.
	MaySkip map[string]string
}

// GoTest builds the tests of a package, runs them in the machine, and reports each as a
// subtest of t. WEFT_GUEST is set in the guest, which tells a test that it runs in a
// machine made for it, with the kernel that it needs.
func GoTest(t *testing.T, m *Machine, s Suite) {
	t.Helper()
	s.Limit = orDefault(s.Limit, 5*time.Minute)
	out, err := m.runSuite(t.Context(), s)
	results, parseErr := testResults(t.Context(), s.Package, out)
	if parseErr != nil {
		t.Fatalf("read the results of %s: %v\n%s", s.Package, parseErr, out)
	}
	failed := false
	for _, r := range results {
		failed = failed || r.action == "fail"
		t.Run(r.test, func(t *testing.T) { r.report(t, s) })
	}
	if len(results) == 0 {
		t.Errorf("%s has no test that matches %q", s.Package, s.Run)
	}
	if err != nil && !failed {
		t.Errorf("%v\n%s", err, tailOf(out))
	}
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

// runSuite returns the output of the test program. The error means that the program failed.
func (m *Machine) runSuite(ctx context.Context, s Suite) ([]byte, error) {
	root, err := ModuleRoot(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "weft-test-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "suite.test")
	if err := goTool(ctx, root, "test", "-c", "-ldflags=-s -w", "-o", program, s.Package); err != nil {
		return nil, err
	}
	if _, err := os.Stat(program); err != nil {
		return nil, fmt.Errorf("%s has no tests", s.Package)
	}
	work := path.Join("/tmp/suite", path.Clean(filepath.ToSlash(s.Package)))
	if err := m.Push(ctx, program, work+"/suite.test"); err != nil {
		return nil, err
	}
	if err := m.pushTree(ctx, filepath.Join(root, s.Package, "testdata"), work+"/testdata"); err != nil {
		return nil, err
	}
	return m.runTestProgram(ctx, s, work)
}

func (m *Machine) runTestProgram(ctx context.Context, s Suite, work string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Limit+30*time.Second)
	defer cancel()
	argv := []string{"./suite.test", "-test.v=test2json", "-test.timeout=" + s.Limit.String()}
	if s.Run != "" {
		argv = append(argv, "-test.run="+s.Run)
	}
	log, err := m.logFile(path.Base(work)) // readable while it runs
	if err != nil {
		return nil, err
	}
	defer log.Close()
	var out bytes.Buffer
	both := io.MultiWriter(&out, log) // one goroutine writes
	err = m.Do(ctx, Command{
		Argv:   append(argv, s.Args...),
		Env:    append([]string{"WEFT_GUEST=" + KernelVersion()}, s.Env...),
		Dir:    work,
		Stdout: both, Stderr: both,
	})
	return out.Bytes(), err
}

func (m *Machine) pushTree(ctx context.Context, local, remote string) error {
	err := filepath.WalkDir(local, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(local, p)
		if err != nil {
			return err
		}
		return m.Push(ctx, p, path.Join(remote, filepath.ToSlash(rel)))
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// testResult is the result of one top-level test.
type testResult struct {
	test   string
	action string // pass, fail or skip; "" if it never ended
	output strings.Builder
	skips  []string // it or its subtests that skipped
}

// testEvent is a line of test2json.
type testEvent struct {
	Action string
	Test   string
	Output string
}

// testResults reads the output of a test program run with -test.v=test2json.
func testResults(ctx context.Context, pkg string, out []byte) ([]*testResult, error) {
	cmd := exec.CommandContext(ctx, "go", "tool", "test2json", "-p", pkg)
	cmd.Stdin = bytes.NewReader(out)
	lines, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	return readEvents(bytes.NewReader(lines))
}

func readEvents(r io.Reader) ([]*testResult, error) {
	var order []*testResult
	byName := make(map[string]*testResult)
	for dec := json.NewDecoder(r); ; {
		var e testEvent
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			return order, nil
		} else if err != nil {
			return nil, err
		}
		if e.Test == "" {
			continue
		}
		top, _, _ := strings.Cut(e.Test, "/")
		t := byName[top]
		if t == nil {
			t = &testResult{test: top}
			byName[top] = t
			order = append(order, t)
		}
		t.add(e)
	}
}

func (r *testResult) add(e testEvent) {
	r.output.WriteString(e.Output)
	if e.Action == "skip" {
		r.skips = append(r.skips, e.Test)
	}
	if e.Test == r.test && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip") {
		r.action = e.Action
	}
}

func (r *testResult) report(t *testing.T, s Suite) {
	t.Log("\n" + r.output.String())
	switch r.action {
	case "fail":
		t.Errorf("%s failed in the guest", r.test)
	case "":
		t.Errorf("%s did not end in the guest", r.test)
	}
	for _, name := range r.skips {
		if why, ok := s.maySkip(name); ok {
			t.Logf("%s may skip: %s", name, why)
			continue
		}
		t.Errorf("%s skipped itself in the guest, where it should run", name)
	}
}

func (s Suite) maySkip(test string) (why string, ok bool) {
	for pattern, why := range s.MaySkip {
		if regexp.MustCompile("^(?:" + pattern + ")$").MatchString(test) {
			return why, true
		}
	}
	return "", false
}

func tailOf(out []byte) []byte { return out[max(0, len(out)-4096):] }

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestEachMutationFitsTheCode keeps the list in step with the code: each text to be removed
// occurs exactly once.
func TestEachMutationFitsTheCode(t *testing.T) {
	all, err := readAll("list")
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Fatal("the list is empty")
	}
	names := map[string]bool{}
	for _, m := range all {
		names[m.name] = true
	}
	for _, m := range all {
		for _, name := range m.with {
			if !names[name] || name == m.name || !m.whole {
				t.Errorf("%s: with %s: want another mutation, on a whole cluster", m.name, name)
			}
		}
		text, err := os.ReadFile(filepath.Join("..", "..", m.file))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if _, err := m.apply(text); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}

// Each trace that package explore keeps belongs to a mutation.
func TestEachTraceIsOfAMutation(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", traces, "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d traces, %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		if _, err := os.Stat(filepath.Join("list", name+".txtar")); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func TestAMutationIsReadWhole(t *testing.T) {
	const good = "what: w\nfile: f.go\ntest: ./a ./b\nrun: TestX\nflags: -n 3\nquick: yes\nwhole: TestY\n-- before --\nif x {\n-- after --\nif false {\n"
	m, err := parse("n", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	if m.what != "w" || m.file != "f.go" || len(m.packages) != 2 || m.run != "TestX" || !slices.Equal(m.flags, []string{"-n", "3"}) || !m.quick || !m.whole || m.directed != "TestY" ||
		string(m.before) != "if x {\n" || string(m.after) != "if false {\n" {
		t.Errorf("parse(%q) = %+v", good, m)
	}
	for _, bad := range []string{
		strings.Replace(good, "file: f.go\n", "", 1),
		strings.Replace(good, "run: TestX", "runs: TestX", 1),
		strings.Replace(good, "if false {", "if x {", 1),
		strings.Replace(good, "-- after --", "-- later --", 1),
		strings.Replace(good, "whole: TestY", "whole: thn", 1),
	} {
		if _, err := parse("n", []byte(bad)); err == nil {
			t.Errorf("parse(%q) has no error", bad)
		}
	}
	if _, err := m.apply([]byte("if x {\nif x {\n")); err == nil {
		t.Error("a guard that is there twice is taken away once")
	}
}

// With -faults a mutation is tried on the lives that can notice it.
func TestWhichLivesAMutationIsTriedOn(t *testing.T) {
	for whole, want := range map[string]string{
		"yes":       "-run TestNothingIsLost ./e2e/fault -plain -faults 1200",
		"thin":      "-run TestNothingIsLost ./e2e/fault -thin -faults 300",
		"snapshots": "-run TestNothingIsLost ./e2e/fault -snapshots -faults 300",
		"TestY":     "-run ^TestY$ ./e2e/fault",
	} {
		m := &mutation{}
		if err := m.set("whole", whole); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(m.tests(options{faults: 1200}), " "); got != want {
			t.Errorf("whole: %s: %q, want %q", whole, got, want)
		}
	}
}

func TestWhatATestRunSays(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		out  string
		err  error
		want verdict
	}{
		{"ok  \tx\t0.1s\n", nil, survived},
		{"ok  \tx\t0.1s [no tests to run]\n", nil, broken},
		{"--- FAIL: TestX (0.00s)\nFAIL\n", failed, noticed},
		{"panic: test timed out after 1s\n", failed, noticed},
		{"FAIL\tx [build failed]\nFAIL\n", failed, broken},
		{"go: cannot find main module\n", failed, broken},
	} {
		if got := read(c.out, c.err); got.verdict != c.want {
			t.Errorf("read(%q) = %v, want %v", c.out, got, c.want)
		}
	}
}

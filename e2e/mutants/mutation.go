// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/txtar"
)

// mutation removes one guard. It is kept in list/NAME.txtar:
//
//	what: an answer is given before the store's commit
//	file: volmgr/volmgr.go
//	test: ./volmgr
//	run: TestNothingIsSaidBeforeTheCommit
//	flags: -search 300
//	quick: yes
//	whole: yes
//	with: no-lease
//	-- before --
//	the lines as they are
//	-- after --
//	the lines without the guard
//
// If random faults trigger a mutation too rarely, a directed test places them:
//
//	whole: TestALateReportOfARebuildIsNotTakenForANewerOnes
//
// One that only clusters with snapshots can notice names their kind, by the flag of e2e/fault: thin volumes, or
// snapshots of volumes that are not thin. They take four times as long, and get a quarter of the faults:
//
//	whole: thin
//
// Where e2e/explore/testdata has NAME.txt, its steps must break a promise as well.
type mutation struct {
	name     string
	what     string   // what is wrong then, as a sentence
	file     string   // the file to change, from the repository's root
	packages []string // the packages whose tests must notice
	run      string   // which of their tests; empty: all
	flags    []string // extra flags for the tests
	quick    bool     // part of what CI runs
	whole    bool     // also tried on the fault suite of a whole cluster
	lives    string   // the kind of clusters there, a flag of that suite
	directed string   // the one test there that places the faults for it; empty: random faults
	with     []string // the guards behind this one: nothing shows there unless they are removed, too
	before   []byte   // found in the file exactly once
	after    []byte
}

// readAll reads the kept mutations, sorted by name.
func readAll(dir string) ([]*mutation, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
	if err != nil {
		return nil, err
	}
	var all []*mutation
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		m, err := parse(strings.TrimSuffix(filepath.Base(path), ".txtar"), data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, m)
	}
	return all, nil
}

func parse(name string, data []byte) (*mutation, error) {
	archive := txtar.Parse(data)
	m := &mutation{name: name}
	for line := range strings.Lines(string(archive.Comment)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok {
			return nil, fmt.Errorf("line %q: want KEY: VALUE", strings.TrimSpace(line))
		}
		if err := m.set(key, value); err != nil {
			return nil, err
		}
	}
	parts := map[string][]byte{}
	for _, f := range archive.Files {
		parts[f.Name] = f.Data
	}
	after, ok := parts["after"]
	m.before, m.after = parts["before"], after
	switch {
	case m.what == "" || m.file == "" || len(m.packages) == 0:
		return nil, fmt.Errorf("what, file and test must be given")
	case len(m.before) == 0 || !ok || len(parts) != 2:
		return nil, fmt.Errorf("want two parts, before and after, not %v", slices.Sorted(maps.Keys(parts)))
	case bytes.Equal(m.before, m.after):
		return nil, fmt.Errorf("before and after are the same")
	}
	return m, nil
}

// set sets a field of a mutation from a line of its file.
func (m *mutation) set(key, value string) error {
	switch key {
	case "what":
		m.what = value
	case "file":
		m.file = value
	case "test":
		m.packages = strings.Fields(value)
	case "run":
		m.run = value
	case "flags":
		m.flags = strings.Fields(value)
	case "quick":
		m.quick = value == "yes"
	case "whole":
		m.whole, m.lives = true, "plain"
		switch {
		case value == "thin" || value == "snapshots":
			m.lives = value
		case strings.HasPrefix(value, "Test"):
			m.directed = value
		case value != "yes":
			return fmt.Errorf("whole: %s: want yes, thin, snapshots, or a test", value)
		}
	case "with":
		m.with = strings.Fields(value)
	default:
		return fmt.Errorf("key %q is not known", key)
	}
	return nil
}

// apply returns the text of a file without the guard.
func (m *mutation) apply(text []byte) ([]byte, error) {
	if n := bytes.Count(text, m.before); n != 1 {
		return nil, fmt.Errorf("%s holds the guard's lines %d times, want once: bring the mutation up to date", m.file, n)
	}
	return bytes.Replace(text, m.before, m.after, 1), nil
}

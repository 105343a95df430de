// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Operators build alerts and scripts on these names: the page must list every one of them and no
// other. The test finds them in the source where they are declared.
func TestTheMonitoringPageNamesWhatThereIs(t *testing.T) {
	page, err := os.ReadFile("../../docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range []struct {
		what, files, prefix string
		declared, shown     *regexp.Regexp
		least               int
	}{
		{"metric", "../../volmgr/*.go", "weft_", regexp.MustCompile(`\bdesc\("([a-z_]+)"`), nil, 8},
		{"metric", "../../volmgr/*.go", "weft_volmgr_", regexp.MustCompile(`\bhistogram\("([a-z_]+)"`), nil, 2},
		{"metric", "../../volmgr/*.go", "", regexp.MustCompile(`Name: "(weft_[a-z_]+[a-z])"`), nil, 1},
		{"metric", "../../initiator/*.go", "weft_initiator_", regexp.MustCompile(`\bmetric\("([a-z_]+)"`), nil, 6},
		{"metric", "../../target/*.go", "weft_target_", regexp.MustCompile(`\bmetric\("([a-z_]+)"`), nil, 11},
		{"metric", "../internal/daemon/*.go", "", regexp.MustCompile(`Name: "(weft_[a-z_]+)"`), nil, 2},
		{"event", "../../volmgr/event/*.go", "", regexp.MustCompile(`\b\w+\s*= "([a-z]+\.[a-z-]+)"`), regexp.MustCompile("`((?:node|target|initiator|agent|drive|pool|volume|leg|store|token|authority|access)\\.[a-z-]+)`"), 45},
		{"reason", "../../volmgr/cluster/*.go", "", regexp.MustCompile(`\bReason\w+\s*= "([A-Z_]+)"`), regexp.MustCompile("(?m)`([A-Z]+(?:_[A-Z]+)+)`"), 25},
	} {
		names := declaredIn(t, list.files, list.declared)
		if len(names) < list.least {
			t.Errorf("found %d of %s in %s, want at least %d", len(names), list.what, list.files, list.least)
		}
		for name := range names {
			if !strings.Contains(string(page), "`"+list.prefix+name+"`") {
				t.Errorf("docs/monitoring.md lacks the %s %s%s", list.what, list.prefix, name)
			}
		}
		if list.shown == nil {
			continue
		}
		for _, shown := range list.shown.FindAllStringSubmatch(string(page), -1) {
			if !names[shown[1]] {
				t.Errorf("docs/monitoring.md has the %s %s, which does not exist", list.what, shown[1])
			}
		}
	}
}

// declaredIn finds the names that match in files other than tests.
func declaredIn(t *testing.T, files string, declared *regexp.Regexp) map[string]bool {
	t.Helper()
	paths, err := filepath.Glob(files)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range declared.FindAllStringSubmatch(string(text), -1) {
			names[match[1]] = true
		}
	}
	return names
}

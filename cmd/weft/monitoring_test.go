// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"weft.dev/weft/cmd/internal/cli"
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
		{"metric", "../../proto/metric/*.go", "", regexp.MustCompile(`= "((?:weft|csi)_[a-z_]+)"`), regexp.MustCompile("`((?:weft|csi)_[a-z_]+)`"), 45},
		{"event", "../../volmgr/event/*.go", "", regexp.MustCompile(`\b\w+\s*= "([a-z]+\.[a-z-]+)"`), regexp.MustCompile("`((?:node|target|initiator|agent|drive|pool|volume|leg|store|token|authority|access)\\.[a-z-]+)`"), 45},
		{"reason", "../../volmgr/cluster/*.go ../../proto/access/*.go ../../proto/pb/refusal.go", "", regexp.MustCompile(`\bReason\w+\s*= "([A-Z_]+)"`), regexp.MustCompile("(?m)`([A-Z]+(?:_[A-Z]+)+)`"), 25},
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
	var paths []string
	for _, pattern := range strings.Fields(files) {
		some, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, some...)
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

// Whoever gets an alert types what it says.
func TestTheCommandsThatAlertsNameExist(t *testing.T) {
	rules, err := os.ReadFile("../../deploy/helm/weft/monitoring/rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(rules)), " ") // YAML breaks long lines
	root := newRoot(&cli.Globals{})
	commands := regexp.MustCompile("`weft ([^`]+)`").FindAllStringSubmatch(text, -1)
	if len(commands) < 25 {
		t.Errorf("found %d commands, want one in each alert", len(commands))
	}
	for _, match := range commands {
		words := strings.Fields(regexp.MustCompile(`\{\{[^}]*\}\}`).ReplaceAllString(match[1], "NAME"))
		cmd, args, err := root.Find(words)
		if err != nil || !cmd.Runnable() {
			t.Errorf("weft %s: there is no such command: %v", match[1], err)
			continue
		}
		if err := cmd.Args(cmd, args); err != nil {
			t.Errorf("weft %s: %v", match[1], err)
		}
	}
}

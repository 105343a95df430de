// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/cmd/internal/cli"
)

// A command in the documentation: in a code block or between backticks, alone or in a line of a shell.
var inGuide = regexp.MustCompile("(?m)(?:^|`|-- |\\(|&& |\\| |ssh \\S+ ['\"]?)weft ([a-z][^`#|&;\\n\\\\]*)")

// The commands that the documentation shows must exist, with their flags.
func TestTheDocumentationShowsCommandsThatExist(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	pages = slices.DeleteFunc(pages, func(page string) bool { return page == referenceFile }) // generated
	found := 0
	for _, page := range append(pages, "../../README.md", "../../CHANGELOG.md", "../../deploy/README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range inGuide.FindAllStringSubmatch(string(text), -1) {
			found++
			checkShown(t, page, match[1])
		}
	}
	if found < 100 {
		t.Errorf("found %d commands in the documentation, want all of them", found)
	}
}

func checkShown(t *testing.T, page, shown string) {
	t.Helper()
	words := slices.DeleteFunc(strings.Fields(shown), func(w string) bool { return w == "…" })
	root := newRoot(&cli.Globals{})
	root.InitDefaultHelpCmd()
	cmd, rest, err := root.Find(words)
	if err != nil || cmd.HasSubCommands() && len(rest) > 0 && !strings.HasPrefix(rest[0], "--") {
		t.Errorf("%s shows %q: no such command", page, shown)
		return
	}
	for _, word := range rest {
		if name, ok := strings.CutPrefix(word, "--"); ok && name != "help" && cmd.Flag(name) == nil {
			t.Errorf("%s shows %q: no flag --%s", page, shown, name)
		}
	}
}

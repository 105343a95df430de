// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A command in the operators' guide: in a code block or between backticks.
var inGuide = regexp.MustCompile("(?m)(?:^|`|-- |\\()weft ([a-z][^`#|\\n\\\\]*)")

// What the guide tells operators to type must exist, flags too.
func TestTheGuideShowsCommandsThatExist(t *testing.T) {
	text, err := os.ReadFile("../../deploy/README.md")
	if err != nil {
		t.Fatal(err)
	}
	found := inGuide.FindAllStringSubmatch(string(text), -1)
	if len(found) < 40 {
		t.Fatalf("found %d commands in the guide, want all of them", len(found))
	}
	for _, match := range found {
		words := slices.DeleteFunc(strings.Fields(match[1]), func(w string) bool { return w == "…" })
		root := newRoot(&globals{})
		root.InitDefaultHelpCmd()
		cmd, rest, err := root.Find(words)
		if err != nil || cmd.HasSubCommands() && len(rest) > 0 && !strings.HasPrefix(rest[0], "--") {
			t.Errorf("guide shows %q: no such command", match[1])
			continue
		}
		for _, word := range rest {
			if name, ok := strings.CutPrefix(word, "--"); ok && name != "help" && cmd.Flag(name) == nil {
				t.Errorf("guide shows %q: no flag --%s", match[1], name)
			}
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/console"
)

// everyCommand is the tree of commands, without cobra's additions.
func everyCommand(t *testing.T) []*cobra.Command {
	t.Helper()
	var all []*cobra.Command
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		all = append(all, cmd)
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(&cli.Globals{Stdout: io.Discard, Stderr: io.Discard}))
	if len(all) < 30 {
		t.Fatalf("found %d commands, want the whole tree", len(all))
	}
	return all
}

func TestEveryCommandHasOneLineAndAnExample(t *testing.T) {
	for _, cmd := range everyCommand(t) {
		path := cmd.CommandPath()
		switch short := cmd.Short; {
		case short == "":
			t.Errorf("%s has no description", path)
		case strings.ContainsAny(short, "\n") || len(short) > 80 || strings.HasSuffix(short, ".") || !unicode.IsUpper(rune(short[0])):
			t.Errorf("%s: description %q: want one line of at most 80 characters, a capital first and no full stop", path, short)
		}
		if cmd.Runnable() && !strings.Contains(cmd.Example, path) {
			t.Errorf("%s: example %q does not show it", path, cmd.Example)
		}
		for line := range strings.Lines(cmd.Long) {
			if len(line) > 82 {
				t.Errorf("%s: line of its help is too long for a terminal: %q", path, line)
			}
		}
	}
}

// Every example must parse: its command exists, and so do its flags.
func TestExamplesAreCommandsThatExist(t *testing.T) {
	for _, cmd := range everyCommand(t) {
		for line := range strings.Lines(cmd.Example) {
			_, words, ok := strings.Cut(line, "weft ")
			if !ok {
				t.Errorf("%s: example %q has no weft", cmd.CommandPath(), line)
				continue
			}
			words, _, _ = strings.Cut(words, ")")
			words, _, _ = strings.Cut(words, ">")
			found, rest, err := newRoot(&cli.Globals{}).Find(strings.Fields(words))
			if err != nil || found.CommandPath() != cmd.CommandPath() && cmd.HasParent() && !cmd.HasSubCommands() {
				t.Errorf("%s: example %q is %v, %v", cmd.CommandPath(), line, found.CommandPath(), err)
				continue
			}
			for _, word := range rest {
				name, isFlag := strings.CutPrefix(word, "--")
				name, _, _ = strings.Cut(name, "=")
				if isFlag && name != "help" && found.Flag(name) == nil {
					t.Errorf("%s: example %q: no flag --%s", cmd.CommandPath(), line, name)
				}
			}
		}
	}
}

func TestEveryFlagIsDescribed(t *testing.T) {
	for _, cmd := range everyCommand(t) {
		for line := range strings.Lines(cmd.LocalFlags().FlagUsages()) {
			if fields := strings.Fields(line); len(fields) < 4 {
				t.Errorf("%s: flag %q says too little", cmd.CommandPath(), line)
			}
		}
	}
}

// The console shows, for each of its actions, the command that does the same.
func TestCommandsThatTheConsoleShowsExist(t *testing.T) {
	all := console.Commands()
	if len(all) < 15 {
		t.Errorf("the console shows only %d commands", len(all))
	}
	for _, line := range all {
		words := strings.Fields(line)[1:]
		found, rest, err := newRoot(&cli.Globals{}).Find(words)
		if err != nil || found.HasSubCommands() {
			t.Errorf("%q is no command: %v", line, err)
			continue
		}
		if err := found.ParseFlags(rest); err != nil {
			t.Errorf("%q: %v", line, err)
		} else if err := found.ValidateArgs(found.Flags().Args()); err != nil {
			t.Errorf("%q: %v", line, err)
		}
	}
}

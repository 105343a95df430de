// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

func example() *cobra.Command {
	run := func(*cobra.Command, []string) {}
	root := &cobra.Command{Use: "tool", Short: "Do things"}
	root.PersistentFlags().String("manager", "", "the `ADDRESS` to ask")
	list := &cobra.Command{Use: "list [NAME]", Short: "List things", Long: ".profile's first line\nand \\n", Example: "  tool list --all", Run: run}
	list.Flags().BoolP("all", "a", false, "also the `hidden` ones")
	root.AddCommand(list, &cobra.Command{Use: "secret", Hidden: true, Run: run})
	return root
}

func TestThereIsAPageForEachCommandThatHelpShows(t *testing.T) {
	got := slices.Sorted(maps.Keys(Pages(example())))
	if want := []string{"tool-list.1", "tool.1"}; !slices.Equal(got, want) {
		t.Errorf("pages are %q, want %q", got, want)
	}
}

func TestAPageSaysWhatTheHelpSays(t *testing.T) {
	want := `.TH TOOL\-LIST 1 "" Weft "Weft manual"
.SH NAME
tool\-list \- List things
.SH SYNOPSIS
.nf
tool list [NAME] [flags]
.fi
.SH DESCRIPTION
.nf
\&.profile\(aqs first line
and \en
.fi
.SH OPTIONS
.TP
\fB\-a, \-\-all\fR \fIhidden\fR
also the hidden ones
.SH OPTIONS OF ALL COMMANDS
.TP
\fB\-\-manager\fR \fIADDRESS\fR
the ADDRESS to ask
.SH EXAMPLES
.nf
  tool list \-\-all
.fi
.SH SEE ALSO
.BR tool (1)
`
	if diff := cmp.Diff(want, Pages(example())["tool-list.1"]); diff != "" {
		t.Errorf("tool-list.1 (-want +got):\n%s", diff)
	}
}

// TestTheFormatterShowsAPage formats a page as man does, if the formatter is installed.
func TestTheFormatterShowsAPage(t *testing.T) {
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Skip("groff is not installed")
	}
	file := filepath.Join(t.TempDir(), "tool-list.1")
	if err := os.WriteFile(file, []byte(Pages(example())["tool-list.1"]), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), groff, "-man", "-Tascii", "-ww", "-P-c", file).CombinedOutput()
	if err != nil {
		t.Fatalf("groff: %v\n%s", err, out)
	}
	for _, want := range []string{".profile's first line", `and \n`, "tool list --all"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the page lacks %q:\n%s", want, out)
		}
	}
}

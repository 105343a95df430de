// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
)

func newVersion(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the program's version",
		Long: `Print the version: the tag that the program was built from. Between two tags, it
is the earlier tag, the number of commits since then, and the commit.`,
		Example: "  weft version",
		Args:    cli.Takes(),
		RunE:    func(*cobra.Command, []string) error { return runVersion(g.Out()) },
	}
}

func runVersion(out *cli.Output) error {
	if out.Format == cli.FormatJSON {
		return json.NewEncoder(out.Stdout).Encode(map[string]string{"version": version(), "go": runtime.Version()})
	}
	_, err := fmt.Fprintf(out.Stdout, "weft %s %s\n", version(), runtime.Version())
	return err
}

// release is the tag that the program was built from, with the number of commits since; the linker
// sets it (make build).
var release string

// version is the release; without one, Go's version of the module or the commit.
func version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	revision, changed := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			changed = "+changes"
		}
	}
	if revision == "" {
		return "devel"
	}
	return "devel-" + revision + changed
}

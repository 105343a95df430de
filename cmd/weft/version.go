// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersion(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the program's version",
		Long: `Print the version: the tag that the program was built from. Between two tags, it
is the earlier tag, the number of commits since then, and the commit.`,
		Example: "  weft version",
		Args:    takes(),
		RunE:    func(*cobra.Command, []string) error { return runVersion(g.out()) },
	}
}

func runVersion(out *output) error {
	if out.format == formatJSON {
		return json.NewEncoder(out.stdout).Encode(map[string]string{"version": version(), "go": runtime.Version()})
	}
	_, err := fmt.Fprintf(out.stdout, "weft %s %s\n", version(), runtime.Version())
	return err
}

// release is the tag that the program was built from, with the number of commits
// since; set by the linker (make build).
var release string

// version is the release; without one, what Go knows of the module or the commit.
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
)

// A command either reads, and answers from a bundle, or refuses it: none changes a cluster or starts a
// daemon as if --bundle was not there.
func TestEveryCommandAnswersFromABundleOrRefusesIt(t *testing.T) {
	g := &cli.Globals{Stdout: io.Discard, Stderr: io.Discard, Bundle: "none.tar.gz"}
	root := newRoot(g)
	g.Bundle = "none.tar.gz" // the flag's default has taken its place
	var reads []string
	refused := 0
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, below := range cmd.Commands() {
			walk(below)
		}
		if cmd.Run != nil {
			t.Errorf("%s: it is run by Run, and cannot refuse a bundle", cmd.CommandPath())
		}
		if cmd == root || cmd.RunE == nil {
			return
		}
		cmd.SetContext(t.Context())
		err := cmd.RunE(cmd, []string{"a", "b"})
		if _, ok := errors.AsType[cli.RefusedError](err); ok && strings.Contains(err.Error(), "cannot answer from a support bundle") {
			refused++
			return
		}
		if err == nil || !strings.Contains(err.Error(), "none.tar.gz: no such file") {
			t.Errorf("%s: it neither opens the bundle nor refuses it: %v", cmd.CommandPath(), err)
		}
		reads = append(reads, strings.TrimPrefix(cmd.CommandPath(), "weft "))
	}
	walk(root)
	if len(reads) != 16 || refused < 60 {
		t.Errorf("%d commands refuse a bundle, and these answer from it: %q", refused, reads)
	}
}

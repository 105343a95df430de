// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func newTarget(g *globals) *cobra.Command {
	return &cobra.Command{Use: "target", Short: "Run the target agent", Example: "  weft target --portal tcp://192.0.2.1", Args: names(),
		RunE: func(*cobra.Command, []string) error { return errors.New("target: not wired yet") }}
}

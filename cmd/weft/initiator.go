// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func newInitiator(g *globals) *cobra.Command {
	return &cobra.Command{Use: "initiator", Short: "Run the initiator agent", Example: "  weft initiator", Args: names(),
		RunE: func(*cobra.Command, []string) error { return errors.New("initiator: not wired yet") }}
}

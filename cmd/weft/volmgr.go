// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func newVolmgr(g *globals) *cobra.Command {
	return &cobra.Command{Use: "volmgr", Short: "Run the volume manager", Example: "  weft volmgr --data-dir /var/lib/weft/volmgr", Args: names(),
		RunE: func(*cobra.Command, []string) error { return errors.New("volmgr: not wired yet") }}
}

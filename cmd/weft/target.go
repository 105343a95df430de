// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/target"
)

type targetOptions struct {
	agentOptions
	portals []string
}

func newTarget(g *globals) *cobra.Command {
	var o targetOptions
	cmd := &cobra.Command{
		Use:   "target",
		Short: "Run the target agent, on machines that have drives",
		Long: `Runs the target agent of this machine: it takes drives in, carves legs of volumes
out of them and exports them over NVMe-oF with the kernel's nvmet. What it
exports goes on serving when the agent stops.

Needs root, configfs, and the kernel modules nvmet, nvmet-tcp and dm-mod, which
it loads if they are missing.`,
		Example: `  weft target --manager m1:4480 --portal tcp://192.0.2.11 --label rack=r1
  weft target --node t1 --portal tcp://192.0.2.11:4420 --portal tcp://[2001:db8::11]`,
		Args: takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.manager, o.tls = g.manager, g.tls
			return runTarget(cmd.Context(), o, g)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringArrayVar(&o.portals, "portal", nil, "`address` that clients reach this node at, tcp://ADDRESS[:4420][#RAIL]; may be repeated")
	return cmd
}

func runTarget(ctx context.Context, o targetOptions, g *globals) error {
	portals, err := parsePortals(o.portals)
	if err != nil {
		return err
	}
	need := []kmod.Module{kmod.ConfigFS, kmod.Nvmet, kmod.NvmetTCP, kmod.DM}
	return runAgent(ctx, o.agentOptions, g.stderr, need, func(b agentBase) (agent, error) {
		return target.New(target.Config{
			Node: b.node, Labels: b.labels, Portals: portals, Manager: b.manager, Version: version(), Log: b.log,
		})
	})
}

func parsePortals(texts []string) ([]block.Portal, error) {
	if len(texts) == 0 {
		return nil, usageError{err: fmt.Errorf("--portal: missing"), hint: "such as --portal tcp://192.0.2.11"}
	}
	var portals []block.Portal
	for _, text := range texts {
		p, err := block.ParsePortal(text)
		if err != nil {
			return nil, usageError{err: fmt.Errorf("--portal: %w", err)}
		}
		portals = append(portals, p)
	}
	return portals, nil
}

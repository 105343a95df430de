// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/initiator"
)

type initiatorOptions struct {
	agentOptions
	stateDir, runDir string
}

func newInitiator(g *globals) *cobra.Command {
	var o initiatorOptions
	cmd := &cobra.Command{
		Use:   "initiator",
		Short: "Run the initiator agent, on machines that use volumes",
		Long: `Runs the initiator agent of this machine: it makes the block devices of the
volumes attached here, /dev/weft/VOLUME, of their legs on the targets. The
devices go on serving when the agent stops, except that a leg that is lost
meanwhile makes writes wait until an agent is there to record it.

Needs root and the kernel modules nvme-tcp, dm-mod, dm-mirror, loop and
tcp_diag, which it loads if they are missing.`,
		Example: "  weft initiator --manager m1:4480 --label rack=r1",
		Args:    takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.manager, o.tls = g.manager, g.tls
			return runInitiator(cmd.Context(), o, g)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.stateDir, "state-dir", "/var/lib/weft/initiator", "`directory` that keeps this host's NVMe identity")
	cmd.Flags().StringVar(&o.runDir, "run-dir", "/run/weft/initiator", "`directory` on a tmpfs, for what must not outlive a boot")
	return cmd
}

func runInitiator(ctx context.Context, o initiatorOptions, g *globals) error {
	bootID, err := kernelText("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read the boot id: %w", err)
	}
	release, err := kernelText("/proc/sys/kernel/osrelease")
	if err != nil {
		return fmt.Errorf("read the kernel's release: %w", err)
	}
	need := []kmod.Module{kmod.NvmeTCP, kmod.Fabrics, kmod.DM, kmod.DMMirror, kmod.Loop, kmod.TCPDiag}
	return runAgent(ctx, o.agentOptions, g.stderr, need, func(b agentBase) (agent, error) {
		return initiator.New(initiator.Config{
			Node: b.node, Labels: b.labels, Version: version(), Kernel: release, BootID: bootID,
			Manager: b.manager, StateDir: o.stateDir, RunDir: o.runDir, Log: b.log,
		})
	})
}

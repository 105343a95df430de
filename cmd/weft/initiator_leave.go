// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/initiator"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

func newInitiatorLeave(g *cli.Globals) *cobra.Command {
	var stateDir string
	cmd := &cobra.Command{
		Use:   "leave-cluster",
		Short: "Make this machine forget its cluster, so that it can join another one",
		Long: `Make this machine forget its cluster. A machine belongs to the first cluster that
its initiator agent contacts, and obeys no other cluster's volume manager.
Afterwards the agent joins the next cluster that it is started with. First detach
the machine's volumes and stop its agent; otherwise the command is refused.

Do not use this after a store was lost: rebuild the store, and the machine's own
cluster is back.`,
		Example: "  weft initiator leave-cluster",
		Args:    cli.Takes(),
		RunE:    func(*cobra.Command, []string) error { return runInitiatorLeave(stateDir, g.Out()) },
	}
	cmd.Flags().StringVar(&stateDir, "state-dir", defaultStateDir, "`directory` of the agent's state")
	return cmd
}

func runInitiatorLeave(stateDir string, out *cli.Output) error {
	agent, err := initiator.New(initiator.Config{Node: "this", BootID: "this", Manager: noManager{}, StateDir: stateDir})
	if err != nil {
		return err
	}
	id, err := agent.Leave()
	switch {
	case err != nil && !id.IsZero():
		return cli.RefusedError{Err: err}
	case err != nil:
		return err
	case id == block.ClusterID{}:
		out.Say("this machine belongs to no cluster")
		return nil
	}
	out.Say("this machine has left cluster %v", id)
	return nil
}

// noManager replaces the manager of an agent that does not run.
type noManager struct{ pb.AgentsClient }

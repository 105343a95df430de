// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

type nodeAddOptions struct {
	node, nqn    string
	authenticate bool
}

func newNodeAdd(g *cli.Globals) *cobra.Command {
	var o nodeAddOptions
	cmd := &cobra.Command{
		Use:   "add NODE",
		Short: "Add a host without Weft's agent, which uses Linux's own NVMe tools",
		Long: `Add a host that does not run "weft initiator". Volumes of one column and one copy
can be attached to it; "nvme discover" and "nvme connect-all" on the host then
find them at port 8009 of any target. Nodes with agents join by themselves and
are not added.

With --authenticate the host proves its identity to the targets, and they theirs
to it (DH-HMAC-CHAP). The command prints both secrets, as nvme-cli takes them, and
prints the same ones again when it is repeated.`,
		Example: `  weft node add h1 --host-nqn "$(ssh h1 cat /etc/nvme/hostnqn)"
  weft node add h1 --host-nqn nqn.2014-08.org.nvmexpress:uuid:5d3e... --authenticate`,
		Args: cli.Takes("NODE"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.node = args[0]
			return runNodeAdd(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.nqn, "host-nqn", "", "`NQN` of the host, from its /etc/nvme/hostnqn")
	cmd.Flags().BoolVar(&o.authenticate, "authenticate", false, "the host proves its identity")
	return cmd
}

func runNodeAdd(ctx context.Context, api pb.ManagerClient, o nodeAddOptions, out *cli.Output) error {
	if o.nqn == "" {
		return cli.UsageError{Err: errors.New("--host-nqn: missing"), Hint: "on the host: cat /etc/nvme/hostnqn, or nvme gen-hostnqn"}
	}
	added, err := api.AddHost(ctx, &pb.AddHostRequest{Node: o.node, HostNqn: o.nqn, Authenticate: o.authenticate})
	if err != nil {
		return err
	}
	out.Say("host %s is known; attach volumes with --stripes 1 --copies 1 to it: `weft attach VOLUME --node %s`", o.node, o.node)
	return out.Print(added, func(w io.Writer) {
		if added.GetHostSecret() != "" {
			fmt.Fprintf(w, "--dhchap-secret=%s\n--dhchap-ctrl-secret=%s\n", added.GetHostSecret(), added.GetControllerSecret())
		}
	})
}

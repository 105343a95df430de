// SPDX-License-Identifier: Apache-2.0

package login

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newAccessList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the nodes and people that have certificates",
		Long: `List the nodes and people that have joined, in which role, until when their
certificates are good, and whose were revoked. Managers that have made their own
certificates are in "weft volmgr list".`,
		Example: "  weft access list",
		Args:    cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			list, err := api.ListAccess(ctx, &pb.ListAccessRequest{})
			if err != nil {
				return err
			}
			return printAccess(list, out)
		}),
	}
}

func printAccess(list *pb.ListAccessResponse, out *cli.Output) error {
	return out.Print(list, func(w io.Writer) {
		var rows [][]string
		for _, a := range list.GetAccess() {
			joined, until := "", ""
			if a.GetJoined() != nil {
				joined = out.Age(a.GetJoined()) + " ago"
			}
			switch {
			case a.GetRevoked() != nil:
				until = "revoked " + out.Age(a.GetRevoked()) + " ago"
			case a.GetEnds() != nil:
				until = a.GetEnds().AsTime().Local().Format(time.DateTime)
			}
			rows = append(rows, []string{nameOf(a.GetSubject()), joined, until})
		}
		cli.Table(w, "WHO JOINED UNTIL", rows...)
	})
}

func newAccessRevoke(g *cli.Globals) *cobra.Command {
	var node, person, role string
	cmd := &cobra.Command{
		Use:   "revoke {--node NODE | --person NAME} [--role ROLE]",
		Short: "Make the certificates of a node or a person worthless",
		Long: `Make the certificates and the tokens of a node or a person worthless, at once and
at every manager: its calls are refused, its streams end, and nothing is renewed.
It can join again with a new token.

A node's attachments and exports go on until they are detached or fenced: its
agent can record nothing any more. Without --role, every role of the name is
revoked. A manager's certificate cannot be while it is a member: it has the
authority's key. Use "weft volmgr remove", and then "weft ca rotate".

"weft node remove" revokes the node's certificates too.`,
		Example: `  weft access revoke --person ada
  weft access revoke --node gpu1 --role initiator`,
		Args: cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			if (node == "") == (person == "") {
				return cli.UsageError{Err: errors.New("give either --node or --person"), Hint: "usage: weft access revoke --node gpu1"}
			}
			return runAccessRevoke(ctx, api, &pb.Subject{Name: node + person, Person: person != "", Role: role}, out)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "`name` of the node")
	f.StringVar(&person, "person", "", "`name` of the person")
	f.StringVar(&role, "role", "", "only in this `role` (default: every role of the name, except that of a manager)")
	return cmd
}

func runAccessRevoke(ctx context.Context, api pb.IdentitiesClient, subject *pb.Subject, out *cli.Output) error {
	revoked, err := api.RevokeAccess(ctx, &pb.RevokeAccessRequest{Subject: subject})
	if err != nil {
		return err
	}
	return printAccess(revoked, out)
}

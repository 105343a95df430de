// SPDX-License-Identifier: Apache-2.0

// Package login has the commands about who may do what: tokens, the authority, and the contexts of
// a person.
package login

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr"
)

// Commands are "weft token", "weft access", "weft ca", "weft login", "weft context" and
// "weft audit".
func Commands(g *cli.Globals, defaultDataDir string) []*cobra.Command {
	return []*cobra.Command{
		cli.Group("token", "Let nodes and people join the cluster", newTokenCreate(g), newTokenList(g), newTokenDelete(g)),
		cli.Group("access", "Who has joined the cluster", newAccessList(g), newAccessRevoke(g)),
		cli.Group("ca", "The authority that signs the cluster's certificates", newCAList(g), newCARotate(g), newCAInit(g, defaultDataDir)),
		newLogin(g),
		cli.Group("context", "The clusters that you are logged in to", newContextList(g), newContextUse(g), newContextDelete(g)),
		cli.Group("audit", "Who asked for what", newAuditVerify(g)),
	}
}

func newTokenCreate(g *cli.Globals) *cobra.Command {
	var node, person, role string
	var life time.Duration
	cmd := &cobra.Command{
		Use:   "create {--node NODE --role target|initiator|csi|manager | --person NAME --role viewer|operator|admin}",
		Short: "Print a token that lets one node or person join, once",
		Long: `Print a token. Its holder gets a certificate of one name and one role: once, and
only until the token expires. It names the cluster's authority, so its holder
shows it to no other cluster.

A token is a secret until it is used: pass it on in a file that only its reader
can open. It cannot be shown again.`,
		Example: `  weft token create --node t1 --role target > t1.token
  weft token create --person ada --role operator --for 24h > ada.token`,
		Args: cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			if (node == "") == (person == "") {
				return cli.UsageError{Err: errors.New("give either --node or --person"), Hint: "usage: weft token create --node t1 --role target"}
			}
			subject := &pb.Subject{Name: node + person, Person: person != "", Role: role}
			return runTokenCreate(ctx, api, subject, life, out)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "`name` of the node that may join")
	f.StringVar(&person, "person", "", "`name` of the person that may log in")
	f.StringVar(&role, "role", "", "`role`: target, initiator, csi or manager of a node; viewer, operator or admin of a person")
	f.DurationVar(&life, "for", 0, "how long the token is good, 168h at most (default 15m)")
	return cmd
}

func runTokenCreate(ctx context.Context, api pb.IdentitiesClient, subject *pb.Subject, life time.Duration, out *cli.Output) error {
	if life < 0 || life%time.Second != 0 {
		return cli.UsageError{Err: fmt.Errorf("--for %v: must be whole seconds", life)}
	}
	made, err := api.CreateToken(ctx, &pb.CreateTokenRequest{Subject: subject, Seconds: uint64(life / time.Second)})
	if err != nil {
		return err
	}
	if err := out.Print(made, func(w io.Writer) { fmt.Fprintln(w, made.GetToken()) }); err != nil {
		return err
	}
	out.Say("for %s, once, until %s", nameOf(subject), made.GetCreated().GetExpires().AsTime().Local().Format(time.DateTime))
	return nil
}

func nameOf(s *pb.Subject) string {
	if s.GetPerson() {
		return fmt.Sprintf("person %s (%s)", s.GetName(), s.GetRole())
	}
	return fmt.Sprintf("node %s (%s)", s.GetName(), s.GetRole())
}

func newTokenList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the tokens that have not expired, without their secrets",
		Example: "  weft token list",
		Args:    cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			list, err := api.ListTokens(ctx, &pb.ListTokensRequest{})
			if err != nil {
				return err
			}
			return out.Print(list, func(w io.Writer) {
				var rows [][]string
				for _, t := range list.GetTokens() {
					used := "no"
					if t.GetUsed() != nil {
						used = out.Age(t.GetUsed()) + " ago"
					}
					rows = append(rows, []string{t.GetId(), nameOf(t.GetSubject()), t.GetExpires().AsTime().Local().Format(time.DateTime), used})
				}
				cli.Table(w, "ID FOR EXPIRES USED", rows...)
			})
		}),
	}
}

func newTokenDelete(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "delete ID",
		Short: "Make a token useless",
		Long: `Make a token useless. Who has joined with it stays a member; to shut it out, use
"weft access revoke".`,
		Example: "  weft token delete 5f1c0de5a2b94c11",
		Args:    cli.Takes("ID"),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, args []string, out *cli.Output) error {
			if _, err := api.DeleteToken(ctx, &pb.DeleteTokenRequest{Id: args[0]}); err != nil {
				return cli.ArgumentError{Name: "ID", Err: err}
			}
			out.Say("token %s can no longer be used", args[0])
			return nil
		}),
	}
}

func newCAList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the authorities that the cluster trusts",
		Long: `List the authorities whose certificates the cluster's members accept: one, and
two while it is rotated.`,
		Example: "  weft ca list",
		Args:    cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			list, err := api.ListAuthorities(ctx, &pb.ListAuthoritiesRequest{})
			if err != nil {
				return err
			}
			return printAuthorities(list, out)
		}),
	}
}

func printAuthorities(list *pb.ListAuthoritiesResponse, out *cli.Output) error {
	return out.Print(list, func(w io.Writer) {
		var rows [][]string
		for _, a := range list.GetAuthorities() {
			does := "signs"
			switch {
			case a.GetBegins() != nil:
				does = "signs from " + a.GetBegins().AsTime().Local().Format(time.DateTime)
			case a.GetGoes() != nil:
				does = "goes on " + a.GetGoes().AsTime().Local().Format(time.DateTime)
			}
			rows = append(rows, []string{a.GetHash()[:16], out.Age(a.GetAdded()), does})
		}
		cli.Table(w, "AUTHORITY AGE STATE", rows...)
	})
}

func newCARotate(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "rotate",
		Short: "Replace the authority by a new one, without a break",
		Long: `Make a new authority. From now on the members trust both. When every certificate
that was signed before has ended or been renewed, after 7 days at most, the new
one signs. When no certificate of the old one is left, the old one is trusted no
more. Nothing has to be restarted, and no member has to join again, unless it is
away for longer than its certificate is good.

Rotate once a year. A rotation does not shut out a holder of the old key.`,
		Example: "  weft ca rotate",
		Args:    cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			list, err := api.RotateAuthority(ctx, &pb.RotateAuthorityRequest{})
			if err != nil {
				return err
			}
			return printAuthorities(list, out)
		}),
	}
}

func newCAInit(g *cli.Globals, defaultDataDir string) *cobra.Command {
	var dataDir, node string
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make an authority for a store that has none, beside the store",
		Long: `Make the authority of a cluster whose store was created by an older version, or
was rebuilt. Run it on one machine, while the manager is stopped. The keys are in
a directory beside the store, DIRECTORY.keys. "weft volmgr init" does this for a
new cluster. A directory that has keys is left as it is.`,
		Example: "  weft ca init --data-dir /var/lib/weft/volmgr",
		Args:    cli.Takes(),
		RunE: func(*cobra.Command, []string) error {
			id, err := volmgr.ClusterOf(dataDir)
			if err != nil {
				return fmt.Errorf("open the store in %s: %w", dataDir, err)
			}
			if err := MakeKeys(dataDir, id, node); err != nil {
				return err
			}
			g.Out().Say("the keys of cluster %v are in %s", id, volmgr.KeysOf(dataDir))
			return nil
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "`directory` of the store")
	cmd.Flags().StringVar(&node, "node", "", "`name` of this manager (default: this host's name)")
	return cmd
}

// MakeKeys makes the keys of a new cluster's first manager, unless they are there.
func MakeKeys(dataDir string, id block.ClusterID, node string) error {
	name, err := cli.NodeOrThis(node)
	if err != nil {
		return err
	}
	manager, err := block.ParseNodeName(name)
	if err != nil {
		return cli.UsageError{Err: err, Hint: "give --node"}
	}
	_, err = pki.CreateKeyring(volmgr.KeysOf(dataDir), id, manager, time.Now)
	return err
}

func newLogin(g *cli.Globals) *cobra.Command {
	var name, tokenFile string
	cmd := &cobra.Command{
		Use:   "login --token-file FILE",
		Short: "Log in to a cluster, with a token",
		Long: `Log in to the cluster whose managers --manager names, with a token from its admin
("weft token create --person NAME --role ROLE"). Key and certificate are kept in
~/.config/weft, which only you can read. Commands use them from then on, and
renew them: you stay logged in unless you give no command for a week.

You can be logged in to several clusters: "weft context use" chooses one.`,
		Example: "  weft login --manager m1:4480,m2:4480,m3:4480 --token-file ada.token --name lab",
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runLogin(cmd.Context(), g, name, tokenFile)
		},
	}
	cmd.Flags().StringVar(&name, "name", "default", "`name` of the context")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "`file` with the token; - for standard input")
	return cmd
}

func runLogin(ctx context.Context, g *cli.Globals, name, tokenFile string) error {
	if tokenFile == "" {
		return cli.UsageError{Err: errors.New("--token-file: missing"), Hint: "an admin prints a token with `weft token create --person NAME --role ROLE`"}
	}
	token, err := pki.ReadToken(tokenFile)
	if err != nil {
		return cli.UsageError{Err: fmt.Errorf("--token-file: %w", err)}
	}
	contexts, err := member.ReadContexts()
	if err != nil {
		return err
	}
	got, err := contexts.LogIn(ctx, name, g.Manager, token)
	if err != nil {
		return fmt.Errorf("log in: %w", err)
	}
	g.Out().Say("logged in to cluster %v as %v; the context %s is in use", got.Identity().Cluster, got.Identity(), name)
	return nil
}

func newContextList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the clusters that you are logged in to",
		Example: "  weft context list",
		Args:    cli.Takes(),
		RunE: func(*cobra.Command, []string) error {
			contexts, err := member.ReadContexts()
			if err != nil {
				return err
			}
			var rows [][]string
			for _, name := range contexts.Names() {
				rows = append(rows, row(contexts, name))
			}
			cli.Table(g.Stdout, "IN-USE NAME WHO UNTIL MANAGERS", rows...)
			return nil
		},
	}
}

func row(contexts *member.Contexts, name string) []string {
	mark, who, until := "", "", ""
	if name == contexts.Current {
		mark = "*"
	}
	if c, err := pki.ReadCredential(contexts.Files(name).Identity); err == nil && c.Cert != nil {
		who, until = c.Identity().String(), c.Cert.NotAfter.Local().Format(time.DateTime)
	}
	return []string{mark, name, who, until, contexts.Contexts[name].Managers}
}

func newContextUse(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "use NAME",
		Short:   "Choose the cluster that commands talk to",
		Example: "  weft context use lab",
		Args:    cli.Takes("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			contexts, err := member.ReadContexts()
			if err == nil {
				err = contexts.Use(args[0])
			}
			if err != nil {
				return cli.UsageError{Err: err}
			}
			g.Out().Say("commands talk to %s", contexts.Contexts[args[0]].Managers)
			return nil
		},
	}
}

func newContextDelete(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "delete NAME",
		Short:   "Log out of a cluster: remove its key and certificate",
		Example: "  weft context delete lab",
		Args:    cli.Takes("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			contexts, err := member.ReadContexts()
			if err == nil {
				err = contexts.LogOut(args[0])
			}
			if err != nil {
				return cli.UsageError{Err: err}
			}
			g.Out().Say("logged out of %s", args[0])
			return nil
		},
	}
}

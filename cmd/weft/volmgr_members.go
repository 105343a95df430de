// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/replicated"
)

func newVolmgrJoin(g *cli.Globals) *cobra.Command {
	var o volmgrOptions
	var node, tokenFile string
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Add a manager to a cluster: its store, in an empty directory",
		Long: `Prepare a directory for a further volume manager, and add it to the cluster whose
managers --manager names, with a token from "weft token create --role manager".
Prints the new manager's id. Then start the manager on the directory: it copies
the cluster's state and the authority's keys, follows, and votes when it has
caught up.

Managers agree by majority, so three survive the loss of one, and five of two. A
manager that would make the number of voters even waits for a second one.

A manager whose disk was lost cannot come back as the same one: remove it with
"weft volmgr remove", and join with an empty directory and a new token.

The command may be repeated with the same directory, also while its manager runs.`,
		Example: "  weft volmgr join --manager m1:4480 --join m2.token --listen m2:4480 --data-dir /var/lib/weft/volmgr",
		Args:    cli.Takes(),
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return o.join(cmd, g, node, tokenFile) }
	cmd.Flags().StringVar(&o.dataDir, "data-dir", defaultDataDir, "`directory` for the new store")
	cmd.Flags().StringVar(&tokenFile, "join", os.Getenv("WEFT_JOIN"), "`file` with the token; - for standard input [WEFT_JOIN]")
	cmd.Flags().StringVar(&node, "node", "", "`name` of this manager, as in the token (default: this host's name)")
	o.addListen(cmd, "`address` that the new manager will answer on")
	o.addAdvertised(cmd)
	return cmd
}

// join adds a manager, which calls the others with its own credential.
func (o *volmgrOptions) join(cmd *cobra.Command, g *cli.Globals, node, tokenFile string) error {
	o.tls, o.plain = g.TLS, g.Plain
	if err := o.enter(cmd.Context(), g, node, tokenFile); err != nil {
		return err
	}
	return g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
		return runVolmgrJoin(ctx, api, *o, out)
	})(cmd, nil)
}

// enter makes the new manager a member, whose credential the calls to the others then show.
func (o *volmgrOptions) enter(ctx context.Context, g *cli.Globals, node, tokenFile string) error {
	if o.plain || !o.tls.Off() {
		return nil
	}
	name, err := cli.NodeOrThis(node)
	if err != nil {
		return err
	}
	e := member.Entry{Managers: g.Manager, Path: pki.IdentityIn(volmgr.KeysOf(o.dataDir)), TokenFile: tokenFile,
		Role: access.Manager, Node: name, Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	files, err := e.Enter(ctx)
	if errors.Is(err, member.ErrNoIdentity) {
		return cli.UsageError{Err: errors.New("--join: missing"), Hint: "`weft token create --node " + name + " --role manager` prints a token"}
	}
	g.TLS = files
	return err
}

func runVolmgrJoin(ctx context.Context, api pb.ManagerClient, o volmgrOptions, out *cli.Output) error {
	cluster, err := cli.ClusterID(ctx, api)
	if err != nil {
		return err
	}
	address, err := o.reachedAt()
	if err != nil {
		return err
	}
	id, err := volmgr.Join(volmgr.Config{Dir: o.dataDir, Version: version()}, cluster)
	if errors.Is(err, replicated.ErrTaken) {
		return joinedBefore(ctx, api, id, fmt.Errorf("join: %w", err), out)
	}
	if err != nil {
		return storeError(o.dataDir, fmt.Errorf("join with %s: %w", o.dataDir, err))
	}
	if _, err := api.AddManager(ctx, &pb.AddManagerRequest{Id: id.String(), Address: address}); err != nil {
		return err
	}
	fmt.Fprintln(out.Stdout, id)
	out.Say("manager %v at %s is added; to run it: `weft volmgr --data-dir %s --listen %s`", id, address, o.dataDir, o.address())
	return nil
}

// joinedBefore says so if a directory is that of a member, which may be running: then a join is
// repeated. If it is not, taken is the error.
func joinedBefore(ctx context.Context, api pb.ManagerClient, id quorum.ID, taken error, out *cli.Output) error {
	hint := "move its content away first, or give another --data-dir"
	if id == 0 {
		return cli.RefusedError{Err: taken, Hints: []string{hint}}
	}
	list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return err
	}
	for _, m := range list.GetManagers() {
		if m.GetId() == id.String() {
			fmt.Fprintln(out.Stdout, id)
			out.Say("manager %v at %s is a member already", id, m.GetAddress())
			return nil
		}
	}
	return cli.RefusedError{Err: taken, Hints: []string{"it was removed from the cluster: " + hint}}
}

func newVolmgrList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the volume managers of the cluster",
		Long: `List the volume managers that agree on the cluster's state: what each of them is,
the newest record that is on its disk, and when it was heard last. If no manager
leads, the one that answers lists what it knows.`,
		Example: "  weft volmgr list",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runVolmgrList(ctx, api, out)
		}),
	}
}

func runVolmgrList(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return err
	}
	return out.Print(list, func(w io.Writer) {
		var rows [][]string
		led := false
		for _, m := range list.GetManagers() {
			led = led || m.GetLeader()
			rows = append(rows, []string{m.GetId(), m.GetAddress(), roleOf(m), strconv.FormatUint(m.GetRecorded(), 10), heardOf(out, m), m.GetProblem()})
		}
		cli.Table(w, "ID ADDRESS ROLE RECORDED HEARD PROBLEM", rows...)
		if !led {
			out.Warn("no manager leads: nothing can be changed until most of those that vote reach one another")
		}
	})
}

func roleOf(m *pb.ManagerMember) string {
	switch {
	case m.GetLeader():
		return "leader"
	case m.GetVoter():
		return "follower"
	}
	return "learner"
}

// heardOf says how long ago a manager was heard.
func heardOf(out *cli.Output, m *pb.ManagerMember) string {
	if m.GetHeard() == nil {
		return ""
	}
	return out.Age(m.GetHeard()) + " ago"
}

func newVolmgrRemove(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "remove MANAGER",
		Short: "Remove a volume manager from the cluster for good",
		Long: `Remove a volume manager, named by its id, the beginning of its id, or its
address. Its process ends, and its certificates and tokens are worthless. It can
join again with an empty directory and a new token. The command may be repeated.

This is refused if the managers that are left and follow would be no majority. If
the majority is lost, see "weft volmgr recover".`,
		Example: "  weft volmgr remove m2:4480",
		Args:    cli.Takes("MANAGER"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolmgrRemove(ctx, api, args[0], out)
		}),
	}
}

// runVolmgrRemove removes the manager that is meant at first, also if that has to be repeated: its
// address may soon be that of a new one. One that is not there any more was removed by an attempt
// whose outcome was not known.
func runVolmgrRemove(ctx context.Context, api pb.ManagerClient, name string, out *cli.Output) error {
	list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return err
	}
	meant := managersNamed(list.GetManagers(), name)
	if len(meant) == 1 {
		name = meant[0].GetId()
	}
	answer, err := api.RemoveManager(ctx, &pb.RemoveManagerRequest{Manager: name})
	removed := answer.GetRemoved()
	switch {
	case status.Code(err) == codes.NotFound && len(meant) == 1:
		removed = meant[0]
		out.Warn("manager %s was removed by an attempt whose answer was lost; to be sure that its certificates are refused: `weft access revoke --node NODE --role manager`", removed.GetId())
	case status.Code(err) == codes.NotFound:
		out.Say("manager %s is no member: nothing to remove", name)
		return nil
	case err != nil:
		return cli.ArgumentError{Name: "MANAGER", Err: err}
	}
	out.Say("manager %s at %s is removed", removed.GetId(), removed.GetAddress())
	return out.Print(removed, nil)
}

// managersNamed returns the managers that an operator may mean: by id, the beginning of it, or address.
func managersNamed(all []*pb.ManagerMember, name string) (meant []*pb.ManagerMember) {
	for _, m := range all {
		if m.GetAddress() == name || name != "" && strings.HasPrefix(m.GetId(), name) {
			meant = append(meant, m)
		}
	}
	return meant
}

func newVolmgrTransfer(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "transfer [MANAGER]",
		Short: "Make another volume manager lead",
		Long: `Make a volume manager lead, named by its id, the beginning of its id, or its
address; without a name, the one that follows best. Agents and commands go to the
new leader by themselves. A leader that is told to stop does this too.`,
		Example: "  weft volmgr transfer m2:4480",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return cli.Takes("MANAGER")(cmd, args)
		},
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			request := &pb.TransferLeadershipRequest{}
			if len(args) > 0 {
				request.Manager = args[0]
			}
			if _, err := api.TransferLeadership(ctx, request); err != nil {
				return cli.ArgumentError{Name: "MANAGER", Err: err}
			}
			list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
			if err != nil {
				return err
			}
			for _, m := range list.GetManagers() {
				if m.GetLeader() {
					out.Say("manager %s at %s leads", m.GetId(), m.GetAddress())
				}
			}
			return nil
		}),
	}
}

func newVolmgrReplace(g *cli.Globals) *cobra.Command {
	var o volmgrOptions
	var node, tokenFile string
	cmd := &cobra.Command{
		Use:   "replace OLD NEW",
		Short: "Put a new volume manager in the place of another one",
		Long: `Put a new volume manager in the place of OLD, which is named as in "weft volmgr
remove". NEW is the address that the new one answers on. Run the command on its
machine: it makes the directory as "weft volmgr join" does, with a token from
"weft token create --role manager", and waits until the manager is started there
and has caught up. If NEW is a manager already, by its id or address, no
directory is made. All else is done with your own rights, which must be those of
an admin.

The new manager gets its vote, leadership goes to it if OLD leads, and then OLD
is removed. So at no time do fewer managers vote than before. If the command is
interrupted, repeat it: it goes on from there.`,
		Example: "  weft volmgr replace m2:4480 m4:4480 --manager m1:4480 --join m4.token --data-dir /var/lib/weft/volmgr",
		Args:    cli.Takes("OLD", "NEW"),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o.listen, o.advertised = args[1], args[1]
		join := func() error {
			own := *g // with the credential of the new manager
			return o.join(cmd, &own, node, tokenFile)
		}
		return g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolmgrReplace(ctx, api, args[0], args[1], join, out)
		})(cmd, args)
	}
	cmd.Flags().StringVar(&o.dataDir, "data-dir", defaultDataDir, "`directory` for the new manager's store")
	cmd.Flags().StringVar(&tokenFile, "join", os.Getenv("WEFT_JOIN"), "`file` with the token; - for standard input [WEFT_JOIN]")
	cmd.Flags().StringVar(&node, "node", "", "`name` of the new manager, as in the token (default: this host's name)")
	return cmd
}

// replacePause is how long a command waits before it asks again how far a manager has caught up.
const replacePause = 300 * time.Millisecond

// runVolmgrReplace puts a manager in the place of another one. join adds it, if it is none yet.
func runVolmgrReplace(ctx context.Context, api pb.ManagerClient, old, added string, join func() error, out *cli.Output) error {
	list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return err
	}
	if meant := managersNamed(list.GetManagers(), old); len(meant) == 1 {
		old = meant[0].GetId() // its address may become that of the new one
	}
	meant := managersNamed(list.GetManagers(), added)
	if len(meant) == 0 {
		if err := join(); err != nil {
			return err
		}
	}
	for said := ""; ; {
		answer, err := api.ReplaceManager(ctx, &pb.ReplaceManagerRequest{Old: old, New: added})
		if err != nil {
			return err
		}
		if answer.GetWaitsFor() == "" {
			out.Say("manager %s is replaced by %s", old, added)
			return out.Print(answer, nil)
		}
		if said == "" {
			said = answer.GetWaitsFor()
			out.Say("waiting for %s", said)
		}
		select {
		case <-time.After(replacePause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

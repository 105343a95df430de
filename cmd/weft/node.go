// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newNode(g *cli.Globals) *cobra.Command {
	return cli.Group("node", "Manage nodes: the machines that run agents",
		g.Watched(newNodeList(g)), newNodeLabel(g), newNodeCordon(g), newNodeDrain(g), newNodeMaintain(g), newNodeUncordon(g), newNodeConfirmDead(g), newNodeAdd(g), newNodeRemove(g))
}

func newNodeList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the nodes and the state of their agents",
		Example: "  weft node list\n  weft node list -o json",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runNodeList(ctx, api, out)
		}),
	}
}

func runNodeList(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	return out.Print(nodes, func(w io.Writer) {
		var rows [][]string
		for _, n := range nodes.GetNodes() {
			rows = append(rows, []string{
				n.GetName(), targetText(out, n), initiatorText(out, n),
				cli.Pairs(n.GetLabels()), portals(n.GetPortals()), problems(n),
			})
		}
		cli.Table(w, "NODE TARGET INITIATOR LABELS PORTALS PROBLEM", rows...)
	})
}

// agentText describes an agent's state in a word or two.
func agentText(o *cli.Output, n *pb.Node, a *pb.AgentStatus) string {
	switch {
	case a.GetRefused() != "":
		return "refused"
	case !a.GetKnown():
		return ""
	case n.GetConfirmedDead():
		return "dead"
	case a.GetOnline():
		return "online"
	}
	return "offline " + o.Age(a.GetSeen())
}

// targetText is agentText for targets. It says which take no new legs.
func targetText(o *cli.Output, n *pb.Node) string {
	text := agentText(o, n, n.GetTarget())
	if why := cli.Shunned(n); why != "" && text != "" {
		text += ", " + why
	}
	return text
}

// initiatorText is agentText for initiators. A host that was added by hand has none.
func initiatorText(o *cli.Output, n *pb.Node) string {
	if n.GetStock() {
		return "no agent"
	}
	return agentText(o, n, n.GetInitiator())
}

func portals(all []*pb.Portal) string {
	var text []string
	for _, p := range all {
		text = append(text, portal(p).String())
	}
	return strings.Join(text, ",")
}

// problems returns the first problem of a node's agents, and how many more there are.
func problems(n *pb.Node) string {
	all := append(n.GetTarget().GetProblems(), n.GetInitiator().GetProblems()...)
	if refused := cmp.Or(n.GetTarget().GetRefused(), n.GetInitiator().GetRefused()); refused != "" {
		return "its agent " + refused
	}
	if len(all) == 0 {
		return ""
	}
	text := fmt.Sprintf("%s: %s: %s", all[0].GetObject(), all[0].GetDoing(), all[0].GetCause())
	if len(all) > 1 {
		text += fmt.Sprintf(" (and %d more)", len(all)-1)
	}
	return text
}

func newNodeLabel(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "label NODE [KEY=VALUE...]",
		Short: "Replace the labels that operators set on a node",
		Long: `Replace the labels that operators set on a node. Without labels, remove all of
them. The labels that the node's own agents report stay.`,
		Example:           "  weft node label t1 rack=r1 zone=north\n  weft node label t1",
		Args:              cli.TakesMore("NODE"),
		ValidArgsFunction: g.CompleteNode,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runNodeLabel(ctx, api, args[0], args[1:], out)
		}),
	}
}

func runNodeLabel(ctx context.Context, api pb.ManagerClient, node string, labels []string, out *cli.Output) error {
	parsed, err := cli.ParsePairs(labels)
	if err != nil {
		return err
	}
	n, err := api.SetNodeLabels(ctx, &pb.SetNodeLabelsRequest{Node: node, Labels: parsed})
	if err != nil {
		return err
	}
	out.Say("node %s has labels %s", node, cli.OrNone(cli.Pairs(n.GetLabels())))
	return out.Print(n, nil)
}

func newNodeConfirmDead(g *cli.Globals) *cobra.Command {
	var off bool
	cmd := &cobra.Command{
		Use:   "confirm-dead NODE",
		Short: "Confirm that a machine is powered off, so that nothing waits for it",
		Long: `Confirm that a machine is powered off and has lost its memory. Then no volume
waits for it: its legs are left out, and its leases end at once. Do this only
after you have checked the machine or its power: a machine that is merely cut off
may still be writing. If one of its agents was seen within the last minute, state
with --powered-off that you have checked.

The mark disappears when the node's agents report again.`,
		Example:           "  weft node confirm-dead t3",
		Args:              cli.Takes("NODE"),
		ValidArgsFunction: g.CompleteNode,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runNodeConfirmDead(ctx, api, args[0], off, out)
		}),
	}
	cmd.Flags().BoolVar(&off, "powered-off", false, "state that the machine is off, although it was seen a moment ago")
	return cmd
}

// justSeen is how recently a node must have spoken for a flag to be required before it is declared
// dead.
const justSeen = time.Minute

func runNodeConfirmDead(ctx context.Context, api pb.ManagerClient, node string, off bool, out *cli.Output) error {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	for _, n := range nodes.GetNodes() {
		ago, ok := lastSeen(out, n)
		if n.GetName() == node && ok && ago < justSeen && !off && !n.GetConfirmedDead() && !online(n) {
			return cli.UsageError{
				Err:  fmt.Errorf("node %s: its agent was seen %v ago, so it may be alive and still write", node, ago.Round(time.Second)),
				Hint: fmt.Sprintf("check the machine or its power; if it is off: `weft node confirm-dead %s --powered-off`", node),
			}
		}
	}
	n, err := api.ConfirmNodeDead(ctx, &pb.ConfirmNodeDeadRequest{Node: node})
	if err != nil {
		return err
	}
	out.Say("node %s is recorded as off", node)
	return out.Print(n, nil)
}

func online(n *pb.Node) bool { return n.GetTarget().GetOnline() || n.GetInitiator().GetOnline() }

// lastSeen is how long ago an agent of a node spoke; false if none has since the manager started.
func lastSeen(o *cli.Output, n *pb.Node) (time.Duration, bool) {
	var last time.Time
	for _, a := range []*pb.AgentStatus{n.GetTarget(), n.GetInitiator()} {
		if at := a.GetSeen(); at != nil && at.AsTime().After(last) {
			last = at.AsTime()
		}
	}
	return o.Now().Sub(last), !last.IsZero()
}

func newNodeRemove(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NODE",
		Short: "Remove a node that is off, with its drives; refused while volumes use it",
		Long: `Remove a node that is off, with its drives, and revoke the certificates of its
target, initiator and CSI driver. Refused while volumes use it. To bring the node
back, let it join again with a new token.`,
		Example:           "  weft node remove t3",
		Args:              cli.Takes("NODE"),
		ValidArgsFunction: g.CompleteNode,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runNodeRemove(ctx, api, args[0], out)
		}),
	}
}

func runNodeRemove(ctx context.Context, api pb.ManagerClient, node string, out *cli.Output) error {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	there := slices.Contains(cli.Each(nodes.GetNodes(), (*pb.Node).GetName), node)
	if _, err := api.RemoveNode(ctx, &pb.RemoveNodeRequest{Node: node}); err != nil {
		return err
	}
	if there {
		out.Say("node %s is removed", node)
	} else {
		out.Say("node %s does not exist: nothing to remove", node)
	}
	return nil
}

// The commands that empty drives and nodes, announce maintenance, and move legs.

func newDriveDrain(g *cli.Globals) *cobra.Command {
	var cancel bool
	cmd := &cobra.Command{
		Use:   "drain DRIVE",
		Short: "Move a drive's legs elsewhere and keep new ones away",
		Long: `Move a drive's legs elsewhere and keep new ones away. Each leg is copied first
and given up only after the copy is in sync. The drive stays in the cluster; with
--cancel its legs stay too, also if it was to be evicted.`,
		Example:           "  weft drive drain 4f1c22aa\n  weft drive drain 4f1c22aa --cancel",
		Args:              cli.Takes("DRIVE"),
		ValidArgsFunction: g.CompleteDrives,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			id, err := resolveDrive(ctx, api, args[0])
			if err != nil {
				return err
			}
			if _, err := api.DrainDrive(ctx, &pb.DrainDriveRequest{DriveId: id, Cancel: cancel}); err != nil {
				return err
			}
			if cancel {
				out.Say("drive %s keeps its legs", cli.ShortID(id))
				return nil
			}
			out.Say("drive %s is being drained", cli.ShortID(id))
			return nil
		}),
	}
	cmd.Flags().BoolVar(&cancel, "cancel", false, "keep the drive and the legs that it still has")
	return cmd
}

func newNodeCordon(g *cli.Globals) *cobra.Command {
	return nodeUpkeep(g, "cordon NODE", "Keep new legs away from a node", "", "%s takes no new legs",
		func(ctx context.Context, api pb.ManagerClient, node string) error {
			_, err := api.CordonNode(ctx, &pb.CordonNodeRequest{Node: node})
			return err
		})
}

func newNodeDrain(g *cli.Globals) *cobra.Command {
	return nodeUpkeep(g, "drain NODE", "Move a node's legs elsewhere and keep new ones away", `Move a node's legs elsewhere and keep new ones away. Each leg is copied first and
given up only after the copy is in sync. "weft volume list" and "weft explain
volume" show what is left; "weft node uncordon" ends it.`, "%s is being drained",
		func(ctx context.Context, api pb.ManagerClient, node string) error {
			_, err := api.CordonNode(ctx, &pb.CordonNodeRequest{Node: node, Drain: true})
			return err
		})
}

func newNodeUncordon(g *cli.Globals) *cobra.Command {
	return nodeUpkeep(g, "uncordon NODE", "End a node's cordon, drain or maintenance", "", "%s takes legs again",
		func(ctx context.Context, api pb.ManagerClient, node string) error {
			_, err := api.UncordonNode(ctx, &pb.UncordonNodeRequest{Node: node})
			return err
		})
}

type nodeMaintainOptions struct {
	node   string
	length time.Duration
	force  bool
	noWait bool
}

func newNodeMaintain(g *cli.Globals) *cobra.Command {
	var o nodeMaintainOptions
	cmd := &cobra.Command{
		Use:   "maintain NODE",
		Short: "Announce that a node is switched off for a while",
		Long: `Announce that a node is switched off for a while, and wait until it can be
stopped without a pause of I/O. The hosts leave out its legs, once other copies
have on their media what was acknowledged. Nothing is made again elsewhere before
the time is over. When the node is back, only changes are copied.

Refused if a volume in use would stop without the node: it has a single copy, or
no other copy is in sync. With --force the I/O of such volumes waits while the
node is off.`,
		Example:           "  weft node maintain t3 --for 15m",
		Args:              cli.Takes("NODE"),
		ValidArgsFunction: g.CompleteNode,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.node = args[0]
			return runNodeMaintain(ctx, api, o, out)
		}),
	}
	cmd.Flags().DurationVar(&o.length, "for", 15*time.Minute, "the `time` that it may take")
	cmd.Flags().BoolVar(&o.force, "force", false, "even if volumes in use stop without the node")
	cmd.Flags().BoolVar(&o.noWait, "no-wait", false, "return at once; stop the node only after the command without this has returned")
	return cmd
}

func runNodeMaintain(ctx context.Context, api pb.ManagerClient, o nodeMaintainOptions, out *cli.Output) error {
	if o.length < time.Second {
		return cli.UsageError{Err: fmt.Errorf("--for %v: must be at least a second", o.length)}
	}
	n, err := api.MaintainNode(ctx, &pb.MaintainNodeRequest{Node: o.node, Seconds: uint32(o.length / time.Second), Force: o.force})
	if err != nil {
		return err
	}
	until := n.GetMaintainedUntil().AsTime().UTC().Format(time.RFC3339)
	if o.noWait {
		out.Say("node %s is under maintenance until %s", o.node, until)
		return out.Print(n, nil)
	}
	err = cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
		if n, err = nodeNamed(ctx, api, o.node); err != nil {
			return "", err
		}
		return strings.Join(n.GetStopWaitsFor(), "; "), nil
	})
	if err != nil {
		return err
	}
	for _, volume := range n.GetStopsIoOf() {
		out.Warn("while %s is off, I/O waits: volume %s", o.node, volume)
	}
	out.Say("node %s can be stopped now; its maintenance ends when it is back, at %s at the latest", o.node, until)
	return out.Print(n, nil)
}

func nodeNamed(ctx context.Context, api pb.ManagerClient, name string) (*pb.Node, error) {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	for _, n := range nodes.GetNodes() {
		if n.GetName() == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("node %s was removed", name)
}

// nodeUpkeep is a command with a node for its only argument.
func nodeUpkeep(g *cli.Globals, use, short, long, said string, do func(context.Context, pb.ManagerClient, string) error) *cobra.Command {
	verb, _, _ := strings.Cut(use, " ")
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: "  weft node " + verb + " t3",
		Args:              cli.Takes("NODE"),
		ValidArgsFunction: g.CompleteNode,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			if err := do(ctx, api, args[0]); err != nil {
				return err
			}
			out.Say(said, args[0])
			return nil
		}),
	}
}

func newLeg(g *cli.Globals) *cobra.Command {
	return cli.Group("leg", "Manage legs: the copies of a volume's columns", newLegMove(g))
}

func newLegMove(g *cli.Globals) *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use:   "move VOLUME COLUMN.COPY",
		Short: "Move one leg of a volume to another drive",
		Long: `Move one leg of a volume to another drive. A new leg is copied first; the old one
is given up only after the new one is in sync, so redundancy does not drop. The
copy is made by the host to which the volume is attached.`,
		Example:           "  weft leg move db1 0.1\n  weft leg move db1 0.1 --to t4",
		Args:              cli.Takes("VOLUME", "COLUMN.COPY"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			r := &pb.MoveLegRequest{Volume: args[0], To: to}
			if n, err := fmt.Sscanf(args[1], "%d.%d", &r.Column, &r.Copy); n != 2 || err != nil {
				return cli.UsageError{Err: fmt.Errorf("leg %q: want COLUMN.COPY, such as 0.1", args[1])}
			}
			if _, err := api.MoveLeg(ctx, r); err != nil {
				return err
			}
			out.Say("leg %s of %s is being moved", args[1], args[0])
			return nil
		}),
	}
	cmd.Flags().StringVar(&to, "to", "", "the `node` that gets the leg; any by default")
	return cmd
}

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

With --authenticate the host proves its identity to the targets, and they
theirs to it (DH-HMAC-CHAP). The command prints both secrets, as nvme-cli takes
them, and prints the same ones again when it is repeated.`,
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/proto/pb"
)

func newNode(g *globals) *cobra.Command {
	return group("node", "Manage nodes: the machines that run agents",
		newNodeList(g), newNodeLabel(g), newNodeConfirmDead(g), newNodeRemove(g))
}

func newNodeList(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the nodes and the state of their agents",
		Example: "  weft node list\n  weft node list -o json",
		Args:    takes(),
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *output) error {
			return runNodeList(ctx, api, out)
		}),
	}
}

func runNodeList(ctx context.Context, api pb.ManagerClient, out *output) error {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	return out.print(nodes, func(w io.Writer) {
		var rows [][]string
		for _, n := range nodes.GetNodes() {
			rows = append(rows, []string{
				n.GetName(), out.agent(n, n.GetTarget()), out.agent(n, n.GetInitiator()),
				pairs(n.GetLabels()), portals(n.GetPortals()), problems(n),
			})
		}
		table(w, "NODE TARGET INITIATOR LABELS PORTALS PROBLEM", rows...)
	})
}

// agent says in a word or two how an agent is.
func (o *output) agent(n *pb.Node, a *pb.AgentStatus) string {
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
	return "offline " + o.age(a.GetSeen())
}

func portals(all []*pb.Portal) string {
	var text []string
	for _, p := range all {
		text = append(text, portal(p).String())
	}
	return strings.Join(text, ",")
}

// problems is the first thing that a node's agents cannot do, and how many more there are.
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

func newNodeLabel(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "label NODE [KEY=VALUE...]",
		Short: "Replace the labels that operators set on a node",
		Long: `Replace the labels that operators set on a node. Without labels, remove all of
them. The labels that the node's own agents report stay.`,
		Example:           "  weft node label t1 rack=r1 zone=north\n  weft node label t1",
		Args:              takesMore("NODE"),
		ValidArgsFunction: g.completeNode,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runNodeLabel(ctx, api, args[0], args[1:], out)
		}),
	}
}

func runNodeLabel(ctx context.Context, api pb.ManagerClient, node string, labels []string, out *output) error {
	parsed, err := parsePairs(labels)
	if err != nil {
		return err
	}
	n, err := api.SetNodeLabels(ctx, &pb.SetNodeLabelsRequest{Node: node, Labels: parsed})
	if err != nil {
		return err
	}
	out.say("node %s has labels %s", node, orNone(pairs(n.GetLabels())))
	return out.print(n, nil)
}

// parsePairs reads KEY=VALUE arguments.
func parsePairs(args []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, arg := range args {
		k, v, ok := strings.Cut(arg, "=")
		if !ok || k == "" {
			return nil, usageError{err: fmt.Errorf("label %q: must be KEY=VALUE", arg)}
		}
		if old, twice := labels[k]; twice && old != v {
			return nil, usageError{err: fmt.Errorf("label %q: given twice, as %q and %q", k, old, v)}
		}
		labels[k] = v
	}
	return labels, nil
}

func newNodeConfirmDead(g *globals) *cobra.Command {
	var off bool
	cmd := &cobra.Command{
		Use:   "confirm-dead NODE",
		Short: "Confirm that a machine is powered off, so that nothing waits for it",
		Long: `Confirm that a machine is powered off and has lost its memory. Its legs are given
up and its leases end at once, instead of when they run out. Do this only after
you have checked the machine or its power: a machine that is merely cut off may
still be writing. If one of its agents was seen within the last minute,
--powered-off must state that you have checked.

The mark disappears when the node's agents report again.`,
		Example:           "  weft node confirm-dead t3",
		Args:              takes("NODE"),
		ValidArgsFunction: g.completeNode,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runNodeConfirmDead(ctx, api, args[0], off, out)
		}),
	}
	cmd.Flags().BoolVar(&off, "powered-off", false, "state that the machine is off, although it was seen a moment ago")
	return cmd
}

// justSeen is how long after its last word a node may not be called off without a flag.
const justSeen = time.Minute

func runNodeConfirmDead(ctx context.Context, api pb.ManagerClient, node string, off bool, out *output) error {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	for _, n := range nodes.GetNodes() {
		ago, ok := out.lastSeen(n)
		if n.GetName() == node && ok && ago < justSeen && !off && !n.GetConfirmedDead() && !online(n) {
			return usageError{
				err:  fmt.Errorf("node %s: its agent was seen %v ago, so it may be alive and still write", node, ago.Round(time.Second)),
				hint: fmt.Sprintf("check the machine or its power; if it is off: `weft node confirm-dead %s --powered-off`", node),
			}
		}
	}
	n, err := api.ConfirmNodeDead(ctx, &pb.ConfirmNodeDeadRequest{Node: node})
	if err != nil {
		return err
	}
	out.say("node %s is recorded as off", node)
	return out.print(n, nil)
}

func online(n *pb.Node) bool { return n.GetTarget().GetOnline() || n.GetInitiator().GetOnline() }

// lastSeen is how long ago an agent of a node spoke; false if none has since the
// manager started.
func (o *output) lastSeen(n *pb.Node) (time.Duration, bool) {
	var last time.Time
	for _, a := range []*pb.AgentStatus{n.GetTarget(), n.GetInitiator()} {
		if at := a.GetSeen(); at != nil && at.AsTime().After(last) {
			last = at.AsTime()
		}
	}
	return o.now().Sub(last), !last.IsZero()
}

func newNodeRemove(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:               "remove NODE",
		Short:             "Remove a node that is off, with its drives; refused while volumes use it",
		Example:           "  weft node remove t3",
		Args:              takes("NODE"),
		ValidArgsFunction: g.completeNode,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runNodeRemove(ctx, api, args[0], out)
		}),
	}
}

func runNodeRemove(ctx context.Context, api pb.ManagerClient, node string, out *output) error {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	there := slices.Contains(each(nodes.GetNodes(), (*pb.Node).GetName), node)
	if _, err := api.RemoveNode(ctx, &pb.RemoveNodeRequest{Node: node}); err != nil {
		return err
	}
	if there {
		out.say("node %s is removed", node)
	} else {
		out.say("node %s does not exist: nothing to remove", node)
	}
	return nil
}

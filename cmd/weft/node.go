// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/proto/pb"
)

func newNode(g *globals) *cobra.Command {
	return group("node", "The machines that run agents",
		newNodeList(g), newNodeLabel(g), newNodeConfirmDead(g), newNodeRemove(g))
}

func newNodeList(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the nodes and how their agents are",
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

// problems is the first thing that a node's agents can not do, and how many more there are.
func problems(n *pb.Node) string {
	all := append(n.GetTarget().GetProblems(), n.GetInitiator().GetProblems()...)
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
		Short: "Replace the labels that operators gave a node",
		Long: `Replaces the labels that operators gave a node before; with none, takes them
away. The labels that the node's own agents report stay.`,
		Example:           "  weft node label t1 rack=r1 zone=north\n  weft node label t1",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: g.completeNodes,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			if len(args) == 0 {
				return usageError{err: fmt.Errorf("NODE: missing"), hint: "usage: weft node label NODE [KEY=VALUE...]"}
			}
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
	out.say("node %s has labels %s", node, pairs(n.GetLabels()))
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
	return &cobra.Command{
		Use:   "confirm-dead NODE",
		Short: "Confirm that a machine is off, so that nothing waits for it",
		Long: `Confirms that a machine is powered off and will not come back with what it has
in memory. Legs on it are given up and leases it held end at once, instead of
after the client lease. Do this only after looking at the machine or its power:
a machine that is merely cut off may still be writing.

The mark goes when the node's agents report again.`,
		Example:           "  weft node confirm-dead t3",
		Args:              takes("NODE"),
		ValidArgsFunction: g.completeNodes,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runNodeConfirmDead(ctx, api, args[0], out)
		}),
	}
}

func runNodeConfirmDead(ctx context.Context, api pb.ManagerClient, node string, out *output) error {
	n, err := api.ConfirmNodeDead(ctx, &pb.ConfirmNodeDeadRequest{Node: node})
	if err != nil {
		return err
	}
	out.say("node %s is recorded as off", node)
	return out.print(n, nil)
}

func newNodeRemove(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:               "remove NODE",
		Short:             "Forget a node that is off, and its drives; refused while volumes use it",
		Example:           "  weft node remove t3",
		Args:              takes("NODE"),
		ValidArgsFunction: g.completeNodes,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runNodeRemove(ctx, api, args[0], out)
		}),
	}
}

func runNodeRemove(ctx context.Context, api pb.ManagerClient, node string, out *output) error {
	if _, err := api.RemoveNode(ctx, &pb.RemoveNodeRequest{Node: node}); err != nil {
		return err
	}
	out.say("node %s is removed", node)
	return nil
}

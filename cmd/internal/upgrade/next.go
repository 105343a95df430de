// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// The command plan shows the steps of an upgrade, and the command next takes one of them.

func newPlan(g *cli.Globals) *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show the steps of an upgrade, in order, and what stands in their way",
		Long: `Show the steps of an upgrade: one for each volume manager and each agent, in
order, with the version that it runs, what the step does, and what stands in its
way now. A target, or an initiator, must not begin while a column of a volume has
one copy in sync, a leg is not in sync, or another target is away.

Everything is to run the version of this program, unless --to names another one.
Nothing is changed.`,
		Example: "  weft upgrade plan",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			f, err := Ask(ctx, api, to)
			if err != nil {
				return err
			}
			p := Make(f)
			return out.PrintValue(p, func(w io.Writer) { showPlan(w, p) })
		}),
	}
	addTo(cmd, g, &to)
	return cmd
}

func addTo(cmd *cobra.Command, g *cli.Globals, to *string) {
	cmd.Flags().StringVar(to, "to", g.Version, "the `version` that everything is to run, as \"weft version\" prints it there (default: this program's)")
	cmd.Flags().Lookup("to").DefValue = "" // the help is the same for all versions
}

// Ask asks for what a plan is made from. Lists from api are complete.
func Ask(ctx context.Context, api pb.ManagerClient, to string) (f Facts, err error) {
	f.To = to
	if f.Upgrade, err = api.GetUpgrade(ctx, &pb.GetUpgradeRequest{}); err != nil {
		return f, err
	}
	list, err := api.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return f, err
	}
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return f, err
	}
	volumes, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		return f, err
	}
	f.Managers, f.Nodes, f.Volumes = list.GetManagers(), nodes.GetNodes(), volumes.GetVolumes()
	return f, nil
}

func showPlan(w io.Writer, p Plan) {
	if p.Count() == 0 {
		fmt.Fprintf(w, "before the first step, make a copy of the store: weft volmgr backup FILE\n\n")
	}
	var rows [][]string
	blocked := map[string][]string{} // steps by reason
	var reasons []string
	for i, s := range p.Steps {
		n := strconv.Itoa(i + 1)
		rows = append(rows, []string{n, s.Kind, s.title(), s.Runs, string(s.State)})
		for _, why := range s.Blocks {
			if blocked[why] == nil {
				reasons = append(reasons, why)
			}
			blocked[why] = append(blocked[why], n)
		}
	}
	cli.Table(w, "STEP PART NAME RUNS STATE", rows...)
	if len(reasons) > 0 {
		fmt.Fprintln(w, "\nin the way now:")
		for _, why := range reasons {
			fmt.Fprintf(w, "  - step %s: %s\n", strings.Join(blocked[why], ", "), why)
		}
	}
	if s := p.Next(); s != nil {
		fmt.Fprintf(w, "\nstep %d, %s %s:\n", 1+slices.IndexFunc(p.Steps, func(o Step) bool { return o.Kind == s.Kind && o.Name == s.Name }), s.Kind, s.title())
		for _, does := range s.Does {
			fmt.Fprintf(w, "  - %s\n", does)
		}
	}
	fmt.Fprintf(w, "\n%s\n", p.Summary())
}

// title is the name of a step's part for people.
func (s Step) title() string {
	if s.Address == "" {
		return s.Name
	}
	return s.Name + " at " + s.Address
}

// Summary says how far an upgrade is, and what comes next.
func (p Plan) Summary() string {
	text := fmt.Sprintf("%d of %d run %s", p.Count(), len(p.Steps), p.To)
	switch {
	case p.Next() != nil:
		return text + "; the next step: `weft upgrade next`"
	case p.Newest > p.Level:
		return text + fmt.Sprintf("; the cluster is at level %d: `weft upgrade finish`", p.Level)
	}
	return text + "; nothing is left to do"
}

type nextOptions struct {
	to     string
	length time.Duration
	force  bool
	noWait bool
}

func newNext(g *cli.Globals) *cobra.Command {
	var o nextOptions
	cmd := &cobra.Command{
		Use:   "next",
		Short: "Take the next step of an upgrade, and wait until it is complete",
		Long: `Take the next step of "weft upgrade plan". A target is put under maintenance
first, so that hosts leave its legs out and no I/O waits, unless it can hand
over to its next process: then it is to be reloaded, and hosts keep its legs. A
volume manager that leads hands over to one that is upgraded. Then the command
says what to install and restart on which machine, and waits until that part is
back with the version and, of a target, until its legs are in sync again. The
maintenance ends when the target is back.

Refused, with the reasons, while something is in the way of the step. With
--force the step begins all the same.

The command may be interrupted and repeated: a step that has begun goes on.`,
		Example: "  weft upgrade next",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runNext(ctx, api, o, out)
		}),
	}
	addTo(cmd, g, &o.to)
	cmd.Flags().DurationVar(&o.length, "for", 15*time.Minute, "the `time` that a target may be away, before its legs are made again elsewhere")
	cmd.Flags().BoolVar(&o.force, "force", false, "even if something is in the way of the step")
	cmd.Flags().BoolVar(&o.noWait, "no-wait", false, "say what to install and restart, and return")
	return cmd
}

func runNext(ctx context.Context, api pb.ManagerClient, o nextOptions, out *cli.Output) error {
	if o.length < time.Second {
		return cli.UsageError{Err: fmt.Errorf("--for %v: must be at least a second", o.length)}
	}
	f, err := Ask(ctx, api, o.to)
	if err != nil {
		return err
	}
	p := Make(f)
	s := p.Next()
	if s == nil {
		out.Say("%s", p.Summary())
		return nil
	}
	if len(s.Blocks) > 0 && !o.force {
		return cli.RefusedError{Err: fmt.Errorf("upgrade %s %s: %s", s.Kind, s.title(), some(s.Blocks)), Hints: []string{
			"wait until that is over, or repair it; `weft upgrade plan` lists all that is in the way",
			"to begin the step all the same: --force",
		}}
	}
	if err := begin(ctx, api, f, *s, o, out); err != nil {
		return err
	}
	fmt.Fprintln(out.Stdout, f.install(*s))
	if o.noWait {
		return nil
	}
	return end(ctx, api, *s, o, out)
}

// begin does what comes before a part is restarted.
func begin(ctx context.Context, api pb.ManagerClient, f Facts, s Step, o nextOptions, out *cli.Output) error {
	switch {
	case s.Successor != "":
		if _, err := api.TransferLeadership(ctx, &pb.TransferLeadershipRequest{Manager: s.Successor}); err != nil {
			return err
		}
		out.Say("manager %s leads now", s.Successor)
	case s.Kind == target && f.answers(s) && !s.Reloads:
		if _, err := api.MaintainNode(ctx, &pb.MaintainNodeRequest{Node: s.Name, Seconds: uint32(o.length / time.Second), Force: o.force}); err != nil {
			return err
		}
		return cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
			now, err := Ask(ctx, api, o.to)
			if err != nil {
				return "", err
			}
			return strings.Join(now.node(s.Name).GetStopWaitsFor(), "; "), nil
		})
	}
	return nil
}

// end waits until a step is complete.
func end(ctx context.Context, api pb.ManagerClient, s Step, o nextOptions, out *cli.Output) error {
	var p Plan
	err := cli.Wait(ctx, out, "the step stands; repeat the command to keep waiting", func(ctx context.Context) (string, error) {
		f, err := Ask(ctx, api, o.to)
		if err != nil {
			return "", err
		}
		p = Make(f)
		if s.Kind == target && p.Find(s.Kind, s.Name).isDone() && f.node(s.Name).GetMaintainedUntil() != nil {
			// The manager was another one when the target went away, so it did not see it return.
			if _, err := api.UncordonNode(ctx, &pb.UncordonNodeRequest{Node: s.Name}); err != nil {
				return "", err
			}
		}
		return f.Waits(s), nil
	})
	if err != nil {
		return err
	}
	out.Say("%s %s runs %s; %s", s.Kind, s.Name, o.to, p.Summary())
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/login"
	"weft.dev/weft/proto/pb"
)

func newEvent(g *cli.Globals) *cobra.Command {
	return cli.Group("event", "Show the history of the cluster", g.Watched(newEventList(g)))
}

type eventListOptions struct {
	object string
	limit  uint32
	follow bool
	audit  bool
}

func newEventList(g *cli.Globals) *cobra.Command {
	var o eventListOptions
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List events, oldest first",
		Long: `List events, oldest first. With --follow, new events are printed as they occur,
until interrupted; with -o json as one object per line.

With --audit, list who asked for what that changed something, and from where: the
numbers in the column EVENTS are those of the events that followed at once. "weft
audit verify" checks that nobody has changed that.`,
		Example: `  weft event list --object "volume db1"
  weft event list --audit
  weft event list --follow -o json`,
		Args: cli.Takes(),
	}
	events := g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
		return runEventList(ctx, api, o, out)
	})
	audit := g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
		return login.RunAuditList(ctx, api, o.limit, out)
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case !o.audit:
			return events(cmd, args)
		case o.follow || o.object != "":
			return cli.UsageError{Err: errors.New("--audit: cannot be combined with --follow or --object")}
		}
		return audit(cmd, args)
	}
	cmd.Flags().StringVar(&o.object, "object", "", "only events of this `object`, such as \"volume db1\" or \"node t1\"")
	cmd.Flags().Uint32Var(&o.limit, "limit", 100, "`number` of events: the newest ones")
	cmd.Flags().BoolVar(&o.audit, "audit", false, "list who asked for what")
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "keep printing new events")
	return cmd
}

func runEventList(ctx context.Context, api pb.ManagerClient, o eventListOptions, out *cli.Output) error {
	events, err := api.ListEvents(ctx, &pb.ListEventsRequest{Object: o.object, Limit: o.limit})
	if err != nil {
		return err
	}
	if len(events.GetEvents()) == 0 && o.object != "" {
		out.Say("no events of object %q: an object is a kind and a name, such as %q or %q", o.object, "volume db1", "node t1")
	}
	if !o.follow {
		return out.Print(events, func(w io.Writer) { eventTable(w, events.GetEvents()) })
	}
	var seq uint64
	for _, e := range events.GetEvents() {
		printEvent(out, e)
		seq = e.GetSeq()
	}
	return followEvents(ctx, api, o.object, seq, out)
}

func eventTable(w io.Writer, events []*pb.Event) {
	var rows [][]string
	for _, e := range events {
		rows = append(rows, []string{
			strconv.FormatUint(e.GetSeq(), 10), e.GetTime().AsTime().UTC().Format(time.RFC3339), pb.Word(e.GetSeverity()),
			e.GetKind(), e.GetObject(), e.GetText(),
		})
	}
	cli.Table(w, "SEQ TIME SEVERITY KIND OBJECT TEXT", rows...)
}

// printEvent prints one event in one line (in YAML, one document).
func printEvent(o *cli.Output, e *pb.Event) {
	switch o.Format {
	case cli.FormatJSON:
		o.Stdout.Write(cli.OneLine(e))
	case cli.FormatYAML:
		fmt.Fprintln(o.Stdout, "---")
		o.Print(e, nil)
	default:
		fmt.Fprintf(o.Stdout, "%s  %-7s  %s: %s\n", e.GetTime().AsTime().UTC().Format(time.RFC3339), pb.Word(e.GetSeverity()), e.GetObject(), e.GetText())
	}
}

// followEvents prints events after a sequence number until ctx ends. If the manager restarts, or
// ends the watch because its reader was too slow, it continues after the last printed event.
func followEvents(ctx context.Context, api pb.ManagerClient, object string, seq uint64, out *cli.Output) error {
	for {
		err := watchEvents(ctx, api, object, &seq, out)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		first, gone := pb.EventsGone(err)
		if gone {
			out.Warn("events %d to %d are no longer kept; what follows begins at %d", seq+1, first-1, first)
			seq = first - 1
		}
		if code := status.Code(err); !gone && !errors.Is(err, io.EOF) && code != codes.Unavailable && code != codes.Aborted {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(cli.PollEvery):
		}
	}
}

func watchEvents(ctx context.Context, api pb.ManagerClient, object string, seq *uint64, out *cli.Output) error {
	stream, err := api.WatchEvents(ctx, &pb.WatchEventsRequest{Object: object, AfterSeq: *seq})
	if err != nil {
		return err
	}
	for {
		e, err := stream.Recv()
		if err != nil {
			return err
		}
		*seq = e.GetSeq()
		printEvent(out, e)
	}
}

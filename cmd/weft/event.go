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

	"weft.dev/weft/proto/pb"
)

func newEvent(g *globals) *cobra.Command {
	return group("event", "The history of the cluster", newEventList(g))
}

type eventListOptions struct {
	object string
	limit  uint32
	follow bool
}

func newEventList(g *globals) *cobra.Command {
	var o eventListOptions
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List what has happened, oldest first",
		Long: `Lists what has happened, oldest first. With --follow new events are printed as
they come, until interrupted; with -o json then one object in each line.`,
		Example: `  weft event list --object "volume db1"
  weft event list --follow -o json`,
		Args: takes(),
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *output) error {
			return runEventList(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.object, "object", "", "only events of this `object`, such as \"volume db1\" or \"node t1\"")
	cmd.Flags().Uint32Var(&o.limit, "limit", 100, "the newest so many")
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on with new events as they come")
	return cmd
}

func runEventList(ctx context.Context, api pb.ManagerClient, o eventListOptions, out *output) error {
	events, err := api.ListEvents(ctx, &pb.ListEventsRequest{Object: o.object, Limit: o.limit})
	if err != nil {
		return err
	}
	if !o.follow {
		return out.print(events, func(w io.Writer) { eventTable(w, events.GetEvents()) })
	}
	var seq uint64
	for _, e := range events.GetEvents() {
		out.printEvent(e)
		seq = e.GetSeq()
	}
	return followEvents(ctx, api, o.object, seq, out)
}

func eventTable(w io.Writer, events []*pb.Event) {
	var rows [][]string
	for _, e := range events {
		rows = append(rows, []string{
			strconv.FormatUint(e.GetSeq(), 10), e.GetTime().AsTime().UTC().Format(time.RFC3339), word(e.GetSeverity()),
			e.GetKind(), e.GetObject(), e.GetText(),
		})
	}
	table(w, "SEQ TIME SEVERITY KIND OBJECT TEXT", rows...)
}

// printEvent prints one event in one line (in YAML, one document).
func (o *output) printEvent(e *pb.Event) {
	switch o.format {
	case formatJSON:
		o.stdout.Write(oneLine(e))
	case formatYAML:
		fmt.Fprintln(o.stdout, "---")
		o.print(e, nil)
	default:
		fmt.Fprintf(o.stdout, "%s  %-7s  %s: %s\n", e.GetTime().AsTime().UTC().Format(time.RFC3339), word(e.GetSeverity()), e.GetObject(), e.GetText())
	}
}

// followEvents prints events after a sequence number until ctx ends. A manager
// that restarts is asked again for what came after the last one printed.
func followEvents(ctx context.Context, api pb.ManagerClient, object string, seq uint64, out *output) error {
	for {
		err := watchEvents(ctx, api, object, &seq, out)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !errors.Is(err, io.EOF) && status.Code(err) != codes.Unavailable {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pollEvery):
		}
	}
}

func watchEvents(ctx context.Context, api pb.ManagerClient, object string, seq *uint64, out *output) error {
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
		out.printEvent(e)
	}
}

// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"text/tabwriter"
	"time"
)

// Turns of Tail, in seconds: Weft's are most of its time.
const (
	longTurn  = 20
	shortTurn = 2
)

// tails is a workload on a server: the latencies of all of its turns, and the p99.9 of each.
type tails struct {
	all   histogram // empty for SPDK's client, which prints only quantiles
	turns []time.Duration
}

// Tail measures how long the slowest I/Os take on Weft's target with Weft's host: 4 KiB at random places
// in memory, 32 at a time, reads and writes by turns, for o.Seconds in all. Bare frames that never wait,
// and SPDK's target and client if they are there, have short turns between, to show what the machine does
// to a program that only polls.
func Tail(ctx context.Context, o Options) error {
	client, serverCPU, clientCPU, end, err := begin(o.Out)
	if err != nil {
		return err
	}
	defer end()
	b := &bench{Options: o, client: client, clientCPU: clientCPU}
	defer func() {
		for _, s := range b.servers {
			s.stop()
		}
	}()
	if err := b.tailServers(serverCPU); err != nil {
		return err
	}
	workloads := slices.DeleteFunc(slices.Clone(inMemory), func(w workload) bool { return w.size != 4096 || w.depth != 32 })
	found := make([][]tails, len(workloads))
	for i := range found {
		found[i] = make([]tails, len(b.servers))
	}
	for end := time.Now().Add(time.Duration(o.Seconds * float64(time.Second))); time.Now().Before(end); {
		for i, w := range workloads {
			if err := b.turns(ctx, w, found[i]); err != nil {
				return err
			}
		}
	}
	for i, w := range workloads {
		fmt.Fprintf(o.Out, "\n%s\n", w.name)
		t := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "\tI/Os\tp50\tp99\tp99.9\tp99.99\tmost\tturns\tp99.9 of a turn, median\tmost\t")
		for k, s := range b.servers {
			found[i][k].print(t, s.name)
		}
		t.Flush()
	}
	return nil
}

// tailServers starts the servers of Tail.
func (b *bench) tailServers(cpu int) error {
	limit, err := bareFrames(busy, cpu)
	if err != nil {
		return err
	}
	b.servers = append(b.servers, limit)
	weft, err := ours("weft", job{Kind: "host"}, cpu, "memory")
	if err != nil {
		return err
	}
	b.servers = append(b.servers, weft)
	polled, err := spdk(weft, cpu)
	if err != nil {
		fmt.Fprintf(b.Out, "left out: SPDK: %v\n", err)
	}
	b.servers = append(b.servers, slices.DeleteFunc(polled, func(s *server) bool { return !s.polls })...)
	return nil
}

// turns runs a workload on each server once.
func (b *bench) turns(ctx context.Context, w workload, found []tails) error {
	for k, s := range b.servers {
		b.Seconds = shortTurn
		if s.name == "weft" {
			b.Seconds = longTurn
		}
		got, err := b.one(ctx, s, w)
		if err != nil {
			return errors.Join(fmt.Errorf("%s on %s: %w", w.name, s.name, err), ctx.Err())
		}
		found[k].turns = append(found[k].turns, got.P999)
		if got.Latencies != nil {
			found[k].all.merge(got.Latencies)
		}
	}
	return nil
}

func (t *tails) print(out *tabwriter.Writer, name string) {
	fmt.Fprintf(out, "%s\t", name)
	if n := t.all.count(); n > 0 {
		fmt.Fprintf(out, "%d\t", n)
		for _, q := range []float64{0.5, 0.99, 0.999, 0.9999} {
			fmt.Fprintf(out, "%s\t", rounded(t.all.quantile(q)))
		}
		fmt.Fprintf(out, "%s\t", rounded(t.all.most()))
	} else {
		fmt.Fprint(out, "–\t–\t–\t–\t–\t–\t")
	}
	slices.Sort(t.turns)
	fmt.Fprintf(out, "%d\t%s\t%s\t\n", len(t.turns), rounded(t.turns[len(t.turns)/2]), rounded(t.turns[len(t.turns)-1]))
}

func rounded(d time.Duration) time.Duration { return d.Round(time.Microsecond) }

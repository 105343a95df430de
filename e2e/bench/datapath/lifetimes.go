// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// lifetimesName is what Options.Only selects beside shapes.
const lifetimesName = "create, clone and delete"

// lifecycle is a device whose snapshots come and go.
type lifecycle interface {
	versions
	name() string
	begin() error                      // with an empty device
	clone(n int) error                 // make a device that begins as snapshot n; errors.ErrUnsupported if that is not possible
	remove(n int, clone bool) error    // delete snapshot n, or its clone; return when its space is free
	written() (bytes int64, err error) // to the drive so far
	end()
}

// lifetimes makes, clones and deletes o.Count snapshots of each device, and prints times and bytes. Before
// each snapshot a grain is written, which is not counted. Snapshots are deleted oldest first.
func lifetimes(ctx context.Context, o Options, all []lifecycle, span int64) error {
	if !strings.Contains(lifetimesName, o.Only) {
		return nil
	}
	fmt.Fprintf(o.Out, "\n%d snapshots, one 4 KiB write before each\n\n", o.Count)
	t := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\t\teach, median\tfirst 100\tlast 100\tall\twritten for each\t")
	for _, l := range all {
		if err := lifetime(ctx, t, l, o.Count, span); err != nil {
			return fmt.Errorf("snapshots of %s: %w", l.name(), err)
		}
	}
	return t.Flush()
}

func lifetime(ctx context.Context, out io.Writer, l lifecycle, count int, span int64) error {
	defer l.end()
	if err := errors.Join(l.begin(), fill(l, span)); err != nil {
		return err
	}
	places := newOffsets(job{Size: 4096, Span: span, Random: true})
	for _, step := range []struct {
		name   string
		before func(n int) error
		do     func(n int) error
	}{
		{"create", func(int) error { off, _ := places.next(); return l.write(off, 4096) }, l.snapshot},
		{"clone", nil, l.clone},
		{"delete the clone", nil, func(n int) error { return l.remove(n, true) }},
		{"delete", nil, func(n int) error { return l.remove(n, false) }},
	} {
		var each []time.Duration
		var bytes int64
		for n := 1; n <= count; n++ {
			took, wrote, err := lifeStep(l, n, step.before, step.do)
			if err = errors.Join(err, ctx.Err()); err != nil && !errors.Is(err, errors.ErrUnsupported) {
				return fmt.Errorf("%s, number %d: %w", step.name, n, err)
			}
			if err != nil {
				break
			}
			each, bytes = append(each, took), bytes+wrote
		}
		printLife(out, l.name(), step.name, each, bytes)
	}
	return nil
}

// lifeStep does something with a snapshot, and returns how long it took and what it wrote.
func lifeStep(l lifecycle, n int, before, do func(n int) error) (took time.Duration, wrote int64, err error) {
	if before != nil {
		if err := before(n); err != nil {
			return 0, 0, err
		}
	}
	was, err := l.written()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := do(n); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	now, err := l.written()
	return took, now - was, err
}

func printLife(out io.Writer, name, step string, each []time.Duration, bytes int64) {
	if len(each) == 0 {
		fmt.Fprintf(out, "%s\t%s\t–\t–\t–\t–\t–\t\n", name, step)
		return
	}
	sum := func(some []time.Duration) (all time.Duration) {
		for _, d := range some {
			all += d
		}
		return all
	}
	few := min(100, len(each))
	first, last, all := sum(each[:few])/time.Duration(few), sum(each[len(each)-few:])/time.Duration(few), sum(each)
	slices.Sort(each)
	ms := func(d time.Duration) string { return fmt.Sprintf("%.2f ms", d.Seconds()*1000) }
	fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\t%.2f s\t%.1f KiB\t\n", name, step, ms(each[len(each)/2]), ms(first), ms(last), all.Seconds(), float64(bytes)/float64(len(each))/1024)
}

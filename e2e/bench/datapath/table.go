// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// print prints a workload's results and returns its row of ratios to the first server.
func (b *bench) print(w workload, samples [][]sample) (row []string) {
	fmt.Fprintf(b.Out, "%s\n", w.name)
	t := tabwriter.NewWriter(b.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tIOPS\tratio\tp50\tp99\tserver µs/IO\tclient µs/IO\tserver allocs/IO\tclient allocs/IO\t")
	for i, s := range b.servers {
		if len(samples[i]) == 0 {
			continue
		}
		of := func(f func(sample) float64) float64 { return median(samples[i], f) }
		ratio := ratioOf(samples[i], samples[0])
		us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
		r := Row{Section: b.section, Workload: w.name, Server: s.name, IOPS: of(func(x sample) float64 { return x.IOPS }),
			Ratio: ratio.Ratio, Least: ratio.Least, Most: ratio.Most,
			P50: of(func(x sample) float64 { return us(x.P50) }), P99: of(func(x sample) float64 { return us(x.P99) }),
			ServerCPU: of(func(x sample) float64 { return x.server }), ClientCPU: of(func(x sample) float64 { return x.CPU })}
		b.results.Rows = append(b.results.Rows, r)
		fmt.Fprintf(t, "%s\t%.0f\t%s\t%s\t%s\t%.1f\t%s\t%s\t%s\t\n", s.name, r.IOPS, r.spread(),
			known(r.P50, "%.0f µs"), known(r.P99, "%.0f µs"), r.ServerCPU, known(r.ClientCPU, "%.1f"),
			allocs(of(func(x sample) float64 { return x.mallocs })), clientAllocs(s, of(func(x sample) float64 { return x.Mallocs })))
	}
	t.Flush()
	fmt.Fprintln(b.Out)
	return b.row(w, samples, 0)
}

// row has the ratios of a workload to the server base, with their spreads.
func (b *bench) row(w workload, samples [][]sample, base int) []string {
	row := []string{w.name}
	for i := range b.servers {
		if len(samples[i]) == 0 {
			row = append(row, "–")
			continue
		}
		row = append(row, ratioOf(samples[i], samples[base]).spread())
	}
	return row
}

// ratioOf is the median and the spread of the IOPS divided by those of base in the same round.
func ratioOf(samples, base []sample) (r Row) {
	var ratios []float64
	for k := range min(len(samples), len(base)) {
		ratios = append(ratios, samples[k].IOPS/base[k].IOPS)
	}
	if len(ratios) > 0 {
		r.Ratio, r.Least, r.Most = median(ratios, func(f float64) float64 { return f }), slices.Min(ratios), slices.Max(ratios)
	}
	return r
}

func known(v float64, format string) string {
	if v <= 0 {
		return "–"
	}
	return fmt.Sprintf(format, v)
}

func allocs(v float64) string {
	if v < 0 {
		return "–"
	}
	return fmt.Sprintf("%.3f", v)
}

func clientAllocs(s *server, v float64) string {
	if s.iscsi != "" || s.perf != "" {
		return "–"
	}
	return allocs(v)
}

// printRatios prints a table for docs/performance.md, of ratios to the server base.
func (b *bench) printRatios(base string, rows [][]string) {
	head := []string{"IOPS ÷ those of " + base}
	for _, s := range b.servers {
		head = append(head, s.name)
	}
	fmt.Fprintf(b.Out, "| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat("---|", len(head)))
	for _, r := range rows {
		fmt.Fprintf(b.Out, "| %s |\n", strings.Join(r, " | "))
	}
}

func median[T any](all []T, of func(T) float64) float64 {
	var values []float64
	for _, v := range all {
		values = append(values, of(v))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

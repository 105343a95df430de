// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// A state is what a device with snapshots holds when a workload begins.
type state string

const (
	empty     state = "nothing written"
	full      state = "all written"
	below     state = "all written, then 100 snapshots"
	rewritten state = "all written, 100 snapshots, all written again"
	frozen    state = "all written, then a snapshot"
)

const (
	manySnapshots = 100
	betweenThem   = 15       // grains that are written between two of many snapshots
	grain         = 16 << 10 // Weft's, and the subcluster of a qcow2 with clusters of 512 KiB
	// place is the distance between two first writes: no two of them share a grain, a subcluster of
	// qcow2 or a block of dm-thin.
	place = 64 << 10
)

// versions is a device with snapshots while it is prepared.
type versions interface {
	write(off, n int64) error // any data
	snapshot(n int) error     // of what is there now; n is its name
}

// prepare brings an empty device to a state. Span is how many of its bytes are used.
func prepare(v versions, s state, span int64) error {
	if s == empty {
		return nil
	}
	if err := fill(v, span); err != nil {
		return err
	}
	switch s {
	case frozen:
		return v.snapshot(1)
	case below, rewritten:
		places := newOffsets(job{Size: grain, Span: span, Random: true})
		for n := range manySnapshots {
			if err := v.snapshot(n + 1); err != nil {
				return fmt.Errorf("snapshot %d: %w", n+1, err)
			}
			for range betweenThem {
				off, _ := places.next()
				if err := v.write(off, grain); err != nil {
					return err
				}
			}
		}
	}
	if s == rewritten {
		return fill(v, span)
	}
	return nil
}

func fill(v versions, span int64) error {
	for off := int64(0); off < span; off += 1 << 20 {
		if err := v.write(off, 1<<20); err != nil {
			return err
		}
	}
	return nil
}

// shape is a workload on a device in a state. Of a shape with first writes each run begins with a
// device that was just prepared, and writes each of its places once.
type shape struct {
	name  string
	state state
	job   job
}

func shapes(span int64) (all []shape) {
	add := func(name string, s state, j job) {
		for _, depth := range []int{1, 32} {
			j.Span, j.Depth, j.Random = span, depth, true
			if j.Size == 0 {
				j.Size = 4096
			}
			all = append(all, shape{fmt.Sprintf("%s, depth %d", name, depth), s, j})
		}
	}
	add("read", full, job{})
	add("read below 100 snapshots", below, job{})
	add("write", full, job{Write: true})
	add("write over 100 snapshots", rewritten, job{Write: true})
	add("first write", empty, job{Write: true, Stride: place})
	add("first write, FUA", empty, job{Write: true, Stride: place, FUA: true})
	add("first write after a snapshot", frozen, job{Write: true, Stride: place})
	add("first write after a snapshot, FUA", frozen, job{Write: true, Stride: place, FUA: true})
	add("16k first write after a snapshot", frozen, job{Write: true, Stride: place, Size: grain})
	return all
}

// measured takes jobs, until it is closed.
type measured struct {
	do    func(job) (result, error)
	close func()
}

// subject makes devices of one kind in any state.
type subject struct {
	name string
	open func(state) (measured, error)
	own  bool // Weft's: an error ends the measurement
}

// contest is what is compared with one raw device, which is reached in the same way.
type contest struct {
	way      string
	raw      measured
	subjects []subject
}

// Snapshots measures mapped legs beside qcow2: the same workloads from the same client, with the same
// processors. They are not exported by the same protocol, so each is divided by a plain file that the
// same server exports through the same protocol: what remains is the cost of the map.
func Snapshots(ctx context.Context, o Options) error {
	client, serverCPU, _, end, err := begin(o.Out)
	if err != nil {
		return err
	}
	defer end()
	parent := o.Dir
	if parent == "" {
		parent = "/dev/shm"
	}
	dir, err := os.MkdirTemp(parent, "weft-bench-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Fprintf(o.Out, "4 KiB on a device of %v with snapshots: IOPS as a ratio to a plain file, through the same server; files in %s\n\n", deviceSize, parent)
	lab := &qcow2Lab{dir: dir, cpu: serverCPU, client: client, direct: o.Dir != ""}
	contests, err := lab.contests()
	if err != nil {
		return err
	}
	for _, c := range contests {
		defer c.raw.close()
	}
	if lab.missing != nil {
		fmt.Fprintf(o.Out, "left out: qcow2: %v\n", lab.missing)
	}
	if err := compareStates(ctx, o, contests, int64(deviceSize)); err != nil {
		return err
	}
	all := []lifecycle{newTreeLife(dir)}
	if lab.missing == nil {
		all = append(all, &qcow2Life{lab: lab})
	}
	return lifetimes(ctx, o, all, int64(deviceSize))
}

// compareStates runs all shapes, and prints a row of ratios for each.
func compareStates(ctx context.Context, o Options, contests []contest, span int64) error {
	head := []string{"4k at random"}
	for _, c := range contests {
		head = append(head, c.way+", raw IOPS")
		for _, s := range c.subjects {
			head = append(head, s.name)
		}
	}
	fmt.Fprintln(o.Out, columns(head))
	broken := map[string]error{}
	for _, s := range shapes(span) {
		if !strings.Contains(s.name, o.Only) {
			continue
		}
		if s.job.Seconds = o.Seconds; s.job.Stride > 0 {
			s.job.Seconds = longestOnce
		}
		row := []string{s.name}
		for _, c := range contests {
			cells, err := c.compare(ctx, s, o.Rounds, broken)
			if err != nil {
				return err
			}
			row = append(row, cells...)
		}
		fmt.Fprintln(o.Out, columns(row))
	}
	for name, err := range broken {
		fmt.Fprintf(o.Out, "not all measured: %s: %v\n", name, err)
	}
	return nil
}

// columns is a row of a table that is printed while the rest is still measured, which takes minutes.
func columns(cells []string) string {
	row := fmt.Sprintf("%-44s", cells[0])
	for _, c := range cells[1:] {
		row += fmt.Sprintf("  %-18s", c)
	}
	return strings.TrimRight(row, " ")
}

// longestOnce is how many seconds a run of first writes takes at most.
const longestOnce = 20

// compare runs a shape on the raw device and on each subject by turns, and returns their cells of the
// table. A subject of others that fails is left out from then on.
func (c contest) compare(ctx context.Context, s shape, rounds int, broken map[string]error) (cells []string, err error) {
	ratios, raws := make([][]float64, len(c.subjects)), []float64(nil)
	kept := make([]*measured, len(c.subjects))
	defer func() {
		for _, m := range kept {
			if m != nil {
				m.close()
			}
		}
	}()
	for range rounds {
		raw, err := c.raw.do(s.job)
		if err != nil {
			return nil, fmt.Errorf("%s on a plain file: %w", s.name, err)
		}
		raws = append(raws, raw.IOPS)
		for i, of := range c.subjects {
			if broken[of.name] != nil {
				continue
			}
			got, err := of.turn(s, &kept[i])
			if err = errors.Join(err, ctx.Err()); err != nil && (of.own || ctx.Err() != nil) {
				return nil, fmt.Errorf("%s on %s: %w", s.name, of.name, err)
			}
			if err != nil {
				broken[of.name] = fmt.Errorf("%s: %w", s.name, err)
				continue
			}
			ratios[i] = append(ratios[i], got.IOPS/raw.IOPS)
		}
	}
	cells = []string{fmt.Sprintf("%.0f", median(raws, func(v float64) float64 { return v }))}
	for _, r := range ratios {
		cells = append(cells, spreadOf(r))
	}
	return cells, nil
}

// turn runs a shape once. A device whose places were all there before is kept for the next turn.
func (s subject) turn(w shape, kept **measured) (result, error) {
	if *kept == nil {
		m, err := s.open(w.state)
		if err != nil {
			return result{}, fmt.Errorf("prepare (%s): %w", w.state, err)
		}
		*kept = &m
	}
	m := *kept
	if w.job.Stride > 0 {
		*kept = nil
		defer m.close()
	}
	return m.do(w.job)
}

// spreadOf is the median with the least and the most.
func spreadOf(ratios []float64) string {
	if len(ratios) == 0 {
		return "–"
	}
	middle := median(ratios, func(v float64) float64 { return v })
	return fmt.Sprintf("%.2f (%.2f–%.2f)", middle, slices.Min(ratios), slices.Max(ratios))
}

// ofServer is a server that the client process reaches.
func ofServer(client *process, s *server) measured {
	return measured{close: s.stop, do: func(j job) (r result, err error) {
		of := s.job
		of.Write, of.Random, of.Size, of.Depth, of.Span, of.Seconds, of.FUA, of.Stride = j.Write, j.Random, j.Size, j.Depth, j.Span, j.Seconds, j.FUA, j.Stride
		err = client.ask(of.duration(), of, &r)
		if err == nil && r.Err != "" {
			err = errors.New(r.Err)
		}
		return r, err
	}}
}

// SPDX-License-Identifier: Apache-2.0

// Package failover measures how long a write waits when a target or a path fails, on the
// user-space data path:
//
//	this process: writer ── volume ── initiator agent ──┬── weft target t1 ── file
//	                                        │           └── weft target t2 ── file
//	                                   weft volmgr
//
// The manager and the targets are processes of their own, over the loopback network. A writer
// writes 4 KiB at a time to a mirrored volume, about a thousand times a second. In each round one
// target fails and comes back, and the longest write of the round is its stall. The last column
// says how long the longest write took just before the failures: how busy the machine is.
package failover

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// Options say what to measure.
type Options struct {
	Weft   string // the program
	Rounds int    // of each failure
	Only   string // failures whose names contain this
	Out    io.Writer
}

// failure is a way to fail.
type failure struct {
	name  string
	rails int // of each target
	fail  func(*cluster, *daemon) error
	mend  func(*cluster, *daemon) error
}

var failures = []failure{
	{"target killed: its connections close", 1, (*cluster).kill, (*cluster).start},
	{"target silent, as after a power cut", 1, (*cluster).powerOff, (*cluster).mendPath},
	{"target's process frozen", 1, (*cluster).freeze, (*cluster).thaw},
	{"target stopped in order", 1, (*cluster).stop, (*cluster).start},
	{"target replaced by its next process", 1, (*cluster).replace, (*cluster).keep},
	{"path silent, and a second rail", 2, (*cluster).cutPath, (*cluster).mendPath},
}

// stall is the outcome of one round.
type stall struct {
	longest, quiet          time.Duration // of the writes, and of those before the failure
	known                   bool          // the host logged the loss of a leg
	detect, record, release time.Duration // its parts
}

// Measure runs all failures and prints the stalls.
func Measure(ctx context.Context, o Options) error {
	out := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(o.Out, "longest write of each round\n\n")
	fmt.Fprintln(out, "failure\tmedian\tp90\tmost\tdetect\trecord\trelease\tmost without a failure\t")
	for _, f := range failures {
		if !strings.Contains(f.name, o.Only) {
			continue
		}
		all, err := f.measure(ctx, o)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		fmt.Fprintf(out, "%s\t%s\t\n", f.name, summary(all))
	}
	fmt.Fprintln(o.Out)
	return out.Flush()
}

func (f failure) measure(ctx context.Context, o Options) (all []stall, retErr error) {
	c, err := newCluster(ctx, o.Weft, f.rails, false)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err := c.close(); retErr == nil {
			retErr = err
		}
	}()
	fmt.Fprintf(o.Out, "%s:", f.name)
	defer fmt.Fprintln(o.Out)
	for i := range o.Rounds {
		s, err := c.round(ctx, f, c.targets[i%len(c.targets)])
		if err != nil {
			return nil, fmt.Errorf("round %d: %w\n%s", i+1, err, c.explain(ctx))
		}
		all = append(all, s)
		fmt.Fprintf(o.Out, " %.2f s", s.longest.Seconds())
	}
	return all, nil
}

// settled is how long writes go on undisturbed before and after each failure.
const settled = time.Second

// round lets a target fail while the writer writes, and brings it back.
func (c *cluster) round(ctx context.Context, f failure, victim *daemon) (stall, error) {
	c.client.writer.reset()
	time.Sleep(settled)
	quiet := c.client.writer.longest()
	c.client.writer.reset()
	c.client.forget()
	if err := f.fail(c, victim); err != nil {
		return stall{}, err
	}
	began := time.Now()
	for time.Since(began) < settled || c.client.writer.waits() {
		if time.Since(began) > time.Minute {
			return stall{}, fmt.Errorf("a write has waited for a minute")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := f.mend(c, victim); err != nil {
		return stall{}, err
	}
	if err := c.healthy(ctx, volume); err != nil {
		return stall{}, err
	}
	time.Sleep(settled)
	s := c.client.parts()
	s.quiet = quiet
	s.longest = c.client.writer.longest()
	return s, c.client.writer.failed()
}

// kill ends a target as a crash of its process does: the kernel closes its connections.
func (c *cluster) kill(t *daemon) error { return t.end(syscall.SIGKILL) }

// freeze stops a target's process; its machine still accepts connections.
func (c *cluster) freeze(t *daemon) error { return t.process.Signal(syscall.SIGSTOP) }

// thaw replaces a frozen target by a new process.
func (c *cluster) thaw(t *daemon) error {
	if err := t.end(syscall.SIGKILL); err != nil {
		return err
	}
	return c.start(t)
}

// stop stops a target as systemd does.
func (c *cluster) stop(t *daemon) error { return t.end(syscall.SIGTERM) }

func (c *cluster) start(t *daemon) error { return t.start() }

// replace has a target hand over to its next process, as systemctl reload does.
func (c *cluster) replace(t *daemon) error { return t.handOver() }

func (c *cluster) keep(*daemon) error { return nil }

// powerOff cuts all paths to a target: nothing comes back from it, and nobody learns why.
func (c *cluster) powerOff(t *daemon) error { c.client.wire.cutAll(t.portals); return nil }

func (c *cluster) cutPath(t *daemon) error { return c.client.cut(t.portals) }

func (c *cluster) mendPath(*daemon) error { c.client.mend(); return nil }

// summary is a row of the table. The parts are medians of the rounds that have them.
func summary(all []stall) string {
	var longest, quiet []time.Duration
	parts := [3][]time.Duration{}
	for _, s := range all {
		longest, quiet = append(longest, s.longest), append(quiet, s.quiet)
		if s.known {
			for i, d := range []time.Duration{s.detect, s.record, s.release} {
				parts[i] = append(parts[i], d)
			}
		}
	}
	text := fmt.Sprintf("%s\t%s\t%s", at(longest, 50), at(longest, 90), at(longest, 100))
	for _, p := range parts {
		text += "\t" + at(p, 50)
	}
	return text + "\t" + at(quiet, 100)
}

// at is the smallest of some durations that a percentage of them does not exceed; "–" of nothing.
func at(all []time.Duration, percent int) string {
	if len(all) == 0 {
		return "–"
	}
	slices.Sort(all)
	d := all[max(0, (len(all)*percent+99)/100-1)]
	return fmt.Sprintf("%.3f s", d.Seconds())
}

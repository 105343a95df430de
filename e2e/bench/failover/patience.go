// SPDX-License-Identifier: Apache-2.0

package failover

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// LoadOptions say how long to measure false alarms, and under which load.
type LoadOptions struct {
	Weft    string // the program
	Seconds int
	Workers int // of each host, each with one I/O at a time
	Burners int // threads that only use a processor; 0: two for each
	Dir     string
	Out     io.Writer
}

// patiences are those that are measured, one host for each, all at the same time.
var patiences = []time.Duration{2 * time.Second, 1500 * time.Millisecond, time.Second, 700 * time.Millisecond, 500 * time.Millisecond}

// failOverOf is the patience with a path that goes with a patience with a target.
func failOverOf(patience time.Duration) time.Duration { return patience / 4 }

// Patience measures false alarms: how often hosts give up legs, or move paths, although nothing
// fails. Each host has a patience of its own and a volume of its own on the same two targets, and
// processors are kept busy by others as well.
func Patience(ctx context.Context, o LoadOptions) (retErr error) {
	c := &cluster{parent: o.Dir}
	defer func() { retErr = errors.Join(retErr, c.close()) }()
	if err := c.begin(ctx, o.Weft, 2); err != nil {
		return err
	}
	var hosts []*loaded
	for i, patience := range patiences {
		h, err := c.addHost(ctx, fmt.Sprintf("h%d", i+1), patience, o.Workers)
		if err != nil {
			return err
		}
		hosts = append(hosts, h)
	}
	for i := range cmp.Or(o.Burners, 2*runtime.NumCPU()) {
		self, err := self(Role, burnerRole)
		if err != nil {
			return err
		}
		if _, err := c.run(fmt.Sprintf("burner%d", i+1), self); err != nil {
			return err
		}
	}
	began := time.Now()
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(o.Seconds) * time.Second):
	}
	took := time.Since(began)
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err
	}
	fmt.Fprintf(o.Out, "%.0f s, %d hosts of %d workers, load at the end %s\n\n", took.Seconds(), len(hosts), o.Workers, load)
	out := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "patience\tlegs given up\tpath\tpaths moved\tlongest silence of each second: p50\tp99\tp99.9\tmost\tlongest I/O: p50\tp99\tmost\tI/Os")
	for _, h := range hosts {
		fmt.Fprintln(out, h.row())
	}
	return out.Flush()
}

// loaded is a host process, and what it has said.
type loaded struct {
	patience time.Duration
	daemon   *daemon
	said     string // the file with its seconds
}

// second is what a host says once a second.
type second struct {
	Silence, Longest time.Duration // the longest silence that ended, as the agent counts it, and the longest I/O
	Lost, Moved, IOs int
	Err              string `json:",omitempty"`
}

// hostOptions say what a host process does.
type hostOptions struct {
	Dir, Manager, Node string
	Patience           time.Duration
	Workers            int
}

func self(args ...string) (*exec.Cmd, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return program(path, args...), nil
}

func (c *cluster) addHost(ctx context.Context, name string, patience time.Duration, workers int) (*loaded, error) {
	o := hostOptions{Dir: filepath.Join(c.dir, name), Manager: c.address, Node: name, Patience: patience, Workers: workers}
	if err := os.Mkdir(o.Dir, 0o700); err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	cmd, err := self(Role, hostRole, string(text))
	if err != nil {
		return nil, err
	}
	d, err := c.run(name, cmd)
	if err != nil {
		return nil, err
	}
	return &loaded{patience: patience, daemon: d, said: d.log}, c.attach(ctx, "v-"+name, name)
}

// seconds is what a host has said since it began to write; before that, nothing is under load.
func (h *loaded) seconds() (all []second, err error) {
	f, err := os.Open(h.said)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var s second
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			return nil, fmt.Errorf("%s says %q", h.said, lines.Text())
		}
		if s.IOs > 0 || len(all) > 0 {
			all = append(all, s)
		}
	}
	return all, lines.Err()
}

// row is a row of the table.
func (h *loaded) row() string {
	all, err := h.seconds()
	if err != nil {
		return fmt.Sprintf("%v\t%v", h.patience, err)
	}
	var silences, longest []time.Duration
	sum := second{}
	for _, s := range all {
		silences, longest = append(silences, s.Silence), append(longest, s.Longest)
		sum.Lost, sum.Moved, sum.IOs, sum.Err = sum.Lost+s.Lost, sum.Moved+s.Moved, sum.IOs+s.IOs, cmp.Or(sum.Err, s.Err)
	}
	row := []string{h.patience.String(), fmt.Sprint(sum.Lost), failOverOf(h.patience).String(), fmt.Sprint(sum.Moved)}
	for _, permille := range []int{500, 990, 999, 1000} {
		row = append(row, atPermille(silences, permille))
	}
	for _, permille := range []int{500, 990, 1000} {
		row = append(row, atPermille(longest, permille))
	}
	return strings.Join(append(row, fmt.Sprint(sum.IOs), sum.Err), "\t")
}

// atPermille is the smallest of some durations that so many of a thousand do not exceed.
func atPermille(all []time.Duration, permille int) string {
	if len(all) == 0 {
		return "–"
	}
	slices.Sort(all)
	return fmt.Sprintf("%.3f s", all[max(0, (len(all)*permille+999)/1000-1)].Seconds())
}

// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// Results are the outcome of one run, as it is kept in docs/performance.
type Results struct {
	Date    string
	Machine string // processors and kernel
	Command string
	Rows    []Row
}

// Row is one workload on one server. Ratio is the median over all rounds of its IOPS divided
// by those of the first server of its section in the same round; Least and Most are the spread.
type Row struct {
	Section, Workload, Server string
	IOPS                      float64
	Ratio, Least, Most        float64
	P50, P99                  float64 // microseconds; 0: unknown
	ServerCPU, ClientCPU      float64 // microseconds of processor time per IO; 0: unknown
}

// key identifies a row in another run.
func (r Row) key() string { return r.Section + "\n" + r.Workload + "\n" + r.Server }

var processorName = regexp.MustCompile(`(?m)^model name\s*:\s*(.*)$`)

// newResults notes and prints when, where and how the run is made.
func newResults(o Options) *Results {
	machine := "unknown processor"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if found := processorName.FindAllSubmatch(b, -1); found != nil {
			machine = fmt.Sprintf("%d × %s", len(found), found[0][1])
		}
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		machine += ", Linux " + string(u.Release[:bytes.IndexByte(u.Release[:], 0)])
	}
	r := &Results{
		Date: time.Now().UTC().Format(time.DateOnly), Machine: machine,
		Command: fmt.Sprintf("make bench PART=user (%d rounds of %v s)", o.Rounds, o.Seconds),
	}
	fmt.Fprintf(o.Out, "%s, %s\n%s\n", r.Date, r.Machine, r.Command)
	return r
}

// write stores the results in a file, if there is a path.
func (r *Results) write(path string) error {
	if path == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o666)
}

// ReadResults reads what write has stored.
func ReadResults(path string) (*Results, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r Results
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &r, nil
}

// tolerance is how much smaller a ratio may be before it counts as worse.
const tolerance = 0.05

// Compare prints what has changed from old to new, and returns how many of Weft's own rows are
// worse: a ratio that is smaller by more than the tolerance, with spreads that do not overlap.
func Compare(out io.Writer, old, new *Results) (worse int) {
	before := map[string]Row{}
	for _, r := range old.Rows {
		before[r.key()] = r
	}
	fmt.Fprintf(out, "%s, %s\ncompared with %s, %s\n\n", new.Date, new.Machine, old.Date, old.Machine)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "section\tworkload\tserver\tbefore\tnow\tnow ÷ before\t")
	for _, r := range new.Rows {
		was, ok := before[r.key()]
		if !ok || was.Ratio == 0 {
			continue
		}
		mark := ""
		if r.Ratio < was.Ratio*(1-tolerance) && r.Most < was.Least {
			if mark = "worse"; ourOwn(r.Server) {
				worse++
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%.2f\t%s\n", r.Section, r.Workload, r.Server, was.spread(), r.spread(), r.Ratio/was.Ratio, mark)
	}
	t.Flush()
	return worse
}

// ourOwn reports whether a server, by its name, runs Weft's code.
func ourOwn(server string) bool {
	return strings.HasPrefix(server, "weft") || strings.HasPrefix(server, "RAID") || strings.HasSuffix(server, "our host")
}

// spread is a ratio with the least and the most of all rounds.
func (r Row) spread() string { return fmt.Sprintf("%.2f (%.2f–%.2f)", r.Ratio, r.Least, r.Most) }

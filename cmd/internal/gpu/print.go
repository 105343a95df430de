// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
)

// Report is a machine with all that is said of it. Its keys are stable.
type Report struct {
	Machine
	Near     []Distance `json:"near"`
	Findings []Finding  `json:"checks"`
	Verdicts []Verdict  `json:"verdicts"`
}

// Distance is how far a drive or NIC is from a GPU.
type Distance struct {
	GPU  string   `json:"gpu"`
	To   string   `json:"to"`
	Near Nearness `json:"near"`
}

// Of makes the report of a machine.
func Of(m Machine) Report {
	r := Report{Machine: m, Findings: m.Findings(), Verdicts: Judge(m)}
	for _, g := range m.GPUs {
		for _, n := range m.NICs {
			r.Near = append(r.Near, Distance{g.Address, n.Name(), Near(g.Function, n.Function)})
		}
		for _, d := range m.Drives {
			r.Near = append(r.Near, Distance{g.Address, d.Name, Near(g.Function, d.Function)})
		}
	}
	return r
}

// Print writes a report for people.
func (r Report) Print(w io.Writer) {
	fmt.Fprintf(w, "kernel %s%s\n\n", cmp.Or(r.Kernel.Release, "unknown"), map[bool]string{true: ", in a virtual machine"}[r.Kernel.Virtual])
	r.printDevices(w)
	r.printNear(w)
	r.printLayers(w)
	var rows [][]string
	for _, f := range r.Findings {
		rows = append(rows, []string{f.About, map[bool]string{true: "ok", false: "problem"}[f.OK], f.Why})
	}
	cli.Table(w, "CHECK STATE WHY", rows...)
	heading := "\nto correct the problems:\n"
	for _, f := range r.Findings {
		if f.Fix != "" {
			fmt.Fprintf(w, "%s  %s: %s\n", heading, f.About, f.Fix)
			heading = ""
		}
	}
	r.printVerdicts(w)
}

func (r Report) printDevices(w io.Writer) {
	var rows [][]string
	row := func(kind, name, what string, f Function) {
		numa := strconv.Itoa(f.NUMA)
		if f.NUMA < 0 {
			numa = ""
		}
		var way []string
		for _, b := range f.Bridges {
			way = append(way, b.Address)
		}
		rows = append(rows, []string{kind, name, numa, f.Link.String(), what, strings.Join(append(way[:len(way):len(way)], f.Address), " > ")})
	}
	for i, g := range r.GPUs {
		row("gpu", strconv.Itoa(i), cmp.Or(g.Model, "NVIDIA GPU"), g.Function)
	}
	for _, n := range r.NICs {
		what := strings.Join(slices.Concat(n.Interfaces, n.Networks), " ")
		if n.Gbits > 0 {
			what = strings.TrimSpace(fmt.Sprintf("%s %d Gbit/s", what, n.Gbits))
		}
		row("nic", n.Name(), what, n.Function)
	}
	for _, d := range r.Drives {
		row("drive", d.Name, d.Model, d.Function)
	}
	if len(rows) > 0 {
		cli.Table(w, "KIND NAME NUMA LINK WHAT PCIE", rows...)
		fmt.Fprintln(w)
	}
}

// printNear writes a table of the GPUs and what is near.
func (r Report) printNear(w io.Writer) {
	var names []string
	for _, d := range r.Near {
		if d.GPU == r.GPUs[0].Address {
			names = append(names, d.To)
		}
	}
	if len(names) == 0 {
		return
	}
	var rows [][]string
	for i, g := range r.GPUs {
		row := []string{strconv.Itoa(i)}
		for _, d := range r.Near {
			if d.GPU == g.Address {
				row = append(row, string(d.Near))
			}
		}
		rows = append(rows, row)
	}
	cli.Table(w, "GPU "+strings.Join(names, " "), rows...)
	fmt.Fprint(w, "(switch: below one PCIe switch; node: at one NUMA node; across: at another)\n\n")
}

// printLayers writes the layers of paths that are more than a drive.
func (r Report) printLayers(w io.Writer) {
	for _, p := range r.Paths {
		if slices.ContainsFunc(r.Drives, func(d Drive) bool { return d.Name == p.Name }) {
			continue
		}
		fmt.Fprintf(w, "%s\n", p.Name)
		printLayer(w, p.Top, 1)
		fmt.Fprintln(w)
	}
}

func printLayer(w io.Writer, l Layer, depth int) {
	fmt.Fprintf(w, "%s%s %s", strings.Repeat("  ", depth), l.Kind, l.Name)
	for _, more := range []string{l.What, l.PCI} {
		if more != "" {
			fmt.Fprintf(w, ", %s", more)
		}
	}
	fmt.Fprintln(w)
	for _, b := range l.Below {
		printLayer(w, b, depth+1)
	}
}

// printVerdicts writes one line for the GPUs whose verdict on a path is the same.
func (r Report) printVerdicts(w io.Writer) {
	type line struct {
		path, way, why string
		gpus           []string
	}
	var lines []*line
	var steps []string
	for _, v := range r.Verdicts {
		var whys []string
		for _, reason := range v.Reasons {
			whys = append(whys, reason.Why)
			if reason.Next != "" && !slices.Contains(steps, reason.Next) {
				steps = append(steps, reason.Next)
			}
		}
		number := strconv.Itoa(slices.IndexFunc(r.GPUs, func(g GPU) bool { return g.Address == v.GPU }))
		now := line{v.Path, string(v.Way), strings.Join(whys, "; "), []string{number}}
		i := slices.IndexFunc(lines, func(l *line) bool { return l.path == now.path && l.way == now.way && l.why == now.why })
		if i < 0 {
			lines = append(lines, &now)
			continue
		}
		lines[i].gpus = append(lines[i].gpus, number)
	}
	if len(lines) == 0 {
		return
	}
	var rows [][]string
	for _, l := range lines {
		rows = append(rows, []string{l.path, strings.Join(l.gpus, ","), l.way, l.why})
	}
	fmt.Fprintln(w)
	cli.Table(w, "PATH GPUS VERDICT WHY", rows...)
	if len(steps) > 0 {
		fmt.Fprint(w, "\nnext steps:\n")
		for _, s := range steps {
			fmt.Fprintf(w, "  %s\n", s)
		}
	}
}

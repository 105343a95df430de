// SPDX-License-Identifier: Apache-2.0

// Bench measures what Weft costs. It compares within one run and prints ratios, since
// absolute figures say more about the machine than about Weft.
//
// The part "vm" runs in virtual machines, over the kernel data path. It measures the cost
// of a volume compared with the raw namespace under it, and how long I/O stalls when a
// target dies. Each workload runs alternately on the raw namespace and on the volume,
// several times; the result is the median of the ratios.
//
// The part "user" runs on the machine itself, over the user-space data path; see package
// datapath. So does the part "failover", which measures how long I/O stalls there when a target
// or a path fails; see package failover.
//
// The part "tail" measures how long the slowest of all I/Os of an hour take there; see package datapath.
//
// The part "snapshots" measures what snapshots cost: how long writes wait for one (package failover),
// and what the map of a leg costs beside qcow2 and, in a virtual machine, beside dm-thin (package
// datapath).
//
// The part "columns" measures what mirroring costs on several processors, without a network; see
// package columns.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"

	"weft.dev/weft/e2e/bench/columns"
	"weft.dev/weft/e2e/bench/datapath"
	"weft.dev/weft/e2e/bench/failover"
	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
)

var (
	part     = flag.String("part", "all", "which part to run: user, failover, patience, tail, snapshots, vm, columns or all; all leaves out patience and tail")
	rounds   = flag.Int("rounds", 0, "runs of each workload on each device, or of each failure; 0: five in the part user, ten in the part failover, 100 in the part snapshots, three in the others")
	seconds  = flag.Float64("seconds", 0, "seconds per run; 0: half a second in the part user, three in the part vm, one in the part columns, an hour in the parts patience and tail")
	weft     = flag.String("weft", "bin/weft", "failover: the `program` to measure")
	deaths   = flag.Int("deaths", 3, "vm: how many times to kill a target")
	count    = flag.Int("count", 1000, "snapshots: how many to make, clone and delete")
	workers  = flag.Int("workers", 8, "patience: workers of each of the five hosts")
	cpus     = flag.Int("cpus", 4, "columns: processors of the machine")
	dir      = flag.String("dir", "", "user: directory for the files of the file-backed half; snapshots: for all files, past the page cache, instead of in memory; patience: for the drives")
	section  = flag.String("section", "", "user, snapshots, vm: run only sections whose titles contain this: in memory, block devices, on files; writes that wait, beside qcow2, beside dm-thin; throughput, stall")
	only     = flag.String("only", "", "user, failover, snapshots: run only workloads or failures whose names contain this; \"create, clone and delete\" is one")
	servers  = flag.String("servers", "", "user: run only servers whose names match this regular expression, and the first one of each section; \"weft|SPDK\"")
	results  = flag.String("results", "", "user: file for the results")
	peers    = flag.Bool("peers", false, "name the programs of others that the part user compares with, instead of measuring")
	before   = flag.String("compare", "", "compare -results with those in this file instead of measuring")
	profiles = flag.String("profiles", "", "user: directory for CPU profiles of our own processes")
	verbose  = flag.Bool("v", false, "vm: also print what the machines do")
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == datapath.Role {
		if err := datapath.Process(os.Args[2:]); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s: %v\n", os.Args[2], err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 2 && os.Args[1] == failover.Role {
		fmt.Fprintf(os.Stderr, "bench: %v\n", failover.Process(os.Args[2:]))
		os.Exit(1)
	}
	if len(os.Args) > 2 && os.Args[1] == columns.Role {
		if err := columns.Process(os.Args[2:]); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %v\n", err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	if !slices.Contains([]string{"user", "failover", "patience", "tail", "snapshots", "vm", "columns", "all"}, *part) {
		fmt.Fprintf(os.Stderr, "bench: no part %q: user, failover, patience, tail, snapshots, vm, columns or all\n", *part)
		os.Exit(2)
	}
	if *peers {
		datapath.Peers(os.Stdout)
		return
	}
	if *before != "" {
		os.Exit(compared())
	}
	os.Exit(parts())
}

// compared compares two files of results. It fails if Weft is worse than before.
func compared() (code int) {
	old, err := datapath.ReadResults(*before)
	if err == nil {
		var now *datapath.Results
		if now, err = datapath.ReadResults(*results); err == nil {
			if n := datapath.Compare(os.Stdout, old, now); n > 0 {
				fmt.Fprintf(os.Stderr, "bench: %d of Weft's ratios are worse than before\n", n)
				return 1
			}
			return 0
		}
	}
	fmt.Fprintf(os.Stderr, "bench: compare: %v\n", err)
	return 1
}

func parts() (code int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := waits(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		return 1
	}
	if *part == "user" || *part == "all" {
		o := datapath.Options{Rounds: cmp.Or(*rounds, 5), Seconds: cmp.Or(*seconds, 0.5), Dir: *dir, Section: *section, Only: *only, Profiles: *profiles, Results: *results, Out: os.Stdout}
		var err error
		if *servers != "" {
			o.Servers, err = regexp.Compile(*servers)
		}
		if err == nil {
			err = datapath.Measure(ctx, o)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "bench: %v\n", err)
			return 1
		}
	}
	if *part == "vm" || *part == "all" {
		*rounds, *seconds = cmp.Or(*rounds, 3), cmp.Or(*seconds, 3)
		code = testbed.Main("bench", *verbose, measure)
	}
	if strings.Contains(sectionThin, *section) && (*part == "snapshots" || *part == "all") {
		code = max(code, thin())
	}
	if *part == "columns" || *part == "all" {
		o := columns.Options{CPUs: *cpus, Rounds: cmp.Or(*rounds, 3), Seconds: cmp.Or(*seconds, 1), Out: os.Stdout}
		code = max(code, testbed.Main("bench", *verbose, func(t vm.TB) { columns.Measure(t, o) }))
	}
	return code
}

// waits runs the parts that measure how long I/O waits.
func waits(ctx context.Context) error {
	if *part == "failover" || *part == "all" {
		if err := failover.Measure(ctx, failover.Options{Weft: *weft, Rounds: cmp.Or(*rounds, 10), Only: *only, Out: os.Stdout}); err != nil {
			return err
		}
	}
	if *part == "snapshots" || *part == "all" {
		if err := snapshots(ctx); err != nil {
			return err
		}
	}
	if *part == "tail" {
		return datapath.Tail(ctx, datapath.Options{Seconds: cmp.Or(*seconds, 3600), Out: os.Stdout})
	}
	if *part == "patience" {
		return failover.Patience(ctx, failover.LoadOptions{Weft: *weft, Seconds: int(cmp.Or(*seconds, 3600)), Workers: *workers, Dir: *dir, Out: os.Stdout})
	}
	return nil
}

// snapshots runs the part "snapshots", except for what runs in a virtual machine.
func snapshots(ctx context.Context) error {
	if strings.Contains(sectionHolds, *section) {
		if err := failover.Holds(ctx, failover.Options{Weft: *weft, Rounds: cmp.Or(*rounds, 100), Out: os.Stdout}); err != nil {
			return err
		}
	}
	if strings.Contains(sectionQcow2, *section) {
		return datapath.Snapshots(ctx, datapath.Options{Rounds: cmp.Or(*rounds, 7), Seconds: cmp.Or(*seconds, 0.3), Only: *only, Count: *count, Dir: *dir, Out: os.Stdout})
	}
	return nil
}

// thin measures mapped legs beside dm-thin, where virtual machines can run.
func thin() (code int) {
	if err := vm.Available(); err != nil {
		fmt.Printf("\nleft out: dm-thin: %v\n", err)
		return 0
	}
	return testbed.Main("bench", *verbose, func(t vm.TB) {
		datapath.Thin(t, datapath.Options{Rounds: cmp.Or(*rounds, 5), Seconds: cmp.Or(*seconds, 0.5), Only: *only, Count: *count, Out: os.Stdout})
	})
}

// The sections of the part "snapshots".
const (
	sectionHolds = "writes that wait"
	sectionQcow2 = "beside qcow2"
	sectionThin  = "beside dm-thin"
)

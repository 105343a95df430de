// SPDX-License-Identifier: Apache-2.0

// Bench measures what Weft costs, in one run and as ratios, since absolute
// figures say more about the machine than about Weft.
//
// The part "vm" runs in virtual machines, over the kernel's data path: what a
// volume costs compared with the raw namespace under it, and how long I/O stalls
// when a target dies. Each workload runs on the raw namespace and on the volume
// in turn, several times, and the median of the ratios counts.
//
// The part "user" runs on the machine itself, over the user-space data path; see
// package datapath.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"

	"weft.dev/weft/e2e/bench/datapath"
	"weft.dev/weft/e2e/testbed"
)

var (
	part     = flag.String("part", "all", "user, vm or all")
	rounds   = flag.Int("rounds", 0, "how often each workload runs on each device; 0: five times in the part user, three times in the part vm")
	seconds  = flag.Float64("seconds", 0, "how long each run takes; 0: half a second of the part user, three of the part vm")
	deaths   = flag.Int("deaths", 3, "vm: how often a target is killed")
	dir      = flag.String("dir", "", "user: where the files of the file-backed half lie")
	only     = flag.String("only", "", "user: workloads whose names contain it")
	profiles = flag.String("profiles", "", "user: a folder for processor profiles of our own processes")
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
	flag.Parse()
	if !slices.Contains([]string{"user", "vm", "all"}, *part) {
		fmt.Fprintf(os.Stderr, "bench: no part %q: user, vm or all\n", *part)
		os.Exit(2)
	}
	os.Exit(parts())
}

func parts() (code int) {
	if *part != "vm" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		err := datapath.Measure(ctx, datapath.Options{Rounds: cmp.Or(*rounds, 5), Seconds: cmp.Or(*seconds, 0.5), Dir: *dir, Only: *only, Profiles: *profiles, Out: os.Stdout})
		if err != nil {
			fmt.Fprintf(os.Stderr, "bench: %v\n", err)
			return 1
		}
	}
	if *part != "user" {
		*rounds, *seconds = cmp.Or(*rounds, 3), cmp.Or(*seconds, 3)
		code = testbed.Main("bench", *verbose, measure)
	}
	return code
}

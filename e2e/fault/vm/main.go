// SPDX-License-Identifier: Apache-2.0

// Vm injects random faults into clusters of virtual machines with real kernels, while a program
// writes to a mirrored volume on the kernel's data path, and reads it. It is the counterpart of the tests of
// package fault, which do the same in user space and virtual time.
//
//	go run ./e2e/fault/vm -faults 500 -first 1     lives of some 25 faults, with seeds 1, 2, …
//	go run ./e2e/fault/vm -faults 25 -first 7      one of them again
//	go run ./e2e/fault/vm -faults 25 -kind thin    with a thin volume; by default the seed says which kind
//
// Each life is a cluster of eight machines: three managers, three targets and two clients. A round
// begins up to three faults, one after another, and ends them in another order. Then everything must
// heal: the volume has all its copies within four minutes (ten if it is thin), and the program, which has seen no error,
// goes on writing. Every block of the volume is a register: each write of it has a number of its own,
// which is acknowledged, or not known if the program's machine died. After a round, each block must
// hold its last acknowledged number or a later one that was written, whole. Reads beside the writes, also
// while faults last, find no number older than one that was acknowledged or read before.
//
// The last quarter of what is written of a thin volume is discarded, too, 16 KiB at a time. Such a block may then be
// blank or as it was, until it is written again: the kernel reports a discard as done if one copy has done it.
//
// Targets serve the legs of a thin volume from their agents' processes, beside the kernel. Now and then a
// snapshot of it is asked for, while faults last or after them. While they last, it may be refused. One that
// is taken must hold, for each block, no number older than the last one that was acknowledged before it was
// asked for, and none that began after it was known to be taken: the other client reads it once all has
// healed.
//
// Of a plain volume, now and then a byte changes on a drive, where the program does not write, and a scrub with repair
// goes on beside the faults. Once all has healed, another one repairs what is left.
//
// The faults: power cuts of each machine, also of the manager that leads; killed, stopped and frozen
// agents and managers; managers whose disk is full; links that are cut (both ways or one), slow or lossy;
// drives that fail; and clocks that jump. A power cut of the client moves the volume to the other one by
// force.
//
// In some lives drives have volatile caches, and lose a part of what was not flushed when their machine loses its power.
//
// Now and then a drive that QEMU emulates stops for good. A life in which the kernel reports that is
// not counted, and another one is lived in its place.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
)

const (
	perLife = 25 // faults
	spoilt  = 4  // lives in a row that may be lost to stopped drives
)

func main() {
	faults := flag.Int("faults", 500, "how many faults to inject")
	first := flag.Uint64("first", uint64(time.Now().Unix()), "the seed of the first life")
	kind := flag.String("kind", "", "the `kind` of all volumes, plain or thin; by default each seed says which")
	verbose := flag.Bool("v", false, "also print what the machines do")
	flag.Parse()
	if *kind != "" && *kind != "plain" && *kind != "thin" {
		fmt.Fprintf(os.Stderr, "faults: -kind %q: must be plain or thin\n", *kind)
		os.Exit(2)
	}
	if err := lives(*faults, *first, *kind, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

// lives runs one life after another until enough faults were injected.
func lives(faults int, seed uint64, kind string, verbose bool) error {
	begun := time.Now()
	dir, err := os.MkdirTemp("", "weft-faults-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	stopped := filepath.Join(dir, "stopped")
	if err := os.Setenv("WEFT_VM_STOPPED", stopped); err != nil {
		return err
	}
	var sum life
	lost := 0
	for done := 0; done < faults; seed++ {
		l := &life{seed: seed, most: min(perLife, faults-done), kind: kind}
		code := testbed.Main(fmt.Sprintf("faults-%d", seed), verbose, l.live)
		switch _, err := os.Stat(stopped); {
		case code == 0:
			done += l.injected
			sum.add(l)
			lost = 0
			fmt.Printf("seed %d: %d faults, %s; %d faults in %v\n", seed, l.injected, l.outcome(), done, time.Since(begun).Round(time.Second))
		case err != nil || lost == spoilt:
			return fmt.Errorf("seed %d, after %d faults of it: see above; again with -first %d -faults %d%s", seed, l.injected, seed, l.most, again(kind))
		default:
			lost++
			fmt.Printf("seed %d is not counted: a drive of QEMU had stopped\n", seed)
			if err := os.Remove(stopped); err != nil {
				return err
			}
		}
	}
	fmt.Printf("PASS: %d faults on Linux %s in %v: %s; none lost, none stale, no error, nothing stuck\n", faults, vm.KernelVersion(), time.Since(begun).Round(time.Second), sum.outcome())
	return nil
}

// again is the option for lives of a kind.
func again(kind string) string {
	if kind == "" {
		return ""
	}
	return " -kind " + kind
}

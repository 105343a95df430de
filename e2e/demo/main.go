// SPDX-License-Identifier: Apache-2.0

// Demo tells the main job as a story on this machine, without any kernel module
// of NVMe: a cluster starts in one process (weft dev), a mirrored, striped volume
// over three targets is created, attached, formatted and mounted; files are
// copied in and checked; a target goes down under a program that writes; I/O
// stalls, and goes on without an error; the target returns and gets what it
// missed; then the one with the other copy goes down. A second run finds what
// the first one has left.
//
// Where this machine can have no block device of it, the same is shown through
// the library that the initiator is made of.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	weft := flag.String("weft", "bin/weft", "the weft program")
	dir := flag.String("dir", "", "directory of the cluster (default: weft/demo in the user's state directory)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // whoever reads may go; the cluster must be ended
	start := time.Now()
	err := run(ctx, *weft, *dir)
	took := time.Since(start).Round(time.Second)
	if err != nil {
		fmt.Printf("\n  %v\n\nmake demo: FAIL after %v\n", err, took)
		os.Exit(1)
	}
	fmt.Printf("\nmake demo: PASS in %v: no error reached the application, every acknowledged write is there\n", took)
}

func run(ctx context.Context, weft, dir string) (err error) {
	if dir == "" {
		if dir, err = defaultDir(); err != nil {
			return err
		}
	}
	if weft, err = filepath.Abs(weft); err != nil {
		return err
	}
	d := &demo{ctx: ctx, weft: weft, dir: dir}
	defer func() {
		if f, ok := recover().(failure); ok {
			err = f.error
		}
		err = errors.Join(err, d.cleanUp())
	}()
	d.story()
	return nil
}

func defaultDir() (string, error) {
	if state := os.Getenv("XDG_STATE_HOME"); state != "" {
		return filepath.Join(state, "weft/demo"), nil
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".local/state/weft/demo"), err
}

func chapter(format string, args ...any) { fmt.Printf("\n— "+format+"\n", args...) }

func tell(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }

// demo is a run of the story.
type demo struct {
	ctx       context.Context //nolint:containedctx // of the whole program
	weft, dir string

	cluster *cluster
	place   place // where files are put
	undo    []func() error
}

// failure ends the story.
type failure struct{ error }

func (d *demo) must(err error) {
	if err == nil {
		err = d.ctx.Err()
	}
	if err != nil {
		panic(failure{err})
	}
}

// cleanUp undoes what was not undone, the last first.
func (d *demo) cleanUp() error {
	var errs []error
	for len(d.undo) > 0 {
		last := d.undo[len(d.undo)-1]
		d.undo = d.undo[:len(d.undo)-1]
		errs = append(errs, last())
	}
	return errors.Join(errs...)
}

// done undoes the last thing that is to be undone, as a part of the story.
func (d *demo) done() {
	last := d.undo[len(d.undo)-1]
	d.undo = d.undo[:len(d.undo)-1]
	d.must(last())
}

const volume = "db1"

func (d *demo) story() {
	chapter("A cluster in one process: a volume manager, three targets with a sparse file for a drive each, an initiator")
	d.start()
	begin := time.Now()
	if d.exists() {
		d.secondRun()
	} else {
		d.firstRun()
	}
	tell("(%v)", time.Since(begin).Round(10*time.Millisecond))

	chapter("A program writes without pause and notes every acknowledged write; then a target goes down")
	w := d.place.write(d)
	w.await(d, 200)
	first := d.holder(0, 1)
	d.loseTarget(w, first)
	d.typed("explain", "volume", volume)

	chapter("%s returns and gets what it missed", first)
	d.heal(first)

	chapter("Now the target with the other copy goes down")
	second := d.holder(0, 0)
	d.loseTarget(w, second)
	n := w.stop(d)
	tell("%d writes were acknowledged, and the last one of every block is there", n)
	d.place.check(d)
	tell("the files are as they were")
	d.heal(second)

	chapter("The end: let go in order. The next run finds it all")
	d.place.leave(d)
	d.typed("status")
	d.done() // the cluster
}

// firstRun makes the volume and puts files on it.
func (d *demo) firstRun() {
	chapter("A volume: two columns of two copies, never two copies on one target")
	d.typed("volume", "create", volume, "--size", "512MiB", "--stripes", "2", "--copies", "2", "--wait")
	d.attach()
	d.place.fill(d)
	d.place.leave(d)
	d.attach()
	d.place.enter(d)
	d.place.check(d)
	tell("after detach and attach every file is as it was")
}

// secondRun finds what an earlier one has left.
func (d *demo) secondRun() {
	chapter("The volume of an earlier run is there")
	d.typed("volume", "list")
	d.attach()
	d.place.enter(d)
	d.place.check(d)
	tell("the files of the earlier run are as they were")
}

// attach makes the volume reachable, and says how.
func (d *demo) attach() {
	device := d.typed("attach", volume)
	if strings.HasPrefix(device, "/dev/") {
		d.place = &mounted{device: device, dir: filepath.Join(d.dir, "mnt"), sums: filepath.Join(d.dir, "demo.sums")}
		return
	}
	d.must(fmt.Errorf("attach gave %q: neither a block device nor a namespace", device))
}

// loseTarget takes a target down and tells what the application noticed.
func (d *demo) loseTarget(w *writer, target string) {
	d.typed("dev", "stop-target", target, "--dir", d.dir)
	w.await(d, 100)
	d.must(w.noErrors())
	tell("the application: a stall of %d ms, no error", w.stall().Milliseconds())
	if text := d.event("leg.stale"); text != "" {
		tell("volmgr, before the first write went on: %s", text)
	}
}

// heal brings a target back.
func (d *demo) heal(target string) {
	begin := time.Now()
	d.typed("dev", "start-target", target, "--dir", d.dir)
	d.awaitHealthy()
	tell("healthy again %v later", time.Since(begin).Round(10*time.Millisecond))
	if text := d.event("leg.in-sync"); text != "" {
		tell("%s", text)
	}
}

// SPDX-License-Identifier: Apache-2.0

// Demo tells the main job as a story on this machine, without any kernel module
// of NVMe: a cluster starts in one process (weft dev), a mirrored, striped volume
// over three targets is created, attached, formatted and mounted; files are
// copied in and checked; a target goes down under a program that writes; I/O
// stalls, and goes on without an error; the target returns and gets what it
// missed; then the one with the other copy goes down. A second run finds what
// the first one has left.
//
// Where this machine can have no block device, it says so and tells the same of a
// volume that weft dev serves as an NVMe/TCP namespace, through this project's
// own library of NVMe/TCP.
//
// Its directory holds
//
//	lock        held while it runs
//	cluster/    the directory of weft dev
//	mnt/        where the volume is mounted
//	*.sums      what was put on the volume
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

func main() {
	// What the story starts is to end with it, also when it is killed. The kernel
	// takes the end of the thread that started it for that.
	runtime.LockOSThread()
	weft := flag.String("weft", "bin/weft", "the weft program")
	dir := flag.String("dir", "", "directory of the story (default: weft/demo in the user's state directory)")
	device := flag.String("block-device", "auto", "as of weft dev; none tells the story through the library")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // whoever reads may go; the cluster must be ended
	start := time.Now()
	d, err := newDemo(ctx, *weft, *dir, *device)
	if err == nil {
		err = d.run()
	}
	took := time.Since(start).Round(time.Second)
	switch {
	case ctx.Err() != nil:
		if err != nil {
			fmt.Printf("\n  while cleaning up: %v\n", err)
		}
		fmt.Printf("\nmake demo: INTERRUPTED after %v; the next run goes on with what is there\n", took)
		os.Exit(130)
	case err == nil:
		fmt.Printf("\nmake demo: PASS in %v: no error reached the application, every acknowledged write is there\n", took)
	default:
		fmt.Printf("\n  %v\n\nmake demo: FAIL after %v\n", err, took)
		if d != nil {
			fmt.Printf("the cluster's log is in %s; to begin anew: rm -r %s\n", filepath.Join(d.dir, "cluster/log"), d.dir)
		}
		os.Exit(1)
	}
}

// demo is a run of the story.
type demo struct {
	ctx     context.Context //nolint:containedctx // of the whole program
	weft    string
	dir     string
	device  string // --block-device of weft dev
	cluster *cluster
	place   place // where files are put
	undo    []func() error
	seen    uint64 // the last event that was told
}

func newDemo(ctx context.Context, weft, dir, device string) (*demo, error) {
	var err error
	if weft, err = filepath.Abs(weft); err != nil {
		return nil, err
	}
	if dir == "" {
		dir, err = defaultDir()
	} else {
		dir, err = filepath.Abs(dir)
	}
	if err != nil {
		return nil, err
	}
	return &demo{ctx: ctx, weft: weft, dir: dir, device: device}, nil
}

func defaultDir() (string, error) {
	if state := os.Getenv("XDG_STATE_HOME"); state != "" {
		return filepath.Join(state, "weft/demo"), nil
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".local/state/weft/demo"), err
}

// run tells the story, and undoes all of it that must not last.
func (d *demo) run() (err error) {
	defer func() {
		switch thrown := recover().(type) {
		case nil:
		case failure:
			err = thrown.error
		default:
			panic(thrown)
		}
		if d.ctx.Err() != nil {
			err = nil // of whatever was cut
		}
		err = errors.Join(err, d.cleanUp())
	}()
	d.prepare()
	d.story()
	return nil
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
		errs = append(errs, d.undoLast())
	}
	return errors.Join(errs...)
}

func (d *demo) undoLast() error {
	last := d.undo[len(d.undo)-1]
	d.undo = d.undo[:len(d.undo)-1]
	return last()
}

// done undoes the last thing that is to be undone, as a part of the story.
func (d *demo) done() { d.must(d.undoLast()) }

// prepare takes the directory, and what a run that was killed has left mounted there.
func (d *demo) prepare() {
	d.must(os.MkdirAll(d.dir, 0o700))
	lock, err := os.OpenFile(filepath.Join(d.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	d.must(err)
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		d.must(fmt.Errorf("another demo runs in %s", d.dir))
	}
	d.undo = append(d.undo, lock.Close)
	mnt := filepath.Join(d.dir, "mnt")
	table, err := os.ReadFile("/proc/self/mounts")
	d.must(err)
	for range strings.Count(string(table), " "+mnt+" ") {
		d.must(exec.Command("umount", mnt).Run())
	}
	// Its cluster ends then; this waits for it. Nearly always there is none.
	_ = exec.CommandContext(d.ctx, d.weft, "dev", "stop", "--dir", filepath.Join(d.dir, "cluster")).Run()
}

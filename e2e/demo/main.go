// SPDX-License-Identifier: Apache-2.0

// Demo shows Weft's main job as a story on this machine, without any NVMe kernel module. It
// starts a cluster in one process (weft dev), then creates, attaches, formats and mounts a
// mirrored, striped volume over three targets, copies files to it and checks them. While a
// program writes, one target is stopped: I/O stalls and continues without an error. The
// target returns and is resynchronized; then the target with the other copy is stopped. A
// second run starts from what the first one left.
//
// Where this machine cannot have block devices, it says so and shows the same with a volume
// that weft dev serves as an NVMe/TCP namespace, through this project's NVMe/TCP library.
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
	// Everything that the story starts must end with it, even when it is killed. The kernel
	// signals a child when the thread that started it ends, so this thread must stay.
	runtime.LockOSThread()
	weft := flag.String("weft", "bin/weft", "the weft program")
	dir := flag.String("dir", "", "directory of the story (default: weft/demo in the user's state directory)")
	device := flag.String("block-device", "auto", "as in weft dev; none uses the NVMe/TCP library instead of a block device")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // the reader of the output may go away; the cluster must still be stopped
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
		fmt.Printf("\nmake demo: INTERRUPTED after %v; the next run continues from here\n", took)
		os.Exit(130)
	case err == nil:
		fmt.Printf("\nmake demo: PASS in %v: no error reached the application, every acknowledged write is on the volume\n", took)
	default:
		fmt.Printf("\n  %v\n\nmake demo: FAIL after %v\n", err, took)
		if d != nil {
			fmt.Printf("the cluster's log is in %s; to start from scratch: rm -r %s\n", filepath.Join(d.dir, "cluster/log"), d.dir)
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
	place   place // where files are stored
	undo    []func() error
	seen    uint64 // the last event that was shown
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

// run tells the story, and undoes everything of it that must not last.
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
			err = nil // the step that was interrupted caused it
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

// cleanUp undoes the remaining steps, in reverse order.
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

// done undoes the last step, as a part of the story.
func (d *demo) done() { d.must(d.undoLast()) }

// prepare locks the directory, and unmounts what a killed run has left mounted there.
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
	// The cluster of a killed run then ends; this waits for it. Nearly always there is
	// none.
	_ = exec.CommandContext(d.ctx, d.weft, "dev", "stop", "--dir", filepath.Join(d.dir, "cluster")).Run()
}

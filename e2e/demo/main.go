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

	"weft.dev/weft/e2e/namespace"
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

func chapter(format string, args ...any) { fmt.Printf("\n— "+format+"\n", args...) }

func tell(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }

const volume = "db1"

func (d *demo) story() {
	chapter("A cluster in one process: a volume manager, three targets with a sparse file for a drive each, an initiator")
	d.start()
	begin := time.Now()
	if !d.exists() || !d.secondRun() {
		d.firstRun()
	}
	tell("(all of this in %v)", time.Since(begin).Round(10*time.Millisecond))

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
	tell("the application ends: %d writes were acknowledged, and the last one of every block is there", n)
	d.check()
	d.heal(second)

	chapter("The end: let go in order. The next run finds it all")
	d.detach()
	d.typed("status")
	d.done() // the cluster
}

// firstRun makes the volume and puts files on it.
func (d *demo) firstRun() {
	chapter("A volume: two columns of two copies, never two copies on one target")
	d.typed("volume", "create", volume, "--size", "512MiB", "--stripes", "2", "--copies", "2", "--wait")
	d.attach()
	d.place.format(d)
	d.place.enter(d)
	files, err := sources(d.weft)
	d.must(err)
	size := d.place.put(d, files)
	tell("%d files of %d MiB are copied there: this source tree, and the weft program", len(files), size>>20)
	d.detach()
	d.remember(files)
	d.attach()
	d.place.enter(d)
	d.check()
}

// secondRun finds what an earlier one has left. A volume of a run that was cut
// before it had put all files there is deleted.
func (d *demo) secondRun() bool {
	chapter("The volume of an earlier run is there")
	d.typed("volume", "list")
	d.attach()
	if _, err := os.Stat(d.note()); err != nil {
		tell("that run ended before all files were on it, or put none there: it is made anew")
		d.typed("detach", volume)
		d.typed("volume", "delete", volume)
		return false
	}
	d.place.enter(d)
	d.check()
	return true
}

// attach makes the volume reachable, and says how.
func (d *demo) attach() {
	device := d.typed("attach", volume)
	if !namespace.Is(device) {
		d.place = &mounted{device: device, dir: filepath.Join(d.dir, "mnt")}
		return
	}
	if d.place == nil {
		tell("no block device here: the rest goes through the library, to the volume as an NVMe namespace")
	}
	d.place = &served{name: device}
}

func (d *demo) detach() {
	d.place.leave(d)
	d.typed("detach", volume)
}

// note is the file that remembers what was put on the volume.
func (d *demo) note() string { return filepath.Join(d.dir, d.place.note()) }

func (d *demo) remember(files []string) {
	s := sums{}
	for _, name := range files {
		f, err := os.Open(name)
		d.must(err)
		_, err = s.add(onVolume(name), f)
		d.must(errors.Join(err, f.Close()))
	}
	d.must(s.save(d.note()))
}

// onVolume is a file's name on the volume.
func onVolume(name string) string { return strings.TrimPrefix(name, "/") }

// check compares every file with what was put there.
func (d *demo) check() {
	want, err := loadSums(d.note())
	d.must(err)
	d.must(d.place.sums(d).differ(want))
	tell("%d files, read from the volume, are as they were put there", len(want))
}

// loseTarget takes a target down and tells what the application noticed.
func (d *demo) loseTarget(w *writer, target string) {
	d.news("")
	d.typed("dev", "stop-target", target, "--dir", d.cluster.dir)
	w.await(d, 100)
	d.must(w.noErrors())
	tell("the application: a stall of %d ms, no error", w.stall().Milliseconds())
	for _, text := range d.news("leg.stale") {
		tell("volmgr, before a write went on without it: %s", text)
	}
}

// heal brings a target back.
func (d *demo) heal(target string) {
	begin := time.Now()
	d.news("")
	d.typed("dev", "start-target", target, "--dir", d.cluster.dir)
	d.awaitHealthy()
	tell("healthy again %v later", time.Since(begin).Round(10*time.Millisecond))
	for _, text := range d.news("leg.in-sync") {
		tell("%s, of 256MiB", text)
	}
}

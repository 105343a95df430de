// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"weft.dev/weft/proto/nvmetcp/namespace"
)

func chapter(format string, args ...any) { fmt.Printf("\n— "+format+"\n", args...) }

func tell(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }

// volume is a name that a user's volume is unlikely to have; it becomes /dev/weft/demo.
const volume = "demo"

func (d *demo) story() {
	chapter("A cluster in one process: a volume manager, three targets with a sparse file for a drive each, an initiator")
	d.start()
	begin := time.Now()
	if !d.exists() || !d.secondRun() {
		d.firstRun()
	}
	tell("(all of this took %v)", time.Since(begin).Round(10*time.Millisecond))

	chapter("A program writes without pause and records every acknowledged write; then a target goes down")
	w := d.place.write(d)
	w.await(d, 200)
	first := d.holder(0, 1)
	d.loseTarget(w, first)
	d.typed("explain", "volume", volume)

	chapter("%s returns and is resynchronized", first)
	d.heal(first)

	chapter("Now the target with the other copy goes down")
	second := d.holder(0, 0)
	d.loseTarget(w, second)
	n := w.stop(d)
	tell("the application ends: %d writes were acknowledged, and the last one of every block is on the volume", n)
	d.check()
	d.heal(second)

	chapter("The end: detach and stop in order. The next run finds everything again")
	d.detach()
	d.typed("status")
	d.done() // the cluster
}

// firstRun creates the volume and copies files to it.
func (d *demo) firstRun() {
	chapter("A volume: two columns of two copies, never two copies on one target")
	d.typed("volume", "create", volume, "--size", "512MiB", "--stripes", "2", "--copies", "2", "--wait")
	d.attach()
	d.place.format(d)
	d.place.enter(d)
	files, err := sources(d.weft)
	d.must(err)
	size := d.place.put(d, files)
	tell("%d files (%d MiB) are copied to it: this source tree and the weft program", len(files), size>>20)
	d.detach()
	d.remember(files)
	d.attach()
	d.place.enter(d)
	d.check()
}

// secondRun checks what an earlier run has left. If that run was interrupted before all
// files were copied, secondRun deletes its volume.
func (d *demo) secondRun() bool {
	chapter("The volume of an earlier run is there")
	d.typed("volume", "list")
	d.attach()
	if _, err := os.Stat(d.note()); err != nil {
		tell("that run ended before all files were copied to it; it is created again")
		d.typed("detach", volume)
		d.typed("volume", "delete", volume)
		return false
	}
	d.place.enter(d)
	d.check()
	return true
}

// attach attaches the volume and shows how.
func (d *demo) attach() {
	device := d.typed("attach", volume)
	if !namespace.Is(device) {
		d.place = &mounted{device: device, dir: filepath.Join(d.dir, "mnt")}
		return
	}
	if d.place == nil {
		tell("no block device here: the rest uses the NVMe/TCP library, with the volume as an NVMe namespace")
	}
	d.place = &served{name: device}
}

func (d *demo) detach() {
	d.place.leave(d)
	d.typed("detach", volume)
}

// note is the file with the sums of the files on the volume.
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

// check compares every file with its recorded sum.
func (d *demo) check() {
	want, err := loadSums(d.note())
	d.must(err)
	d.must(d.place.sums(d).differ(want))
	tell("%d files, read from the volume, are unchanged", len(want))
}

// loseTarget takes a target down and reports what the application noticed.
func (d *demo) loseTarget(w *writer, target string) {
	d.news("")
	d.typed("dev", "stop-target", target, "--dir", d.cluster.dir)
	w.await(d, 100)
	d.must(w.noErrors())
	tell("the application: a stall of %d ms, no error", w.stall().Milliseconds())
	for _, text := range d.news("leg.stale") {
		tell("volmgr's record, made before a write continued without the leg: %s", text)
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

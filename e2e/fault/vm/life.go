// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

const (
	volume = "db1"
	span   = 16 // MiB of the volume that are written
	// MiB of the volume, which has two columns. A plain one is compared whole.
	plainSize, thinSize = 48, 256
	rate                = 150
	reads               = 50 // per second, beside the writes
	trims               = 10 // discards per second of a thin volume
	atOnce              = 3  // faults
	healsIn             = 4 * time.Minute
	// Targets read and write thin legs in their agents' processes. Under emulation, beside other work, 128 MiB were
	// copied there at 0.3 MiB/s.
	thinHealsIn = 10 * time.Minute
	between     = 3 * time.Second // at most, between two faults of a round
	atMost      = 8 * time.Second // that all of a round last together
	goOnAfter   = 30
)

// life is a cluster from its creation to its end.
type life struct {
	seed uint64
	most int    // faults
	kind string // of the volume: plain or thin; empty: drawn

	injected, written, read, discarded int
	asked, taken, refused              int // snapshots
	lost                               int // blocks, with drives' caches
	rotten, mended                     int // bytes that changed on a drive, and ranges that were repaired

	*testbed.Bed
	rand   *rand.Rand
	thin   bool
	caches bool        // drives have volatile caches
	holder *vm.Machine // the client with the volume
	device string
	writer *testbed.Writer
	next   uint64 // sequence number of a writer
	acks   testbed.Acks
	blank  map[uint64]bool // blocks that may be blank, since they were discarded

	snapshots []*snapshot // that are not checked yet
}

// live runs the life. It fails t if a promise is broken. In every second life, targets and clients have two
// networks. Half of the volumes are thin, and in a quarter of the lives drives have volatile caches.
func (l *life) live(t vm.TB) {
	l.rand = rand.New(rand.NewPCG(l.seed, 0))
	l.acks, l.blank, l.next = testbed.Acks{}, map[uint64]bool{}, 1
	o := testbed.Options{Managers: 3, Clients: 2, DriveSize: "4GiB", Rails: l.rand.IntN(2) == 0}
	l.thin = l.rand.IntN(2) == 0
	if l.kind != "" {
		l.thin = l.kind == "thin"
	}
	if o.Caches = l.rand.IntN(4) == 0; o.Caches {
		l.caches, o.LosesCaches = true, true
		l.say("drives have volatile caches")
	}
	// A kernel that loses its legs or its drive says so.
	l.Bed = testbed.Start(t, o, vm.AllowKernel(`I/O error|hung_task|blocked for more than`))
	l.create()
	l.attach(l.Clients[0])
	for l.injected < l.most {
		l.round()
	}
	l.settle()
	l.check()
	l.checkSnapshots()
	l.Detach(volume)
	for _, t := range l.Targets {
		l.lost += l.driveOf(t).Lost()
	}
}

// create creates the volume. Targets serve the legs of a thin one from their agents' processes, beside their kernels.
func (l *life) create() {
	size, flags := plainSize, []string{}
	if l.thin {
		l.say("the volume is thin")
		size, flags = thinSize, append(flags, "--thin")
	}
	l.Create(volume, fmt.Sprintf("%dMiB", size), 2, 2, flags...)
}

func (l *life) say(format string, args ...any) {
	fmt.Printf("  seed %d, %d: %s\n", l.seed, l.injected, fmt.Sprintf(format, args...))
}

// outcome says in numbers what the life has shown.
func (l *life) outcome() string {
	return fmt.Sprintf("%d writes acknowledged and found, %d reads, %d discards, %d snapshots right, %d not taken, %d changed bytes, %d repairs, %d blocks lost with caches", l.written, l.read, l.discarded, l.taken, l.refused, l.rotten, l.mended, l.lost)
}

// add adds the outcome of another life.
func (l *life) add(other *life) {
	l.written, l.read, l.discarded = l.written+other.written, l.read+other.read, l.discarded+other.discarded
	l.taken, l.refused = l.taken+other.taken, l.refused+other.refused
	l.rotten, l.mended, l.lost = l.rotten+other.rotten, l.mended+other.mended, l.lost+other.lost
}

// attach gives the volume to a client and begins to write.
func (l *life) attach(client *vm.Machine) {
	l.holder, l.device = client, l.Attach(volume, client)
	l.write()
}

func (l *life) write() {
	discards := 0
	if l.thin {
		discards = trims
	}
	l.writer = l.WriteReadAndDiscard(l.holder, l.device, span, rate, reads, discards, l.next)
}

// other is the client without the volume.
func (l *life) other() *vm.Machine {
	if l.holder == l.Clients[0] {
		return l.Clients[1]
	}
	return l.Clients[0]
}

// round injects faults, ends them, and requires that everything heals.
func (l *life) round() {
	faults := l.choose(min(1+l.rand.IntN(atOnce), l.most-l.injected))
	var names []string
	for _, f := range faults {
		names = append(names, f.name)
	}
	l.say("%s", strings.Join(names, " + "))
	var changed *rotten
	if !l.thin && l.rand.IntN(6) == 0 {
		changed = l.rot()
	}
	l.inject(faults)
	moved := l.end(faults)
	l.healthy(names)
	if changed != nil {
		l.mend(changed)
	}
	if l.thin && l.rand.IntN(4) == 0 {
		l.ask()
	}
	if l.rand.IntN(3) > 0 {
		l.checkSnapshots()
	}
	switch {
	case moved:
	case l.rand.IntN(3) == 0:
		l.settle()
		l.check()
		l.write()
	default:
		l.writer.AwaitProgress(goOnAfter, time.Minute)
		l.writer.NoErrors()
	}
}

// inject begins the faults, and lets them last. Now and then a snapshot is asked for meanwhile.
func (l *life) inject(faults []fault) {
	for _, f := range faults {
		l.must(f.begin(l.T.Context()), f.name)
		l.injected++
		l.pause(between)
	}
	l.pause(atMost)
	if l.thin && l.rand.IntN(2) == 0 {
		l.ask()
	}
}

// end ends the faults in any order. It reports whether that has moved the volume to the other
// client.
func (l *life) end(faults []fault) (moved bool) {
	for _, i := range l.rand.Perm(len(faults)) {
		l.must(faults[i].end(l.T.Context()), "end of "+faults[i].name)
		moved = moved || faults[i].moves
		l.pause(between)
	}
	if moved {
		l.move()
	}
	return moved
}

func (l *life) pause(most time.Duration) { time.Sleep(time.Duration(l.rand.Int64N(int64(most)))) }

func (l *life) must(err error, what string) {
	if err != nil {
		l.T.Fatalf("%s: %v\n%s", what, err, l.State())
	}
}

// move takes the volume from a client that has died, by force, and checks it on the other one.
func (l *life) move() {
	l.writer.Abandon()
	l.count()
	if l.thin { // what it has not told of may be discarded
		l.blank = testbed.Discardable(span)
	}
	l.Weft("detach", volume, "--force")
	l.holder, l.device = l.other(), l.Attach(volume, l.other())
	l.check()
	l.write()
}

// settle ends the writer in order.
func (l *life) settle() {
	l.writer.Stop()
	l.count()
}

// count takes what the writer was told.
func (l *life) count() {
	l.written += len(l.writer.Log())
	l.read += l.writer.Reads()
	l.next = l.writer.Next() + 1000 // those in flight may be on the volume
	l.discarded += l.writer.Discards()
	l.acks.Add(l.writer)
	l.writer.Blank(l.blank)
}

// check compares the volume with what was acknowledged.
func (l *life) check() { l.VerifyDiscarded(l.holder, l.device, span, l.acks, 0, l.blank) }

// healthy waits until the volume has all of its copies.
func (l *life) healthy(after []string) {
	patience := healsIn
	if l.thin || l.caches { // a leg whose drive lost its cache is copied whole
		patience = thinHealsIn
	}
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithTimeout(l.T.Context(), 5*time.Second)
		v, err := l.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
		cancel()
		if err == nil && v.Health == pb.Health_HEALTH_HEALTHY {
			return
		}
		if time.Now().After(deadline) {
			l.T.Fatalf("%v after %s the volume is not healthy: %v\n%s", patience, strings.Join(after, " + "), err, l.State())
		}
		time.Sleep(200 * time.Millisecond)
	}
}

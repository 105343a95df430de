// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

var (
	faults  = flag.Int("faults", 240, "how many faults, over all clusters")
	seed    = flag.Uint64("seed", 0, "of one run, to see it again; 0: some runs from -first on")
	first   = flag.Uint64("first", 1, "seed of the first run")
	members = flag.Int("managers", 0, "how many managers there are, 1 or 3; 0: that depends on the seed")
	only    = flag.String("only", "", "these faults alone, separated by commas")
	sums    = flag.Bool("integrity", false, "volumes keep checksums")
	thinly  = flag.Bool("thin", false, "volumes are thin, and snapshots are taken of them")
	shots   = flag.Bool("snapshots", false, "snapshots are taken of volumes that are not thin")
	plainly = flag.Bool("plain", false, "volumes are not thin and have no snapshots; without one of these flags, that depends on the seed")
	logFile = flag.String("log", "", "file for what the daemons log")
)

// faultsPerRun is how many faults one cluster gets.
const faultsPerRun = 60

// TestNothingIsLost puts clusters through faults while a user works.
func TestNothingIsLost(t *testing.T) {
	if *seed != 0 {
		cryptotest.SetGlobalRandom(t, *seed) // elections, too, are as they were
		live(t, *seed, *faults)
		return
	}
	for i := range uint64((*faults + faultsPerRun - 1) / faultsPerRun) {
		each(t, *first+i, live)
	}
}

// lost is set when a life has failed; with -failfast, one failure is enough.
var lost atomic.Bool

// each runs a seed's life in parallel with others.
func each(t *testing.T, seed uint64, live func(t *testing.T, seed uint64, faults int)) {
	t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
		t.Parallel()
		if failfast := flag.Lookup("test.failfast"); lost.Load() && failfast != nil && failfast.Value.String() == "true" {
			t.Skip("-failfast: another life has gone wrong")
		}
		defer func() { lost.CompareAndSwap(false, t.Failed()) }()
		live(t, seed, faultsPerRun)
	})
}

// layouts are the layouts of the clusters, which have enough targets to leave placement a
// choice.
var layouts = []block.Layout{
	{Stripes: 1, Copies: 2},
	{Stripes: 2, Copies: 2},
	{Stripes: 1, Copies: 3},
	{Stripes: 2, Copies: 3},
	{Stripes: 2, Copies: 1},
}

func live(t *testing.T, seed uint64, faults int) {
	synctest.Test(t, func(t *testing.T) { life(t, seed, faults, func(*cluster) {}) })
}

// life runs one cluster. Use it only in a synctest bubble.
func life(t tester, seed uint64, faults int, lie func(*cluster)) {
	random := rand.New(rand.NewPCG(seed, 0))
	w := newWorld(seed)
	c := newCluster(t, 4, 2, func(c *cluster) {
		c.random = rand.New(rand.NewPCG(seed, 2))
		for i, h := range c.targets {
			h.platter.volatile, h.platter.random = w.volatile(i), rand.New(rand.NewPCG(seed, uint64(10+i)))
		}
		if w.rails {
			c.rails = []string{"a", "b"}
		}
		if w.disk {
			c.stores = t.TempDir()
		}
		c.user.flushes, c.integrity, c.thin = w.flushes, *sums, w.thin
		c.members, c.quorum = w.managers, w.quorum
		lie(c)
		if c.thin || w.snapshots {
			c.roomForSnapshots()
			c.healAfter = healAfter
		}
	})
	defer c.close()
	defer c.tell(seed)
	c.did("%v", w)
	c.createVolume(w.layout)
	if w.dark { // only the labels have been flushed yet
		for _, h := range c.targets {
			h.loseAll(random)
		}
		for _, h := range c.targets {
			h.start()
		}
		c.did("all targets have lost their power")
	}
	c.attach(c.clients[0])
	c.healthy()
	for _, h := range c.targets {
		h.platter.set(func() { h.platter.instant = false })
	}
	c.user.work(seed, 6)
	c.clerk = c.newClerk(seed)
	if c.thin || w.snapshots {
		c.archive = c.newArchive(seed)
	}
	f := &chaos{cluster: c, world: w, random: random}
	c.pass = f.wait
	defer func() { c.pass = time.Sleep }()
	for f.faults < faults {
		f.round(min(12, faults-f.faults))
	}
	if w.layout.Copies > 1 {
		c.equalCopies(random)
	}
	c.archive.clear()
	f.check()
}

// world describes the cluster of one life.
type world struct {
	layout  block.Layout
	caches  string // of drives: "volatile", "none", or "mixed"
	flushes int    // one in so many of the user's operations is a flush
	disk    bool   // the manager's store is on a disk
	dark    bool   // targets lose power once the volume has been created
	rails   bool   // targets are reached on two rails

	thin      bool // volumes are thin, with snapshots
	snapshots bool // volumes that are not thin have snapshots

	managers int
	quorum   bool // a single manager keeps its records as several do
}

// managersOf is how many managers the clusters of a seed have.
func managersOf(seed uint64) int {
	switch {
	case *members != 0:
		return *members
	case seed%4 == 0:
		return 1
	}
	return 3
}

func newWorld(seed uint64) world {
	random := rand.New(rand.NewPCG(seed, 1))
	w := world{
		layout: layouts[seed%uint64(len(layouts))], caches: "volatile",
		flushes: []int{20, 20, 200}[random.IntN(3)], disk: random.IntN(4) == 0,
		dark: random.IntN(2) == 0, rails: rand.New(rand.NewPCG(seed, 3)).IntN(3) == 0,
		managers: managersOf(seed), quorum: rand.New(rand.NewPCG(seed, 4)).IntN(2) == 0,
	}
	switch n := random.IntN(4); {
	case n == 0 || w.layout.Copies == 1: // with one copy, a lost cache is lost data
		w.caches = "none"
	case n == 1:
		w.caches = "mixed"
	}
	w.thin, w.snapshots = seed%9 == 3, seed%9 == 6 // they take five times as long
	if *thinly || *shots || *plainly || *sums {
		w.thin, w.snapshots = *thinly, *shots
	}
	return w
}

// volatile reports whether a target's drive has a volatile cache.
func (w world) volatile(target int) bool {
	return w.caches == "volatile" || w.caches == "mixed" && target%2 == 0
}

func (w world) String() string {
	return fmt.Sprintf("%v, thin: %v, snapshots: %v, caches: %s, one flush in %d operations, store on a disk: %v, two rails: %v, managers: %d, a quorum even of one: %v",
		w.layout, w.thin, w.thin || w.snapshots, w.caches, w.flushes, w.disk, w.rails, w.managers, w.quorum)
}

// tell prints what happened, if a life failed.
func (c *cluster) tell(seed uint64) {
	wrong := 0
	c.every(func(u *user) {
		u.mu.Lock()
		defer u.mu.Unlock()
		wrong += u.wrong
	})
	c.user.mu.Lock()
	counts := fmt.Sprint(c.user.counts)
	c.user.mu.Unlock()
	if c.archive != nil {
		counts += fmt.Sprint("; snapshots ", c.archive.counted())
	}
	if c.clerk != nil {
		counts += fmt.Sprint("; API ", c.clerk.counts)
	}
	c.t.Logf("seed %d: %s in %v of virtual time", seed, counts, time.Since(c.began).Round(time.Second))
	if wrong > 0 {
		c.t.Errorf("%d things went wrong", wrong)
	}
	if c.t.Failed() {
		c.historyMutex.Lock()
		defer c.historyMutex.Unlock()
		c.t.Logf("go test ./e2e/fault -seed %d%s\n%s", seed, chosen(), strings.Join(c.history, "\n"))
	}
}

// chosen returns the flags that choose kinds of clusters, as they were given.
func chosen() (flags string) {
	flag.Visit(func(f *flag.Flag) {
		switch f.Name {
		case "integrity", "thin", "snapshots", "plain", "managers", "only":
			flags += fmt.Sprintf(" -%s=%v", f.Name, f.Value)
		}
	})
	return flags
}

// chaos injects faults into a cluster.
type chaos struct {
	cluster *cluster
	world   world
	random  *rand.Rand
	faults  int
	undo    []repair // of the active faults
	whole   bool     // no fault since the last time everything was healthy
	backup  []byte   // of the manager's store
	torn    bool     // a drive may hold torn blocks, because one target lost power
}

// repair ends a fault at a given time.
type repair struct {
	at   time.Time
	what string
	do   func()
}

// round injects n faults, some of them together, heals all, and verifies the data.
func (r *chaos) round(n int) {
	c := r.cluster
	r.whole, r.torn = r.random.IntN(2) == 0, false
	if r.whole {
		// Faults that were under way at the end may still cost another leg: then the loss of
		// another drive's cache would lose both copies.
		time.Sleep(5 * time.Second)
		c.healthy()
	}
	pause := float64(2 * time.Second)
	if r.random.IntN(3) == 0 { // while the effects of the last fault continue
		pause /= 10
	}
	for range n {
		if err := r.fault(r.kinds()); err != "" {
			c.did("%s", err)
		}
		r.faults++
		r.whole = false
		r.wait(time.Duration(r.random.ExpFloat64() * pause))
		r.check()
	}
	r.heal()
	c.archive.rest()
	c.archive.attachAll()
	c.healthy()
	c.agreed()
	c.clerk.progress()
	c.pause()
	c.verify()
	c.sameCopies()
	c.noDifference()
	c.archive.inspect()
	c.resume()
	c.archive.goOn()
	r.check()
}

func (r *chaos) check() {
	r.cluster.every(func(u *user) {
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.wrong > 0 {
			r.cluster.t.FailNow()
		}
	})
}

// wait lets time pass, and ends the faults that are due.
func (r *chaos) wait(d time.Duration) {
	for deadline := time.Now().Add(d); ; {
		next := -1
		for i, u := range r.undo {
			if !u.at.After(deadline) && (next < 0 || u.at.Before(r.undo[next].at)) {
				next = i
			}
		}
		if next < 0 {
			time.Sleep(time.Until(deadline))
			return
		}
		u := r.undo[next]
		r.undo = slices.Delete(r.undo, next, next+1)
		time.Sleep(time.Until(u.at))
		r.cluster.did("%s", u.what)
		u.do()
	}
}

// later schedules the end of a fault.
func (r *chaos) later(longest time.Duration, what string, do func()) {
	d := 100*time.Millisecond + time.Duration(r.random.Int64N(int64(longest)))
	r.undo = append(r.undo, repair{time.Now().Add(d), what, do})
}

// due reports whether a repair is scheduled.
func (r *chaos) due(what string) bool {
	return slices.ContainsFunc(r.undo, func(u repair) bool { return u.what == what })
}

// heal ends all faults, in random order.
func (r *chaos) heal() {
	for len(r.undo) > 0 { // ending one may start another
		i := r.random.IntN(len(r.undo))
		u := r.undo[i]
		r.undo = slices.Delete(r.undo, i, i+1)
		r.cluster.did("%s", u.what)
		u.do()
	}
	r.cluster.network.heal()
	r.cluster.did("all healed")
}

// verify reads everything, through whatever serves it now.
func (c *cluster) verify() {
	c.t.Helper()
	c.every(func(u *user) {
		if u == c.user || u.deviceSize() > 0 {
			if err := u.verify(); err != nil {
				c.t.Fatalf("read all of %s: %v\n%s", u.name, err, c.explain())
			}
		}
	})
}

// pause lets all users finish what they have begun.
func (c *cluster) pause() {
	c.t.Helper()
	c.every(func(u *user) {
		if !u.pause(patience) {
			c.t.Fatalf("the user of %s waits for answers since %v\n%s", u.name, patience, c.explain())
		}
	})
}

func (c *cluster) resume() { c.every((*user).resume) }

// equalCopies reads everything while each target in turn is down: the other copies must hold
// all that its copy does.
func (c *cluster) equalCopies(random *rand.Rand) {
	c.t.Helper()
	c.archive.rest()
	c.pause()
	// Faults that were under way at the end may still cost another leg.
	time.Sleep(5 * time.Second)
	c.healthy()
	for _, i := range random.Perm(len(c.targets)) {
		h := c.targets[i]
		c.did("%s is down, to see what the others have", h.name)
		h.kill()
		time.Sleep(6 * time.Second) // until every part of the cluster knows
		c.verify()
		h.start()
		c.healthy()
	}
}

// kind is a kind of fault; do returns a description of the fault, empty if it did nothing.
type kind struct {
	name   string
	weight int
	do     func() string
}

// kinds lists all the faults of a cluster with one user.
func (r *chaos) kinds() []kind {
	all := []kind{
		{"kill target", 5, r.killTarget},
		{"lose power", 4, r.losePower},
		{"kill manager", 3, r.killManager},
		{"slow store", 3, r.slowStore},
		{"kill client", 3, r.killClient},
		{"restart client", 1, r.restartClient},
		{"cut link", 5, r.cutLink},
		{"isolate", 3, r.isolate},
		{"cut rail", 6, r.cutRail},
		{"delay link", 3, r.delayLink},
		{"slow medium", 5, r.slowMedium},
		{"break medium", 2, r.breakMedium},
		{"move", 4, r.move},
		{"force move", 4, r.forceMove},
		{"lose record", 3, r.loseRecord},
		{"lose rebuilt", 2, r.loseRebuilt},
		{"cut label", 1, r.cutLabel},
		{"lose powers", 2, r.losePowers},
		{"resend", 4, r.resend},
		{"lose power hung", 2, r.losePowerHung},
		{"flip cache", 1, r.flipCache},
		{"lose store", 1, r.loseStore},
		{"restore store", 1, r.restoreStore},
		{"freeze", 3, r.freeze},
		{"step clock", 1, r.stepClock},
		{"double", 1, r.double},
		{"restart target", 1, r.restartTarget},
		{"stop target", 3, r.stopTarget},
		{"replace target", 4, r.replaceTarget},
		{"blackout", 1, r.blackout},
		{"expand", 4, r.expand},
		{"scrub", 3, r.scrub},
	}
	if len(r.cluster.managers) > 1 {
		all = append(all, kind{"lose the majority", 1, r.loseMajority})
	}
	if r.cluster.archive != nil {
		all = append(all, kind{"go back", 4, r.goBack}, kind{"lose store going back", 1, r.loseStoreGoingBack}, kind{"fill drives", 2, r.fillDrives})
	}
	return append(all, r.managerKinds()...)
}

// fault injects one of these faults, and returns its description.
func (r *chaos) fault(all []kind) string {
	if *only != "" {
		chosen := strings.Split(*only, ",")
		all = slices.DeleteFunc(all, func(k kind) bool { return !slices.Contains(chosen, k.name) })
	}
	if len(all) == 0 {
		return "nothing of what was chosen applies here"
	}
	for range 20 {
		sum := 0
		for _, f := range all {
			sum += f.weight
		}
		at := r.random.IntN(sum)
		for _, f := range all {
			if at -= f.weight; at < 0 {
				if what := f.do(); what != "" {
					r.cluster.count(f.name)
					return what
				}
				break
			}
		}
	}
	return "nothing more can break"
}

func (r *chaos) target() *targetHost { return r.cluster.targets[r.random.IntN(len(r.cluster.targets))] }

// column lists the targets that hold the copies of one of the volume's columns, in random
// order; nil if the manager does not answer.
func (r *chaos) column() (hosts []*targetHost) {
	c := r.cluster
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
	if err != nil || c.layout.Stripes == 0 {
		return nil
	}
	column := uint32(r.random.IntN(c.layout.Stripes))
	for _, l := range v.GetLegs() {
		for _, h := range c.targets {
			if l.GetColumn() == column && h.name == l.GetNode() {
				hosts = append(hosts, h)
			}
		}
	}
	r.random.Shuffle(len(hosts), func(i, j int) { hosts[i], hosts[j] = hosts[j], hosts[i] })
	return hosts
}

// holder returns a target that has a copy of the volume, or any target if the manager does not
// answer.
func (r *chaos) holder() *targetHost {
	if hosts := r.column(); len(hosts) > 0 {
		return hosts[0]
	}
	return r.target()
}

// client returns a client that should have the volume.
func (r *chaos) client() *clientHost {
	nodes := r.cluster.users.nodes()
	name := nodes[0]
	if len(nodes) > 1 {
		name = nodes[r.random.IntN(len(nodes))]
	}
	for _, h := range r.cluster.clients {
		if h.name == name {
			return h
		}
	}
	return r.cluster.clients[0]
}

func (r *chaos) killTarget() string {
	h := r.target()
	if h.process == nil {
		return ""
	}
	h.kill()
	r.later(12*time.Second, h.name+" is started", h.start)
	return h.name + " is killed"
}

// powerOff cuts the power of a target, whose drive may then hold torn blocks.
func (r *chaos) powerOff(h *targetHost) {
	h.powerOff(r.random)
	r.torn = r.torn || h.platter.volatile
}

// losePower cuts the power of a target. If its drive has a volatile cache, everything else
// must be healthy: if a second drive lost its cache, writes in both caches would be lost, as
// on any mirror.
func (r *chaos) losePower() string {
	h := r.target()
	if h.process == nil || h.platter.volatile && !r.whole {
		return ""
	}
	r.powerOff(h)
	r.later(12*time.Second, h.name+" has power again", h.start)
	return h.name + " loses its power"
}

// losePowerHung is losePower for a target whose drive has not answered for a moment.
func (r *chaos) losePowerHung() string {
	h := r.holder()
	if h.process == nil || h.platter.volatile && !r.whole {
		return ""
	}
	h.platter.hang()
	r.cluster.did("%s's drive hangs", h.name)
	r.wait(time.Duration(r.random.Int64N(int64(time.Second))))
	if h.process == nil {
		return "and " + h.name + " is down already"
	}
	r.powerOff(h)
	r.later(12*time.Second, h.name+" has power again", h.start)
	return h.name + " loses its power"
}

// blackout cuts the power of all targets and clients, whatever they are doing. It does nothing
// while one target may still need others to repair torn blocks: after a blackout the user
// expects whole blocks, because drives that lose power together keep blocks whole here.
func (r *chaos) blackout() string {
	c := r.cluster
	if r.torn {
		return ""
	}
	for _, h := range c.clients {
		if h.process != nil {
			h.kill()
			r.later(6*time.Second, h.name+" is started", h.start)
		}
	}
	for _, h := range c.targets {
		if on := h.process != nil; on {
			r.later(6*time.Second, h.name+" has power again", h.start)
		}
		h.loseAll(r.random)
	}
	if r.world.caches != "none" {
		c.every((*user).powerLost)
	}
	return "the power of all targets and clients is lost"
}

func (r *chaos) killClient() string {
	h := r.client()
	if h.process == nil {
		return ""
	}
	h.kill()
	r.later(6*time.Second, h.name+" is started", h.start)
	return h.name + " is killed"
}

// restartClient restarts a client's process in order.
func (r *chaos) restartClient() string {
	h, c := r.client(), r.cluster
	if h.process == nil || !c.user.pause(10*time.Second) {
		return ""
	}
	c.user.close()
	defer c.user.resume()
	resume, ok := c.archive.closeAt(h)
	defer resume()
	if !ok {
		return ""
	}
	h.leave()
	h.start()
	return h.name + " is restarted"
}

// places lists the ends that a link can have.
func (r *chaos) places() []string {
	all := r.cluster.managerNames()
	for _, h := range r.cluster.targets {
		all = append(all, h.name)
	}
	return append(all, r.client().name, r.client().name) // more often: the data passes here
}

func (r *chaos) link() (a, b string) {
	all := r.places()
	for a == b {
		a, b = all[r.random.IntN(len(all))], all[r.random.IntN(len(all))]
	}
	return a, b
}

func (r *chaos) cutLink() string {
	n := r.cluster.network
	a, b := r.link()
	both := r.random.IntN(2) == 0
	n.cut(a, b, true)
	if both {
		n.cut(b, a, true)
	}
	r.later(12*time.Second, fmt.Sprintf("%s and %s reach each other", a, b), func() {
		n.part(a, b, false)
	})
	return fmt.Sprintf("%s does not reach %s; both ways: %v", a, b, both)
}

// cutRail cuts or delays one rail of a target, for a client.
func (r *chaos) cutRail() string {
	c := r.cluster
	if len(c.rails) == 0 {
		return ""
	}
	client, rail := r.client().name, r.holder().name+"-"+c.rails[r.random.IntN(len(c.rails))]
	longest := []time.Duration{time.Second, 15 * time.Second}[r.random.IntN(2)] // a flapping cable, or a rail that is down
	back := func() { c.network.part(client, rail, false) }
	way := r.random.IntN(4)
	switch way {
	case 0:
		c.network.part(client, rail, true)
	case 1:
		c.network.cut(client, rail, true)
	case 2:
		c.network.cut(rail, client, true)
	default:
		c.network.delay(client, rail, longest/2)
		back = func() { c.network.delay(client, rail, 0) }
	}
	r.later(longest, fmt.Sprintf("%s is back for %s", rail, client), back)
	return fmt.Sprintf("%s %s for %s", rail, []string{"is down", "gets nothing", "answers nothing", "is slow"}[way], client)
}

func (r *chaos) isolate() string {
	n := r.cluster.network
	a, _ := r.link()
	others := slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(r.places()))), func(b string) bool { return b == a })
	set := func(cut bool) {
		for _, b := range others {
			n.part(a, b, cut)
		}
	}
	set(true)
	r.later(15*time.Second, a+" is reached again", func() { set(false) })
	return a + " is cut off"
}

func (r *chaos) delayLink() string {
	n := r.cluster.network
	a, b := r.link()
	d := time.Duration(r.random.Int64N(int64(3 * time.Second)))
	n.delay(a, b, d)
	r.later(10*time.Second, fmt.Sprintf("no delay from %s to %s", a, b), func() { n.delay(a, b, 0) })
	return fmt.Sprintf("from %s to %s it takes %v", a, b, d.Round(time.Millisecond))
}

// slowMedium makes a drive slow, for all or some of its I/O, or makes it hang.
func (r *chaos) slowMedium() string {
	h := r.target()
	p, d := h.platter, time.Duration(r.random.Int64N(int64(3*time.Second)))
	what := ""
	switch r.random.IntN(4) {
	case 0:
		p.set(func() { p.each = d })
		what = fmt.Sprintf("%s's drive takes up to %v", h.name, d.Round(time.Millisecond))
	case 1:
		p.set(func() { p.each, p.straggle = d/100, 5*d })
		what = fmt.Sprintf("%s's drive takes up to %v now and then", h.name, (5 * d).Round(time.Millisecond))
	case 2:
		what = r.straggle(h)
		if client := r.client().name; r.random.IntN(2) == 0 { // the client reconnects at once
			r.cutBriefly(client, h.name)
		}
		return what
	default:
		p.hang()
		what = h.name + "'s drive hangs"
	}
	r.later(10*time.Second, h.name+"'s drive is fast", p.well)
	return what
}

// straggle makes drives delay some of the I/O that they have or soon get for long, while they
// complete the rest at once.
func (r *chaos) straggle(hosts ...*targetHost) string {
	for _, h := range hosts {
		h.platter.set(func() { h.platter.straggle = 25 * time.Second })
	}
	r.wait(100*time.Millisecond + time.Duration(r.random.Int64N(int64(300*time.Millisecond))))
	for _, h := range hosts {
		h.platter.set(func() { h.platter.straggle = 0 })
	}
	return fmt.Sprintf("%v's drives keep some of their IO for up to 25s", hosts)
}

// resend makes a client reconnect to a target at once, while the drive still delays some I/O
// of the old connections. The client sends that I/O again, and then writes to the same places.
func (r *chaos) resend() string {
	c, h, client := r.cluster, r.holder(), r.client()
	if h.process == nil || client.process == nil {
		return ""
	}
	c.did("%s", r.straggle(h))
	c.every((*user).heat)
	c.network.reset(client.name, h.name)
	return fmt.Sprintf("the connections of %s and %s are reset", client.name, h.name)
}

// cutBriefly cuts a link, too briefly for a drive that hangs to be declared lost.
func (r *chaos) cutBriefly(a, b string) {
	n := r.cluster.network
	n.part(a, b, true)
	r.later(1500*time.Millisecond, fmt.Sprintf("%s and %s reach each other", a, b), func() {
		n.part(a, b, false)
	})
	r.cluster.did("%s and %s do not reach each other", a, b)
}

// breakMedium makes a drive return errors. After a failed label write or flush, a target does
// not use the drive again until its process is restarted: that takes an operator.
func (r *chaos) breakMedium() string {
	h, c := r.target(), r.cluster
	if slices.ContainsFunc(r.cluster.targets, func(h *targetHost) bool { return h.platter.failing() }) {
		return ""
	}
	c.every(func(u *user) { u.medium(true) })
	p, what, restart, loses := h.platter, "", true, false
	switch r.random.IntN(5) {
	case 0, 1:
		p.set(func() { p.badData = errMedium })
		what, restart = "reads and writes nothing", false
	case 2:
		p.set(func() { p.err = errMedium })
		what = "gives errors"
	case 3:
		p.set(func() { p.refusal = errReadOnly })
		what = "takes no writes"
	default:
		p.set(func() { p.cacheErr = errCache })
		what, loses = "loses what it should flush", true
		c.every(func(u *user) { u.cacheLoses(true) })
	}
	r.later(10*time.Second, h.name+"'s drive has no errors", func() {
		p.well()
		c.every(func(u *user) { u.medium(false) })
		if loses {
			c.every(func(u *user) { u.cacheLoses(false) })
		}
		if restart && h.process != nil {
			h.kill()
			h.start()
		}
	})
	return h.name + "'s drive " + what
}

// expand makes the volume's wanted size larger while other faults are active. If the manager
// cannot take the request now, it is repeated when everything is healthy.
func (r *chaos) expand() string {
	c := r.cluster
	if c.size == mostSize {
		return ""
	}
	c.size = min(mostSize, c.size+block.Size(1+r.random.IntN(512))*unit)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := c.expand(ctx); err != nil {
		c.did("expand: %v", err)
	}
	return fmt.Sprintf("the volume is to have %d bytes", c.size)
}

func (r *chaos) other() *clientHost {
	for _, h := range r.cluster.clients {
		if h.name != r.cluster.user.node() && h.process != nil {
			return h
		}
	}
	return nil
}

// move detaches the volume and attaches it elsewhere. Targets may lose power in between: after
// a clean detach all data is on the drives, not only in caches.
func (r *chaos) move() string {
	c, from, to := r.cluster, r.client(), r.other()
	if to == nil || from.process == nil || !c.user.pause(10*time.Second) {
		return ""
	}
	c.did("the volume is moved from %s to %s", from.name, to.name)
	c.user.close()
	r.detachAt(from, r.loseDetached)
	c.attach(to)
	c.user.resume()
	return "the volume is moved"
}

// detachAt detaches the volume, and calls then at that moment.
func (r *chaos) detachAt(from *clientHost, then func()) {
	c := r.cluster
	for range 1000 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Node: from.name})
		v, looked := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		cancel()
		if errors.Join(err, looked) == nil && v.GetAttachment() == nil {
			then()
			return
		}
		r.wait(time.Millisecond)
	}
	c.detach(from, false)
}

// loseDetached cuts the power of some or all targets while the volume is detached. If their
// drives have volatile caches, the detach must be clean.
func (r *chaos) loseDetached() {
	c := r.cluster
	if r.random.IntN(2) == 0 || r.torn {
		return
	}
	v, err := c.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: volumeName})
	if err != nil || !v.GetClean() && r.world.caches != "none" {
		return
	}
	all := r.random.IntN(2) == 0
	for _, h := range c.targets {
		if h.process == nil || !all && r.random.IntN(2) == 0 {
			continue
		}
		h.loseAll(r.random)
		c.did("%s loses its power", h.name)
		c.count("lose detached")
		r.later(6*time.Second, h.name+" has power again", h.start)
	}
}

// forceMove takes the volume from a client that is cut off but keeps running: cut off from
// everything, in one direction only, or together with some targets from the rest. A drive may
// hold back its writes for any time.
func (r *chaos) forceMove() string { return r.forceMoveAnd(func() {}) }

// forceMoveAnd calls then just before the volume is taken.
func (r *chaos) forceMoveAnd(then func()) string {
	c, from, to := r.cluster, r.client(), r.other()
	if to == nil {
		return ""
	}
	switch h := r.target(); r.random.IntN(4) {
	case 0:
		c.did("%s", r.straggle(h))
	case 1:
		c.did("%s", r.straggle(c.targets...))
	}
	way := r.random.IntN(5) // both directions, one, the other, or with some targets
	with := map[string]bool{from.name: true}
	for _, h := range c.targets {
		if way > 2 && r.random.IntN(2) == 0 {
			with[h.name] = true
		}
	}
	for _, h := range c.managers[1:] {
		if way > 2 && r.random.IntN(4) == 0 {
			with[h.name] = true
		}
	}
	others := append(c.managerNames(), to.name)
	for _, h := range c.targets {
		others = append(others, h.name)
	}
	set := func(cut bool) {
		for a := range with {
			for _, b := range others {
				if !with[b] {
					c.network.cut(a, b, cut && way != 2)
					c.network.cut(b, a, cut && way != 1)
				}
			}
		}
	}
	set(true)
	c.did("%v are cut off, and the volume of %s goes to %s", slices.Sorted(maps.Keys(with)), from.name, to.name)
	r.later(30*time.Second, fmt.Sprintf("%v are reached again", slices.Sorted(maps.Keys(with))), func() { set(false) })
	r.wait(time.Duration(r.random.Int64N(int64(time.Second))))
	c.user.taken(r.random.Uint64())
	then()
	c.detach(from, true)
	c.attach(to)
	return "the volume is taken"
}

// loseRecord makes the client lose a copy, the manager lose power while it records that, and
// then the client and the targets of the other copies die: when the volume is attached again,
// only the first copy is there.
func (r *chaos) loseRecord() string {
	c, client, hosts := r.cluster, r.client(), r.column()
	if c.leader() == nil || client.process == nil || len(hosts) < 2 || hosts[0].process == nil {
		return ""
	}
	a, others := hosts[0], hosts[1:]
	c.network.part(client.name, a.name, true)
	c.did("%s and %s do not reach each other", client.name, a.name)
	r.wait(600 * time.Millisecond) // the copy is given up a little later
	leader := c.leader()
	if leader == nil {
		return "and no manager leads"
	}
	c.did("%s", r.armTrap(leader))
	// Its start is certain, whatever happens meanwhile: another manager may be about to be replaced,
	// and that waits for a majority.
	r.undo = append(r.undo, repair{time.Now().Add(3 * time.Second), leader.started(), func() { r.startManager(leader) }})
	r.wait(time.Second + time.Duration(r.random.Int64N(int64(time.Second))))
	if len(c.managers) > 1 && r.random.IntN(2) == 0 {
		leader.cut()
	} else {
		c.cutManager()
	}
	if client.process != nil {
		client.kill()
		c.did("%s is killed", client.name)
		r.later(time.Second, client.name+" is started", client.start)
	}
	for _, b := range others { // their caches may hold the last copy
		if b.process != nil {
			b.kill()
			r.later(25*time.Second, b.name+" is started", b.start)
		}
	}
	for _, h := range c.managers {
		if h.running == nil && !r.due(h.started()) {
			r.later(time.Second, h.started(), func() { r.startManager(h) })
		}
	}
	r.later(time.Second, client.name+" reaches "+a.name, func() { c.network.part(client.name, a.name, false) })
	return fmt.Sprintf("%v are killed", others)
}

// loseRebuilt keeps a target away for some time, and cuts the power of all targets as soon as
// its copy is rebuilt.
func (r *chaos) loseRebuilt() string {
	c, h := r.cluster, r.holder()
	if h.process == nil || r.torn || r.world.layout.Copies == 1 {
		return ""
	}
	h.kill()
	c.did("%s is killed", h.name)
	r.wait(3*time.Second + time.Duration(r.random.Int64N(int64(3*time.Second))))
	if h.process != nil {
		return "and is back already"
	}
	h.start()
	c.did("%s is started", h.name)
	for range 4000 { // before a label or a user's flush makes it durable
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		cancel()
		if err == nil && v.GetHealth() == pb.Health_HEALTH_HEALTHY {
			break
		}
		r.wait(time.Millisecond)
	}
	return r.blackout()
}

// cutLabel overwrites the end of a target's drive, where one of its labels is, while the
// target is down. Then it cuts the power during the write of a label: the hanging drive writes
// none of it, and some of it as it dies.
func (r *chaos) cutLabel() string {
	c, h := r.cluster, r.holder()
	if h.process == nil || c.leader() == nil {
		return ""
	}
	h.kill()
	h.platter.set(h.platter.goOnLocked)
	h.buried()
	if err := h.platter.overwriteEnd(); err != nil {
		c.t.Fatalf("%v", err)
	}
	h.start()
	c.did("%s's drive is written over at its end", h.name)
	r.wait(2 * time.Second)
	return r.forceMoveAnd(func() {
		h.platter.hangWrites() // a label's write first reads what is there
		at := time.Now().Add(500 * time.Millisecond)
		r.undo = append(r.undo, repair{at, h.name + " loses its power", func() {
			if h.process == nil {
				return
			}
			// By now the other copies may be gone.
			h.loseAll(r.random)
			if h.platter.volatile {
				c.every((*user).cachesLost)
			}
			r.later(6*time.Second, h.name+" has power again", h.start)
		}})
	})
}

// freeze stops a process for a while; it then continues as if nothing had happened.
func (r *chaos) freeze() string {
	var name string
	var p *process
	switch r.random.IntN(3) {
	case 0:
		h := r.manager()
		name, p = h.name, h.process
	case 1:
		h := r.client()
		name, p = h.name, h.process
	default:
		h := r.target()
		name, p = h.name, h.process
	}
	if p == nil {
		return ""
	}
	p.at.freeze()
	r.later(30*time.Second, name+" goes on", p.at.thaw)
	return name + " stands still"
}

// stepClock sets the manager's clock, forward or back, by up to a day.
func (r *chaos) stepClock() string {
	d := time.Duration(r.random.Int64N(int64(48*time.Hour))) - 24*time.Hour
	r.cluster.clock.Store(int64(d))
	return fmt.Sprintf("the manager's clock is %v ahead", d.Round(time.Second))
}

// double starts a second agent beside a running one: it must be refused or do no harm.
func (r *chaos) double() string {
	c, h, client := r.cluster, r.target(), r.client()
	at, second, what, doubled := h.machine(), h.agent, h.name, &h.doubled
	if r.random.IntN(2) == 0 {
		at, second, what, doubled = client.machine(), client.agent, client.name, &client.doubled
	}
	if at == nil {
		return ""
	}
	*doubled = true
	beside := at.beside()
	agent := second(beside)
	p := run(beside, func(ctx context.Context) {
		if err := agent(ctx); ctx.Err() == nil {
			c.did("the second %s ends: %v", what, err)
		}
	})
	r.later(5*time.Second, "the second "+what+" is gone", func() {
		beside.kill()
		p.end()
	})
	return "a second " + what + " is started"
}

// restartTarget restarts a target's process in order.
func (r *chaos) restartTarget() string {
	h := r.target()
	if h.process == nil {
		return ""
	}
	h.leave()
	h.start()
	return h.name + " is restarted"
}

// stopTarget stops a target in order, and starts it again later.
func (r *chaos) stopTarget() string {
	h := r.holder()
	if h.process == nil {
		return ""
	}
	began := time.Now()
	h.leave()
	r.later(12*time.Second, h.name+" is started", h.start)
	return fmt.Sprintf("%s is stopped in order, which took %v", h.name, time.Since(began).Round(time.Millisecond))
}

// replaceTarget replaces a target's process by its next one, which may die before it begins.
func (r *chaos) replaceTarget() string {
	h := r.holder()
	if h.process == nil {
		return ""
	}
	began, lives := time.Now(), r.random.IntN(4) > 0
	h.handOver(lives)
	return fmt.Sprintf("%s hands over to its next process, which lives: %v; that took %v", h.name, lives, time.Since(began).Round(time.Millisecond))
}

// losePowers cuts the power of several targets while the clients keep running. As with a
// blackout, it does nothing while one target may still need others to repair torn blocks.
func (r *chaos) losePowers() string {
	c := r.cluster
	if r.torn {
		return ""
	}
	var lost []string
	for _, h := range c.targets {
		if h.process != nil && r.random.IntN(3) > 0 {
			h.loseAll(r.random)
			lost = append(lost, h.name)
			r.later(6*time.Second, h.name+" has power again", h.start)
		}
	}
	if r.world.caches != "none" {
		c.every((*user).cachesLost)
	}
	return fmt.Sprintf("%v lose their power", lost)
}

// flipCache makes a drive return with a volatile cache that it did not have, or without the
// one that it had, as a change of settings or a battery can do.
func (r *chaos) flipCache() string {
	h := r.target()
	if h.process == nil || r.world.caches != "mixed" || h.platter.volatile && !r.whole {
		return ""
	}
	r.powerOff(h)
	h.platter.set(func() { h.platter.volatile = !h.platter.volatile })
	h.start()
	return fmt.Sprintf("%s comes back with a volatile cache: %v", h.name, h.platter.volatile)
}

// loseStore loses the manager's store and rebuilds it from drives and hosts, all of which are
// there at that time.
func (r *chaos) loseStore() string {
	c := r.cluster
	if c.archive != nil {
		// A target may still carry out what the lost manager has asked for last. It would keep the leg of a
		// snapshot that no store knows: an operator is told so, and nothing removes it.
		r.heal()
		c.archive.rest()
	}
	c.clerk.hold()
	c.archive.lose()
	c.loseStore()
	c.did("the managers' stores are lost")
	r.undo = slices.DeleteFunc(r.undo, func(u repair) bool { return strings.HasPrefix(u.what, managerPrefix) })
	r.heal()
	c.did("rebuilt: %s", c.rebuildStore())
	return r.startAnew()
}

// restoreStore starts the manager from its first backup, perhaps repeatedly.
func (r *chaos) restoreStore() string {
	c := r.cluster
	if c.archive != nil {
		return "" // it would not know of some snapshots
	}
	r.heal()
	if r.backup == nil {
		c.eventually("back up", func(ctx context.Context) (err error) {
			r.backup, err = c.backup(ctx)
			return err
		})
		return "the manager's store is backed up"
	}
	c.clerk.hold()
	c.loseStore()
	if err := volmgr.Restore(c.managers[0].config(), bytes.NewReader(r.backup)); err != nil {
		c.t.Fatalf("%v", err)
	}
	return "the backup is restored; " + r.startAnew()
}

// startAnew starts a manager with another store, and attaches the volume, which that store
// does not show as attached.
func (r *chaos) startAnew() string {
	c, h := r.cluster, r.client()
	c.user.taken(r.random.Uint64())
	c.archive.begin()
	c.startManager()
	c.clerk.begin()
	c.user.moveTo(h.name)
	patient := time.Now().Add(20 * time.Second)
	c.eventually("attach to "+h.name, func(ctx context.Context) error {
		_, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: h.name})
		if err != nil && time.Now().After(patient) { // every agent has reported by now
			c.choose(ctx, volumeName)
			c.archive.choose(ctx)
		}
		return err
	})
	c.archive.attachAgain()
	c.archive.goOn()
	return "the manager begins anew"
}

// What an operator is told of a copy: how new its label is; whether that label, or else the
// newest one, says that the copy is in sync; which epoch its drive has admitted; and whether
// it may lack data from its drive's cache.
var (
	ownLabel    = regexp.MustCompile(`its label \(generation (\d+), epoch (\d+), revision (\d+)\) (lists|does not list) it`)
	newestLabel = regexp.MustCompile(`the newest label \(generation (\d+), epoch (\d+)\) lists it`)
	admitted    = regexp.MustCompile(`it admitted epoch (\d+) of`)
)

// speaks ranks the evidence for a copy: newer labels first, then a later epoch, then a cache
// that was not lost. Nil if no label says that the copy is in sync.
func speaks(reason string) (much []int) {
	own := ownLabel.FindStringSubmatch(reason)
	if own == nil {
		return nil
	}
	said := own[1:3]
	if newest := newestLabel.FindStringSubmatch(reason); newest != nil {
		said = newest[1:]
	} else if own[4] != "lists" {
		return nil
	}
	if m := admitted.FindStringSubmatch(reason); m != nil {
		said = append(slices.Clone(said), m[1])
	}
	for _, text := range said {
		n, _ := strconv.Atoi(text)
		much = append(much, n)
	}
	kept := 1
	if strings.Contains(reason, "may have lost cached writes") {
		kept = 0
	}
	revision, _ := strconv.Atoi(own[3])
	return append(much, kept, revision)
}

// choose acts as a careful operator does when no copy is certain: of the copies of a column it
// takes the one with the newest label. All drives are there, and no host has written anything
// that it has not noted, so the user must lose nothing.
func (c *cluster) choose(ctx context.Context, name block.VolumeName) {
	v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: string(name)})
	if err != nil {
		return
	}
	believed, most, chosen := map[uint32]bool{}, map[uint32][]int{}, map[uint32]*pb.Leg{}
	for _, l := range v.GetLegs() {
		believed[l.GetColumn()] = believed[l.GetColumn()] || l.GetState() == pb.LegState_LEG_STATE_IN_SYNC
		if much := speaks(l.GetReason()); slices.Compare(much, most[l.GetColumn()]) > 0 {
			most[l.GetColumn()], chosen[l.GetColumn()] = much, l
		}
	}
	for column, l := range chosen {
		if believed[column] {
			continue
		}
		_, err := c.operator.PromoteStaleLeg(ctx, &pb.PromoteStaleLegRequest{Volume: string(name), LegId: l.GetId(), AcceptDataLoss: true})
		c.did("%s: nothing of column %d can be believed, leg %d.%d on %s is taken (%v): %s", name, column, column, l.GetCopy(), l.GetNode(), err, l.GetReason())
		c.count("promoted")
	}
}

// backup is the backup that an operator keeps.
func (c *cluster) backup(ctx context.Context) ([]byte, error) {
	stream, err := c.operator.Backup(ctx, &pb.BackupRequest{})
	if err != nil {
		return nil, err
	}
	var all []byte
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, chunk.GetData()...)
	}
}

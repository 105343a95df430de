// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

var (
	faults  = flag.Int("faults", 240, "how many faults, over all clusters")
	seed    = flag.Uint64("seed", 0, "of one run, to see it again; 0: some runs from -first on")
	first   = flag.Uint64("first", 1, "seed of the first run")
	logFile = flag.String("log", "", "file for what the daemons log")
)

// faultsPerRun is how many faults a cluster sees in its life.
const faultsPerRun = 60

// TestNothingIsLost has clusters live through faults, under a user.
func TestNothingIsLost(t *testing.T) {
	if *seed != 0 {
		live(t, *seed, *faults)
		return
	}
	for i := range uint64((*faults + faultsPerRun - 1) / faultsPerRun) {
		t.Run(fmt.Sprintf("seed %d", *first+i), func(t *testing.T) {
			t.Parallel()
			live(t, *first+i, faultsPerRun)
		})
	}
}

// layouts are what clusters have, with as many targets as leave room for a choice.
var layouts = []block.Layout{
	{Stripes: 1, Copies: 2},
	{Stripes: 2, Copies: 2},
	{Stripes: 1, Copies: 3},
	{Stripes: 2, Copies: 3},
}

func live(t *testing.T, seed uint64, faults int) {
	synctest.Test(t, func(t *testing.T) { life(t, seed, faults, func(*cluster) {}) })
}

// life is that of one cluster. Only in a bubble.
func life(t tester, seed uint64, faults int, lie func(*cluster)) {
	random := rand.New(rand.NewPCG(seed, 0))
	layout := layouts[seed%uint64(len(layouts))]
	c := newCluster(t, 4, 2, lie)
	defer c.close()
	defer c.tell(seed)
	c.createVolume(layout)
	c.attach(c.clients[0])
	c.healthy()
	c.user.work(seed, 6)
	f := &chaos{cluster: c, random: random}
	for f.faults < faults {
		f.round(min(12, faults-f.faults))
	}
	c.equalCopies(random)
	f.check()
}

// tell says what happened, if it went wrong.
func (c *cluster) tell(seed uint64) {
	c.user.mu.Lock()
	wrong, counts := c.user.wrong, fmt.Sprint(c.user.counts)
	c.user.mu.Unlock()
	c.t.Logf("seed %d: %v in %v of virtual time", seed, counts, time.Since(c.began).Round(time.Second))
	if wrong > 0 {
		c.t.Errorf("%d things went wrong", wrong)
	}
	if c.t.Failed() {
		c.historyMutex.Lock()
		defer c.historyMutex.Unlock()
		c.t.Logf("go test ./e2e/fault -seed %d\n%s", seed, strings.Join(c.history, "\n"))
	}
}

// chaos gives a cluster faults.
type chaos struct {
	cluster *cluster
	random  *rand.Rand
	faults  int
	undo    []repair // of faults that are not over
	whole   bool     // nothing has happened since all was well
	torn    bool     // a drive may hold torn blocks, since one target has lost its power
}

// repair ends a fault at its time.
type repair struct {
	at   time.Time
	what string
	do   func()
}

// round gives n faults, some at a time, heals all, and looks whether all is there.
func (r *chaos) round(n int) {
	c := r.cluster
	r.whole, r.torn = true, false
	pause := float64(2 * time.Second)
	if r.random.IntN(3) == 0 { // while what the last one began is still under way
		pause /= 10
	}
	for range n {
		if err := r.fault(); err != "" {
			c.did("%s", err)
		}
		r.faults++
		r.whole = false
		r.wait(time.Duration(r.random.ExpFloat64() * pause))
		r.check()
	}
	r.heal()
	c.healthy()
	if !c.user.pause(patience) {
		c.t.Fatalf("the user waits for answers since %v\n%s", patience, c.explain())
	}
	c.verify()
	c.user.resume()
	r.check()
}

func (r *chaos) check() {
	r.cluster.user.mu.Lock()
	defer r.cluster.user.mu.Unlock()
	if r.cluster.user.wrong > 0 {
		r.cluster.t.FailNow()
	}
}

// wait lets time pass, and ends the faults that are over.
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

// later ends a fault some time from now.
func (r *chaos) later(longest time.Duration, what string, do func()) {
	d := 100*time.Millisecond + time.Duration(r.random.Int64N(int64(longest)))
	r.undo = append(r.undo, repair{time.Now().Add(d), what, do})
}

// heal ends all faults, in any order.
func (r *chaos) heal() {
	r.random.Shuffle(len(r.undo), func(i, j int) { r.undo[i], r.undo[j] = r.undo[j], r.undo[i] })
	for _, u := range r.undo {
		r.cluster.did("%s", u.what)
		u.do()
	}
	r.undo = nil
	r.cluster.network.heal()
	r.cluster.did("all healed")
}

// verify reads all, through whatever serves it now.
func (c *cluster) verify() {
	c.t.Helper()
	if err := c.user.verify(); err != nil {
		c.t.Fatalf("read all: %v\n%s", err, c.explain())
	}
}

// equalCopies reads everything while each target in turn is down: what it alone
// has the others must have too.
func (c *cluster) equalCopies(random *rand.Rand) {
	c.t.Helper()
	if !c.user.pause(patience) {
		c.t.Fatalf("the user waits for answers since %v\n%s", patience, c.explain())
	}
	// What was on its way when the faults ended may cost one more leg, late.
	time.Sleep(5 * time.Second)
	c.healthy()
	for _, i := range random.Perm(len(c.targets)) {
		h := c.targets[i]
		c.did("%s is down, to see what the others have", h.name)
		h.kill()
		time.Sleep(6 * time.Second) // until everybody knows
		c.verify()
		h.start()
		c.healthy()
	}
}

// fault does one fault, and returns what it was; empty if there was nothing to do.
func (r *chaos) fault() string {
	all := []struct {
		weight int
		do     func() string
	}{
		{6, r.killTarget},
		{4, r.losePower},
		{3, r.killManager},
		{3, r.killClient},
		{1, r.restartClient},
		{6, r.cutLink},
		{3, r.isolate},
		{3, r.delayLink},
		{3, r.slowMedium},
		{2, r.breakMedium},
		{2, r.move},
		{2, r.forceMove},
		{1, r.blackout},
		{4, r.expand},
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
					return what
				}
				break
			}
		}
	}
	return "nothing more can break"
}

func (r *chaos) target() *targetHost { return r.cluster.targets[r.random.IntN(len(r.cluster.targets))] }

func (r *chaos) client() *clientHost {
	for _, h := range r.cluster.clients {
		if h.name == r.cluster.user.node() {
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

// losePower takes the power of a target while all else is well: with a second one
// writes would be lost that both had in their caches, as on any mirror.
func (r *chaos) losePower() string {
	h := r.target()
	if h.process == nil || !r.whole {
		return ""
	}
	h.powerOff(r.random)
	r.torn = true
	r.later(12*time.Second, h.name+" has power again", h.start)
	return h.name + " loses its power"
}

// blackout takes the power of all targets and clients, at whatever they are. Not while
// the others may be needed to repair what one has lost: the user takes blocks for
// whole after a blackout, since drives that lose power together leave them whole here.
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
	c.user.powerLost()
	return "the power of all targets and clients is lost"
}

func (r *chaos) killManager() string {
	c := r.cluster
	if c.manager == nil {
		return ""
	}
	c.killManager()
	r.later(8*time.Second, "the manager is started", c.startManager)
	return "the manager is killed"
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

// restartClient ends the client's process in order.
func (r *chaos) restartClient() string {
	h, c := r.client(), r.cluster
	if h.process == nil || !c.user.pause(10*time.Second) {
		return ""
	}
	c.user.close()
	h.leave()
	h.start()
	c.user.resume()
	return h.name + " is restarted"
}

// places are all between whom a link can be.
func (r *chaos) places() []string {
	all := []string{"m1"}
	for _, h := range r.cluster.targets {
		all = append(all, h.name)
	}
	return append(all, r.client().name, r.client().name) // where the data goes
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
		n.cut(a, b, false)
		n.cut(b, a, false)
	})
	return fmt.Sprintf("%s does not reach %s; both ways: %v", a, b, both)
}

func (r *chaos) isolate() string {
	n := r.cluster.network
	a, _ := r.link()
	others := slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(r.places()))), func(b string) bool { return b == a })
	set := func(cut bool) {
		for _, b := range others {
			n.cut(a, b, cut)
			n.cut(b, a, cut)
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

func (r *chaos) slowMedium() string {
	h := r.target()
	d := time.Duration(r.random.Int64N(int64(3 * time.Second)))
	h.platter.slow(d)
	r.later(10*time.Second, h.name+"'s drive is fast", func() { h.platter.slow(0) })
	return fmt.Sprintf("%s's drive takes %v", h.name, d.Round(time.Millisecond))
}

var errMedium = fmt.Errorf("this drive has a bad day: %w", block.ErrMedium)

func (r *chaos) breakMedium() string {
	h, u := r.target(), r.cluster.user
	if slices.ContainsFunc(r.cluster.targets, func(h *targetHost) bool { return h.platter.failing() }) {
		return ""
	}
	u.medium(true)
	h.platter.fail(errMedium)
	r.later(10*time.Second, h.name+"'s drive has no errors", func() {
		h.platter.fail(nil)
		u.medium(false)
	})
	return h.name + "'s drive gives errors"
}

// expand has the volume wanted larger, in the middle of all else. If nobody takes the
// request now, it is made again when all is well.
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

// move detaches the volume, and attaches it elsewhere.
func (r *chaos) move() string {
	c, from, to := r.cluster, r.client(), r.other()
	if to == nil || from.process == nil || len(r.undo) > 0 || !c.user.pause(10*time.Second) {
		return ""
	}
	c.did("the volume is moved from %s to %s", from.name, to.name)
	c.user.close()
	c.detach(from, false)
	c.attach(to)
	c.user.resume()
	return "the volume is moved"
}

// forceMove takes the volume from a client that nobody reaches, and that lives on.
func (r *chaos) forceMove() string {
	c, from, to := r.cluster, r.client(), r.other()
	if to == nil || c.manager == nil || len(r.undo) > 0 {
		return ""
	}
	others := []string{"m1"}
	for _, h := range c.targets {
		others = append(others, h.name)
	}
	way := r.random.IntN(3) // there and back, there, back
	set := func(cut bool) {
		for _, b := range others {
			c.network.cut(from.name, b, cut && way != 2)
			c.network.cut(b, from.name, cut && way != 1)
		}
	}
	set(true)
	c.did("%s is cut off, and its volume goes to %s", from.name, to.name)
	r.later(20*time.Second, from.name+" is reached again", func() { set(false) })
	r.wait(time.Duration(r.random.Int64N(int64(time.Second))))
	c.detach(from, true)
	c.attach(to)
	return "the volume is taken"
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math/rand/v2"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/pace"
)

// virtual is a clock whose time passes when nothing else is left to do.
type virtual struct {
	time   int64
	timers []simTimer
}

func (c *virtual) now() int64 { return c.time + 1 }
func (c *virtual) after(d time.Duration, do func()) {
	c.timers = append(c.timers, simTimer{c.time + int64(max(0, d)), do})
}

// runUntil lets time pass until is, or for a time at most; it says how long that took.
func (c *virtual) runUntil(is func() bool, most time.Duration) time.Duration {
	began := c.time
	for !is() && len(c.timers) > 0 {
		next := 0
		for i := range c.timers {
			if c.timers[i].at < c.timers[next].at {
				next = i
			}
		}
		t := c.timers[next]
		if t.at > began+int64(most) {
			c.time = began + int64(most)
			break
		}
		c.timers = append(c.timers[:next], c.timers[next+1:]...)
		c.time = max(c.time, t.at)
		t.do()
	}
	return time.Duration(c.time - began)
}

// spindle is a leg that does one IO at a time.
type spindle struct {
	c     *virtual
	size  block.Size
	free  int64 // when it has done what it was given
	each  time.Duration
	speed block.Size // bytes in a second
}

func (d *spindle) Geometry() block.Geometry { return block.Geometry{Size: d.size, BlockSize: 4096} }

func (d *spindle) Submit(io *block.IO) {
	d.free = max(d.free, d.c.time) + int64(d.each) + int64(float64(io.Len)/float64(d.speed)*float64(time.Second))
	d.c.after(time.Duration(d.free-d.c.time), func() { io.Complete(nil) })
}

// spindles is a mirror in virtual time, with the second leg still to be added.
func spindles(t *testing.T, cfg Config, speed block.Size) (*Volume, *virtual, chan Event) {
	t.Helper()
	events := make(chan Event, 10)
	cfg.Layout, cfg.OnEvent = layout(1, 2, block.DefaultChunk), func(e Event) { events <- e }
	c := &virtual{}
	v, err := newVolume(cfg, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Add(0, 0, newSpindle(c, cfg.Size, speed), InSync, false); err != nil {
		t.Fatal(err)
	}
	return v, c, events
}

func newSpindle(c *virtual, size, speed block.Size) *spindle {
	return &spindle{c: c, size: size, each: 50 * time.Microsecond, speed: speed}
}

// users read one block after another, with a pause, until stop, and measure what that takes.
type users struct {
	latency pace.Sample
	stop    bool
}

func (u *users) begin(v *Volume, c *virtual, pause time.Duration) {
	r := rand.New(rand.NewPCG(1, 2))
	io := &block.IO{Op: block.OpRead, Len: 4096, Data: make([]byte, 4096)}
	var began int64
	next := func() {
		if u.stop {
			return
		}
		began, io.Off = c.now(), r.Int64N(int64(v.Geometry().Size)/4096)*4096
		v.Submit(io)
	}
	io.Done = func(*block.IO) {
		u.latency.IOs++
		u.latency.Took += time.Duration(c.now() - began)
		c.after(pause, next)
	}
	next()
}

func (u *users) take() time.Duration {
	mean := u.latency.Took / time.Duration(max(1, u.latency.IOs))
	u.latency = pace.Sample{}
	return mean
}

func TestARebuildKeepsItsRate(t *testing.T) {
	for _, rate := range []block.Size{10 * block.MiB, 100 * block.MiB} {
		const size, speed = 256 * block.MiB, block.GiB
		v, c, events := spindles(t, Config{Size: size, RebuildRate: rate}, speed)
		if err := v.Add(0, 1, newSpindle(c, size, speed), Rebuilding, true); err != nil {
			t.Fatal(err)
		}
		took := c.runUntil(func() bool { return len(events) > 0 }, time.Hour)
		want := time.Duration(float64(size) / float64(rate) * float64(time.Second))
		if e := wait(t, events); e.Kind != LegCaughtUp || took < want*95/100 || took > want*105/100 {
			t.Errorf("%v at %v/s took %v, want %v (%+v)", size, rate, took, want, e)
		}
	}
}

func TestTheRateOfARebuildCanChange(t *testing.T) {
	const size, speed = 64 * block.MiB, block.GiB
	v, c, events := spindles(t, Config{Size: size, RebuildRate: block.MiB}, speed)
	if err := v.Add(0, 1, newSpindle(c, size, speed), Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	c.runUntil(func() bool { return false }, 5*time.Second)
	if done := v.Status().Legs[0][1].Resync.Done; done < 4*block.MiB || done > 8*block.MiB {
		t.Errorf("%v copied after 5s at 1MiB/s", done)
	}
	v.SetRebuildRate(0)
	if took := c.runUntil(func() bool { return len(events) > 0 }, time.Hour); took > 5*time.Second {
		t.Errorf("the rest took %v without a limit", took)
	}
}

// Users' IO takes many times as long while a leg is copied to; with the throttle it does not, and
// the rebuild still ends.
func TestARebuildGivesWayToUsersWhoseIOItSlowsDown(t *testing.T) {
	const size, speed = block.GiB, 100 * block.MiB
	measure := func(bound bool) (alone, during, took time.Duration) {
		v, c, events := spindles(t, Config{Size: size}, speed)
		var all users
		for i := range 8 {
			all.begin(v, c, time.Duration(i+1)*100*time.Microsecond)
		}
		c.runUntil(func() bool { return false }, 2*time.Second)
		alone = all.take()
		if err := v.Add(0, 1, newSpindle(c, size, speed), Rebuilding, true); err != nil {
			t.Fatal(err)
		}
		took = c.runUntil(func() bool {
			if !bound {
				v.background.Slow(0)
			}
			return len(events) > 0
		}, time.Hour)
		if e := wait(t, events); e.Kind != LegCaughtUp {
			t.Errorf("event %+v", e)
		}
		return alone, all.take(), took
	}
	alone, unbound, quick := measure(false)
	_, during, took := measure(true)
	t.Logf("users' IO: %v alone, %v during an unbound rebuild of %v, %v during one of %v", alone, unbound, quick, during, took)
	bound := max(pace.SlowFactor*alone, alone+pace.SlowMore)
	if unbound < bound*11/10 {
		t.Errorf("an unbound rebuild slows users down from %v to %v only: the test shows nothing", alone, unbound)
	}
	if during > bound {
		t.Errorf("users' IO takes %v during the rebuild and %v without: want at most %v", during, alone, bound)
	}
	if most := time.Duration(float64(size)/float64(pace.LeastRate)*float64(time.Second)) * 5 / 4; took > most {
		t.Errorf("the rebuild took %v, want at most %v", took, most)
	}
}

func TestWithoutUsersARebuildIsNotSlowedDown(t *testing.T) {
	const size, speed = 512 * block.MiB, block.GiB
	v, c, events := spindles(t, Config{Size: size}, speed)
	u := &users{}
	u.begin(v, c, time.Millisecond)
	v.background.Slow(pace.LeastRate)
	if err := v.Add(0, 1, newSpindle(c, size, speed), Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	c.runUntil(func() bool { return false }, 2*time.Second)
	u.stop = true
	if took := c.runUntil(func() bool { return len(events) > 0 }, time.Hour); took > 10*time.Second {
		t.Errorf("%v took %v after the users had left", size, took)
	}
}

// What a leg with a cache was given is durable in steps, so a leg that leaves during its rebuild and
// returns misses little of what was copied.
func TestAnInterruptedRebuildGoesOnWhereItWas(t *testing.T) {
	const size, speed = block.GiB, block.GiB
	v, c, events := spindles(t, Config{Size: size, RebuildRate: 64 * block.MiB}, speed)
	v.flushUnit = 64 << 20
	cached := &cachedSpindle{newSpindle(c, size, speed)}
	if err := v.Add(0, 1, cached, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	c.runUntil(func() bool { return false }, 10*time.Second)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	missed := block.Size(v.Status().Legs[0][1].Dirty) * block.Size(1<<v.plan.region)
	if rest := size - 10*64*block.MiB; missed < rest || missed > rest+80*block.MiB {
		t.Errorf("the leg misses %v after 10s at 64MiB/s, want %v and what was not flushed", missed, rest)
	}
	c.runUntil(func() bool { return false }, time.Second) // it answers all that it was sent
	if err := v.Add(0, 1, cached, Rebuilding, false); err != nil {
		t.Fatal(err)
	}
	if took := c.runUntil(func() bool { return len(events) > 0 }, time.Hour); took > 8*time.Second {
		t.Errorf("the rest took %v", took)
	}
	if e := wait(t, events); e.Kind != LegCaughtUp {
		t.Errorf("event %+v", e)
	}
}

// cachedSpindle has a volatile cache.
type cachedSpindle struct{ *spindle }

func (d *cachedSpindle) Geometry() block.Geometry {
	g := d.spindle.Geometry()
	g.VolatileCache = true
	return g
}

func TestOnlyTheLastFlushOfARebuildEndsIt(t *testing.T) {
	v, legs, events := mirrorOf(t, 2)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	v.flushUnit = 16 << 20 // all of it
	back := &slow{memory: newMemory(16 * block.MiB)}
	if err := v.Add(0, 1, back, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	var both []*block.IO
	until(t, func() bool {
		answerAll(legs[:1])
		back.mu.Lock()
		kept := back.kept
		back.kept = nil
		back.mu.Unlock()
		for _, io := range kept {
			if io.Op == block.OpFlush {
				both = append(both, io)
				continue
			}
			back.memory.Submit(io)
		}
		return len(both) == 2
	})
	both[0].Complete(nil)
	if s := v.Status().Legs[0][1].State; s != Rebuilding || len(events) > 0 {
		t.Errorf("after the first flush the leg is %v", s)
	}
	both[1].Complete(nil)
	if e := wait(t, events); e.Kind != LegCaughtUp {
		t.Errorf("event %+v", e)
	}
}

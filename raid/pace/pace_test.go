// SPDX-License-Identifier: Apache-2.0

package pace

import (
	"math/rand/v2"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

func TestALimiterHoldsForAllThatShareIt(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	const unit = 512 << 10
	for range 200 {
		l := Limiter{rate: block.Size(1+r.IntN(500)) * block.MiB}
		workers := make([]int64, 1+r.IntN(8)) // when each begins its next step
		var end, bytes int64
		for range 500 {
			i := 0
			for j := range workers {
				if workers[j] < workers[i] {
					i = j
				}
			}
			began := workers[i]
			now := began + r.Int64N(int64(5*time.Millisecond))
			workers[i] = now + int64(l.wait(began, now, unit))
			bytes, end = bytes+unit, max(end, began)
		}
		allowed := float64(l.rate)*float64(end)/float64(time.Second) + float64(unit*(1+len(workers)))
		if float64(bytes) > allowed {
			t.Fatalf("%d bytes in %v at %v/s by %d workers", bytes, time.Duration(end), l.rate, len(workers))
		}
	}
}

func TestTheRulesOfTheThrottle(t *testing.T) {
	fast, slow := Sample{10, 10 * time.Millisecond}, Sample{10, 100 * time.Millisecond} // 1 ms and 10 ms each
	alone := Sample{5, 5 * time.Millisecond}
	for _, c := range []struct {
		name            string
		was             throttle
		during, without Sample
		speed, want     block.Size
	}{
		{"nothing is known of users yet", throttle{}, slow, Sample{}, block.GiB, 0},
		{"users are not slowed down", throttle{}, fast, alone, block.GiB, 0},
		{"users are slowed down", throttle{}, slow, alone, block.GiB, block.GiB / 2},
		{"as measured earlier", throttle{alone: time.Millisecond}, slow, Sample{}, block.GiB, block.GiB / 2},
		{"still", throttle{rate: 256 * block.MiB, alone: time.Millisecond}, slow, Sample{}, 256 * block.MiB, 128 * block.MiB},
		{"no longer", throttle{rate: 256 * block.MiB, alone: time.Millisecond}, fast, Sample{}, 256 * block.MiB, 320 * block.MiB},
		{"the rate is no limit", throttle{rate: 256 * block.MiB, alone: time.Millisecond}, fast, Sample{}, 100 * block.MiB, 0},
		{"it must end", throttle{rate: LeastRate, alone: time.Millisecond}, slow, Sample{}, LeastRate, LeastRate},
		{"slower by a little", throttle{alone: 50 * time.Microsecond}, Sample{1, 200 * time.Microsecond}, Sample{}, block.GiB, 0},
	} {
		got := c.was
		if got.look(c.during, c.without, c.speed); got.rate != c.want {
			t.Errorf("%s: rate %v, want %v", c.name, got.rate, c.want)
		}
	}
}

func TestAThrottleIsNeverBelowItsLeastRate(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	random := func() Sample {
		return Sample{r.Int64N(100), time.Duration(r.Int64N(int64(time.Minute)))}
	}
	var th throttle
	for range 10000 {
		if th.look(random(), random(), block.Size(r.Int64N(int64(block.GiB)))); th.rate != 0 && th.rate < LeastRate {
			t.Fatalf("rate %v", th.rate)
		}
	}
}

// A data path that does not see each I/O gives counts. The I/O that ends while the work rests shows what users' I/O takes
// without it.
func TestUsersIOIsToldAsCounts(t *testing.T) {
	const each, step = 10 * time.Millisecond, 4 << 20
	var now, told int64
	var all Sample
	working := true
	b := &Background{Counts: func() (Sample, bool) {
		for ; told < now; told += int64(time.Millisecond) { // an I/O each ms, which takes ten times as long beside the work
			all.IOs++
			if all.Took += time.Millisecond; working {
				all.Took += 9 * time.Millisecond
			}
		}
		return all, true
	}}
	var none Limiter
	var bytes int64
	for now = 1; now < int64(20*time.Second); {
		if rest := b.Begin(now); rest > 0 {
			now += int64(rest)
			continue
		}
		working = true
		began := now
		now += int64(each)
		pause := b.End(&none, began, now, step)
		working = false
		bytes += step
		now += int64(pause)
	}
	if rate := block.Size(bytes / 20); rate > 100*block.MiB || rate < LeastRate {
		t.Errorf("%v a second, of 400 MiB without users; want much less", rate)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.throttle.alone < 500*time.Microsecond || b.throttle.alone > 4*time.Millisecond {
		t.Errorf("users' I/O is said to take %v without the work, want about 1ms", b.throttle.alone)
	}
}

// Several steps go on at a time, which last longer than a rest and do not end together. What users' I/O takes without
// them is learned nevertheless. A step that hangs stops neither the others nor, once it has ended, that.
func TestARestBeginsWhenAllStepsHaveEnded(t *testing.T) {
	const ms, span = int64(time.Millisecond), 60_000 // in ms
	for _, hangs := range []int64{0, 20_000} {       // for so long, one more step is under way
		r := rand.New(rand.NewPCG(11, 11))
		var b Background
		var none Limiter
		var lanes [4]struct{ began, next int64 } // began is 0 between steps
		if hangs > 0 {
			b.Begin(ms)
		}
		worked, learned, longest := int64(0), hangs, int64(0) // worked: by all lanes; when users' I/O was last seen without the work
		for now := int64(1); now < span; now++ {
			busy := int64(0)
			for i := range lanes {
				l := &lanes[i]
				if now < l.next {
				} else if l.began != 0 {
					l.next, l.began = now+max(1, int64(b.End(&none, l.began*ms, now*ms, 64<<20))/ms), 0
				} else if pause := b.Begin(now * ms); pause > 0 {
					l.next = now + max(1, int64(pause)/ms)
				} else {
					l.began, l.next = now, now+300+r.Int64N(600)
				}
				if l.began != 0 {
					busy++
				}
			}
			if worked += busy; now == hangs {
				b.End(&none, ms, now*ms, 0)
			}
			took := ms // of an I/O that ends now
			if busy > 0 {
				took = 3 * ms / 2
			}
			if b.Served(now*ms-took, now*ms); b.quiet.Load() != 0 {
				learned = max(learned, now)
			}
			longest = max(longest, now-learned)
		}
		b.mu.Lock()
		if alone := b.throttle.alone; alone < 900*time.Microsecond || alone > 1100*time.Microsecond {
			t.Errorf("users' I/O is said to take %v without the work, want 1ms", alone)
		}
		b.mu.Unlock()
		if share := float64(worked) / span / float64(len(lanes)); share < 0.8 {
			t.Errorf("the steps were under way for %.2f of the time", share)
		}
		if longest > 12_000 {
			t.Errorf("users' I/O was not seen without the work for %d ms", longest)
		}
	}
}

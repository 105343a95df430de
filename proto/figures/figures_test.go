// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestALatencyIsInItsBucket(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200_000 {
		took := time.Duration(1) << r.IntN(36)
		took += time.Duration(r.Int64N(int64(took)))
		i := Bucket(took)
		if i < Buckets-1 && took.Seconds() >= bounds[i] || i > 0 && took.Seconds() < bounds[i-1] {
			t.Fatalf("%v is in bucket %d, from %v s to %v s", took, i, bounds[max(0, i-1)], bounds[i])
		}
	}
	for i := range Buckets {
		above := time.Duration(bounds[i]*1e9) + 1
		if got := Bucket(above); got != min(i+1, Buckets-1) {
			t.Errorf("just above the bound of bucket %d: %v is in bucket %d", i, above, got)
		}
	}
	for took, want := range map[time.Duration]int{-1: 0, 0: 0, time.Hour: Buckets - 1, 64 * time.Second: Buckets - 1} {
		if got := Bucket(took); got != want {
			t.Errorf("Bucket(%v) = %d, want %d", took, got, want)
		}
	}
}

func TestAPercentileIsWrongByAtMost5Percent(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var tally Tally
	var all []time.Duration
	for range 50_000 {
		took := time.Duration(20_000 + r.ExpFloat64()*300_000)
		all = append(all, took)
		tally.Add(Read, 4096, took, false)
	}
	var f Figures
	tally.Take(&f)
	slices.Sort(all)
	for _, q := range []float64{0.5, 0.9, 0.99, 0.999} {
		want, got := all[int(q*float64(len(all)))], f[Read].Latency.Quantile(q)
		if ratio := float64(got) / float64(want); ratio < 0.93 || ratio > 1.07 {
			t.Errorf("quantile %v = %v, want %v", q, got, want)
		}
	}
}

func TestFiguresOfATimeAreTheDifferenceOfReadings(t *testing.T) {
	var m Meter
	m.Add(1, Write, 4096, time.Millisecond, false)
	m.Add(2, Flush, 0, time.Second, true)
	before := m.Figures()
	m.Add(3, Write, 8192, 3*time.Millisecond, true)
	after := m.Figures()
	d, ok := after.Since(&before)
	if w := d[Write]; !ok || w.IOs != 1 || w.Bytes != 8192 || w.Errors != 1 || w.Took != 3*time.Millisecond || w.Latency.Count() != 1 || d[Flush].IOs != 0 {
		t.Errorf("difference = %+v, %v", d, ok)
	}
	if _, ok := before.Since(&after); ok {
		t.Error("a reading from before the counts began anew is taken for an earlier one")
	}
	if p := d.Latency().Quantile(0.99); p < 2800*time.Microsecond || p > 3200*time.Microsecond {
		t.Errorf("p99 = %v, want 3ms", p)
	}
}

func TestAMeterCountsEachIOOnce(t *testing.T) {
	var m Meter
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			for i := range uint64(5000) {
				m.Add(g*i, Op(i%4), 512, time.Duration(i), false)
			}
		})
	}
	for range 20 {
		m.Figures()
	}
	wg.Wait()
	f := m.Figures()
	if f.IOs() != 20_000 || f.Latency().Count() != 20_000 || f[Read].Bytes != 5000*512 {
		t.Errorf("%d I/Os, %d latencies, %d bytes read", f.IOs(), f.Latency().Count(), f[Read].Bytes)
	}
}

func TestATallyTakesNoMemoryForAnIO(t *testing.T) {
	var tally Tally
	if n := testing.AllocsPerRun(1000, func() { tally.Add(Write, 4096, time.Millisecond, false) }); n != 0 {
		t.Errorf("%v allocations for each I/O", n)
	}
}

func TestWaitsThatOverlapCountOnce(t *testing.T) {
	var w Waits
	w.Begin(100)
	w.Begin(120)
	if got := w.Total(150); got != 50 {
		t.Errorf("while they wait: %d, want 50", got)
	}
	w.End(160)
	w.End(200)
	w.Begin(150) // noticed late: until 200 it is counted
	if got := w.Total(260); got != 160 {
		t.Errorf("after a late one: %d, want 160", got)
	}
	w.End(300)
	if got := w.Total(1000); got != 200 {
		t.Errorf("in all: %d, want 200", got)
	}
}

// Of I/Os that take a random time, or more if they come at a certain place of a pattern, those that a
// sampler chooses have the percentiles and the mean of all.
func TestSampledIOsStandForAll(t *testing.T) {
	for _, pattern := range []int{1, 2, 7, 8, 16, 31, 32, 64} {
		r := rand.New(rand.NewPCG(5, 6))
		var tally Tally
		var s Sampler
		var all []time.Duration
		var sum time.Duration
		timed := 0
		const n = 500_000
		for i := range n {
			took := time.Duration(20_000 + r.ExpFloat64()*300_000)
			if pattern > 1 && i%pattern == 0 {
				took += time.Millisecond
			}
			all, sum = append(all, took), sum+took
			if s.Next(int64(i) * 10_000) {
				timed++
				tally.Add(Read, 4096, took, false)
			} else {
				tally.AddUntimed(Read, 4096)
			}
		}
		tally.Add(Write, 4096, time.Hour, true)
		var f Figures
		tally.Take(&f)
		got := f[Read]
		if got.IOs != n || got.Bytes != n*4096 || got.Latency.Count() > n || got.Latency.Count() < n-1000 || f[Write].Latency.Count() != 1 {
			t.Errorf("%d I/Os, %d bytes, %d latencies; want %d I/Os and nearly as many latencies", got.IOs, got.Bytes, got.Latency.Count(), n)
		}
		if timed < n/mostEvery*9/10 || timed > n/mostEvery*12/10 {
			t.Errorf("%d of %d were timed, want one in %d", timed, n, mostEvery)
		}
		if ratio := float64(got.Took) / float64(sum); ratio < 0.93 || ratio > 1.07 {
			t.Errorf("every %d-th is slow: they took %v, want %v", pattern, got.Took, sum)
		}
		// A percentile is right if nearly that part of all is below the bounds of its bucket.
		slices.Sort(all)
		for _, q := range []float64{0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99} {
			bucket := Bucket(got.Latency.Quantile(q))
			below, _ := slices.BinarySearch(all, Bound(bucket-1))
			upTo, _ := slices.BinarySearch(all, Bound(bucket))
			if few := 0.03; float64(below)/n > q+few || float64(upTo)/n < q-few {
				t.Errorf("every %d-th is slow: quantile %v is between %v and %v, those of %.3f and %.3f", pattern, q, Bound(bucket-1), Bound(bucket), float64(below)/n, float64(upTo)/n)
			}
		}
	}
}

// Chosen when they begin, I/Os of a queue count once they end: slow ones, which end late, count as often
// as they come.
func TestSlowIOsOfAQueueAreChosenAsOftenAsFastOnes(t *testing.T) {
	var tally Tally
	var s Sampler
	type io struct {
		timed bool
		took  time.Duration
	}
	const rounds, depth = 20_000, 64
	for i := range rounds {
		var fast, slow []io
		for k := range depth {
			timed := s.Next(int64(i*depth+k) * 10_000)
			if k%4 == 0 {
				slow = append(slow, io{timed, 10 * time.Millisecond})
			} else {
				fast = append(fast, io{timed, time.Millisecond})
			}
		}
		for _, io := range append(fast, slow...) {
			if io.timed {
				tally.Add(Write, 512, io.took, false)
			} else {
				tally.AddUntimed(Write, 512)
			}
		}
	}
	var f Figures
	tally.Take(&f)
	w := f[Write]
	part := float64(w.Latency[Bucket(10*time.Millisecond)]) / float64(w.Latency.Count())
	if w.IOs != rounds*depth || part < 0.235 || part > 0.265 {
		t.Errorf("%d I/Os, %.3f slow; want %d and 0.25", w.IOs, part, rounds*depth)
	}
}

func TestASamplerChoosesFewerTheMoreThereAre(t *testing.T) {
	var s Sampler
	now := int64(0)
	chosen := func(n int, apart time.Duration) (c int) {
		for range n {
			now += int64(apart)
			if s.Next(now) {
				c++
			}
		}
		return c
	}
	for _, test := range []struct {
		apart time.Duration
		every int
	}{
		{time.Second, 1}, {260 * time.Microsecond, 1}, {240 * time.Microsecond, 8}, {130 * time.Microsecond, 8},
		{120 * time.Microsecond, 16}, {60 * time.Microsecond, 32}, {time.Microsecond, 32}, {300 * time.Microsecond, 1},
	} {
		chosen(3*paceIOs, test.apart) // until it knows the pace
		const n = 64 * paceIOs
		got := chosen(n, test.apart)
		if want := n / test.every; got < want*8/10 || got > want*12/10 || test.every == 1 && got != n {
			t.Errorf("one every %v: %d of %d are chosen, want one in %d", test.apart, got, n, test.every)
		}
	}
}

func TestAFailedIOStandsForItselfOnly(t *testing.T) {
	var tally Tally
	for range 5 {
		tally.AddUntimed(Write, 512)
	}
	tally.Add(Write, 0, time.Minute, true)
	var first Figures
	tally.Take(&first) // what is untimed stays so
	tally.Add(Write, 512, time.Millisecond, false)
	f := first.Clone()
	tally.Take(&f)
	w := f[Write]
	if w.IOs != 7 || w.Errors != 1 || w.Latency[Bucket(time.Minute)] != 1 || w.Latency[Bucket(time.Millisecond)] != 6 || w.Took != time.Minute+6*time.Millisecond {
		t.Errorf("%d I/Os, %d errors, %d of a minute, %d of 1 ms, %v together", w.IOs, w.Errors, w.Latency[Bucket(time.Minute)], w.Latency[Bucket(time.Millisecond)], w.Took)
	}
	if first[Write].IOs != 6 || first[Write].Latency.Count() != 1 {
		t.Errorf("before: %d I/Os, %d latencies; want 6 and 1", first[Write].IOs, first[Write].Latency.Count())
	}
}

func TestAMeterTimesAllIOsUntilTheyAreMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Meter
		timed := 0
		ios := func(n int, took time.Duration) {
			for range n {
				began := m.Begin(0)
				if began != 0 {
					timed++
				}
				time.Sleep(took)
				m.End(0, Read, 4096, began, false)
			}
		}
		ios(2*paceIOs, 300*time.Microsecond) // the clock is not that of the test before
		timed = 0
		ios(4*paceIOs, 300*time.Microsecond)
		if timed != 4*paceIOs {
			t.Errorf("%d of %d I/Os were timed that take 300 µs, one after another", timed, 4*paceIOs)
		}
		ios(2*paceIOs, 10*time.Microsecond)
		before := m.Figures()
		timed = 0
		const n = 200 * paceIOs
		ios(n, 10*time.Microsecond)
		if timed < n/mostEvery*8/10 || timed > n/mostEvery*12/10 {
			t.Errorf("%d of %d I/Os were timed, want one in %d", timed, n, mostEvery)
		}
		after := m.Figures()
		f, _ := after.Since(&before)
		if r := f[Read]; r.IOs != n || r.Bytes != n*4096 || r.Latency.Count() < n-400 || r.Latency.Count() > n+400 || r.Latency.Quantile(0.5) < 9500*time.Nanosecond || r.Latency.Quantile(0.5) > 10500*time.Nanosecond {
			t.Errorf("%d I/Os, %d latencies with a median of %v; want %d of 10 µs", r.IOs, r.Latency.Count(), r.Latency.Quantile(0.5), n)
		}
		ios(4*paceIOs, 300*time.Microsecond)
		timed = 0
		ios(paceIOs, 300*time.Microsecond)
		if timed != paceIOs {
			t.Errorf("%d of %d I/Os are timed once they are fewer again", timed, paceIOs)
		}
	})
}

func TestAMeterCountsUntimedIOsOfAllSizesAndErrors(t *testing.T) {
	var m Meter
	want := Count{}
	for i, bytes := range []int64{0, 1, 512, 1 << 20, mostUntimed, mostUntimed + 1, 1 << 50} {
		for op := range Any {
			m.End(7, op, bytes, 0, false)
			m.End(7, op, 0, 0, true)
		}
		want.IOs += 2
		want.Errors++
		want.Bytes += uint64(bytes)
		if i == 2 {
			m.Figures()
		}
	}
	f := m.Figures()
	for op := range Any {
		if c := f[op]; c.IOs != want.IOs || c.Bytes != want.Bytes || c.Errors != want.Errors {
			t.Errorf("%v: %d I/Os, %d bytes, %d errors; want %d, %d, %d", op, c.IOs, c.Bytes, c.Errors, want.IOs, want.Bytes, want.Errors)
		}
	}
}

func BenchmarkTally(b *testing.B) {
	var tally Tally
	for i := range b.N {
		tally.Add(Read, 4096, time.Duration(i&0xfffff), false)
	}
}

func BenchmarkMeter(b *testing.B) {
	var m Meter
	b.RunParallel(func(pb *testing.PB) {
		for i := rand.Uint64(); pb.Next(); i++ {
			m.End(i, Read, 4096, m.Begin(i), false)
		}
	})
}

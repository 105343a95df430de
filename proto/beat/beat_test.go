// SPDX-License-Identifier: Apache-2.0

package beat

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// ticks collects the times of some ticks of a ticker that starts after a delay.
func ticks(t *testing.T, delay, every time.Duration, n int) (all []time.Time) {
	t.Helper()
	time.Sleep(delay)
	ticker := NewTicker(every)
	defer ticker.Stop()
	for range n {
		all = append(all, <-ticker.C)
	}
	return all
}

func TestTickersTickTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, delay := range []time.Duration{1, 37 * time.Millisecond, 99 * time.Millisecond} {
			for _, every := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond} {
				for _, at := range ticks(t, delay, every, 5) {
					if since := at.UnixNano() % int64(every); since != 0 {
						t.Errorf("a ticker of %v that starts %v later ticks %v after the common moment", every, delay, time.Duration(since))
					}
				}
			}
		}
	})
}

func TestTicksAreOneIntervalApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const every = 250 * time.Millisecond
		all := ticks(t, 170*time.Millisecond, every, 20)
		for i := range all[1:] {
			if d := all[i+1].Sub(all[i]); d != every {
				t.Errorf("tick %d comes %v after the one before, want %v", i+1, d, every)
			}
		}
	})
}

func TestTheNextTickIsNeitherNowNorFar(t *testing.T) {
	defer offset.Store(0)
	for _, name := range []string{"", "a", "node-7"} {
		if name != "" {
			Spread(name)
		}
		for _, at := range []time.Time{time.Unix(0, 0), time.Unix(-5, 3), time.Unix(1_700_000_000, 999_999_999)} {
			for d := time.Duration(0); d < 300*time.Millisecond; d += 777 * time.Microsecond {
				const every = 100 * time.Millisecond
				now := at.Add(d)
				p := pause(now, every)
				if p < every/2 || p >= every+every/2 {
					t.Fatalf("%v: the next tick is %v away", now, p)
				}
				if rest := (now.Add(p).UnixNano() - offset.Load()) % int64(every); rest != 0 {
					t.Fatalf("%v: the next tick is %v beside the common moment", now, time.Duration(rest))
				}
			}
		}
	}
}

func TestAnIntervalCanBeChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ticker := NewTicker(time.Second)
		defer ticker.Stop()
		time.Sleep(730 * time.Millisecond)
		ticker.Reset(100 * time.Millisecond)
		for i, want := range []time.Duration{800, 900, 1000, 1100} {
			if got := (<-ticker.C).Sub(start); got != want*time.Millisecond {
				t.Errorf("tick %d comes after %v, want %v ms", i, got, int(want))
			}
		}
		ticker.Reset(time.Second)
		if got := (<-ticker.C).Sub(start); got != 2*time.Second {
			t.Errorf("with the longer interval, a tick comes after %v, want 2 s", got)
		}
	})
}

func TestAFunctionIsCalledAtEachTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var calls []time.Duration
		start := time.Now()
		time.Sleep(30 * time.Millisecond)
		mu.Lock()
		var ticker *Ticker
		ticker = Call(100*time.Millisecond, func() {
			mu.Lock()
			defer mu.Unlock()
			if calls = append(calls, time.Since(start)); len(calls) == 3 {
				ticker.Stop() // also from within
			}
		})
		mu.Unlock()
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		if want := []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond}; !slices.Equal(calls, want) {
			t.Errorf("called after %v, want %v", calls, want)
		}
	})
}

func TestProgramsOfDifferentMachinesTickApart(t *testing.T) {
	defer offset.Store(0)
	seen := map[int64]bool{}
	for _, name := range []string{"a", "b", "node-1", "node-2", "node-3"} {
		Spread(name)
		seen[offset.Load()%int64(time.Second)] = true
	}
	if len(seen) != 5 {
		t.Errorf("five machines have %d different moments", len(seen))
	}
}

func TestAStoppedTickerIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ticker := NewTicker(time.Second)
		<-ticker.C
		ticker.Stop()
		ticker.Stop()
		select {
		case at := <-ticker.C:
			t.Errorf("a stopped ticker ticks at %v", at)
		case <-time.After(time.Minute):
		}
	})
}

func TestAReaderThatIsLateMissesTicks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ticker := NewTicker(time.Second)
		defer ticker.Stop()
		time.Sleep(10*time.Second + time.Second/2)
		<-ticker.C
		select {
		case <-ticker.C:
			t.Error("two ticks wait for a late reader")
		default:
		}
		<-ticker.C
	})
}

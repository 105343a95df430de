// SPDX-License-Identifier: Apache-2.0

package ahead

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/raid/dm/mirror"
	"weft.dev/weft/raid/pace"
)

const (
	region  = 128 << 10
	regions = 40
	size    = regions*region - 36<<10 // the last region is shorter
)

// pair is a leg in sync, and one that is copied to and has a volatile cache.
type pair struct {
	mu                    sync.Mutex
	source, cache, medium []byte
	log                   mirror.LogImage // what users have written
	under                 int             // calls under way
	fails                 func() error    // of a write; nil: none fails
	slow                  time.Duration
	pace                  pace.Background
	rate                  pace.Limiter
	began                 time.Time
}

func newPair() *pair {
	p := &pair{source: make([]byte, size), cache: make([]byte, size), medium: make([]byte, size), log: mirror.CleanLog(regions), began: time.Now()}
	r := rand.New(rand.NewPCG(3, 4))
	for i := range p.source {
		p.source[i] = byte(r.Uint32())
	}
	return p
}

func (p *pair) call(do func()) error {
	p.mu.Lock()
	p.under++
	p.mu.Unlock()
	time.Sleep(p.slow)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.under--
	do()
	return nil
}

// userWrites writes as users do: first to the log.
func (p *pair) userWrites(r *rand.Rand) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := r.IntN(size/4096) * 4096
	p.log.Mark(uint64(at / region))
	p.source[at] = byte(r.Uint32())
}

// copyOf is a copy of the regions of lacks.
func (p *pair) copyOf(lacks mirror.LogImage) *Copy {
	return New(Config{
		Lacks: lacks, Region: region, Size: size, Pace: &p.pace, Rate: &p.rate, Now: func() int64 { return int64(time.Since(p.began)) + 1 },
		Read: func(b []byte, off int64) error { return p.call(func() { copy(b, p.source[off:]) }) },
		Write: func(b []byte, off int64) error {
			p.mu.Lock()
			fails := p.fails
			p.mu.Unlock()
			if fails != nil {
				if err := fails(); err != nil {
					return err
				}
			}
			return p.call(func() { copy(p.cache[off:], b) })
		},
		Flush: func() error { return p.call(func() { copy(p.medium, p.cache) }) },
		Skip: func(r uint64) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.log.Dirty(r)
		},
	})
}

// check compares the medium of the leg with the leg in sync where the leg lacks nothing.
func (p *pair) check(t *testing.T, left mirror.LogImage) (checked int) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for r := range uint64(regions) {
		if left.Dirty(r) || p.log.Dirty(r) {
			continue
		}
		checked++
		from, to := r*region, min((r+1)*region, size)
		if string(p.medium[from:to]) != string(p.source[from:to]) {
			t.Fatalf("region %d is neither left nor in the log, and its copies differ", r)
		}
	}
	return checked
}

func TestWhatIsNotLeftIsOnTheMediumWhileUsersWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		p := newPair()
		p.slow, p.rate = time.Millisecond, pace.NewLimiter(4*region)
		c := p.copyOf(mirror.DirtyLog(regions))
		ended := make(chan error, 1)
		go func() { ended <- c.Run(t.Context()) }()
		for i := 0; len(ended) == 0; i++ {
			time.Sleep(100 * time.Millisecond)
			if i%20 == 0 {
				p.userWrites(r)
			}
			p.check(t, c.Left())
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		written, left := p.log.CountDirty(), c.Left()
		if left.CountDirty() > written || p.check(t, left) < regions-int(written) || p.under != 0 {
			t.Errorf("in the end %d regions are left, and users have written to %d", left.CountDirty(), written)
		}
	})
}

func TestOnlyWhatALegLacksIsCopied(t *testing.T) {
	p := newPair()
	lacks := mirror.CleanLog(regions)
	for _, r := range []uint64{0, 7, 8, regions - 1} {
		lacks.Mark(r)
	}
	c := p.copyOf(lacks)
	if err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if done, total, _ := c.Progress(); done != 3*region+region-36<<10 || total != 4*region || !c.Left().AllClean() {
		t.Errorf("%v of %v copied, and %d regions are left", done, total, c.Left().CountDirty())
	}
	for r := range regions {
		if same := p.medium[r*region+5] == p.source[r*region+5] && p.medium[r*region+6] == p.source[r*region+6]; same != lacks.Dirty(uint64(r)) {
			t.Errorf("region %d: copied %v", r, same)
		}
	}
}

// A path that moves takes a second or two; a leg that fails for longer is left to others.
func TestAPieceIsTriedAgain(t *testing.T) {
	for name, test := range map[string]struct {
		times int
		err   error
		ends  bool
	}{
		"no answer for a while":        {40, errors.New("no answer"), false},
		"no answer any more":           {1000, errors.New("no answer"), true},
		"writes cannot be sent at all": {8, errors.ErrUnsupported, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			p, failed := newPair(), 0
			p.fails = func() error {
				p.mu.Lock()
				defer p.mu.Unlock()
				if failed++; failed <= test.times {
					return test.err
				}
				return nil
			}
			c := p.copyOf(mirror.DirtyLog(regions))
			err := c.Run(t.Context())
			if (err != nil) != test.ends || err != nil && !errors.Is(err, test.err) || c.Left().AllClean() == test.ends {
				t.Errorf("%s: %v, %d regions left", name, err, c.Left().CountDirty())
			}
		})
	}
}

// Run has a caller who lets the leg join then.
func TestNothingIsUnderWayWhenACopyHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(9, 9))
		for range 20 {
			p := newPair()
			p.slow = 3 * time.Millisecond
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.Int64N(int64(100*time.Millisecond))))
			c := p.copyOf(mirror.DirtyLog(regions))
			err := c.Run(ctx)
			cancel()
			if p.mu.Lock(); p.under != 0 || err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%d calls under way, %v", p.under, err)
			}
			p.mu.Unlock()
			p.check(t, c.Left())
		}
	})
}

func TestACopyKeepsItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair()
		p.rate = pace.NewLimiter(2 * region)
		began := time.Now()
		if err := p.copyOf(mirror.DirtyLog(regions)).Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < regions/2*time.Second*9/10 || took > regions/2*time.Second*11/10 {
			t.Errorf("%d regions at two a second took %v", regions, took)
		}
	})
}

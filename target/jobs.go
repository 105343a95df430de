// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Timing of the job runner.
const (
	// hungAfter is how long a job may take before it is reported.
	hungAfter = 3 * time.Second
	// An order that is still given is tried again after retryFirst. Each further failure doubles
	// the wait, up to retryMost.
	retryFirst = 500 * time.Millisecond
	retryMost  = 10 * time.Second
	// deadAfter is how long a drive may be silent before it counts as failed.
	deadAfter = 10 * time.Second
)

// jobs carry out orders in the background. Orders with the same key run one after another, or together where
// that saves writes of a label; different keys run independently, so a device that hangs delays no other. An order
// is not repeated at once, however often it is given.
type jobs struct {
	do   func(context.Context, order) error
	all  func(context.Context, []order) error // all of these, or none; see together
	wake func()                               // called when a job is over
	log  *slog.Logger

	mu      sync.Mutex
	running map[string]*job // by key
	tries   map[string]*try // by the order's text, for as long as it is given
}

type job struct {
	order  order // the one under way
	since  time.Time
	cancel context.CancelFunc
}

// try is the outcome of an order.
type try struct {
	order order
	err   error // nil: it succeeded, and if the order is still given, it had no effect
	wait  time.Duration
	again time.Time // no retry before this
}

func newJobs(do func(context.Context, order) error, all func(context.Context, []order) error, wake func(), log *slog.Logger) *jobs {
	return &jobs{do: do, all: all, wake: wake, log: log, running: map[string]*job{}, tries: map[string]*try{}}
}

// start begins the orders that can begin, and reports whether there were any. An order that is no
// longer given is forgotten; if it is a lasting one and under way, it is cancelled.
func (j *jobs) start(ctx context.Context, orders []order) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.forgetLocked(orders)
	groups := map[string][]order{}
	for _, o := range orders {
		tried := j.tries[o.String()]
		if j.running[o.key()] != nil || tried != nil && time.Now().Before(tried.again) {
			continue
		}
		groups[o.key()] = append(groups[o.key()], o)
	}
	for key, group := range groups {
		ctx, cancel := context.WithCancel(ctx)
		j.running[key] = &job{order: group[0], since: time.Now(), cancel: cancel}
		go j.run(ctx, key, group)
	}
	return len(groups) > 0
}

func (j *jobs) forgetLocked(orders []order) {
	given := map[string]bool{}
	for _, o := range orders {
		given[o.String()] = true
	}
	for text := range j.tries {
		if !given[text] {
			delete(j.tries, text)
		}
	}
	for _, r := range j.running {
		if lasting(r.order) && !given[r.order.String()] {
			r.cancel()
		}
	}
}

func (j *jobs) run(ctx context.Context, key string, orders []order) {
	for len(orders) > 0 && ctx.Err() == nil {
		n := together(orders)
		if n == 1 || !j.runAll(ctx, key, orders[:n]) {
			j.runEach(ctx, key, orders[:n])
		}
		orders = orders[n:]
	}
	j.mu.Lock()
	j.running[key].cancel()
	delete(j.running, key)
	j.mu.Unlock()
	j.wake()
}

// runAll carries out orders together, and reports whether that is the end of them. A drive that fails fails each.
func (j *jobs) runAll(ctx context.Context, key string, orders []order) bool {
	j.begin(key, orders[0])
	err := j.all(ctx, orders)
	if err != nil && !deviceError(err) {
		return false
	}
	for _, o := range orders {
		j.end(ctx, o, err)
	}
	return true
}

func (j *jobs) runEach(ctx context.Context, key string, orders []order) {
	for _, o := range orders {
		if ctx.Err() != nil {
			return
		}
		j.begin(key, o)
		j.end(ctx, o, j.do(ctx, o))
	}
}

// together is how many of the first orders can run together: changes of the records of legs, in one write of a label.
func together(orders []order) (n int) {
	for n < len(orders) {
		if _, puts := orders[n].(putLeg); !puts {
			break
		}
		n++
	}
	return max(1, n)
}

func (j *jobs) begin(key string, o order) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.running[key].order, j.running[key].since = o, time.Now()
}

func (j *jobs) end(ctx context.Context, o order, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil && ctx.Err() != nil {
		return
	}
	wait, last := retryFirst, j.tries[o.String()]
	switch {
	case err == nil:
		j.log.Info("order done", "order", o.String(), "object", o.about())
	case last == nil || last.err == nil:
		j.log.Warn("order not done", "order", o.String(), "object", o.about(), "err", err)
	default:
		wait = min(2*last.wait, retryMost)
	}
	j.tries[o.String()] = &try{order: o, err: err, wait: wait, again: time.Now().Add(wait)}
}

// under reports whether a job with this key is running.
func (j *jobs) under(key string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.running[key] != nil
}

// keys are those of the jobs that are running.
func (j *jobs) keys() map[string]bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	keys := map[string]bool{}
	for key := range j.running {
		keys[key] = true
	}
	return keys
}

// hung returns the order that has kept a key busy for longer than after, and since when.
func (j *jobs) hung(key string, after time.Duration) (o order, since time.Time, hung bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.running[key]
	if r == nil || time.Since(r.since) < after {
		return nil, time.Time{}, false
	}
	return r.order, r.since, true
}

// none reports whether no job is running.
func (j *jobs) none() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.running) == 0
}

// rest waits until no job is running, and reports whether that is so before limit. ended is signalled
// when a job is over.
func (j *jobs) rest(ended <-chan struct{}, limit time.Duration) bool {
	late := time.NewTimer(limit)
	defer late.Stop()
	for !j.none() {
		select {
		case <-ended:
		case <-late.C:
			return false
		}
	}
	return true
}

// settled reports whether no job is running except lasting and hung ones.
func (j *jobs) settled() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, r := range j.running {
		if !lasting(r.order) && time.Since(r.since) < hungAfter {
			return false
		}
	}
	return true
}

// problems lists the orders that failed and those that hang.
func (j *jobs) problems() []problem {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []problem
	for _, t := range j.tries {
		if t.err != nil {
			out = append(out, problem{t.order.about(), t.order.String(), t.err.Error()})
		}
	}
	for _, r := range j.running {
		if !lasting(r.order) && time.Since(r.since) >= hungAfter {
			out = append(out, problem{r.order.about(), r.order.String(), "still running: the device does not answer"})
		}
	}
	return out
}

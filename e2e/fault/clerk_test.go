// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/pb"
)

// clerk calls the managers' API all the time, and knows what was acknowledged: it creates and
// deletes pools, each with a name of its own, and asks each manager in turn what there is. What is
// acknowledged must be in every answer from then on, whichever manager leads, and a read must not
// be older than one that ended before it began.
//
// An attempt that got no answer may take effect later: its request may still be on its way.
type clerk struct {
	cluster *cluster
	random  *rand.Rand
	leads   pb.ManagerClient
	each    []pb.ManagerClient
	hangUp  []func() error
	ended   context.Context //nolint:containedctx // of both goroutines
	stop    context.CancelFunc
	work    sync.WaitGroup

	mu     sync.Mutex
	epoch  int // one more with each store
	next   int
	pools  map[string]*pool
	events map[uint64]string // as they were read first, by number
	newest uint64            // of these
	held   bool              // nothing is begun
	busy   int
	acked  int
	counts map[string]int
}

// pool is what the clerk knows of one.
type pool struct {
	created  bool // acknowledged
	deleting bool // there was an attempt
	deleted  bool // acknowledged
	loose    bool // an attempt to create it got no answer
}

func (c *cluster) newClerk(seed uint64) *clerk {
	k := &clerk{cluster: c, random: rand.New(rand.NewPCG(seed, 50)), pools: map[string]*pool{}, events: map[uint64]string{}, counts: map[string]int{}}
	k.ended, k.stop = context.WithCancel(context.Background())
	at := c.network.boot("clerk")
	conn := c.dialManager(at, grpc.WithUnaryInterceptor(k.attempt))
	k.leads, k.hangUp = pb.NewManagerClient(conn), append(k.hangUp, conn.Close)
	for _, h := range c.managers {
		one := c.dialOne(at, h.address())
		k.each, k.hangUp = append(k.each, pb.NewManagerClient(one)), append(k.hangUp, one.Close)
	}
	reads := rand.New(rand.NewPCG(seed, 51))
	k.work.Go(func() { k.repeat(k.random, k.change) })
	k.work.Go(func() { k.repeat(reads, func() { k.read(reads.IntN(len(k.each))) }) })
	return k
}

// close ends the clerk.
func (k *clerk) close() {
	if k == nil {
		return
	}
	k.stop()
	k.work.Wait()
	for _, hangUp := range k.hangUp {
		if err := hangUp(); err != nil {
			k.cluster.t.Errorf("%v", err)
		}
	}
}

// repeat does something now and then.
func (k *clerk) repeat(random *rand.Rand, do func()) {
	for k.ended.Err() == nil {
		k.sleep(time.Duration(random.Int64N(int64(600 * time.Millisecond))))
		k.mu.Lock()
		held := k.held
		if !held {
			k.busy++
		}
		k.mu.Unlock()
		if held {
			continue
		}
		do()
		k.mu.Lock()
		k.busy--
		k.mu.Unlock()
	}
}

func (k *clerk) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-k.ended.Done():
	}
}

// hold stops the clerk, while the store is replaced.
func (k *clerk) hold() {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.held = true
	k.mu.Unlock()
	for {
		k.mu.Lock()
		busy := k.busy
		k.mu.Unlock()
		if busy == 0 {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// begin continues over a store that may have forgotten what was acknowledged.
func (k *clerk) begin() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.epoch++
	k.held, k.newest = false, 0
	clear(k.pools)
	clear(k.events)
}

// progress waits until another change is acknowledged.
func (k *clerk) progress() {
	if k == nil {
		return
	}
	k.mu.Lock()
	acked := k.acked
	k.mu.Unlock()
	k.cluster.eventually("a change is acknowledged", func(context.Context) error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.acked == acked {
			return fmt.Errorf("the last one was number %d", acked)
		}
		return nil
	})
}

func (k *clerk) wrong(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	k.cluster.did("WRONG: %s", text)
	k.cluster.t.Errorf("%9.3fs  %s", time.Since(k.cluster.began).Seconds(), text)
}

// most is how many pools there are at a time.
const most = 6

// change creates a pool, or deletes one. It repeats that until it is acknowledged, unless the
// store is replaced.
func (k *clerk) change() {
	k.mu.Lock()
	name, epoch := "", k.epoch
	there := []string{}
	for name, p := range k.pools {
		if p.created && !p.deleting {
			there = append(there, name)
		}
	}
	if slices.Sort(there); len(there) == most {
		name = there[k.random.IntN(len(there))]
	}
	deletes := name != ""
	if !deletes {
		k.next++
		name = fmt.Sprintf("e%d-p%d", epoch, k.next)
		k.pools[name] = &pool{}
	}
	p := k.pools[name]
	p.deleting = deletes
	k.mu.Unlock()
	for k.ended.Err() == nil {
		err := k.try(name, deletes)
		k.mu.Lock()
		held := k.held
		if err == nil {
			k.acked++
			p.created, p.deleted = true, deletes
			k.counts["changes"]++
		}
		k.mu.Unlock()
		if err == nil || held {
			return
		}
		k.sleep(100 * time.Millisecond)
	}
}

// attempt notes attempts to create a pool that got no answer. One with an answer, even that its
// outcome is not known, has taken effect or never will, once a later one is acknowledged.
func (k *clerk) attempt(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	err := next(ctx, method, request, reply, conn, o...)
	if r, ok := request.(*pb.CreatePoolRequest); ok && err != nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		_, notLeader := pb.NotLeader(err)
		switch p := k.pools[r.GetName()]; {
		case p == nil || notLeader:
		case pb.OutcomeUnknown(err):
			k.counts["unknown outcomes"]++
		default:
			p.loose = true
			k.counts["attempts without an answer"]++
		}
	}
	return err
}

func (k *clerk) try(name string, deletes bool) (err error) {
	ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
	defer cancel()
	if deletes {
		_, err = k.leads.DeletePool(ctx, &pb.DeletePoolRequest{Name: name})
	} else {
		_, err = k.leads.CreatePool(ctx, &pb.CreatePoolRequest{Name: name, Selector: map[string]string{"clerk": name}})
	}
	return err
}

// known is what a read that begins now must show.
type known struct {
	there, gone []string
	newest      uint64
}

func (k *clerk) known() (w known) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, p := range k.pools {
		switch {
		case p.created && !p.deleting:
			w.there = append(w.there, name)
		case p.deleted && !p.loose:
			w.gone = append(w.gone, name)
		}
	}
	w.newest = k.newest
	return w
}

// read asks one manager what there is.
func (k *clerk) read(which int) {
	before := k.known()
	ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
	defer cancel()
	pools, err := k.each[which].ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return
	}
	events, err := k.each[which].ListEvents(ctx, &pb.ListEventsRequest{AfterSeq: before.newest - min(before.newest, 20)})
	if err != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.counts["reads"]++
	from := k.cluster.managers[which].name
	var names []string
	for _, p := range pools.GetPools() {
		names = append(names, p.GetName())
		if k.pools[p.GetName()] == nil && strings.HasPrefix(p.GetName(), fmt.Sprintf("e%d-", k.epoch)) {
			k.wrong("%s lists pool %s, which nobody has created", from, p.GetName())
		}
	}
	for _, name := range before.there {
		if !slices.Contains(names, name) && !k.pools[name].deleting {
			k.wrong("pool %s was created, and %s lists %v", name, from, names)
		}
	}
	for _, name := range before.gone {
		if slices.Contains(names, name) {
			k.wrong("pool %s was deleted, and %s lists it", name, from)
		}
	}
	k.compareLocked(from, before.newest, events.GetEvents())
}

// compareLocked checks events that were read: they are those that were read before, and newer ones.
func (k *clerk) compareLocked(from string, newest uint64, events []*pb.Event) {
	last := uint64(0)
	for _, e := range events {
		last = e.GetSeq()
		text := fmt.Sprintf("%s of %s at %v: %s", e.GetKind(), e.GetObject(), e.GetTime().AsTime(), e.GetText())
		if was, ok := k.events[last]; ok && was != text {
			k.wrong("event %d is %q at %s, and was %q", last, text, from, was)
		}
		k.events[last] = text
		delete(k.events, last-min(last, 100))
	}
	if last < newest {
		k.wrong("the newest event at %s is %d, and event %d was read before", from, last, newest)
	}
	k.newest = max(k.newest, last)
}

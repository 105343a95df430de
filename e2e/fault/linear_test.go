// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	kept "weft.dev/weft/volmgr/cluster"
)

// TestTheAPIIsLinearizable puts three managers through faults while callers create, delete, grow,
// label, attach, detach and read volumes, and repeat what was not answered. What they were told must
// be what one manager that answers one call after the other could have told them. A read with
// "stale" is held to less: see transcript.
func TestTheAPIIsLinearizable(t *testing.T) {
	if *seed != 0 {
		cryptotest.SetGlobalRandom(t, *seed)
		linear(t, *seed, *faults)
		return
	}
	for i := range uint64((*faults/4 + faultsPerRun - 1) / faultsPerRun) {
		each(t, *first+i, linear)
	}
}

func linear(t *testing.T, seed uint64, faults int) {
	var all []*transcript
	synctest.Test(t, func(t *testing.T) { all = linearLife(t, seed, faults) })
	sum, began := map[string]int{}, time.Now()
	for _, h := range all {
		if why := h.check(); why != "" {
			t.Fatalf("shelf %d: %s", h.shelf, why)
		}
		h.sum(sum)
	}
	t.Logf("seed %d: %v, checked in %v", seed, sum, time.Since(began).Round(time.Millisecond))
}

// sum counts attempts by what became of them.
func (h *transcript) sum(sum map[string]int) {
	for _, op := range h.ops {
		switch a := op.Output.(answer); {
		case a.stale:
			sum["stale"]++
		case op.Input.(call).reads():
			sum["reads"]++
		default:
			sum[[...]string{"changes", "refusals", "unknown outcomes"}[a.how]]++
		}
	}
}

// idle are users of devices that they do not use.
type idle struct{ cluster *cluster }

func (idle) found(at *machine, volume block.Device, name block.VolumeName) userspace.Exported {
	return newExport(at, volume, name)
}
func (idle) died(*machine)     {}
func (u idle) nodes() []string { return names(u.cluster.clients) }

// linearLife runs one cluster, and returns what callers were told.
func linearLife(t tester, seed uint64, faults int) (all []*transcript) {
	c := newCluster(t, 3, 2, func(c *cluster) {
		withoutCaches(c)
		c.random = rand.New(rand.NewPCG(seed, 2))
		c.members, c.quorum = 3, true
		if *members != 0 {
			c.members = *members
		}
		c.users = idle{c}
	})
	defer c.close()
	defer c.tell(seed)
	f := &chaos{cluster: c, random: rand.New(rand.NewPCG(seed, 0))}
	c.pass = f.wait
	defer func() { c.pass = time.Sleep }()
	for f.faults < faults {
		h := &transcript{cluster: c, shelf: len(all), from: c.applied.Load()}
		all = append(all, h)
		f.shelf(h, seed, min(6, faults-f.faults))
	}
	return all
}

// shelf injects n faults while callers use two volumes, heals all, reads what there is, and removes
// it.
func (r *chaos) shelf(h *transcript, seed uint64, n int) {
	c := r.cluster
	k := newCallers(h, seed)
	pause := float64(2 * time.Second)
	if r.random.IntN(3) == 0 {
		pause /= 10
	}
	for range n {
		c.did("%s", r.fault(r.linearKinds()))
		r.faults++
		r.wait(time.Duration(r.random.ExpFloat64() * pause))
	}
	r.heal()
	c.agreed()
	r.wait(2 * time.Second)
	k.close()
	time.Sleep(lateFor)
	k.final()
	c.clear(h)
}

// lateFor is longer than a call is under way for which nobody waits, when all is healed.
const lateFor = 10 * time.Second

// linearKinds lists the faults: above all those of managers.
func (r *chaos) linearKinds() []kind {
	return append([]kind{
		{"kill manager", 5, r.killManager},
		{"slow store", 3, r.slowStore},
		{"freeze", 3, r.freeze},
		{"pause leader", 5, r.pauseLeader},
		{"deafen leader", 3, r.deafenLeader},
		{"step clock", 1, r.stepClock},
		{"cut link", 3, r.cutLink},
		{"isolate", 2, r.isolate},
		{"delay link", 2, r.delayLink},
		{"kill target", 2, r.killTarget},
		{"kill client", 2, r.killClient},
	}, r.managerKinds()...)
}

// pauseLeader freezes the leader until another one leads, and cuts it off from the others just
// before it goes on: for a moment it takes itself for the leader.
func (r *chaos) pauseLeader() string {
	c := r.cluster
	h := c.leader()
	if h == nil || len(c.managers) == 1 {
		return ""
	}
	at := h.running.at
	at.freeze()
	c.did("%s stands still", h.name)
	r.wait(time.Second + time.Duration(r.random.Int64N(int64(3*time.Second))))
	for _, other := range c.managers {
		if other != h {
			c.network.part(h.name, other.name, true)
		}
	}
	r.later(5*time.Second, h.name+" and the other managers reach each other", func() {
		for _, other := range c.managers {
			if other != h {
				c.network.part(h.name, other.name, false)
			}
		}
	})
	at.thaw()
	return h.name + " goes on, and does not reach the others"
}

// deafenLeader makes the leader hear no other manager, while they hear it: what it proposes is
// committed later, when it does not lead any more.
func (r *chaos) deafenLeader() string {
	c := r.cluster
	h := c.leader()
	if h == nil || len(c.managers) == 1 {
		return ""
	}
	set := func(cut bool) {
		for _, other := range c.managers {
			if other != h {
				c.network.cut(other.name, h.name, cut)
			}
		}
	}
	set(true)
	r.later(5*time.Second, h.name+" hears the other managers", func() { set(false) })
	return h.name + ", which leads, hears no other manager"
}

// clear removes the volumes of a shelf.
func (c *cluster) clear(h *transcript) {
	c.eventually("the volumes are removed", func(ctx context.Context) error {
		all, err := c.operator.ListVolumes(ctx, &pb.ListVolumesRequest{})
		if err != nil || len(all.GetVolumes()) == 0 {
			return err
		}
		err = errors.New("there are volumes")
		for _, v := range all.GetVolumes() {
			_, detached := c.operator.Detach(ctx, &pb.DetachRequest{Volume: v.GetName(), Node: v.GetAttachment().GetNode()})
			_, deleted := c.operator.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.GetName()})
			err = errors.Join(err, detached, deleted)
		}
		return err
	})
}

// callers call the managers' API until they are closed.
type callers struct {
	history *transcript
	leads   pb.ManagerClient
	each    []pb.ManagerClient
	hangUp  []func() error
	work    sync.WaitGroup
	over    chan struct{}

	mu       sync.Mutex
	label    int // the newest
	requests int
	leader   int // of each, as it was said last
}

func newCallers(h *transcript, seed uint64) *callers {
	c, k := h.cluster, &callers{history: h, over: make(chan struct{})}
	at := c.network.boot("callers")
	conn := c.dialManager(at, grpc.WithUnaryInterceptor(h.record), grpc.WithStatsHandler(departures{}))
	k.leads, k.hangUp = pb.NewManagerClient(conn), append(k.hangUp, conn.Close)
	for _, m := range c.managers {
		one := c.dialOne(at, m.address(), grpc.WithUnaryInterceptor(h.record), grpc.WithStatsHandler(departures{}))
		k.each, k.hangUp = append(k.each, pb.NewManagerClient(one)), append(k.hangUp, one.Close)
	}
	for i := range 5 {
		random := rand.New(rand.NewPCG(seed, uint64(1000*(h.shelf+1)+i)))
		do := k.change
		if i >= 3 {
			do = k.read
		}
		k.work.Go(func() { k.repeat(random, do) })
	}
	return k
}

func (k *callers) repeat(random *rand.Rand, do func(*rand.Rand)) {
	for {
		select {
		case <-k.over:
			return
		case <-time.After(time.Duration(random.Int64N(int64(500 * time.Millisecond)))):
			do(random)
		}
	}
}

// close ends the callers, when what they have under way is answered.
func (k *callers) close() {
	close(k.over)
	k.work.Wait()
	for _, hangUp := range k.hangUp[1:] {
		if err := hangUp(); err != nil {
			k.history.cluster.t.Errorf("%v", err)
		}
	}
}

// final reads all, while nothing else is asked for.
func (k *callers) final() {
	c, h := k.history.cluster, k.history
	c.eventually("all is read", func(ctx context.Context) error {
		_, listed := k.leads.ListVolumes(ctx, &pb.ListVolumesRequest{})
		_, counted := k.leads.GetStatus(ctx, &pb.GetStatusRequest{})
		return errors.Join(listed, counted)
	})
	if err := k.hangUp[0](); err != nil {
		c.t.Errorf("%v", err)
	}
	c.did("shelf %d: %d attempts", h.shelf, len(h.ops))
}

// manager is the one to ask: that which leads, through a connection that repeats calls or one that
// does not, or any.
func (k *callers) manager(random *rand.Rand) pb.ManagerClient {
	switch random.IntN(3) {
	case 0:
		return k.leads
	case 1:
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.each[k.leader]
	}
	return k.each[random.IntN(len(k.each))]
}

// follow remembers which manager leads, from the answer of one that does not.
func (k *callers) follow(err error) {
	leader, notLeader := pb.NotLeader(err)
	for i, h := range k.history.cluster.managers {
		if notLeader && h.address() == leader {
			k.mu.Lock()
			k.leader = i
			k.mu.Unlock()
		}
	}
}

// change asks for a change, and repeats the request until it is answered, or gives up. Some requests
// are repeated although they were answered.
func (k *callers) change(random *rand.Rand) {
	c := k.choose(random)
	k.mu.Lock()
	k.requests++
	id := fmt.Sprintf("r%d-%d", k.history.shelf, k.requests)
	k.mu.Unlock()
	for range 1 + random.IntN(2)*random.IntN(4) {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond+time.Duration(random.Int64N(int64(2*time.Second))))
		err := k.ask(metadata.AppendToOutgoingContext(ctx, pb.RequestKey, id), k.manager(random), c)
		cancel()
		k.follow(err)
		if err == nil && random.IntN(4) > 0 {
			return
		}
		if err != nil { // not too many attempts without an answer: each may take effect at any later time
			time.Sleep(time.Duration(random.Int64N(int64(time.Second))))
		}
	}
}

// sizes are what volumes have and grow to, in MiB: all within the extent that each leg begins with.
var sizes = []uint64{8, 12, 16, 24}

func (k *callers) choose(random *rand.Rand) call {
	c := call{volume: random.IntN(shelf), size: sizes[random.IntN(2)]}
	switch n := random.IntN(100); {
	case n < 30:
		c.kind = callCreate
	case n < 42:
		c.kind = callDelete
	case n < 54:
		c.kind, c.size = callGrow, sizes[random.IntN(len(sizes))]
	case n < 74:
		k.mu.Lock()
		k.label++
		c.kind, c.label = callLabel, k.label
		k.mu.Unlock()
	case n < 87:
		c.kind, c.node = callAttach, []string{"c1", "c2"}[random.IntN(2)]
	default:
		c.kind, c.node = callDetach, []string{"c1", "c2"}[random.IntN(2)]
	}
	return c
}

// read reads, from any manager and with more patience than changes have: a manager may stand still.
func (k *callers) read(random *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), []time.Duration{2 * time.Second, 15 * time.Second}[random.IntN(2)])
	defer cancel()
	from := k.manager(random)
	if random.IntN(4) == 0 {
		ctx = metadata.AppendToOutgoingContext(ctx, pb.ReadKey, pb.ReadStale)
	}
	c := call{kind: callGet, volume: random.IntN(shelf)}
	switch random.IntN(5) {
	case 0:
		c = call{kind: callList}
	case 1:
		c = call{kind: callStatus}
	}
	_ = k.ask(ctx, from, c) // the history has it
}

func (k *callers) ask(ctx context.Context, m pb.ManagerClient, c call) (err error) {
	name := k.history.name(c.volume)
	switch c.kind {
	case callCreate:
		_, err = m.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: c.size * mib, Copies: 2, Stripes: 1})
	case callDelete:
		_, err = m.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: name})
	case callGrow:
		_, err = m.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: name, SizeBytes: c.size * mib})
	case callLabel:
		_, err = m.UpdateVolume(ctx, &pb.UpdateVolumeRequest{Volume: name, SetLabels: map[string]string{labelOfShelf: strconv.Itoa(c.label)}})
	case callAttach:
		_, err = m.Attach(ctx, &pb.AttachRequest{Volume: name, Node: c.node})
	case callDetach:
		_, err = m.Detach(ctx, &pb.DetachRequest{Volume: name, Node: c.node})
	case callGet:
		_, err = m.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name})
	case callList:
		_, err = m.ListVolumes(ctx, &pb.ListVolumesRequest{})
	case callStatus:
		_, err = m.GetStatus(ctx, &pb.GetStatusRequest{})
	}
	return err
}

// What cannot have been said by one manager is noticed, and what can is not.
func TestTheModelOfTheAPI(t *testing.T) {
	one := volume{id: "1", size: 8, next: 8}
	fresh, grown, labelled := one, one, one
	fresh.creating, grown.next, labelled.label = true, 16, 1
	create, get, list := call{kind: callCreate, size: 8}, call{kind: callGet}, call{kind: callList}
	shows := func(v volume) answer { return answer{shown: true, volume: v} }
	none := answer{how: refused, reason: codes.NotFound.String()}
	for _, c := range []struct {
		what string
		ok   bool
		ops  []porcupine.Operation
	}{
		{"a volume is created, and is ready later", true, inTurn(create, shows(fresh), get, shows(one))},
		{"a volume that was created is not there", false, inTurn(create, shows(fresh), get, none)},
		{"a repeated request finds the volume", true, inTurn(create, shows(fresh), create, shows(one))},
		{"a repeated request makes another volume", false, inTurn(create, shows(fresh), create, shows(volume{id: "2", size: 8, next: 8, creating: true}))},
		{"a request without an answer takes effect late", true, inTurn(create, answer{how: unknown}, get, none, get, shows(fresh))},
		{"its effect is undone", false, inTurn(create, answer{how: unknown}, get, shows(fresh), get, none)},
		{"a deleted volume is there for a while", true, inTurn(create, shows(fresh), call{kind: callDelete}, answer{}, get, shows(volume{id: "1", size: 8, next: 8, leaving: true}), get, none)},
		{"a deleted volume is ready", false, inTurn(create, shows(fresh), call{kind: callDelete}, answer{}, get, shows(one))},
		{"a volume is there without a request", false, inTurn(get, shows(one))},
		{"a label is lost", false, inTurn(create, shows(fresh), call{kind: callLabel, label: 1}, shows(labelled), get, shows(one))},
		{"a volume shrinks", false, inTurn(create, shows(fresh), call{kind: callGrow, size: 16}, shows(grown), get, shows(one))},
		{"a refusal without its cause", false, inTurn(create, shows(fresh), call{kind: callDelete}, answer{how: refused, reason: kept.ReasonAttached})},
		{"a list lacks a volume", false, inTurn(create, shows(fresh), list, answer{})},
		{"a stale list lacks a volume", true, append(inTurn(create, shows(fresh)), porcupine.Operation{Input: list, Output: answer{stale: true}, Call: 0, Return: 9})},
		{"a stale list goes further, and lacks a volume", false, append(inTurn(create, shows(fresh)), porcupine.Operation{Input: list, Output: answer{stale: true}, Call: 3, Return: 9})},
	} {
		h := &transcript{ops: c.ops}
		if why := h.check(); (why == "") != c.ok {
			t.Errorf("%s: linearizable: %v, want %v\n%s", c.what, !c.ok, c.ok, h)
		}
	}
}

// inTurn is a history of calls, each after the answer to the one before; one without an answer does
// not end.
func inTurn(callsAndAnswers ...any) (ops []porcupine.Operation) {
	for i := 0; i < len(callsAndAnswers); i += 2 {
		op := porcupine.Operation{Input: callsAndAnswers[i], Output: callsAndAnswers[i+1], Call: int64(i + 1), Return: int64(i + 2)}
		if op.Output.(answer).how == unknown {
			op.Return = never
		}
		ops = append(ops, op)
	}
	return ops
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/engine/history"
)

// TestNothingIsLostToThoseWhoShare puts clusters through faults while several clients have the
// volume at once: either all of them write it, or all read what one of them wrote before,
// alone.
func TestNothingIsLostToThoseWhoShare(t *testing.T) {
	if *seed != 0 {
		cryptotest.SetGlobalRandom(t, *seed)
		liveShared(t, *seed, *faults)
		return
	}
	for i := range uint64((*faults/4 + faultsPerRun - 1) / faultsPerRun) {
		each(t, *first+i, liveShared)
	}
}

func liveShared(t *testing.T, seed uint64, faults int) {
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(seed, 20))
		writers := seed%2 == 0
		var p *partners
		c := newCluster(t, 4, 3, func(c *cluster) {
			c.random = rand.New(rand.NewPCG(seed, 21))
			p, c.members = newPartners(c), managersOf(seed)
			for i, h := range c.targets {
				h.platter.volatile, h.platter.random = !writers, rand.New(rand.NewPCG(seed, uint64(30+i)))
			}
		})
		defer c.close()
		defer c.tell(seed)
		defer p.stop()
		r := &chaos{cluster: c, random: random}
		c.pass = r.wait
		defer func() { c.pass = time.Sleep }()
		if writers {
			c.did("all clients write")
			c.createVolume(block.Layout{Stripes: 2, Copies: 1})
		} else {
			c.did("all clients read")
			c.createVolume(block.Layout{Stripes: 1 + int(seed/2%2), Copies: 2})
		}
		c.clerk = c.newClerk(seed)
		p.work(seed)
		for r.faults < faults {
			r.partnersRound(p, writers, min(12, faults-r.faults))
		}
		p.check()
		p.set(func() { t.Logf("seed %d: answers: %v", seed, p.ops) })
	})
}

// partnersRound injects n faults while the volume is shared, heals all, and verifies the data.
func (r *chaos) partnersRound(p *partners, writers bool, n int) {
	mode := pb.AttachMode_ATTACH_MODE_SHARED_BLOCK
	if !writers {
		mode = pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY
		r.writeAlone(p)
	}
	for _, h := range r.cluster.clients {
		r.cluster.attachAs(h, mode)
	}
	kinds := []kind{
		{"kill target", 5, r.killTarget},
		{"kill manager", 3, r.killManager},
		{"slow store", 2, r.slowStore},
		{"kill client", 3, r.killClient},
		{"cut link", 5, r.cutLink},
		{"isolate", 3, r.isolate},
		{"delay link", 3, r.delayLink},
		{"slow medium", 5, r.slowMedium},
		{"freeze", 3, r.freeze},
		{"step clock", 1, r.stepClock},
		{"put out", 6, func() string { return r.putOut(p, mode, true) }},
		{"leave", 2, func() string { return r.putOut(p, mode, false) }},
	}
	if writers { // writers' drives have no caches
		kinds = append(kinds, kind{"lose power", 3, r.losePower})
	}
	kinds = append(kinds, r.managerKinds()...)
	for range n {
		r.cluster.did("%s", r.fault(kinds))
		r.faults++
		r.wait(time.Duration(r.random.ExpFloat64() * float64(2*time.Second)))
		p.check()
		if !writers && r.random.IntN(6) == 0 { // while faults are active
			r.writeAlone(p)
			for _, h := range r.cluster.clients {
				r.cluster.attachAs(h, mode)
			}
		}
	}
	r.heal()
	r.cluster.agreed()
	r.cluster.clerk.progress()
	for _, h := range r.cluster.clients {
		r.cluster.attachAs(h, mode)
		p.progress(h.name)
	}
	p.verify()
	p.check()
}

// writeAlone takes the volume from all clients, and lets one of them write all of it.
func (r *chaos) writeAlone(p *partners) {
	c := r.cluster
	force := r.random.IntN(2) == 0
	for _, h := range c.clients {
		p.end(h.name)
		c.leaves(h, force)
	}
	h := r.client()
	c.attachAs(h, pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
	c.eventually(h.name+" writes all", func(context.Context) error { return p.write(h.name) })
	p.end(h.name)
	c.leaves(h, false)
	c.did("%s has written all of it", h.name)
}

// putOut takes the volume from a client, by force and perhaps while it is cut off, and lets it
// in again, perhaps before it has noticed.
func (r *chaos) putOut(p *partners, mode pb.AttachMode, force bool) string {
	c, h := r.cluster, r.client()
	how := "leaves"
	if force {
		how = "is put out"
		others := c.managerNames()
		for _, t := range c.targets {
			if r.random.IntN(2) == 0 {
				others = append(others, t.name)
			}
		}
		set := func(others []string, cut bool) {
			for _, other := range others {
				c.network.part(h.name, other, cut)
			}
		}
		set(others, true)
		c.did("%s does not reach %v", h.name, others)
		r.later(8*time.Second, h.name+" reaches targets", func() { set(others[len(c.managers):], false) })
		r.later(15*time.Second, h.name+" reaches managers", func() { set(others[:len(c.managers)], false) })
		r.wait(time.Duration(r.random.Int64N(int64(time.Second))))
	}
	p.end(h.name)
	c.leaves(h, force)
	p.settle(h.name)
	c.did("%s %s", h.name, how)
	r.wait(time.Duration(r.random.Int64N(int64(2 * time.Second))))
	c.eventually("let "+h.name+" in again", func(ctx context.Context) error {
		_, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: h.name, Mode: mode})
		return err
	})
	return h.name + " is let in again"
}

// leaves detaches a volume from a client.
func (c *cluster) leaves(from *clientHost, force bool) {
	c.t.Helper()
	c.eventually(from.name+" is without the volume", func(ctx context.Context) error {
		if _, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Node: from.name, Force: force}); err != nil {
			return err
		}
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		for _, a := range append(v.GetAttachments(), v.GetAttachment()) {
			if a.GetNode() == from.name {
				return fmt.Errorf("it is %v, waits for %s", a.GetState(), a.GetWaitingFor())
			}
		}
		return err
	})
}

// partners are the users of a volume that several clients have at once. Like user they know
// what each unit may hold.
type partners struct {
	cluster *cluster
	workers sync.WaitGroup

	mu      sync.Mutex
	devices map[string]*partnersDevice // by client, the newest
	units   []history.Unit
	clock   int64
	numbers uint64
	ops     map[string]int // answered operations, by client
	paused  bool
	ended   bool
	wrong   int
}

// hot is how many units are used: few, so that partners use the same ones.
const hot = 48

type partnersDevice struct {
	*export

	// Under partners.mu:
	loose  map[int64]int64 // unacknowledged writes that may still land: their units, by start
	ending bool            // it is about to be removed, and may return errors
	fenced bool            // nothing that it starts may be answered
}

func newPartners(c *cluster) *partners {
	p := &partners{cluster: c, devices: map[string]*partnersDevice{}, units: history.Zeroes(hot), ops: map[string]int{}}
	c.users = p
	return p
}

func (p *partners) nodes() []string { return names(p.cluster.clients) }

func names(clients []*clientHost) (names []string) {
	for _, h := range clients {
		names = append(names, h.name)
	}
	return names
}

// found settles what an older device of the client had under way, since that device is fenced.
func (p *partners) found(at *machine, volume block.Device, name block.VolumeName) userspace.Exported {
	d := &partnersDevice{export: newExport(at, volume, name), loose: map[int64]int64{}}
	p.settle(at.host)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices[at.host] = d
	return d
}

func (p *partners) died(at *machine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.devices[at.host]; d != nil && d.at == at {
		d.die()
	}
}

// end marks a client's device as about to be removed.
func (p *partners) end(client string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.devices[client]; d != nil {
		d.ending = true
	}
}

// settle marks a client's device as fenced: its pending writes have landed by now, or never
// will.
func (p *partners) settle(client string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.devices[client]
	if d == nil {
		return
	}
	p.clock++
	for began, at := range d.loose {
		p.units[at].Discarded(began, p.clock)
	}
	clear(d.loose)
	d.ending, d.fenced = true, true
}

func (p *partners) work(seed uint64) {
	for i, client := range p.nodes() {
		for j := range 3 {
			random := rand.New(rand.NewPCG(seed, uint64(100+10*i+j)))
			p.workers.Go(func() {
				for d, more := p.device(client); more; d, more = p.device(client) {
					if d != nil {
						p.operate(client, d, random.Int64N(hot), random.IntN(2) == 0)
					}
					time.Sleep(time.Duration(random.ExpFloat64() * float64(20*time.Millisecond)))
				}
			})
		}
	}
}

// device returns the device that a client may use; nil if there is none now.
func (p *partners) device(client string) (d *partnersDevice, more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d = p.devices[client]; p.paused || d != nil && d.over() {
		d = nil
	}
	return d, !p.ended
}

// operate writes or reads a unit; false if there was no successful answer.
func (p *partners) operate(client string, d *partnersDevice, at int64, write bool) bool {
	size := int64(d.volume.Geometry().Size) / unit
	place := at * (size / hot)
	write = write && !d.volume.Geometry().ReadOnly
	io := &block.IO{Op: block.OpRead, Data: make([]byte, unit), Off: place * unit, Len: unit}
	p.mu.Lock()
	p.clock++
	began, late, number := p.clock, d.fenced, uint64(0)
	if write {
		p.numbers++
		io.Op, number = block.OpWrite, p.numbers
		fill(io.Data, number, place)
		if !late {
			p.units[at].WriteRepeated(number, began)
			d.loose[began] = at
		}
	}
	p.mu.Unlock()
	answered := make(chan bool, 1)
	io.Done = func(io *block.IO) {
		p.mu.Lock()
		defer p.mu.Unlock()
		answered <- p.outcome(client, d, io, at, place, began, late)
	}
	d.at.awake()
	d.volume.Submit(io)
	select {
	case good := <-answered:
		return good
	case <-d.dead:
		return false
	}
}

func (p *partners) outcome(client string, d *partnersDevice, io *block.IO, at, place, began int64, late bool) bool {
	what := fmt.Sprintf("%v of unit %d by %s", io.Op, at, client)
	select {
	case <-d.dead: // nobody will get the answer
		return false
	default:
	}
	if io.Err != nil {
		if !d.ending && !d.over() && !p.ended {
			p.fault("%s, on a device that nobody takes away: %v", what, io.Err)
		}
		return false
	}
	p.clock++
	if late && io.Op == block.OpWrite {
		p.fault("%s was answered though it was put out before", what)
		return false
	}
	var err error
	if io.Op == block.OpWrite {
		delete(d.loose, began)
		err = p.units[at].Acked(began, p.clock)
	} else if number, wrong := parse(io.Data, place); wrong != nil {
		err = fmt.Errorf("%w; it may hold %v", wrong, p.units[at].At(began))
	} else {
		err = p.units[at].Read(number, began, p.clock)
	}
	if err != nil {
		p.fault("%s: %v", what, err)
	}
	p.ops[client]++
	return true
}

func (p *partners) fault(format string, args ...any) {
	p.wrong++
	p.cluster.did("WRONG: "+format, args...)
}

func (p *partners) check() {
	p.cluster.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wrong > 0 {
		p.cluster.t.Fatalf("%d things went wrong", p.wrong)
	}
}

// write makes a client write every unit.
func (p *partners) write(client string) error {
	d, _ := p.device(client)
	if d == nil {
		return errors.New("there is no device")
	}
	for at := range int64(hot) {
		if !p.operate(client, d, at, true) {
			return fmt.Errorf("unit %d was not written", at)
		}
	}
	return nil
}

// progress waits until a client gets answers.
func (p *partners) progress(client string) {
	p.cluster.t.Helper()
	was := p.answers(client)
	p.cluster.eventually(client+" goes on", func(context.Context) error {
		if n := p.answers(client) - was; n < 5 {
			return fmt.Errorf("%d answers", n)
		}
		return nil
	})
}

func (p *partners) answers(client string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ops[client]
}

// verify makes every client read everything while nobody writes.
func (p *partners) verify() {
	p.set(func() { p.paused = true })
	defer p.set(func() { p.paused = false })
	time.Sleep(time.Second)
	for _, client := range slices.Backward(p.nodes()) {
		p.mu.Lock()
		d := p.devices[client]
		p.mu.Unlock()
		for at := range int64(hot) {
			p.operate(client, d, at, false)
		}
	}
}

func (p *partners) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// stop ends the work, including operations that wait for an answer.
func (p *partners) stop() {
	p.mu.Lock()
	p.ended = true
	for _, d := range p.devices {
		d.die()
	}
	p.mu.Unlock()
	p.workers.Wait()
}

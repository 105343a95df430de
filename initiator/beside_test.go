// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/pb"
)

// agentsBeside are the agents beside the kernel's targets, which have old controllers ended.
type agentsBeside struct {
	w       *world
	targets map[string]*controller.Target
	accepts map[string]chan net.Conn
	fails   bool          // they cannot
	takes   time.Duration // how long it takes
	returns bool          // the old controller connects again as soon as it has been ended
}

// besides starts the agents. close ends them.
func besides(w *world) (a *agentsBeside, end func()) {
	a = &agentsBeside{w: w, targets: map[string]*controller.Target{}, accepts: map[string]chan net.Conn{}}
	for i := range w.layout.Copies {
		name := node(i)
		target, err := controller.New(controller.Config{})
		if err != nil {
			w.t.Fatal(err)
		}
		subsystem, err := target.AddSubsystem(controller.SubsystemConfig{
			NQN: w.nqn(name), Serial: "1", PerHost: 1, Hosts: []controller.Host{{NQN: w.identity().NQN}},
			Replace: func(_ context.Context, by block.ServedBy) error { return a.replace(name, by) },
		})
		if err != nil {
			w.t.Fatal(err)
		}
		a.targets[name], a.accepts[name] = target, make(chan net.Conn)
		if _, err := target.Serve(&pipes{accepts: a.accepts[name], closed: make(chan struct{})}, controller.PortConfig{ID: 1, Link: []*controller.Subsystem{subsystem}}); err != nil {
			w.t.Fatal(err)
		}
	}
	return a, func() {
		w.mu.Lock()
		w.beside = nil
		w.mu.Unlock()
		for _, target := range a.targets {
			if err := target.Close(context.Background()); err != nil {
				w.t.Error(err)
			}
		}
	}
}

func (a *agentsBeside) replace(node string, by block.ServedBy) error {
	time.Sleep(a.takes)
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	if a.fails {
		return errors.New("a drive hangs")
	}
	if by == block.SamePart {
		a.w.did("replace the export of %s", node)
	} else {
		a.w.did("change the export of %s to %v", node, by)
	}
	for i := range a.w.ctrl {
		if c := &a.w.ctrl[i]; a.returns && c.NQN == a.w.nqn(node) && c.State == fabrics.Connecting {
			c.State = fabrics.Live
		}
	}
	return nil
}

// dial connects to the agent of a node.
func (a *agentsBeside) dial(node string) net.Conn {
	near, far := net.Pipe()
	a.accepts[node] <- far
	return near
}

// pipes is a listener of connections within this process.
type pipes struct {
	accepts chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.accepts:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// besideRails is betweenRails with the kernel's targets, and the agents beside them.
func besideRails(t *testing.T, f func(w *world, a *agentsBeside, at, other string)) {
	t.Helper()
	var a *agentsBeside
	var end func()
	betweenRailsFrom(t, func(w *world) { a, end = besides(w); w.beside = a.dial }, func(w *world, at, other string) {
		defer end()
		time.Sleep(time.Second) // until the host knows what the agents offer
		w.took()
		f(w, a, at, other)
	})
}

// Linux's target keeps old controllers. The agent beside it ends them before the host connects through another
// portal. The path then stays there: a move cuts all connections to a portal, those of other volumes, too.
func TestAPathToTheKernelsTargetMovesOnceTheAgentBesideItHasEndedTheOldController(t *testing.T) {
	besideRails(t, func(w *world, _ *agentsBeside, at, other string) {
		w.cutAt(at, true)
		time.Sleep(600 * time.Millisecond)
		w.expect("loss of a network", "destroy-sockets t1", "replace the export of t1", "connect t1 at "+other, "disconnect t1 at "+at)
		w.cutAt(at, false)
		time.Sleep(time.Minute)
		w.expect("the network is well again, and the path stays")
		w.cutAt(other, true)
		time.Sleep(600 * time.Millisecond)
		w.expect("loss of the other network", "destroy-sockets t1", "replace the export of t1", "connect t1 at "+at, "disconnect t1 at "+other)
		if p := w.attachment(); p.GetPhase() != serving {
			t.Errorf("after all that it is %v", p)
		}
	})
}

// As long as the old controller may still write, the host does not connect. It gives up the leg when it would
// have without another portal, or somewhat later.
func TestAPathToTheKernelsTargetDoesNotMoveWhileTheOldControllerIsThere(t *testing.T) {
	besideRails(t, func(w *world, a *agentsBeside, at, other string) {
		a.fails = true
		w.cutAt(at, true)
		time.Sleep(10 * time.Second)
		got := w.took()
		if slices.Contains(got, "connect t1 at "+other) || !slices.Contains(got, "record-stale c0.1") {
			t.Errorf("with an agent that cannot end the old controller: %q; want the leg recorded stale, and no connection before", got)
		}
	})
}

// The kernel may connect the old controller again in the meantime, and its target serves both. The old one goes as
// soon as the new one is there: if it fell silent again, the kernel would send its writes again over the new one.
func TestAnOldControllerThatConnectsAgainGoesAtOnce(t *testing.T) {
	besideRails(t, func(w *world, a *agentsBeside, at, other string) {
		a.returns = true
		w.cutAt(at, true)
		time.Sleep(900 * time.Millisecond)
		w.expect("loss of a network", "destroy-sockets t1", "replace the export of t1", "connect t1 at "+other, "disconnect t1 at "+at)
	})
}

// The same name may be served by another program one day: what the one before has promised does not count then.
func TestATargetsPromiseIsAskedForAnew(t *testing.T) {
	var a *agentsBeside
	var end func()
	betweenRailsFrom(t, func(w *world) { a, end = besides(w); w.beside = a.dial; w.perHost = true }, func(w *world, at, other string) {
		defer end()
		time.Sleep(time.Second)
		w.mu.Lock()
		w.perHost = false
		w.mu.Unlock()
		time.Sleep(2 * promiseLasts)
		w.took()
		w.cutAt(at, true)
		time.Sleep(900 * time.Millisecond)
		w.expect("loss of a network", "destroy-sockets t1", "replace the export of t1", "connect t1 at "+other, "disconnect t1 at "+at)
	})
}

// serveBy has the manager name the portals of the part that is to serve the legs of t1.
func (w *world) serveBy(port uint32) {
	w.change(func(all *pb.InitiatorWanted) {
		for _, l := range all.Attachments[0].Legs {
			for _, p := range l.Portals {
				if l.GetNode() == "t1" {
					p.Port = port
				}
			}
		}
	})
}

// A leg of which a snapshot is to be taken changes from the kernel to the process of its target, and back later. The
// host follows it on the network on which it is, at a time of its own choice.
func TestAPathFollowsALegThatChangesHands(t *testing.T) {
	besideRails(t, func(w *world, _ *agentsBeside, at, _ string) {
		w.serveBy(4422)
		time.Sleep(time.Second)
		w.expect("the leg changes", "change the export of t1 to the process", "connect t1 at "+at, "disconnect t1 at "+at)
		w.serveBy(4420)
		time.Sleep(time.Second)
		w.expect("the leg changes back", "change the export of t1 to the kernel", "connect t1 at "+at, "disconnect t1 at "+at)
		time.Sleep(time.Minute)
		w.expect("nothing more")
		if p := w.attachment(); p.GetPhase() != serving {
			t.Errorf("after all that it is %v", p)
		}
	})
}

// As long as the target does not have a leg change, its path stays as it is.
func TestAPathStaysWhileItsLegDoesNotChangeHands(t *testing.T) {
	besideRails(t, func(w *world, a *agentsBeside, at, _ string) {
		w.mu.Lock()
		a.fails = true
		w.mu.Unlock()
		w.serveBy(4422)
		time.Sleep(time.Minute)
		w.expect("the target refuses")
		w.mu.Lock()
		a.fails = false
		w.mu.Unlock()
		time.Sleep(time.Minute)
		w.expect("it does not refuse any more", "change the export of t1 to the process", "connect t1 at "+at, "disconnect t1 at "+at)
		if p := w.attachment(); p.GetPhase() != serving {
			t.Errorf("after all that it is %v", p)
		}
	})
}

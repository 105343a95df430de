// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	nvmehost "weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/proto/pb"
)

var host, stranger = block.HostFromID(block.UUID{1}), block.HostFromID(block.UUID{0xee})

// told is what a wanted state says of one host.
func told(h block.Host, nqn string, keys *pb.ExportKeys) *pb.Discovered {
	return &pb.Discovered{VolumeId: block.UUID{9}.String(), HostNqn: string(h.NQN), Nqn: nqn, Keys: keys,
		Portal: &pb.Portal{Transport: pb.Transport_TRANSPORT_TCP, Address: "2001:db8::7", Port: 4420}}
}

// ask is the log as a host reads it at address, on one line.
func ask(t *testing.T, address string, me block.Host, keys ...dhchap.Key) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c := nvmehost.Config{Portals: []string{address}, Host: me}
	if len(keys) == 2 {
		c.HostKey, c.ControllerKey = keys[0], keys[1]
	}
	found, err := nvmehost.DiscoverWith(ctx, c)
	var names []string
	for _, e := range found {
		names = append(names, string(e.Subsystem)+" at ["+e.Address+"]:"+e.Service)
	}
	return strings.Join(names, ", "), err
}

func TestDiscoveryAnswersForTheWholeClusterAndListensOnlyOnceItKnows(t *testing.T) {
	var opened net.Listener
	busy := true
	d := New(Config{Log: slog.New(slog.DiscardHandler), Port: Port, Portals: []block.Portal{{Transport: block.RDMA, Address: "192.0.2.1", Port: 4420}, {Transport: block.TCP, Address: "192.0.2.1", Port: 4421}},
		Listen: func(p block.Portal) (net.Listener, error) {
			if p.Address != "192.0.2.1" || p.Port != Port || p.Transport != block.TCP {
				t.Errorf("it listens at %v", p)
			}
			if busy {
				return nil, errors.New("address already in use")
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			opened = l
			return l, err
		}})
	defer d.Close()
	if d.Tell(nil); opened != nil || d.target != nil {
		t.Fatal("it answers before the manager has said anything")
	}
	const nqn = "nqn.2026-11.dev.weft:one"
	if d.Tell(&pb.TargetWanted{}); opened != nil || d.target != nil {
		t.Fatal("it answers in a cluster without hosts that would ask")
	}
	first := &pb.TargetWanted{Discovers: true, Discovery: []*pb.Discovered{told(host, nqn, nil), {HostNqn: "rubbish"}}}
	d.Tell(first)
	if got := d.Problems(); len(got) != 1 || got[0].Where != "discovery at 192.0.2.1 port 8009" || !strings.Contains(got[0].Cause, "address already in use; if another program has the port") {
		t.Errorf("another program has the port, and the problems are %+v", got)
	}
	busy = false
	d.Tell(first) // it tries again
	if got := d.Problems(); len(got) != 0 {
		t.Errorf("it listens, and has the problems %+v", got)
	}
	if opened == nil || len(d.open) != 1 {
		t.Fatalf("it listens at %v", d.open)
	}
	at := opened.Addr().String()
	if got, err := ask(t, at, host); err != nil || got != nqn+" at [2001:db8::7]:4420" {
		t.Errorf("the host is told %q, %v", got, err)
	}
	if got, err := ask(t, at, stranger); err != nil || got != "" {
		t.Errorf("a stranger is told %q, %v", got, err)
	}

	hostKey, controllerKey := []byte(strings.Repeat("h", block.SecretSize)), []byte(strings.Repeat("c", block.SecretSize))
	key := func(secret []byte) dhchap.Key {
		k, err := dhchap.NewKey(dhchap.SHA256, secret)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	d.Tell(&pb.TargetWanted{Discovers: true, Discovery: []*pb.Discovered{told(host, nqn, nil), told(host, nqn+"2", &pb.ExportKeys{Host: hostKey, Controller: controllerKey})}})
	if got, err := ask(t, at, host); err == nil {
		t.Errorf("a host that proves nothing is told %q", got)
	}
	if got, err := ask(t, at, host, key(hostKey), key(controllerKey)); err != nil || strings.Count(got, nqn) != 2 {
		t.Errorf("a host with its secret is told %q, %v", got, err)
	}
	d.Tell(&pb.TargetWanted{Discovers: true})
	if got, err := ask(t, at, host); err != nil || got != "" {
		t.Errorf("after a detach, the host is told %q, %v", got, err)
	}
	d.Tell(&pb.TargetWanted{})
	if got, err := ask(t, at, host); err == nil {
		t.Errorf("without hosts that would ask, it tells %q", got)
	}
}

func TestWithoutAPortThereIsNoDiscovery(t *testing.T) {
	d := New(Config{Log: slog.New(slog.DiscardHandler), Portals: []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}},
		Listen: func(p block.Portal) (net.Listener, error) { t.Errorf("it listens at %v", p); return nil, net.ErrClosed }})
	d.Tell(&pb.TargetWanted{Discovers: true, Discovery: []*pb.Discovered{told(host, "nqn.2026-11.dev.weft:one", nil)}})
	d.Close()
}

// While one process of the agent hands over to the next, a host that asks waits for its answer. The
// next process has one of the two portals only.
func TestAHostThatAsksDuringAHandoverIsNotRefused(t *testing.T) {
	const nqn = "nqn.2026-11.dev.weft:one"
	wanted := &pb.TargetWanted{Discovers: true, Discovery: []*pb.Discovered{told(host, nqn, nil)}}
	c := Config{Port: Port, Log: slog.New(slog.DiscardHandler), Portals: []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}, {Transport: block.TCP, Address: "192.0.2.2", Port: 4420}}}
	listens := 0
	at := ""
	c.Listen = func(p block.Portal) (net.Listener, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if listens++; p.Address == "192.0.2.1" {
			at = l.Addr().String()
		}
		return l, err
	}
	before := New(c)
	before.Tell(wanted)
	left := before.Leave()
	before.Close()
	if listens != 2 || len(left) != 2 {
		t.Fatalf("after listening at %d addresses, left are %v", listens, left)
	}
	answer := make(chan string, 1)
	go func() {
		got, err := ask(t, at, host)
		answer <- fmt.Sprint(got, err)
	}()

	data, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	left[c.Portals[0]] = data
	c.Portals = c.Portals[:1]
	asked, rest := c.Split(left)
	if len(asked) != 1 || len(rest) != 2 || rest[c.Portals[0]] != data {
		t.Fatalf("of the sockets %v, those of discovery are %v, and the others %v", left, asked, rest)
	}
	c.Inherited = asked
	after := New(c)
	defer after.Close()
	after.Tell(wanted)
	if got := <-answer; got != nqn+" at [2001:db8::7]:4420<nil>" || listens != 2 {
		t.Errorf("a host that asked meanwhile is told %s, after listening %d times", got, listens)
	}
	for _, l := range rest {
		l.Close()
	}
}

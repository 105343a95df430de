// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	nvmehost "weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/proto/pb"
)

// intruder is a machine that reaches the targets, and knows every name and id in the cluster: they
// are in `weft node list -o json` and `weft volume list -o json`.
type intruder struct {
	*mirror
	at *machine
}

func (m *mirror) intruder() *intruder { return &intruder{m, m.network.boot("evil")} }

// host is a client's identity, which `weft node list` shows.
func (i *intruder) host(of *clientHost) block.Host {
	i.t.Helper()
	list, err := i.operator.ListNodes(context.Background(), &pb.ListNodesRequest{})
	if err != nil {
		i.t.Fatal(err)
	}
	for _, n := range list.GetNodes() {
		if n.GetName() != of.name {
			continue
		}
		id, err := block.ParseUUID(n.GetHost().GetId())
		if err != nil {
			i.t.Fatal(err)
		}
		return block.HostFromID(id)
	}
	i.t.Fatalf("no node %s", of.name)
	return block.Host{}
}

// subsystem is the name of a target's export to a client.
func (i *intruder) subsystem(client *clientHost, target *targetHost) block.NQN {
	i.t.Helper()
	v := i.volume()
	id, err := block.ParseVolumeID(v.GetId())
	if err != nil {
		i.t.Fatal(err)
	}
	return block.SubsystemNQN(id, block.Epoch(v.GetEpoch()), i.host(client), block.NodeName(target.name))
}

// connect tries to connect to a target's export.
func (i *intruder) connect(to *targetHost, subsystem block.NQN, as block.Host, hostKey, controllerKey dhchap.Key) error {
	portal := to.portals()[0]
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // it tries again until then
	defer cancel()
	c, err := nvmehost.Connect(ctx, nvmehost.Config{
		Portals: []string{net.JoinHostPort(portal.Address, "4420")}, Subsystem: subsystem, Host: as, IOQueues: 1,
		HostKey: hostKey, ControllerKey: controllerKey,
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			to, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			return i.at.dial(ctx, to, address)
		},
	})
	if err == nil {
		c.Cut()
	}
	return err
}

// connections are those of c1 to a target.
func (i *intruder) connections(to *targetHost) map[*conn]bool {
	i.network.mu.Lock()
	defer i.network.mu.Unlock()
	all := map[*conn]bool{}
	for c := range i.network.conns {
		if c.out.pair.hosts() == (pair{"c1", to.name}) {
			all[c] = true
		}
	}
	return all
}

// toldOf requires events about hosts that these targets refused, with the intruder's address.
func (i *intruder) toldOf(targets ...*targetHost) {
	i.t.Helper()
	list, err := i.operator.ListEvents(context.Background(), &pb.ListEventsRequest{Object: "volume " + volumeName, Limit: 1000})
	if err != nil {
		i.t.Fatal(err)
	}
	told := map[string]bool{}
	for _, e := range list.GetEvents() {
		if e.GetKind() == "target.refused" && strings.HasPrefix(e.GetAttributes()["address"], "evil") {
			told[e.GetAttributes()["node"]] = true
		}
	}
	for _, target := range targets {
		if !told[target.name] {
			i.t.Errorf("no event tells that %s refused the stranger: %v", target.name, list.GetEvents())
		}
	}
}

// A stranger who knows all names and ids took a volume's connections over, read 2.6 GiB of it and
// wrote to it (28 connections in 15 s). Without the keys it gets in nowhere, under no identity, and
// the host does not notice.
func TestAStrangerWithAllNamesGetsInNowhere(t *testing.T) {
	mirrored(t, withoutCaches, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		i := m.intruder()
		wrong, err := dhchap.Generate(dhchap.SHA256, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range []*targetHost{m.first, m.second} {
			subsystem := i.subsystem(m.clients[0], target)
			before := i.connections(target)
			for range 5 {
				for _, as := range []block.Host{i.host(m.clients[0]), block.ProvenHost(subsystem), {NQN: block.ProvenHost(subsystem).NQN, ID: i.host(m.clients[0]).ID}} {
					for _, key := range []dhchap.Key{{}, wrong} {
						if err := i.connect(target, subsystem, as, key, dhchap.Key{}); err == nil {
							t.Fatalf("%s let the stranger in as %s, with %v\n%s", target.name, as.NQN, key, m.explain())
						}
					}
				}
			}
			after := i.connections(target)
			for c := range before {
				if !after[c] {
					t.Errorf("a connection of c1 to %s was ended", target.name)
				}
			}
			if len(before) == 0 || len(after) != len(before) {
				t.Errorf("c1 had %d connections to %s and has %d", len(before), target.name, len(after))
			}
		}
		m.holds("c1", 1, everyUnit...)
		m.put("c1", 2, everyUnit...)
		time.Sleep(2 * time.Minute)
		i.toldOf(m.first, m.second)
	})
}

// keyring is what hosts were told of their keys, by the names of subsystems.
type keyring struct {
	mu   sync.Mutex
	keys map[block.NQN]*pb.ExportKeys
}

func (k *keyring) overhear(c *cluster) {
	k.keys = map[block.NQN]*pb.ExportKeys{}
	c.overhear = func(ctx context.Context, d *grpc.StreamDesc, conn *grpc.ClientConn, method string, next grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
		s, err := next(ctx, d, conn, method, o...)
		return overheard{s, k}, err
	}
}

type overheard struct {
	grpc.ClientStream
	keyring *keyring
}

// RecvMsg notes the keys of a wanted state. They come in a message of their own kind, or as the
// pieces of one.
func (o overheard) RecvMsg(m any) error {
	err := o.ClientStream.RecvMsg(m)
	if w, ok := m.(*pb.InitiatorWanted); ok && err == nil {
		o.keyring.note(w)
	}
	return err
}

func (k *keyring) note(w *pb.InitiatorWanted) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := w.GetAttachments()
	for _, piece := range w.GetScale().GetDifference().GetPieces() {
		var part pb.InitiatorWanted
		if proto.Unmarshal(piece.GetContent(), &part) == nil {
			all = append(all, part.GetAttachments()...)
		}
	}
	for _, a := range all {
		for _, l := range a.GetLegs() {
			if l.GetKeys() != nil {
				k.keys[block.NQN(l.GetNqn())] = l.GetKeys()
			}
		}
	}
}

// of returns the keys to a subsystem.
func (k *keyring) of(t *testing.T, subsystem block.NQN) (hostKey, controllerKey dhchap.Key) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	keys := k.keys[subsystem]
	if keys == nil {
		t.Fatalf("nobody was told keys for %s", subsystem)
	}
	for to, secret := range map[*dhchap.Key][]byte{&hostKey: keys.GetHost(), &controllerKey: keys.GetController()} {
		var err error
		if *to, err = dhchap.NewKey(dhchap.SHA256, secret); err != nil {
			t.Fatal(err)
		}
	}
	return hostKey, controllerKey
}

// A fence is also a key: whoever has the keys of an epoch that is over gets in nowhere, neither
// under its names nor under those of the present epoch.
func TestTheKeysOfAnEpochThatIsOverOpenNothing(t *testing.T) {
	var keys keyring
	mirrored(t, func(c *cluster) { withoutCaches(c); keys.overhear(c) }, func(m *mirror) {
		i := m.intruder()
		old := i.subsystem(m.clients[0], m.first)
		hostKey, controllerKey := keys.of(t, old)
		m.network.part("c1", m.first.name, true) // otherwise c1 and the intruder replace one another
		if err := i.connect(m.first, old, block.ProvenHost(old), hostKey, controllerKey); err != nil {
			t.Fatalf("with the right keys: %v", err) // so the refusals below are those of the keys
		}
		m.network.part("c1", m.first.name, false)
		time.Sleep(20 * time.Second) // c1 is back
		m.put("c1", 1, everyUnit...)
		m.takenTo(m.clients[1], m.clients[0])
		now := i.subsystem(m.clients[1], m.first)
		if now == old {
			t.Fatal("the epoch has the names of the one before")
		}
		for _, to := range []block.NQN{old, now} {
			for _, as := range []block.Host{block.ProvenHost(old), block.ProvenHost(now), i.host(m.clients[0]), i.host(m.clients[1])} {
				if err := i.connect(m.first, to, as, hostKey, controllerKey); err == nil {
					t.Errorf("the old keys opened %s as %s", to, as.NQN)
				}
			}
		}
		m.holds("c2", 1, everyUnit...)
	})
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// What one process packs, the next one unpacks: a connection that was made in between is accepted
// by the next one, on the same socket.
func TestAnEstateKeepsSocketsListening(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	portal := block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: uint16(l.Addr().(*net.TCPAddr).Port), Rail: "a"}
	told := &pb.TargetHandover{
		Wanted: &pb.TargetWanted{Generation: 7}, Devices: []*pb.Device{{Path: "/dev/x"}}, Losses: map[string]uint32{"11111111-2222-4333-8444-555555555555": 3},
	}
	e := Estate{told: told, listeners: map[block.Portal]net.Listener{portal: l}}
	message, sockets, err := e.Pack()
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	host, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatalf("nobody accepts, and a host is refused: %v", err)
	}
	defer host.Close()
	next, err := Unpack(message, sockets)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if !proto.Equal(next.told, told) {
		t.Errorf("unpacked %v, want %v", next.told, told)
	}
	accepting, ok := next.listeners[portal]
	if !ok {
		t.Fatalf("unpacked %v, want portal %v", next.listeners, portal)
	}
	c, err := accepting.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.RemoteAddr().String() != host.LocalAddr().String() {
		t.Errorf("accepted %v, want the host that has waited, %v", c.RemoteAddr(), host.LocalAddr())
	}
}

func TestAnEstateWithoutItsSocketsIsRefused(t *testing.T) {
	message, err := proto.Marshal(&pb.TargetHandover{Portals: []*pb.Portal{{Address: "127.0.0.1", Port: 4420}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(message, nil); err == nil {
		t.Error("an estate with a portal and no socket is taken")
	}
}

func TestAJobKeepsTheNextProcessWaiting(t *testing.T) {
	ended := make(chan struct{}, 1)
	hold := make(chan struct{})
	j := newJobs(func(context.Context, order) error { <-hold; return nil }, func() { poke(ended) }, nil)
	j.running["drive"] = &job{cancel: func() {}}
	if j.rest(ended, time.Millisecond) {
		t.Error("an order is carried out, and the locks are given up")
	}
	close(hold)
	delete(j.running, "drive")
	if !j.rest(ended, time.Minute) {
		t.Error("nothing is carried out, and the locks are kept")
	}
}

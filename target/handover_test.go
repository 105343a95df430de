// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"net"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/userspace"
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
	message, sockets, err := e.Pack(true)
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

// The connections of a controller go along, and so does everything that is known of it.
func TestAnEstateKeepsConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	portal := block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: 4420, Rail: "a"}
	c := userspace.Controller{Portal: portal, Passed: controller.Passed{
		Subsystem: "nqn.2026-11.dev.weft:test", ID: 9, Host: block.Host{NQN: "nqn.2014-08.org.nvmexpress:uuid:a", ID: block.UUID{1}},
		Since: time.Unix(3, 4), Spaces: map[uint32]controller.PassedSpace{1: {UUID: block.UUID{2}, Blocks: 5, BlockSize: 512, ReadOnly: true}}, MDTS: 18, InCapsule: 19, Config: 6,
		KeepAlive: 7 * time.Second, Settings: map[uint8]uint32{8: 9}, Behavior: []byte{10}, Events: 11, Masked: []uint8{1},
		Waiting: []uint8{0}, Changed: []uint32{12}, Requests: []uint16{13}, WriteThrough: true,
	}}
	var hosts []net.Conn
	for i := range uint16(2) {
		host, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer host.Close()
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		hosts = append(hosts, host)
		c.Queues = append(c.Queues, controller.PassedQueue{
			Conn: conn, ID: i, Size: 14, Head: 15, NoFlow: true, HeaderDigest: true, DataDigest: true, Align: 16, Read: []byte{17},
		})
	}
	e := Estate{told: &pb.TargetHandover{}, controllers: []userspace.Controller{c}}
	message, sockets, err := e.Pack(true)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	next, err := Unpack(message, sockets)
	if err != nil {
		t.Fatal(err)
	}
	for i, q := range next.controllers[0].Queues {
		if _, err := q.Conn.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := hosts[i].Read(b); err != nil || b[0] != byte(i) {
			t.Errorf("queue %d: %d arrives, %v", i, b[0], err)
		}
		q.Conn.Close()
		next.controllers[0].Queues[i].Conn, c.Queues[i].Conn = nil, nil
	}
	if got := next.controllers[0]; !reflect.DeepEqual(got, c) {
		t.Errorf("unpacked %+v\nwant     %+v", got, c)
	}
	// A process of an earlier version gets none of it.
	c.Queues = nil
	message, sockets, err = Estate{told: &pb.TargetHandover{}, controllers: []userspace.Controller{c}}.Pack(false)
	if told := (&pb.TargetHandover{}); err != nil || len(sockets) != 0 || proto.Unmarshal(message, told) != nil || len(told.GetControllers()) != 0 {
		t.Errorf("%d sockets and %v, %v", len(sockets), told, err)
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
	j := newJobs(func(context.Context, order) error { <-hold; return nil }, nil, func() { poke(ended) }, nil)
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

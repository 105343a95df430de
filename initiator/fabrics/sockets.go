// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// A sockID is struct inet_diag_sockid (linux/inet_diag.h): ports and addresses
// in network order, then interface and cookie as the kernel gave them.
type sockID [48]byte

func (id *sockID) remotePort() uint16 { return binary.BigEndian.Uint16(id[2:]) }

func (id *sockID) remote(family uint8) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(id[20:24]))
	}
	return netip.AddrFrom16([16]byte(id[20:36])).Unmap()
}

// sockRequest is struct inet_diag_req_v2. Its answers tell the struct tcp_info of each socket.
type sockRequest struct {
	family uint8
	states uint32
	id     sockID
}

func (r sockRequest) Len() int { return 8 + len(r.id) }

func (r sockRequest) Serialize() []byte {
	b := make([]byte, 8, r.Len())
	b[0], b[1], b[2] = r.family, unix.IPPROTO_TCP, 1<<(netlink.INET_DIAG_INFO-1)
	binary.NativeEndian.PutUint32(b[4:], r.states)
	return append(b, r.id[:]...)
}

// A socket is one TCP connection of this machine.
type socket struct {
	family   uint8
	id       sockID
	answered bool // its peer has sent data; true if the kernel does not tell
}

// parseSocket reads a struct inet_diag_msg and the struct tcp_info in the attributes after it.
func parseSocket(message []byte) (s socket, ok bool) {
	const (
		idAt       = 4 // family, state, timer and retransmits, one byte each, come before it
		attributes = 72
		received   = int(unsafe.Offsetof(unix.TCPInfo{}.Bytes_received))
	)
	if len(message) < attributes {
		return s, false
	}
	s = socket{family: message[0], id: sockID(message[idAt:]), answered: true}
	all, err := nl.ParseRouteAttr(message[attributes:])
	if err != nil {
		return s, false
	}
	for _, a := range all {
		if a.Attr.Type == netlink.INET_DIAG_INFO && len(a.Value) >= received+8 {
			s.answered = binary.NativeEndian.Uint64(a.Value[received:]) > 0
		}
	}
	return s, true
}

// DestroySockets makes the kernel drop every TCP connection to p at once, as if the peer had
// reset it (ss -K). I/O that waits on them fails in 0.2 s instead of after keep-alive and
// command timeouts, and their controllers reconnect. This affects all controllers of this
// machine at p, whatever their subsystem.
func (t *Tree) DestroySockets(ctx context.Context, p block.Portal) (destroyed int, err error) {
	return t.destroy(ctx, p, func(socket) bool { return true })
}

// DestroyUnanswered is DestroySockets for the connections on which the peer has sent no data yet. While the kernel
// connects a controller, the loss of a socket ends the wait for the connection and for the first answer on it
// (ICResp), but not for any later one: that lasts a minute then, the time limit of admin commands
// (drivers/nvme/host/tcp.c, nvme_tcp_error_recovery does nothing in the state connecting).
func (t *Tree) DestroyUnanswered(ctx context.Context, p block.Portal) (destroyed int, err error) {
	return t.destroy(ctx, p, func(s socket) bool { return !s.answered })
}

func (t *Tree) destroy(ctx context.Context, p block.Portal, those func(socket) bool) (destroyed int, err error) {
	const op = "destroy sockets to"
	address, err := netip.ParseAddr(p.Address)
	if err != nil {
		return 0, &Error{Op: op, Path: p.String(), Err: err}
	}
	count := make(chan int, 1)
	err = t.await(ctx, op, p.String(), func() error {
		n, err := destroySockets(address.Unmap(), p.Port, those)
		count <- n
		if err != nil {
			return &Error{Op: op, Path: p.String(), Err: err}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return <-count, nil
}

func destroySockets(address netip.Addr, port uint16, those func(socket) bool) (destroyed int, err error) {
	// An IPv4 peer may be on an IPv6 socket, as a mapped address.
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		n, err := destroyFamily(family, address, port, those)
		destroyed += n
		if err != nil {
			return destroyed, err
		}
	}
	return destroyed, nil
}

func destroyFamily(family uint8, address netip.Addr, port uint16, those func(socket) bool) (destroyed int, err error) {
	var id sockID
	binary.BigEndian.PutUint16(id[2:], port)
	dump := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	dump.AddData(sockRequest{family: family, states: 0xfff, id: id})
	messages, err := dump.Execute(unix.NETLINK_INET_DIAG, 0)
	if errors.Is(err, unix.ENOENT) { // no IPv6
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for _, m := range messages {
		s, ok := parseSocket(m)
		if !ok || s.id.remotePort() != port || s.id.remote(s.family) != address || !those(s) {
			continue
		}
		kill := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		kill.AddData(sockRequest{family: s.family, states: 0xfff, id: s.id})
		_, err := kill.Execute(unix.NETLINK_INET_DIAG, 0)
		if errors.Is(err, unix.ENOENT) { // it ended on its own
			continue
		}
		if err != nil {
			return destroyed, err
		}
		destroyed++
	}
	return destroyed, nil
}

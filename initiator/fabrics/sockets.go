// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"

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

// sockRequest is struct inet_diag_req_v2.
type sockRequest struct {
	family uint8
	states uint32
	id     sockID
}

func (r sockRequest) Len() int { return 8 + len(r.id) }

func (r sockRequest) Serialize() []byte {
	b := make([]byte, 8, r.Len())
	b[0], b[1] = r.family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], r.states)
	return append(b, r.id[:]...)
}

// parseSocket reads the id of a struct inet_diag_msg: family, state, timer and
// retransmits, one byte each, come before it.
func parseSocket(message []byte) (family uint8, id sockID, ok bool) {
	if len(message) < 4+len(id) {
		return 0, id, false
	}
	return message[0], sockID(message[4:]), true
}

// DestroySockets makes the kernel drop every TCP connection to p at once, as if the peer had
// reset it (ss -K). I/O that waits on them fails in 0.2 s instead of after keep-alive and
// command timeouts, and their controllers reconnect. This affects all controllers of this
// machine at p, whatever their subsystem.
func (t *Tree) DestroySockets(ctx context.Context, p block.Portal) (destroyed int, err error) {
	address, err := netip.ParseAddr(p.Address)
	if err != nil {
		return 0, &Error{Op: "destroy sockets to", Path: p.String(), Err: err}
	}
	count := make(chan int, 1)
	err = t.await(ctx, "destroy sockets to", p.String(), func() error {
		n, err := destroySockets(address.Unmap(), p.Port)
		count <- n
		if err != nil {
			return &Error{Op: "destroy sockets to", Path: p.String(), Err: err}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return <-count, nil
}

func destroySockets(address netip.Addr, port uint16) (destroyed int, err error) {
	// An IPv4 peer may be on an IPv6 socket, as a mapped address.
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		n, err := destroyFamily(family, address, port)
		destroyed += n
		if err != nil {
			return destroyed, err
		}
	}
	return destroyed, nil
}

func destroyFamily(family uint8, address netip.Addr, port uint16) (destroyed int, err error) {
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
		f, id, ok := parseSocket(m)
		if !ok || id.remotePort() != port || id.remote(f) != address {
			continue
		}
		kill := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		kill.AddData(sockRequest{family: f, states: 0xfff, id: id})
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

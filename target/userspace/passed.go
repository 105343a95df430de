// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/pb"
)

// Message returns what goes to another process with the controller's connections.
func (c Controller) Message() *pb.PassedController {
	m := &pb.PassedController{
		Nqn: string(c.Subsystem), Cntlid: uint32(c.ID), HostNqn: string(c.Host.NQN), HostId: c.Host.ID[:], Since: c.Since.UnixNano(),
		Portal: &pb.Portal{Transport: pb.Transport_TRANSPORT_TCP, Address: c.Portal.Address, Port: uint32(c.Portal.Port), Rail: c.Portal.Rail},
		Cc:     c.Config, KatoMs: uint32(c.KeepAlive.Milliseconds()), Features: map[uint32]uint32{}, HostBehavior: c.Behavior,
		Events: c.Events, Masked: c.Masked, Waiting: c.Waiting, Changed: c.Changed, WriteThrough: c.WriteThrough,
		Mdts: uint64(c.MDTS), InCapsule: uint64(c.InCapsule),
	}
	for id, v := range c.Settings {
		m.Features[uint32(id)] = v
	}
	for nsid, s := range c.Spaces {
		m.Namespaces = append(m.Namespaces, &pb.PassedNamespace{Nsid: nsid, Uuid: s.UUID[:], Blocks: s.Blocks, BlockSize: uint64(s.BlockSize), ReadOnly: s.ReadOnly})
	}
	slices.SortFunc(m.Namespaces, func(a, b *pb.PassedNamespace) int { return cmp.Compare(a.GetNsid(), b.GetNsid()) })
	for _, cid := range c.Requests {
		m.EventRequests = append(m.EventRequests, uint32(cid))
	}
	for _, q := range c.Queues {
		m.Queues = append(m.Queues, &pb.PassedQueue{
			Number: uint32(q.ID), Size: q.Size, Head: q.Head, NoFlowControl: q.NoFlow,
			HeaderDigest: q.HeaderDigest, DataDigest: q.DataDigest, Align: uint32(q.Align), Read: q.Read,
		})
	}
	return m
}

// ControllerOf is the inverse of Message. sockets are the connections of its queues; the caller closes
// them, since the controller has duplicates.
func ControllerOf(m *pb.PassedController, portal block.Portal, sockets []*os.File) (c Controller, retErr error) {
	c = Controller{portal, controller.Passed{
		Subsystem: block.NQN(m.GetNqn()), ID: uint16(m.GetCntlid()), Since: time.Unix(0, m.GetSince()), Spaces: map[uint32]controller.PassedSpace{},
		Config: m.GetCc(), KeepAlive: time.Duration(m.GetKatoMs()) * time.Millisecond, Settings: map[uint8]uint32{}, Behavior: m.GetHostBehavior(),
		Events: m.GetEvents(), Masked: m.GetMasked(), Waiting: m.GetWaiting(), Changed: m.GetChanged(), WriteThrough: m.GetWriteThrough(),
		MDTS: block.Size(m.GetMdts()), InCapsule: block.Size(m.GetInCapsule()),
	}}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(fmt.Errorf("controller %d of %s: %w", m.GetCntlid(), m.GetNqn(), retErr), c.Close())
		}
	}()
	c.Host.NQN = block.NQN(m.GetHostNqn())
	if !exactly(c.Host.ID[:], m.GetHostId()) {
		return c, fmt.Errorf("a host id of %d bytes", len(m.GetHostId()))
	}
	for id, v := range m.GetFeatures() {
		c.Settings[uint8(id)] = v
	}
	for _, n := range m.GetNamespaces() {
		s := controller.PassedSpace{Blocks: n.GetBlocks(), BlockSize: block.Size(n.GetBlockSize()), ReadOnly: n.GetReadOnly()}
		if !exactly(s.UUID[:], n.GetUuid()) {
			return c, fmt.Errorf("a UUID of %d bytes", len(n.GetUuid()))
		}
		c.Spaces[n.GetNsid()] = s
	}
	for _, cid := range m.GetEventRequests() {
		c.Requests = append(c.Requests, uint16(cid))
	}
	for i, q := range m.GetQueues() {
		conn, err := net.FileConn(sockets[i])
		if err != nil {
			return c, err
		}
		c.Queues = append(c.Queues, controller.PassedQueue{
			Conn: conn, ID: uint16(q.GetNumber()), Size: q.GetSize(), Head: q.GetHead(), NoFlow: q.GetNoFlowControl(),
			HeaderDigest: q.GetHeaderDigest(), DataDigest: q.GetDataDigest(), Align: uint8(q.GetAlign()), Read: q.GetRead(),
		})
	}
	return c, nil
}

// exactly fills to with b, if that is as long.
func exactly(to, b []byte) bool { return copy(to, b) == len(to) && len(b) == len(to) }

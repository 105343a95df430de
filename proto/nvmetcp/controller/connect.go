// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// fabrics executes a Fabrics command. q is nil before Connect.
func (c *conn) fabrics(r *request, p *nvmetcp.PDU, q *queue) error {
	kind := r.cmd.FabricsType()
	switch {
	case kind == nvmetcp.FabricsConnect && q != nil, kind != nvmetcp.FabricsConnect && q == nil:
		r.finish(nvmetcp.CommandSequenceError | dnr)
	case kind == nvmetcp.FabricsConnect:
		return c.fetch(r, p, nvmetcp.ConnectDataSize, nvmetcp.ConnectDataSize, (*request).connect)
	case kind == nvmetcp.FabricsAuthSend || kind == nvmetcp.FabricsAuthRecv:
		return c.authenticate(r, p, q)
	case !q.proven:
		r.finish(nvmetcp.AuthenticationRequired | dnr)
	case kind == nvmetcp.FabricsDisconnect:
		return c.disconnect(r, q)
	case kind == nvmetcp.FabricsPropertyGet && q.id == 0:
		r.propertyGet(q.ctrl)
	case kind == nvmetcp.FabricsPropertySet && q.id == 0:
		r.propertySet(q.ctrl)
	default:
		r.finish(nvmetcp.InvalidOpcode | dnr)
	}
	return nil
}

// errDisconnected ends a connection after the host's Disconnect.
var errDisconnected = errors.New("the host has disconnected")

// disconnect ends an I/O queue (Base, 6.4). The connection is closed once the answer has
// been sent, unless the host closes it first.
func (c *conn) disconnect(r *request, q *queue) error {
	if q.id == 0 {
		r.finish(nvmetcp.ConnectInvalidQueueType | dnr)
		return nil
	}
	r.finish(nvmetcp.Success)
	c.rest()
	return errDisconnected
}

// connectError is the reason for refusing a Connect.
type connectError struct {
	status nvmetcp.Status
	result uint64
	why    string
}

func (e *connectError) Error() string { return e.why }

// invalid names the invalid field (IATTR and IPO of the answer).
func invalid(offset uint16, inData bool, why string) *connectError {
	return &connectError{nvmetcp.ConnectInvalidParameters | dnr, nvmetcp.ConnectInvalid(offset, inData), why}
}

// maxAdminQueue is four times what Linux asks for.
const maxAdminQueue = 128

// connect executes a Connect whose data has arrived (Base, 6.3).
func (r *request) connect() {
	c := r.c
	cmd := nvmetcp.ParseConnect(&r.cmd)
	data, err := nvmetcp.ParseConnectData(r.data)
	refused := (*connectError)(nil)
	if err != nil {
		refused = invalid(nvmetcp.ConnectFieldSubsystem, true, err.Error())
	} else {
		refused = c.join(r, cmd, data)
	}
	if refused != nil {
		c.log.Warn("connect refused", "subsystem", data.Subsystem, "host", data.Host, "queue", cmd.QueueID, "reason", refused.why)
		r.result = refused.result
		r.finish(refused.status)
	}
}

func (c *conn) join(r *request, cmd nvmetcp.Connect, data nvmetcp.ConnectData) *connectError {
	switch {
	case cmd.RecordFormat != 0:
		return &connectError{nvmetcp.ConnectIncompatibleFormat | dnr, 0, "the record format is not 0"}
	case cmd.QueueSize < 2 || int(cmd.QueueSize) > c.t.cfg.QueueDepth || cmd.QueueID == 0 && cmd.QueueSize > maxAdminQueue:
		return invalid(nvmetcp.ConnectFieldQueueSize, false, "the queue size is not supported")
	case int(cmd.QueueID) > c.t.cfg.MaxIOQueues:
		return invalid(nvmetcp.ConnectFieldQueueID, false, "there is no such queue")
	}
	if n := c.t.data.conns(data.Host); n >= c.t.cfg.MaxConnectionsPerHost {
		return &connectError{nvmetcp.ConnectControllerBusy, 0, fmt.Sprintf("the host has %d connections", n)}
	}
	if _, err := block.ParseNQN(string(data.Host)); err != nil {
		return invalid(nvmetcp.ConnectFieldHost, true, err.Error())
	}
	s, refused := c.port.find(data)
	if refused != nil {
		return refused
	}
	if cmd.QueueID == 0 {
		return c.joinAdmin(r, s, cmd, data)
	}
	return c.joinIO(r, s, cmd, data)
}

// find returns the subsystem, if the host may connect to it through the port.
func (p *Port) find(data nvmetcp.ConnectData) (*Subsystem, *connectError) {
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	s := p.t.subsystems[data.Subsystem]
	if data.Subsystem == nvmetcp.DiscoveryNQN {
		s = p.t.discovery
	} else if _, ok := p.linked[s]; !ok {
		return nil, invalid(nvmetcp.ConnectFieldSubsystem, true, "there is no such subsystem")
	}
	if !s.admitsLocked(data.Host) {
		return nil, &connectError{nvmetcp.ConnectInvalidHost | dnr, nvmetcp.ConnectInvalid(nvmetcp.ConnectFieldHost, true), "the host may not connect"}
	}
	if data.HostID.IsZero() && !s.discovery {
		return nil, invalid(nvmetcp.ConnectFieldHostID, true, "the host has no identifier")
	}
	return s, nil
}

// joinAdmin connects an admin queue: it makes an association.
func (c *conn) joinAdmin(r *request, s *Subsystem, cmd nvmetcp.Connect, data nvmetcp.ConnectData) *connectError {
	if data.ControllerID != nvmetcp.DynamicController {
		return invalid(nvmetcp.ConnectFieldControllerID, true, "controllers are dynamic here")
	}
	a, older, keys, err := c.port.newAssociation(s, block.Host{NQN: data.Host, ID: data.HostID}, c)
	if err != nil {
		return &connectError{nvmetcp.ConnectControllerBusy, 0, err.Error()}
	}
	if err := a.await(older, c.t.cfg.StallTimeout); err != nil {
		a.abandon(err)
		return &connectError{nvmetcp.ConnectControllerBusy, 0, err.Error()}
	}
	c.bind(r, a, cmd, keys)
	a.setKATO(cmd.KATO)
	c.log.Info("controller begins", "subsystem", s.cfg.NQN, "cntlid", a.id, "host", data.Host)
	return nil
}

// await waits until the commands of the older associations have left the Devices.
func (a *association) await(older []*association, patience time.Duration) error {
	late := time.NewTimer(patience)
	defer late.Stop()
	for _, o := range older {
		select {
		case <-o.gone:
		case <-a.killed:
			return errReplaced
		case <-late.C:
			return errors.New("commands of the host's older controller are still in a device")
		}
	}
	return nil
}

// errEnded refuses a queue of a controller that has ended since the host connected it, or goes to another process.
// The host may try again, with another controller: Linux removes its device if it may not.
var errEnded = &connectError{
	nvmetcp.ConnectInvalidParameters, nvmetcp.ConnectInvalid(nvmetcp.ConnectFieldControllerID, true), "the controller has ended",
}

// joinIO connects an I/O queue to an association.
func (c *conn) joinIO(r *request, s *Subsystem, cmd nvmetcp.Connect, data nvmetcp.ConnectData) *connectError {
	c.t.mu.Lock()
	a := s.associations[data.ControllerID]
	c.t.mu.Unlock()
	host := block.Host{NQN: data.Host, ID: data.HostID}
	switch {
	case a == nil || a.dead.Load():
		return errEnded
	case a.host != host || a.port != c.port:
		return invalid(nvmetcp.ConnectFieldControllerID, true, "the host has no such controller here")
	case s.discovery:
		return invalid(nvmetcp.ConnectFieldQueueID, false, "discovery has no I/O queues")
	case !a.enabled.Load():
		return &connectError{nvmetcp.CommandSequenceError | dnr, 0, "the controller is not enabled"}
	}
	switch err := a.join(c, cmd.QueueID); {
	case errors.Is(err, ErrExists):
		return invalid(nvmetcp.ConnectFieldQueueID, false, "the queue is connected already")
	case err != nil:
		return errEnded
	}
	c.bind(r, a, cmd, s.keysOf(a))
	return nil
}

// bind makes c a queue of a and answers the Connect.
func (c *conn) bind(r *request, a *association, cmd nvmetcp.Connect, keys Host) {
	q := &queue{ctrl: a, id: cmd.QueueID, size: cmd.QueueSize, noFlow: cmd.Attributes&nvmetcp.ConnectNoFlowControl != 0}
	q.proof.keys = keys
	q.proven = q.proof.keys.HostKey.IsZero()
	c.bound.Store(q)
	if q.proven {
		c.introduced()
	}
	r.result = nvmetcp.ConnectResult{ControllerID: a.id, AuthRequired: !q.proven}.Encode()
	r.finish(nvmetcp.Success)
}

// introduced ends the handshake: its timeout gives way to keep alive and the stall timeout, and the
// queue gets its memory. The limiter still counts a connection for discovery as handshaking, since
// anybody may have one.
func (c *conn) introduced() {
	c.sock.SetReadDeadline(time.Time{})
	q, host := c.bound.Load(), strangers
	if !q.ctrl.sub.discovery {
		host = q.ctrl.host.NQN
		c.t.limiter.connected(c)
	}
	c.enroll(host)
	buffer, most := adminBuffer, c.t.adminMemory()
	if q.id != 0 {
		buffer, most = ioBuffer, c.t.memoryLimit
		c.r.Configure(c.readerConfig(uint32(c.t.cfg.InCapsule)))
	}
	c.r.Grow(buffer)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.memoryLimit = most
	c.limit = 2*int(q.size) + 1 // an answered request counts until its answer is known to be sent
}

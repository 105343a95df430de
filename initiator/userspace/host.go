// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/nvmetcp/host"
)

// reconnectMax is the longest pause between attempts to reconnect: a returning target should
// be noticed soon.
const reconnectMax = 500 * time.Millisecond

// dialHost connects by NVMe/TCP through way; nil means the network.
func dialHost(way Dial) dial {
	return func(ctx context.Context, o dialOptions) (connection, error) { return connect(ctx, way, o) }
}

func connect(ctx context.Context, way Dial, o dialOptions) (connection, error) {
	hostKey, controllerKey, err := proofs(o.keys)
	if err != nil {
		return nil, err
	}
	h := &hostConnection{beside: o.beside}
	h.Controller, err = host.Connect(ctx, host.Config{
		HostKey: hostKey, ControllerKey: controllerKey,
		Portals: []string{o.portal}, Subsystem: o.subsystem, Host: o.host, HeaderDigest: o.digests, DataDigest: o.digests,
		IOQueues: o.ioQueues, KATO: o.keepAlive, KeepAliveEvery: o.every, AskEvery: o.ask, ReconnectMax: reconnectMax, Dial: way, Log: o.log,
		OnState: func(host.State) { o.changed() }, OnNamespaces: o.changed, Replace: h.replace,
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// proofs returns keys as the protocol has them; none if there are none.
func proofs(k block.Keys) (hostKey, controllerKey dhchap.Key, err error) {
	if k.IsZero() {
		return hostKey, controllerKey, nil
	}
	return dhchap.NewKeys(k.Host.Reveal(), k.Controller.Reveal())
}

type hostConnection struct {
	*host.Controller
	rescan time.Time // when the next rescan may start
	beside *lists.Beside
	move   atomic.Pointer[move] // the last one
}

type move struct {
	to     block.Portal
	waited bool
}

func (c *hostConnection) Live() (bool, error) {
	s := c.State()
	if s.Phase == host.Live {
		return true, nil
	}
	return false, s.Err
}

func (c *hostConnection) Refused() time.Time {
	if s := c.State(); s.Phase != host.Live && keeper.Refuses(s.Err) {
		return s.Failed
	}
	return time.Time{}
}

func (c *hostConnection) Move(to block.Portal, waited bool) {
	c.move.Store(&move{to, waited})
	c.Controller.Move(to.HostPort())
}

func (c *hostConnection) Replaces() (own, beside bool) {
	if c.Controller.Replaces() {
		return true, false
	}
	return false, c.beside.Replaces()
}

func (c *hostConnection) Change(ctx context.Context, through block.Portal, by block.ServedBy) error {
	ctx, cancel := context.WithTimeout(ctx, volume.ChangeWithin)
	defer cancel()
	return c.beside.Replace(ctx, through, by)
}

// Answered counts what has come from beside the target, too, while that ends the older controller.
func (c *hostConnection) Answered() bool {
	beside := c.beside.Heard()
	return c.Controller.Answered() || beside
}

// replace has the older controller ended before a connection that moves is made anew. If that cannot be done, the
// host waits until the target must have ended it.
func (c *hostConnection) replace(ctx context.Context) error {
	move := c.move.Load()
	if move.waited || time.Since(c.State().Since) > volume.Quiesce {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, replaceTimeout)
	defer cancel()
	return c.beside.Replace(ctx, move.to, block.SamePart)
}

// replaceTimeout is how long the agent beside a target may take to end a controller, before it is asked again.
const replaceTimeout = 5 * time.Second

// Namespace also makes the controller look again if it does not know the namespace, because
// the event that announces one may have been lost with a connection. It does so only from time
// to time: each finding makes the keeper call Namespace again.
func (c *hostConnection) Namespace(nsid uint32, id block.UUID) (block.Device, error) {
	n, err := c.Controller.Namespace(nsid, id)
	if err != nil {
		if now := time.Now(); errors.Is(err, block.ErrGone) && !now.Before(c.rescan) {
			c.rescan = now.Add(keeper.RetryInterval)
			c.Rescan()
		}
		return nil, err
	}
	return n, nil
}

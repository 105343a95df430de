// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"maps"
	"net"
	"syscall"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// tryTimeout is how long an attempt to connect to a portal may take.
const tryTimeout = time.Second

// Portals knows which portals accept connections, as far as that was tried. The keeper's goroutine owns it.
type Portals struct {
	reach  func(ctx context.Context, address string) error
	tell   func(event func()) bool
	tried  map[volume.Path]volume.Tried
	trying map[volume.Path]time.Time // since when
}

// NewPortals tries portals with reach, which connects to HOST:PORT and closes that connection again. It
// learns of the outcome through tell, the keeper's Tell.
func NewPortals(reach func(ctx context.Context, address string) error, tell func(event func()) bool) *Portals {
	return &Portals{reach, tell, map[volume.Path]volume.Tried{}, map[volume.Path]time.Time{}}
}

// Reach connects through dial, nil for the machine's network, and closes the connection again.
func Reach(dial func(ctx context.Context, network, address string) (net.Conn, error)) func(ctx context.Context, address string) error {
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	return func(ctx context.Context, address string) error {
		c, err := dial(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return c.Close()
	}
}

// Try begins to find out whether a portal accepts connections. Over RDMA that cannot be told so soon: such a
// portal counts as one that does.
func (p *Portals) Try(ctx context.Context, path volume.Path) error {
	if path.Portal.Transport != block.TCP {
		p.tried[path] = volume.Tried{At: time.Now(), OK: true}
		return nil
	}
	if _, under := p.trying[path]; under {
		return volume.ErrLater
	}
	p.trying[path] = time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(ctx, tryTimeout)
		defer cancel()
		err := p.reach(ctx, path.Portal.HostPort())
		p.tell(func() {
			delete(p.trying, path)
			if Refuses(err) {
				p.Refused(path, time.Now())
				return
			}
			p.tried[path] = volume.Tried{At: time.Now(), OK: err == nil}
		})
	}()
	return nil
}

// Tried is when a portal was last tried; zero: it was not.
func (p *Portals) Tried(path volume.Path) time.Time { return p.tried[path].At }

// Refused notes that a portal refused to connect.
func (p *Portals) Refused(path volume.Path, at time.Time) {
	p.tried[path] = volume.Tried{At: at, Refused: p.tried[path].Refused.Again(at)}
}

// Accepted forgets that the portals of a target have refused: it is there again.
func (p *Portals) Accepted(n block.NQN) {
	for path, t := range p.tried {
		if path.Subsystem == n && !t.Refused.Last.IsZero() {
			t.Refused = volume.Refusals{}
			p.tried[path] = t
		}
	}
}

// Forget forgets all outcomes.
func (p *Portals) Forget() { clear(p.tried) }

// See adds what is known to a look at the volume.
func (p *Portals) See(s *volume.Seen) { s.Tried, s.Trying = maps.Clone(p.tried), maps.Clone(p.trying) }

// Refuses reports whether an attempt to connect was answered with a reset: the machine answers, and nobody
// listens there.
func Refuses(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

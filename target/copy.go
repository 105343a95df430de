// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	nvme "weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/mapped"
	"weft.dev/weft/target/userspace"
)

// A copy of a snapshot that a drive lacks is copied from the target of another one over NVMe/TCP. The
// source is frozen, so what was read never becomes old, and the copy is not read before it is complete.

// dialer connects to another machine.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// copySource is a pb.CopySource with its identifiers checked.
type copySource struct {
	portals []string
	nqn     block.NQN
	host    block.Host
	keys    block.Keys
	nsid    uint32
	uuid    block.UUID
	since   block.UUID // zero: the copy begins as zeroes
	rate    block.Size // a second; 0: no limit
}

// parseSource returns nil for a leg that is not copied, or not yet.
func parseSource(o *pb.LegOrigin) (*copySource, error) {
	if o.GetKind() != pb.LegOriginKind_LEG_ORIGIN_KIND_COPY || o.GetWait() {
		return nil, nil
	}
	m := o.GetSource()
	s := &copySource{nsid: m.GetNsid(), rate: block.Size(m.GetBytesPerSecond())}
	var err error
	if s.nqn, err = block.ParseNQN(m.GetNqn()); err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	if s.uuid, err = block.ParseUUID(m.GetUuid()); err != nil {
		return nil, fmt.Errorf("source: namespace: %w", err)
	}
	id, err := block.ParseUUID(m.GetHost().GetId())
	if err != nil {
		return nil, fmt.Errorf("source: host: %w", err)
	}
	s.host = block.Host{NQN: block.NQN(m.GetHost().GetNqn()), ID: id}
	if s.keys, err = block.ParseKeys(m.GetKeys().GetHost(), m.GetKeys().GetController()); err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	switch since := m.GetSinceLegId(); {
	case (since == "") != (o.GetLegId() == ""):
		return nil, errors.New("source: what the copy begins as is known at one of the ends alone")
	case since != "":
		leg, err := block.ParseLegID(since)
		if err != nil {
			return nil, fmt.Errorf("source: %w", err)
		}
		s.since = leg.UUID
	}
	for _, p := range m.GetPortals() {
		if p.GetTransport() == pb.Transport_TRANSPORT_TCP {
			s.portals = append(s.portals, portalOf(p).HostPort())
		}
	}
	if len(s.portals) == 0 {
		return nil, errors.New("source: no address for TCP")
	}
	return s, nil
}

const (
	// copyPiece is how much is read at a time.
	copyPiece = mapped.ChunkSize
	// copyWaits is how long a copy waits for the drive's reserve to grow, or for its tree to get of it.
	copyWaits = 10 * time.Second
	copyLooks = 200 * time.Millisecond
	// commandFor is the longest that the source may take for one command.
	commandFor = 30 * time.Second
)

func (t tools) copyLeg(ctx context.Context, o copyLeg) error {
	return t.planted(o.drive, func(d planted) error {
		return d.Copy(o.leg, o.revision, o.size, o.base, func(to block.Device, room func() block.Size) error { return t.pull(ctx, o, to, room) })
	})
}

// pull copies the source to a leg. The manager lets the drive's reserve grow as the copy takes of it; some of
// that is always left for the volumes.
func (t tools) pull(ctx context.Context, o copyLeg, to block.Device, room func() block.Size) error {
	from, err := o.from.open(ctx, t.dial)
	if err != nil {
		return ofSource(err)
	}
	defer from.controller.Cut()
	stop := context.AfterFunc(ctx, from.controller.Cut) // a read that waits for the source ends then
	defer stop()
	pace := pacer{rate: o.from.rate, began: time.Now()}
	return from.each(ctx, int64(o.size), func(r block.Range) error {
		for at := r.Off; at < r.End; {
			n := min(r.End-at, copyPiece-at%copyPiece)
			if err := awaitRoom(ctx, room); err != nil {
				return err
			}
			if err := from.copy(ctx, to, at, n); err != nil {
				return err
			}
			at += n
			t.progress(o.leg, progress{min(block.Size(at), o.size-block.MiB), block.Size(pace.done + n)}) // it is complete when it is sealed
			if err := pace.after(ctx, n); err != nil {
				return err
			}
		}
		return nil
	})
}

// awaitRoom waits until a copy may take more space.
func awaitRoom(ctx context.Context, room func() block.Size) error {
	for began := time.Now(); room() < userspace.FlattenSpare; {
		if time.Since(began) > copyWaits {
			return fmt.Errorf("its tree has %s free, and its drive no more than what is left to hosts: %w", room().Short(), block.ErrFull)
		}
		if !sleep(ctx, copyLooks) {
			return ctx.Err()
		}
	}
	return nil
}

// ofSource makes an error one that says nothing about this machine's drive.
func ofSource(err error) error {
	if err == nil {
		return nil
	}
	return errors.New("read the copy's source: " + err.Error())
}

// source is an open copySource.
type source struct {
	controller *nvme.Controller
	namespace  *nvme.Namespace
	since      block.UUID
}

func (s *copySource) open(ctx context.Context, dial dialer) (*source, error) {
	config := nvme.Config{Portals: s.portals, Subsystem: s.nqn, Host: s.host, IOQueues: 1, QueueDepth: 4, ReconnectMax: time.Second, CommandTimeout: commandFor, Dial: dial}
	if !s.keys.IsZero() {
		var err error
		if config.HostKey, config.ControllerKey, err = dhchap.NewKeys(s.keys.Host.Reveal(), s.keys.Controller.Reveal()); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, commandFor)
	defer cancel()
	c, err := nvme.Connect(ctx, config)
	if err != nil {
		return nil, err
	}
	n, err := c.Namespace(s.nsid, s.uuid)
	if err != nil {
		c.Cut()
		return nil, err
	}
	return &source{c, n, s.since}, nil
}

// each calls do for each range of the first size bytes that the copy has to take from the source.
func (s *source) each(ctx context.Context, size int64, do func(block.Range) error) error {
	for at := int64(0); at < size; {
		asked, cancel := context.WithTimeout(ctx, commandFor)
		var found []block.Range
		var err error
		next := at
		if s.since.IsZero() {
			found, next, err = s.namespace.Allocated(asked, at, size)
		} else {
			found, next, err = s.namespace.Differing(asked, s.since, at, size)
		}
		cancel()
		if err != nil {
			return ofSource(cmp.Or(ctx.Err(), err))
		}
		for _, r := range found {
			// Whole grains: the rest of each is equal.
			r.Off = r.Off / mapped.GrainSize * mapped.GrainSize
			r.End = min((r.End+mapped.GrainSize-1)/mapped.GrainSize*mapped.GrainSize, size)
			if err := do(r); err != nil {
				return err
			}
		}
		at = next
	}
	return nil
}

// copy copies n bytes. Zeroes take no space where the copy does not begin as something else.
func (s *source) copy(ctx context.Context, to block.Device, at, n int64) error {
	data := make([]byte, n)
	if err := block.ReadAt(s.namespace, data, at); err != nil {
		return ofSource(cmp.Or(ctx.Err(), err))
	}
	for began := time.Now(); ; {
		io := &block.IO{Op: block.OpWrite, Off: at, Len: n, Data: data}
		if block.AllZero(data) {
			io = &block.IO{Op: block.OpWriteZeroes, Unmap: true, Off: at, Len: n}
		}
		err := block.Do(to, io)
		if !errors.Is(err, block.ErrFull) || time.Since(began) > copyWaits {
			return err
		}
		if !sleep(ctx, copyLooks) {
			return ctx.Err()
		}
	}
}

// pacer keeps a copy to its rate.
type pacer struct {
	rate  block.Size
	began time.Time
	done  int64
}

func (p *pacer) after(ctx context.Context, n int64) error {
	if p.done += n; p.rate == 0 {
		return ctx.Err()
	}
	due := p.began.Add(time.Duration(float64(p.done) / float64(p.rate) * float64(time.Second)))
	sleep(ctx, time.Until(due))
	return ctx.Err()
}

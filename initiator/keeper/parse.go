// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Parse refuses a wanted state that cannot be acted on; the error names the field.
//
// Long: one statement for each field.
func Parse(p *pb.WantedAttachment) (*volume.Wanted, error) {
	id, err := block.ParseVolumeID(p.GetVolumeId())
	if err != nil {
		return nil, fmt.Errorf("volume id: %w", err)
	}
	name, err := block.ParseDeviceName(p.GetVolumeName())
	if err != nil {
		return nil, err
	}
	w := &volume.Wanted{
		Volume: id, Name: name,
		Size:        block.Size(p.GetSizeBytes()),
		Epoch:       block.Epoch(p.GetEpoch()),
		Grant:       p.GetGrant(),
		SinceEpoch:  block.Epoch(p.GetSinceEpoch()),
		BootID:      p.GetBootId(),
		Equalize:    p.GetEqualize(),
		Detach:      p.GetDetach(),
		RebuildRate: block.Size(p.GetRebuildBytesPerSecond()),
		Thin:        p.GetThin(),
		Heal:        p.GetHealerId() != "",
		Rail:        p.GetRail(),
		GPU:         p.GetNearGpu(),
		Layout: block.Layout{
			Stripes: int(p.GetLayout().GetStripes()),
			Copies:  int(p.GetLayout().GetCopies()),
			Chunk:   block.Size(p.GetLayout().GetChunkBytes()),
			Data:    int(p.GetLayout().GetData()),
			Parity:  int(p.GetLayout().GetParity()),

			Integrity: p.GetLayout().GetIntegrity(),
		},
	}
	if err := w.Layout.Check(); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	if w.Layout.Kind() != block.Mirror {
		return nil, fmt.Errorf("layout %v: this version serves mirrors only", w.Layout)
	}
	if err := setMode(w, p.GetMode()); err != nil {
		return nil, fmt.Errorf("mode %v: %w", p.GetMode(), err)
	}
	if w.Epoch == 0 || w.Size == 0 || w.Size%block.SectorSize != 0 {
		return nil, fmt.Errorf("epoch %d, size %d: both must be positive, the size in whole sectors", w.Epoch, w.Size)
	}
	if want := w.Layout.LegSize(w.Size); block.Size(p.GetLegSizeBytes()) != want {
		return nil, fmt.Errorf("leg size %d: must be %d for this size and layout", p.GetLegSizeBytes(), want)
	}
	if w.Holds, err = parseHolds(p.GetHolds()); err != nil {
		return nil, err
	}
	if w.Scrub, err = parseScrub(p.GetScrub(), w.Layout); err != nil {
		return nil, fmt.Errorf("scrub: %w", err)
	}
	for _, l := range p.GetLegs() {
		if err := addLink(w, l); err != nil {
			return nil, fmt.Errorf("leg %q: %w", l.GetLegId(), err)
		}
	}
	slices.SortFunc(w.Links, func(a, b volume.Link) int {
		return cmp.Or(cmp.Compare(a.Column, b.Column), cmp.Compare(a.Copy, b.Copy))
	})
	return w, nil
}

// addLink adds a leg, which must fit to the others.
func addLink(w *volume.Wanted, p *pb.WantedLink) error {
	l, err := parseLink(p, w.Layout)
	switch {
	case err != nil:
		return err
	case w.At(l.Column, l.Copy) != nil:
		return fmt.Errorf("column %d has another copy %d", l.Column, l.Copy)
	case w.ReadOnly && l.Rebuilding:
		return errors.New("a read-only attachment cannot rebuild it")
	}
	w.Links = append(w.Links, l)
	return nil
}

// setMode refuses a mode in which copies could diverge: with several writers, each host would
// have to drop a lost copy before any of them acknowledges a write that the copy misses.
func setMode(w *volume.Wanted, m pb.AttachMode) error {
	switch m {
	case pb.AttachMode_ATTACH_MODE_UNSPECIFIED, pb.AttachMode_ATTACH_MODE_EXCLUSIVE:
	case pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY:
		w.ReadOnly = true
		if w.Equalize {
			return errors.New("the copies cannot be made equal in a read-only attachment")
		}
	case pb.AttachMode_ATTACH_MODE_SHARED_BLOCK:
		if w.Layout.Copies > 1 {
			return fmt.Errorf("needs a volume with one copy; this one has %d", w.Layout.Copies)
		}
	default:
		return errors.New("this version does not know it")
	}
	return nil
}

func parseScrub(p *pb.Scrub, layout block.Layout) (*volume.Scrub, error) {
	if p == nil {
		return nil, nil
	}
	if p.GetId() == "" {
		return nil, errors.New("it has no id")
	}
	s := &volume.Scrub{
		ID: p.GetId(), Rate: block.Size(p.GetBytesPerSecond()), Repair: p.GetRepair(), Run: p.GetRun(), Recorded: int(p.GetRecorded()),
		Begin: volume.ScrubPosition{Column: int(p.GetBegin().GetColumn()), Off: block.Size(p.GetBegin().GetOffset())},
	}
	if s.Begin.Column >= layout.Stripes || s.Begin.Off%block.ScrubUnit != 0 || s.Begin.Off > maxOffset {
		return nil, fmt.Errorf("it begins in column %d at %d: not in a layout of %v, or not in whole blocks", s.Begin.Column, uint64(s.Begin.Off), layout)
	}
	for _, at := range p.GetFrom() {
		if int(at.GetColumn()) >= layout.Stripes || int(at.GetCopy()) >= layout.Slots() {
			return nil, fmt.Errorf("column %d copy %d: not in a layout of %v", at.GetColumn(), at.GetCopy(), layout)
		}
		s.From = append(s.From, volume.Place{Column: int(at.GetColumn()), Copy: int(at.GetCopy())})
	}
	return s, nil
}

// maxOffset bounds the position of a scrub, so that sums of offsets do not overflow.
const maxOffset = block.Size(1 << 60)

// longestHold bounds how long I/O may be held: a host's file systems and programs wait for it.
const longestHold = time.Minute

func parseHolds(all []*pb.Hold) (holds []volume.Hold, err error) {
	for _, h := range all {
		id, limit := h.GetId(), h.GetLimit().AsDuration()
		switch {
		case id == "":
			return nil, errors.New("hold: it has no id")
		case slices.ContainsFunc(holds, func(o volume.Hold) bool { return o.ID == id }):
			return nil, fmt.Errorf("hold %q: it is listed twice", id)
		case limit <= 0 || limit > longestHold:
			return nil, fmt.Errorf("hold %q: limit %v: must be positive and at most %v", id, limit, longestHold)
		}
		holds = append(holds, volume.Hold{ID: id, Limit: limit, Freeze: h.GetFreeze(), Prepare: h.GetFreeze() && h.GetPrepare()})
	}
	return holds, nil
}

func parseLink(p *pb.WantedLink, layout block.Layout) (volume.Link, error) {
	leg, err := block.ParseLegID(p.GetLegId())
	if err != nil {
		return volume.Link{}, err
	}
	nqn, err := block.ParseNQN(p.GetNqn())
	if err != nil {
		return volume.Link{}, err
	}
	uuid, err := block.ParseUUID(p.GetUuid())
	if err != nil {
		return volume.Link{}, err
	}
	l := volume.Link{
		Leg: leg, NQN: nqn, UUID: uuid,
		Column: int(p.GetColumn()), Copy: int(p.GetCopy()),
		Rebuilding: p.GetState() == pb.LegState_LEG_STATE_REBUILDING,
		Revision:   p.GetRevision(), Node: p.GetNode(), NSID: p.GetNsid(), WriteThrough: p.GetWriteThrough(), CopyAll: p.GetCopyAll(), CopyAllSince: p.GetCopyAllSince(),
		CacheLost: p.GetCacheLost(), AllSince: p.GetAllSince(),
		Reborn: p.GetReborn(), Paths: int(p.GetPaths()), LeaveOut: p.GetLeaveOut(),
	}
	if !l.Rebuilding && p.GetState() != pb.LegState_LEG_STATE_IN_SYNC {
		return volume.Link{}, fmt.Errorf("state %v: must be in sync or rebuilding", p.GetState())
	}
	if l.Column >= layout.Stripes || l.Copy >= layout.Slots() {
		return volume.Link{}, fmt.Errorf("column %d copy %d: not in a layout of %v", l.Column, l.Copy, layout)
	}
	if l.Keys, l.Host, err = parseIdentity(p); err != nil {
		return volume.Link{}, err
	}
	if l.Portals, err = parsePortals(p.GetPortals()); err != nil {
		return volume.Link{}, fmt.Errorf("portals: %w", err)
	}
	return l, nil
}

// parseIdentity returns what to prove to a leg's target, and as which host.
func parseIdentity(p *pb.WantedLink) (block.Keys, block.Host, error) {
	keys, err := block.ParseKeys(p.GetKeys().GetHost(), p.GetKeys().GetController())
	if err != nil || p.GetHost() == nil {
		return keys, block.Host{}, err
	}
	id, err := block.ParseUUID(p.GetHost().GetId())
	if err != nil {
		return keys, block.Host{}, fmt.Errorf("host: %w", err)
	}
	host := block.HostFromID(id)
	if string(host.NQN) != p.GetHost().GetNqn() {
		return keys, block.Host{}, fmt.Errorf("host: %s does not fit to id %v", p.GetHost().GetNqn(), id)
	}
	return keys, host, nil
}

// parsePortals leaves out portals of transports that this version does not know.
func parsePortals(all []*pb.Portal) (known []block.Portal, err error) {
	transports := map[pb.Transport]block.Transport{pb.Transport_TRANSPORT_TCP: block.TCP, pb.Transport_TRANSPORT_RDMA: block.RDMA}
	for _, p := range all {
		transport, ok := transports[p.GetTransport()]
		if !ok {
			continue
		}
		if p.GetPort() > 65535 {
			return nil, fmt.Errorf("port %d: must be 1 to 65535", p.GetPort())
		}
		port := cmp.Or(uint16(p.GetPort()), block.DefaultPort)
		known = append(known, block.Portal{Transport: transport, Address: p.GetAddress(), Port: port, Rail: p.GetRail()})
	}
	if len(known) == 0 {
		return nil, fmt.Errorf("none of the %d has a transport that this version knows", len(all))
	}
	return known, nil
}

// State is a keeper's public view of its volume.
type State struct {
	Report *pb.AttachmentReport // nil if there is nothing to report
	Notes  []string             // what makes no progress, for people
	Paths  []string             // why it does not use the paths that it could, for people
	Acted  uint64               // the generation of the wanted state last acted on
	Idle   bool                 // the volume is not wanted, and nothing of it is left here
	Left   bool                 // it was detached cleanly, though wanted, because its host shuts down
}

// news reports whether the manager should hear of s soon, after was.
func (s State) news(was State) bool {
	return s.Acted != was.Acted || News(was.Report, s.Report) || !slices.Equal(s.Paths, was.Paths)
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// wanted is a WantedAttachment, checked and typed.
type wanted struct {
	volume   block.VolumeID
	name     block.VolumeName
	size     block.Size
	layout   block.Layout
	epoch    block.Epoch
	bootID   string
	equalize bool
	detach   bool
	links    []link // by column, then copy
}

// link is a leg that the manager wants used.
type link struct {
	leg          block.LegID
	column, copy int
	rebuilding   bool // else in sync
	revision     uint64
	node         string
	nqn          block.NQN
	nsid         uint32
	uuid         block.UUID
	portals      []block.Portal
	writeThrough bool
	copyAll      bool // what the host's log says of it is not enough
}

// at is the link of a copy of a column, nil if the manager lists none.
func (w *wanted) at(column, copy int) *link {
	for i := range w.links {
		if w.links[i].column == column && w.links[i].copy == copy {
			return &w.links[i]
		}
	}
	return nil
}

// parseWanted refuses what can not be acted on; the text names the field.
func parseWanted(p *pb.WantedAttachment) (*wanted, error) {
	volume, err := block.ParseVolumeID(p.GetVolumeId())
	if err != nil {
		return nil, fmt.Errorf("volume id: %w", err)
	}
	name, err := block.ParseVolumeName(p.GetVolumeName())
	if err != nil {
		return nil, err
	}
	w := &wanted{
		volume: volume, name: name,
		size:     block.Size(p.GetSizeBytes()),
		epoch:    block.Epoch(p.GetEpoch()),
		bootID:   p.GetBootId(),
		equalize: p.GetEqualize(),
		detach:   p.GetDetach(),
		layout: block.Layout{
			Stripes: int(p.GetLayout().GetStripes()),
			Copies:  int(p.GetLayout().GetCopies()),
			Chunk:   block.Size(p.GetLayout().GetChunkBytes()),
		},
	}
	if mode := p.GetMode(); mode != pb.AttachMode_ATTACH_MODE_UNSPECIFIED && mode != pb.AttachMode_ATTACH_MODE_EXCLUSIVE {
		return nil, fmt.Errorf("mode %v: only exclusive attachments are supported", mode)
	}
	if err := w.layout.Check(); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	if w.epoch == 0 || w.size == 0 || w.size%block.SectorSize != 0 {
		return nil, fmt.Errorf("epoch %d, size %d: both must be positive, the size in whole sectors", w.epoch, w.size)
	}
	if want := w.layout.LegSize(w.size); block.Size(p.GetLegSizeBytes()) != want {
		return nil, fmt.Errorf("leg size %d: must be %d for this size and layout", p.GetLegSizeBytes(), want)
	}
	for _, l := range p.GetLegs() {
		link, err := parseLink(l, w.layout)
		if err != nil {
			return nil, fmt.Errorf("leg %q: %w", l.GetLegId(), err)
		}
		if w.at(link.column, link.copy) != nil {
			return nil, fmt.Errorf("leg %q: column %d has another copy %d", l.GetLegId(), link.column, link.copy)
		}
		w.links = append(w.links, link)
	}
	slices.SortFunc(w.links, func(a, b link) int {
		return cmp.Or(cmp.Compare(a.column, b.column), cmp.Compare(a.copy, b.copy))
	})
	return w, nil
}

func parseLink(p *pb.WantedLink, layout block.Layout) (link, error) {
	leg, err := block.ParseLegID(p.GetLegId())
	if err != nil {
		return link{}, err
	}
	nqn, err := block.ParseNQN(p.GetNqn())
	if err != nil {
		return link{}, err
	}
	uuid, err := block.ParseUUID(p.GetUuid())
	if err != nil {
		return link{}, err
	}
	l := link{
		leg: leg, nqn: nqn, uuid: uuid,
		column: int(p.GetColumn()), copy: int(p.GetCopy()),
		rebuilding: p.GetState() == pb.LegState_LEG_STATE_REBUILDING,
		revision:   p.GetRevision(), node: p.GetNode(), nsid: p.GetNsid(), writeThrough: p.GetWriteThrough(), copyAll: p.GetCopyAll(),
	}
	if !l.rebuilding && p.GetState() != pb.LegState_LEG_STATE_IN_SYNC {
		return link{}, fmt.Errorf("state %v: must be in sync or rebuilding", p.GetState())
	}
	if l.column >= layout.Stripes || l.copy >= layout.Copies {
		return link{}, fmt.Errorf("column %d copy %d: not in a layout of %v", l.column, l.copy, layout)
	}
	for _, p := range p.GetPortals() {
		portal, err := parsePortal(p)
		if err != nil {
			return link{}, err
		}
		l.portals = append(l.portals, portal)
	}
	if len(l.portals) == 0 {
		return link{}, fmt.Errorf("portals: none")
	}
	return l, nil
}

func parsePortal(p *pb.Portal) (block.Portal, error) {
	transports := map[pb.Transport]block.Transport{pb.Transport_TRANSPORT_TCP: block.TCP, pb.Transport_TRANSPORT_RDMA: block.RDMA}
	transport, ok := transports[p.GetTransport()]
	if !ok {
		return block.Portal{}, fmt.Errorf("portal transport %v: not supported", p.GetTransport())
	}
	if p.GetPort() > 65535 {
		return block.Portal{}, fmt.Errorf("portal port %d: must be 1 to 65535", p.GetPort())
	}
	port := cmp.Or(uint16(p.GetPort()), block.DefaultPort)
	return block.Portal{Transport: transport, Address: p.GetAddress(), Port: port, Rail: p.GetRail()}, nil
}

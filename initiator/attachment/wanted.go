// SPDX-License-Identifier: Apache-2.0

// Package attachment is what both data paths of the initiator know of an
// attachment: what the manager wants of it and how its keeper is told, what the
// manager has answered to records, how a leg is judged silent, which lost legs may
// leave together, and what is reported. The files of package initiator and of
// initiator/userspace that plan are over it. But for a keeper's Inbox and Recorder
// it is all values; it does no I/O and reads no clock.
package attachment

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Wanted is a WantedAttachment, checked and typed.
type Wanted struct {
	Volume   block.VolumeID
	Name     block.VolumeName
	Size     block.Size
	Layout   block.Layout
	Epoch    block.Epoch
	Grant    uint64 // of several in one epoch; 0 if it has one
	BootID   string
	ReadOnly bool // it is shared, and none writes
	Equalize bool
	Detach   bool
	Links    []Link // by column, then copy
}

// Link is a leg that the manager wants used.
type Link struct {
	Leg          block.LegID
	Column, Copy int
	Rebuilding   bool // else in sync
	Revision     uint64
	Node         string
	NQN          block.NQN
	NSID         uint32
	UUID         block.UUID
	Portals      []block.Portal
	WriteThrough bool
	CopyAll      bool // what the host's log says of it is not enough
	// Reborn is the revision at which it last came back without what only a cache
	// had held, in sync all the same; 0: never.
	Reborn uint64
}

// At is the link of a copy of a column, nil if the manager lists none.
func (w *Wanted) At(column, copy int) *Link {
	for i := range w.Links {
		if w.Links[i].Column == column && w.Links[i].Copy == copy {
			return &w.Links[i]
		}
	}
	return nil
}

// Parse refuses what cannot be acted on; the text names the field.
func Parse(p *pb.WantedAttachment) (*Wanted, error) {
	volume, err := block.ParseVolumeID(p.GetVolumeId())
	if err != nil {
		return nil, fmt.Errorf("volume id: %w", err)
	}
	name, err := block.ParseVolumeName(p.GetVolumeName())
	if err != nil {
		return nil, err
	}
	w := &Wanted{
		Volume: volume, Name: name,
		Size:     block.Size(p.GetSizeBytes()),
		Epoch:    block.Epoch(p.GetEpoch()),
		Grant:    p.GetGrant(),
		BootID:   p.GetBootId(),
		Equalize: p.GetEqualize(),
		Detach:   p.GetDetach(),
		Layout: block.Layout{
			Stripes: int(p.GetLayout().GetStripes()),
			Copies:  int(p.GetLayout().GetCopies()),
			Chunk:   block.Size(p.GetLayout().GetChunkBytes()),
		},
	}
	if err := w.Layout.Check(); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	if err := w.setMode(p.GetMode()); err != nil {
		return nil, fmt.Errorf("mode %v: %w", p.GetMode(), err)
	}
	if w.Epoch == 0 || w.Size == 0 || w.Size%block.SectorSize != 0 {
		return nil, fmt.Errorf("epoch %d, size %d: both must be positive, the size in whole sectors", w.Epoch, w.Size)
	}
	if want := w.Layout.LegSize(w.Size); block.Size(p.GetLegSizeBytes()) != want {
		return nil, fmt.Errorf("leg size %d: must be %d for this size and layout", p.GetLegSizeBytes(), want)
	}
	for _, l := range p.GetLegs() {
		link, err := parseLink(l, w.Layout)
		if err != nil {
			return nil, fmt.Errorf("leg %q: %w", l.GetLegId(), err)
		}
		if w.At(link.Column, link.Copy) != nil {
			return nil, fmt.Errorf("leg %q: column %d has another copy %d", l.GetLegId(), link.Column, link.Copy)
		}
		if w.ReadOnly && link.Rebuilding {
			return nil, fmt.Errorf("leg %q: to be rebuilt in a read-only attachment", l.GetLegId())
		}
		w.Links = append(w.Links, link)
	}
	slices.SortFunc(w.Links, func(a, b Link) int {
		return cmp.Or(cmp.Compare(a.Column, b.Column), cmp.Compare(a.Copy, b.Copy))
	})
	return w, nil
}

// setMode refuses what would let copies differ: with several hosts that write, each
// would have to leave a lost copy before a write goes on that misses it.
func (w *Wanted) setMode(m pb.AttachMode) error {
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
		return errors.New("not known")
	}
	return nil
}

func parseLink(p *pb.WantedLink, layout block.Layout) (Link, error) {
	leg, err := block.ParseLegID(p.GetLegId())
	if err != nil {
		return Link{}, err
	}
	nqn, err := block.ParseNQN(p.GetNqn())
	if err != nil {
		return Link{}, err
	}
	uuid, err := block.ParseUUID(p.GetUuid())
	if err != nil {
		return Link{}, err
	}
	l := Link{
		Leg: leg, NQN: nqn, UUID: uuid,
		Column: int(p.GetColumn()), Copy: int(p.GetCopy()),
		Rebuilding: p.GetState() == pb.LegState_LEG_STATE_REBUILDING,
		Revision:   p.GetRevision(), Node: p.GetNode(), NSID: p.GetNsid(), WriteThrough: p.GetWriteThrough(), CopyAll: p.GetCopyAll(),
		Reborn: p.GetReborn(),
	}
	if !l.Rebuilding && p.GetState() != pb.LegState_LEG_STATE_IN_SYNC {
		return Link{}, fmt.Errorf("state %v: must be in sync or rebuilding", p.GetState())
	}
	if l.Column >= layout.Stripes || l.Copy >= layout.Copies {
		return Link{}, fmt.Errorf("column %d copy %d: not in a layout of %v", l.Column, l.Copy, layout)
	}
	for _, p := range p.GetPortals() {
		portal, err := parsePortal(p)
		if err != nil {
			return Link{}, err
		}
		l.Portals = append(l.Portals, portal)
	}
	if len(l.Portals) == 0 {
		return Link{}, fmt.Errorf("portals: none")
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

// State is what a keeper shows of its volume.
type State struct {
	Report *pb.AttachmentReport // nil if there is nothing to tell
	Notes  []string             // what does not go forward, for people
	Acted  uint64               // the generation of the wanted state that was acted on
	Idle   bool                 // the volume is not wanted, and nothing is left of it here
	Left   bool                 // it was let go, clean, though it is wanted: its host ends
}

// Leaving is w for a host that ends: to be let go.
func (w *Wanted) Leaving() *Wanted {
	leaving := *w
	leaving.Detach = true
	return &leaving
}

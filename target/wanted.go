// SPDX-License-Identifier: Apache-2.0

package target

import (
	"errors"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
)

// wanted is a pb.TargetWanted with its identifiers checked. Without a cluster it demands nothing,
// not even that existing things be removed.
type wanted struct {
	cluster    block.ClusterID
	drives     []wantedDrive
	legs       []wantedLeg
	admissions map[block.VolumeID]block.Epoch
	exports    []wantedExport
	space      map[block.DriveID][]*pb.Extent // what the trees of a drive may have
	problems   []problem                      // including the entries that could not be parsed
}

type wantedDrive struct {
	id block.DriveID
	*pb.WantedDrive
}

type wantedLeg struct {
	id     block.LegID
	drive  block.DriveID
	volume block.VolumeID
	origin userspace.Origin
	source *copySource // of a copy
	*pb.WantedLeg
}

type wantedExport struct {
	volume     block.VolumeID
	epoch      block.Epoch
	host       block.NQN
	keys       nvmet.Keys // zero: it proves nothing
	readOnly   bool
	stays      bool // in the other part than that which is to have it
	namespaces []wantedNamespace
	*pb.WantedExport
}

// inProcess reports whether the export belongs to the process beside the kernel now.
func (e *wantedExport) inProcess() bool { return e.GetProcess() != e.stays }

type wantedNamespace struct {
	nsid uint32
	leg  block.LegID
	uuid block.UUID
}

// parseWanted skips entries that it cannot parse and reports them: one bad entry must not hold up
// the rest.
func parseWanted(m *pb.TargetWanted) wanted {
	w := wanted{admissions: map[block.VolumeID]block.Epoch{}, space: map[block.DriveID][]*pb.Extent{}}
	var err error
	if w.cluster, err = block.ParseClusterID(m.GetClusterId()); err != nil && m.GetClusterId() != "" {
		w.bad("cluster", err)
	}
	for _, d := range m.GetDrives() {
		id, err := block.ParseDriveID(d.GetDriveId())
		if err != nil {
			w.bad("drive "+d.GetDriveId(), err)
			continue
		}
		w.drives = append(w.drives, wantedDrive{id, d})
	}
	for _, l := range m.GetLegs() {
		leg, err := parseLeg(l)
		if err != nil {
			w.bad("leg "+l.GetLegId(), err)
			continue
		}
		w.legs = append(w.legs, leg)
	}
	for _, s := range m.GetSpace() {
		id, err := block.ParseDriveID(s.GetDriveId())
		if err != nil {
			w.bad("space of drive "+s.GetDriveId(), err)
			continue
		}
		w.space[id] = s.GetExtents()
	}
	for _, a := range m.GetAdmissions() {
		v, err := block.ParseVolumeID(a.GetVolumeId())
		if err != nil {
			w.bad("volume "+a.GetVolumeId(), err)
			continue
		}
		w.admissions[v] = max(w.admissions[v], block.Epoch(a.GetEpoch()))
	}
	for _, e := range m.GetExports() {
		export, err := parseExport(e)
		if err != nil {
			w.bad("export "+e.GetNqn(), err)
			continue
		}
		w.exports = append(w.exports, export)
	}
	return w
}

func (w *wanted) bad(object string, err error) {
	w.problems = append(w.problems, problem{object, "read the wanted state", err.Error()})
}

func parseLeg(m *pb.WantedLeg) (l wantedLeg, err error) {
	l.WantedLeg = m
	if l.id, err = block.ParseLegID(m.GetLegId()); err != nil {
		return l, err
	}
	if l.drive, err = block.ParseDriveID(m.GetDriveId()); err != nil {
		return l, err
	}
	if m.GetRemove() {
		return l, nil
	}
	if l.volume, err = block.ParseVolumeID(m.GetVolume().GetVolumeId()); err != nil {
		return l, err
	}
	image := drive.ImageOf(m)
	if err := image.Check(); err != nil {
		return l, err
	}
	size := block.Size(m.GetSizeBytes())
	if l.origin, err = parseOrigin(m); err == nil {
		l.source, err = parseSource(m.GetOrigin())
	}
	if err != nil {
		return l, fmt.Errorf("origin: %w", err)
	}
	if drive.Mapped(m) {
		return l, checkMapped(m, size)
	}
	if drive.Based(m) {
		if _, err := block.ParseUUID(m.GetTreeId()); err != nil {
			return l, fmt.Errorf("tree: %w", err)
		}
	}
	if size == 0 || size%block.MiB != 0 || size > image.Room() {
		return l, fmt.Errorf("size %v: must be a multiple of 1MiB within the extents' %v", size, image.Room())
	}
	return l, nil
}

// restores reports whether the leg is to be made again of a snapshot, once at this revision.
func (l wantedLeg) restores() bool {
	return l.origin.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE
}

// parseOrigin refuses kinds that it does not know: the leg would begin as something else.
func parseOrigin(m *pb.WantedLeg) (o userspace.Origin, err error) {
	if m.GetOrigin() == nil {
		return o, nil
	}
	o.Kind = m.GetOrigin().GetKind()
	if o.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_COPY && m.GetOrigin().GetLegId() == "" && drive.Mapped(m) {
		return o, nil // it begins as zeroes
	}
	switch o.Leg, err = block.ParseLegID(m.GetOrigin().GetLegId()); {
	case err != nil:
		return o, err
	case !drive.InTree(m):
		return o, errors.New("the leg is in no tree")
	case drive.Based(m) && o.Kind != pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE:
		return o, errors.New("the leg was there before its tree")
	case m.GetOrigin().GetLegId() == m.GetLegId():
		return o, errors.New("it is the leg itself")
	case o.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_UNSPECIFIED || o.Kind > pb.LegOriginKind_LEG_ORIGIN_KIND_COPY:
		return o, fmt.Errorf("kind %d: %w", o.Kind, errors.ErrUnsupported)
	}
	return o, nil
}

func checkMapped(m *pb.WantedLeg, size block.Size) error {
	if _, err := block.ParseUUID(m.GetTreeId()); err != nil {
		return fmt.Errorf("tree: %w", err)
	}
	if size == 0 || size%block.MiB != 0 || size > block.MaxMapped {
		return fmt.Errorf("size %v: must be a multiple of 1MiB, at most %v", size, block.MaxMapped)
	}
	return nil
}

func parseExport(m *pb.WantedExport) (e wantedExport, err error) {
	e.WantedExport = m
	if e.volume, err = block.ParseVolumeID(m.GetVolumeId()); err != nil {
		return e, err
	}
	e.epoch, e.readOnly = block.Epoch(m.GetEpoch()), m.GetReadOnly()
	v, epoch, _, _, err := block.ParseSubsystemNQN(block.NQN(m.GetNqn()))
	if err != nil {
		return e, err
	}
	if v != e.volume || epoch != e.epoch { // the name decides what is fenced
		return e, fmt.Errorf("nqn names volume %v epoch %d, the export %v epoch %d", v, epoch, e.volume, e.epoch)
	}
	if e.host, err = block.ParseNQN(m.GetHost().GetNqn()); err != nil {
		return e, fmt.Errorf("host: %w", err)
	}
	if e.keys, err = parseKeys(m.GetKeys()); err != nil {
		return e, err
	}
	for _, ns := range m.GetNamespaces() {
		leg, err := block.ParseLegID(ns.GetLegId())
		if err != nil {
			return e, fmt.Errorf("namespace %d: leg: %w", ns.GetNsid(), err)
		}
		id, err := block.ParseUUID(ns.GetUuid())
		if err != nil {
			return e, fmt.Errorf("namespace %d: %w", ns.GetNsid(), err)
		}
		e.namespaces = append(e.namespaces, wantedNamespace{ns.GetNsid(), leg, id})
	}
	return e, nil
}

func parseKeys(m *pb.ExportKeys) (nvmet.Keys, error) {
	k, err := block.ParseKeys(m.GetHost(), m.GetController())
	if err != nil || k.IsZero() {
		return nvmet.Keys{}, err
	}
	return nvmet.KeysOf(k)
}

// subsystem returns the export without its namespaces.
func (e wantedExport) subsystem() nvmet.Subsystem {
	s := nvmet.Subsystem{
		NQN: block.NQN(e.GetNqn()), Serial: e.GetSerial(), Model: nvmet.Model,
		CntlidMin: nvmet.DefaultCntlidMin, CntlidMax: nvmet.DefaultCntlidMax,
		AllowedHosts: []nvmet.Link{nvmet.LinkTo(e.host)},
	}
	if e.GetCntlidMin() != 0 {
		s.CntlidMin = uint16(min(e.GetCntlidMin(), nvmet.DefaultCntlidMax))
	}
	if e.GetCntlidMax() != 0 {
		s.CntlidMax = uint16(min(e.GetCntlidMax(), nvmet.DefaultCntlidMax))
	}
	return s
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/drivepolicy"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// This file converts package cluster's values to wire messages and back. Enumerations use
// the same words on both sides, on the wire with a prefix.

const (
	driveStatePrefix      = "DRIVE_STATE_"
	legStatePrefix        = "LEG_STATE_"
	volumeStatePrefix     = "VOLUME_STATE_"
	healthPrefix          = "HEALTH_"
	attachModePrefix      = "ATTACH_MODE_"
	attachmentStatePrefix = "ATTACHMENT_STATE_"
	severityPrefix        = "SEVERITY_"
	phasePrefix           = "ATTACHMENT_PHASE_"
	linkStatePrefix       = "LINK_STATE_"
	scrubOutcomePrefix    = "SCRUB_OUTCOME_"
	abilityPrefix         = "ABILITY_"
	holdStatePrefix       = "HOLD_STATE_"
)

// toEnum returns the enumeration value of a word; an unknown word gives UNSPECIFIED.
func toEnum[E interface{ ~int32 }, W ~string](values map[string]int32, prefix string, word W) E {
	return E(values[prefix+string(word)])
}

// fromEnum returns the word of an enumeration value; UNSPECIFIED gives the empty word. A value
// that this version does not know gives its number, which equals no word: a mode of access, for
// example, must not be taken for the default one.
func fromEnum[W ~string](e protoreflect.Enum, prefix string) W {
	value := e.Descriptor().Values().ByNumber(e.Number())
	switch {
	case e.Number() == 0:
		return ""
	case value == nil:
		return W(strconv.Itoa(int(e.Number())))
	}
	return W(string(value.Name())[len(prefix):])
}

func list[A, B any](in []A, convert func(A) B) []B {
	out := make([]B, 0, len(in))
	for _, a := range in {
		out = append(out, convert(a))
	}
	return out
}

// listErr is list for conversions that can fail.
func listErr[A, B any](in []A, convert func(A) (B, error)) ([]B, error) {
	var out []B
	for _, a := range in {
		b, err := convert(a)
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

func pbTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func fromTime(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// id prints an identifier, the zero one as the empty text.
func id(u block.UUID) string {
	if u.IsZero() {
		return ""
	}
	return u.String()
}

// ---- to operators ----

func pbStatus(s cluster.Status, version string) *pb.Status {
	return &pb.Status{
		ClusterId: s.ClusterID.String(), Version: version,
		CapacityBytes: uint64(s.Capacity), AllocatedBytes: uint64(s.Allocated),
		Nodes: uint32(s.Nodes), NodesOffline: uint32(s.NodesOffline),
		Drives: uint32(s.Drives), DrivesNotReady: uint32(s.DrivesNotReady),
		Volumes: uint32(s.Volumes), VolumesDegraded: uint32(s.VolumesDegraded), VolumesUnavailable: uint32(s.VolumesUnavailable),
		Attachments: uint32(s.Attachments), Wrong: s.Wrong,
	}
}

func pbNode(n cluster.Node) *pb.Node {
	return &pb.Node{
		Name: string(n.Name), Labels: n.Labels, Portals: list(n.Portals, pbPortal), Host: pbHost(n.Host),
		ProcessPortals: list(n.ProcessPortals, pbPortal),
		Target:         pbAgentStatus(n.Target), Initiator: pbAgentStatus(n.Initiator), ConfirmedDead: n.ConfirmedDead,
		MaintainedUntil: pbTime(n.MaintainedUntil), StopWaitsFor: n.StopWaits, StopsIoOf: n.StopsIO,
		Stock: n.Stock, Cordoned: n.Cordoned, Draining: n.Draining,
	}
}

func pbAgentStatus(s cluster.AgentStatus) *pb.AgentStatus {
	return &pb.AgentStatus{
		Known: s.Known, Online: s.Online, BootId: s.BootID, Seen: pbTime(s.Seen), Version: s.Version, Kernel: s.Kernel,
		Generation: s.Generation, Problems: list(s.Problems, pbProblem), Silent: pbDuration(s.Silent), Refused: s.Refused,
	}
}

// pbDuration leaves a duration of 0 unset.
func pbDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func pbProblem(p cluster.Problem) *pb.Problem {
	return &pb.Problem{Object: p.Object, Doing: p.Doing, Cause: p.Cause, Since: pbTime(p.Since)}
}

var transports = map[block.Transport]pb.Transport{block.TCP: pb.Transport_TRANSPORT_TCP, block.RDMA: pb.Transport_TRANSPORT_RDMA}

func pbPortal(p block.Portal) *pb.Portal {
	return &pb.Portal{Transport: transports[p.Transport], Address: p.Address, Port: uint32(p.Port), Rail: p.Rail}
}

func pbHost(h block.Host) *pb.Host {
	if h.NQN == "" {
		return nil
	}
	return &pb.Host{Nqn: string(h.NQN), Id: h.ID.String()}
}

func pbDevice(d cluster.Device) *pb.Device {
	return &pb.Device{
		Path: d.Path, Model: d.Model, Serial: d.Serial, Wwid: d.WWID, SizeBytes: uint64(d.Size), BlockSize: d.BlockSize,
		NumaNode: d.NUMANode, Rotational: d.Rotational, VolatileCache: d.VolatileCache, ReadOnly: d.ReadOnly,
		Holders: d.Holders, Signatures: d.Signatures, DriveId: id(d.DriveID.UUID), ClusterId: id(d.Cluster.UUID), Refused: d.Refused, Unread: d.Unread, Health: pbHealth(d.Health),
	}
}

func pbDrive(d cluster.Drive) *pb.Drive {
	return &pb.Drive{
		Id: d.ID.String(), Node: string(d.Node), Device: d.Device, Model: d.Model, Serial: d.Serial, Wwid: d.WWID,
		SizeBytes: uint64(d.Size), BlockSize: d.BlockSize, NumaNode: d.NUMANode, VolatileCache: d.VolatileCache,
		Labels: d.Labels, State: toEnum[pb.DriveState](pb.DriveState_value, driveStatePrefix, d.State), Reason: d.Reason,
		CapacityBytes: uint64(d.Capacity), AllocatedBytes: uint64(d.Allocated), Health: pbHealth(d.Health),
		ThinBytes: uint64(d.Thin), ThinUsedBytes: uint64(d.ThinUsed), ProvisionedBytes: uint64(d.Promised),
	}
}

func pbDrivePolicy(p drivepolicy.Policy) *pb.DrivePolicy {
	return &pb.DrivePolicy{Name: p.Name, Model: p.Model, MinSizeBytes: uint64(p.MinSize), MaxSizeBytes: uint64(p.MaxSize), Nodes: p.Nodes, Labels: p.Labels}
}

func fromDrivePolicy(p *pb.DrivePolicy) drivepolicy.Policy {
	return drivepolicy.Policy{
		Name: p.GetName(), Model: p.GetModel(), MinSize: block.Size(p.GetMinSizeBytes()), MaxSize: block.Size(p.GetMaxSizeBytes()),
		Nodes: p.GetNodes(), Labels: p.GetLabels(),
	}
}

func pbPool(p cluster.Pool) *pb.Pool {
	return &pb.Pool{
		Name: p.Name, Selector: p.Selector, CapacityBytes: uint64(p.Capacity), AllocatedBytes: uint64(p.Allocated), Drives: uint32(p.Drives),
		Rebalance: pbRebalance(p.Rebalance), ProvisionedBytes: uint64(p.Promised),
	}
}

func pbRebalance(r *cluster.Rebalance) *pb.PoolRebalance {
	if r == nil {
		return nil
	}
	return &pb.PoolRebalance{
		Began: pbTime(r.Began), Ended: pbTime(r.Ended), Stopped: r.Stopped, MaxMoves: uint32(r.MaxMoves), Moves: uint32(r.Moves), Moving: uint32(r.Moving),
	}
}

func pbPlannedMove(m cluster.PlannedMove) *pb.PlannedMove {
	return &pb.PlannedMove{
		Volume: string(m.Volume), Column: uint32(m.Column), Copy: uint32(m.Copy), SizeBytes: uint64(m.Size),
		FromNode: string(m.FromNode), FromDriveId: m.From.String(), ToNode: string(m.ToNode), ToDriveId: m.To.String(),
	}
}

func pbLayout(l block.Layout) *pb.Layout {
	out := &pb.Layout{Stripes: uint32(l.Stripes), Copies: uint32(l.Copies), ChunkBytes: uint64(l.Chunk), Integrity: l.Integrity}
	if l.Kind() == block.Code {
		out.Data, out.Parity = proto.Uint32(uint32(l.Data)), proto.Uint32(uint32(l.Parity))
	}
	return out
}

func pbExtent(e image.Extent) *pb.Extent { return &pb.Extent{Start: e.Start, Count: e.Count} }

func pbVolume(v cluster.Volume) *pb.Volume {
	out := &pb.Volume{
		Id: v.ID.String(), Name: string(v.Name), SizeBytes: uint64(v.Size), Layout: pbLayout(v.Layout), Pool: v.Pool, Spread: v.Spread,
		Labels: v.Labels, State: toEnum[pb.VolumeState](pb.VolumeState_value, volumeStatePrefix, v.State),
		Health: toEnum[pb.Health](pb.Health_value, healthPrefix, v.Health),
		Epoch:  uint64(v.Epoch), Clean: v.Clean, Generation: v.Generation, Created: pbTime(v.Created),
		ExpandingToBytes: uint64(v.ExpandingTo), Formatted: v.Formatted, FenceWaitsFor: v.FenceWaitsFor, Scrub: pbScrub(v.Scrub),
		ScrubEverySeconds: uint64(v.ScrubEvery / time.Second), ScrubBytesPerSecond: uint64(v.ScrubRate),
		Authentication:        cmp.Or(v.Authentication, block.PropertyAuthentication.Default),
		RebuildBytesPerSecond: uint64(v.RebuildRate), Rebuilds: list(v.Rebuilds, pbRebuild), Thin: v.Thin,
		CloneOf: string(v.CloneOf), Failed: v.Failed, Sealed: pbTime(v.Sealed), Paths: uint32(max(1, v.Paths)),
	}
	if x := v.Restoring; x != nil {
		out.RestoringTo = string(x.Name)
	}
	if x := v.Flatten; x != nil {
		out.Flattening = &pb.Flattening{Since: pbTime(x.Since), Ended: pbTime(x.Ended), LeftBytes: uint64(x.Left), WaitsFor: x.Waits}
	}
	if v.Heal != nil {
		out.Healing = pbAttachment(*v.Heal)
	}
	if x := v.Snapshot; x != nil {
		out.Snapshot = &pb.SnapshotOf{VolumeId: x.Volume.String(), VolumeName: string(x.Name), Taken: pbTime(x.Taken), GroupId: x.Group, FsFrozen: x.FSFrozen}
		out.Snapshot.Freezes = x.Taking != nil && x.Taking.Freeze
	}
	for _, l := range v.Legs {
		out.UsedBytes += uint64(l.Used)
	}
	out.Space = pbLegSpace(spaceOf(v))
	for i := range v.PastScrubs {
		out.PastScrubs = append(out.PastScrubs, pbScrub(&v.PastScrubs[i]))
	}
	for _, l := range v.Legs {
		out.Legs = append(out.Legs, pbLeg(v.ID, l))
	}
	if v.Attachment != nil {
		out.Attachment = pbAttachment(*v.Attachment)
		out.Attachments = []*pb.Attachment{out.Attachment}
	}
	if len(v.Shared) > 0 {
		out.Attachments = list(v.Shared, pbAttachment)
		out.Attachment = out.Attachments[0]
	}
	return out
}

// spaceOf adds up what the legs take; nil unless it is known of all that are not being deleted.
func spaceOf(v cluster.Volume) (sum *cluster.LegSpace) {
	for _, l := range v.Legs {
		switch {
		case l.State == cluster.LegDeleting:
			continue
		case l.Space == nil:
			return nil
		case sum == nil:
			sum = &cluster.LegSpace{}
		}
		sum.Referenced += l.Space.Referenced
		sum.Freed += l.Space.Freed
	}
	return sum
}

func pbLegSpace(s *cluster.LegSpace) *pb.LegSpace {
	if s == nil {
		return nil
	}
	return &pb.LegSpace{ReferencedBytes: uint64(s.Referenced), FreedBytes: uint64(s.Freed)}
}

func pbLeg(volume block.VolumeID, l cluster.Leg) *pb.Leg {
	return &pb.Leg{
		Id: l.ID.String(), VolumeId: volume.String(), Column: uint32(l.Column), Copy: uint32(l.Copy),
		DriveId: l.Drive.String(), Node: string(l.Node), Extents: list(l.Extents, pbExtent),
		State: toEnum[pb.LegState](pb.LegState_value, legStatePrefix, l.State), Revision: l.Revision,
		StaleSince: pbTime(l.StaleSince), Reason: l.Reason, UsedBytes: uint64(l.Used), Full: l.Full, Space: pbLegSpace(l.Space),
	}
}

func pbAttachment(a cluster.Attachment) *pb.Attachment {
	return &pb.Attachment{
		VolumeId: a.VolumeID.String(), VolumeName: string(a.VolumeName), Node: string(a.Node),
		Mode:  toEnum[pb.AttachMode](pb.AttachMode_value, attachModePrefix, a.Mode),
		Epoch: uint64(a.Epoch), State: toEnum[pb.AttachmentState](pb.AttachmentState_value, attachmentStatePrefix, a.State),
		BootId: a.BootID, Device: a.Device, WaitingFor: a.WaitingFor,
		ResyncDoneBytes: uint64(a.ResyncDone), ResyncTotalBytes: uint64(a.ResyncTotal), Since: pbTime(a.Since),
		SizeBytes: uint64(a.Size), DeviceNumber: a.Number,
		AuthenticatesWith: list(a.AuthenticatesWith, func(n block.NodeName) string { return string(n) }),
		StockNqn:          string(a.StockNQN), Rail: a.Prefers.Rail, NearGpu: a.Prefers.GPU,
	}
}

func pbEvent(e event.Event) *pb.Event {
	return &pb.Event{
		Seq: e.Seq, Time: pbTime(e.Time), Severity: toEnum[pb.Severity](pb.Severity_value, severityPrefix, e.Severity),
		Kind: e.Kind, Object: e.Object, Text: e.Text, Attributes: e.Attributes,
	}
}

func pbExplanation(e cluster.Explanation) *pb.Explanation {
	return &pb.Explanation{Object: e.Object, Summary: e.Summary, Facts: e.Facts, Waits: e.Waits, Actions: e.Actions}
}

// ---- to agents ----

// pbConsequences leaves out the mildest consequences if the answer would be too large.
func pbConsequences(c cluster.Consequences) *pb.WhatIfResponse {
	all := &pb.WhatIfResponse{
		Nodes: list(c.Nodes, func(n block.NodeName) string { return string(n) }), DriveIds: list(c.Drives, block.DriveID.String),
		CopiedBytes: uint64(c.Copied),
	}
	if c.ReplaceAfter > 0 {
		all.ReplaceAfter = durationpb.New(c.ReplaceAfter)
	}
	size := 0
	for i := range c.Volumes {
		v := &c.Volumes[i]
		all.VolumesLosingData += one(v.DataLost)
		all.VolumesUnavailable += one(v.Stops() && !v.DataLost)
		all.VolumesDegraded += one(v.Degrades())
		all.LegsLost += uint32(len(v.Legs))
		all.LegsWithoutPlace += uint32(v.Unplaced())
		if size >= pageBytes {
			all.VolumesLeftOut++
			continue
		}
		all.Volumes = append(all.Volumes, pbVolumeLoss(v))
		size += proto.Size(all.Volumes[i])
	}
	for _, a := range c.Attachments {
		if size >= pageBytes {
			all.AttachmentsLeftOut++
			continue
		}
		all.Attachments = append(all.Attachments, pbAttachment(a))
		size += proto.Size(all.Attachments[len(all.Attachments)-1])
	}
	return all
}

func one(yes bool) uint32 {
	if yes {
		return 1
	}
	return 0
}

func pbVolumeLoss(c *cluster.Consequence) *pb.VolumeLoss {
	v := &pb.VolumeLoss{
		VolumeId: c.Volume.String(), VolumeName: string(c.Name), SizeBytes: uint64(c.Size),
		Before: toEnum[pb.Health](pb.Health_value, healthPrefix, c.Before), After: toEnum[pb.Health](pb.Health_value, healthPrefix, c.After),
		DataLost: c.DataLost, Hosts: c.Hosts, CopyWaitsFor: c.CopyWaits,
	}
	for _, l := range c.Legs {
		lost := &pb.LegLoss{
			Column: uint32(l.Column), Copy: uint32(l.Copy), Node: string(l.Node), DriveId: l.Drive.String(),
			State: toEnum[pb.LegState](pb.LegState_value, legStatePrefix, l.State), SizeBytes: uint64(l.Size),
			To: string(l.To), Why: l.Why,
		}
		if l.To != "" {
			lost.ToDriveId = l.ToDrive.String()
		}
		v.Legs = append(v.Legs, lost)
	}
	return v
}

func pbVolumeLabel(v evidence.VolumeLabel) *pb.VolumeLabel {
	out := &pb.VolumeLabel{
		VolumeId: v.ID.String(), Name: string(v.Name), SizeBytes: uint64(v.Size), Layout: pbLayout(v.Layout), Pool: v.Pool,
		Spread: v.Spread, Labels: v.Labels, Epoch: uint64(v.Epoch), Generation: v.Generation, Clean: v.Clean,
		InSyncLegs: list(v.InSync, block.LegID.String), SuspectLegs: list(v.Suspect, block.LegID.String), ExpandingToBytes: uint64(v.ExpandingTo),
		OtherLegs: list(v.Others, block.LegID.String), ListsAllLegs: v.ListsAll, CrowdedColumns: list(v.Crowded, func(c int) uint32 { return uint32(c) }),
		Quiet: v.Quiet, Writer: string(v.Writer), RestoringToId: id(v.RestoringTo.UUID),
	}
	if v.Created != 0 {
		out.Created = timestamppb.New(time.Unix(0, v.Created))
	}
	if x := v.Snapshot; !x.Volume.IsZero() {
		out.Snapshot = &pb.SnapshotOf{VolumeId: x.Volume.String(), VolumeName: string(x.Name), GroupId: x.Group, FsFrozen: x.FSFrozen}
		if x.Taken != 0 {
			out.Snapshot.Taken = timestamppb.New(time.Unix(0, x.Taken))
		}
	}
	return out
}

// fromSnapshotOf is the inverse, of a label.
func fromSnapshotOf(x *pb.SnapshotOf) (out evidence.SnapshotOf, err error) {
	if x == nil {
		return out, nil
	}
	out.Name, out.Group, out.FSFrozen = block.VolumeName(x.VolumeName), x.GroupId, x.FsFrozen
	if x.Taken != nil {
		out.Taken = x.Taken.AsTime().UnixNano()
	}
	out.Volume, err = field("drives.legs.volume.snapshot.volume_id", x.VolumeId, block.ParseVolumeID)
	return out, err
}

func pbAdmission(a cluster.Admission) *pb.Admission {
	return &pb.Admission{VolumeId: a.Volume.String(), Epoch: uint64(a.Epoch)}
}

func targetWanted(w cluster.TargetWanted) *pb.TargetWanted {
	return &pb.TargetWanted{
		Term: w.Term, Generation: w.Generation, ClusterId: w.ClusterID.String(), Drives: list(w.Drives, pbWantedDrive), Legs: list(w.Legs, pbWantedLeg),
		Admissions: list(w.Admissions, pbAdmission), Exports: list(w.Exports, pbWantedExport), MayStop: w.MayStop, Scale: parts.Understood(),
		Space: list(w.Space, func(s cluster.WantedSpace) *pb.WantedSpace {
			return &pb.WantedSpace{DriveId: s.Drive.String(), Extents: list(s.Extents, pbExtent)}
		}),
		Discovery: list(w.Discovered, pbDiscovered), Discovers: w.Discovers,
	}
}

func pbDiscovered(d cluster.Discovered) *pb.Discovered {
	return &pb.Discovered{VolumeId: d.Volume.String(), HostNqn: string(d.Host), Nqn: string(d.NQN), Portal: pbPortal(d.Portal), Away: d.Away, Keys: pbKeys(d.Keys)}
}

func pbWantedDrive(d cluster.WantedDrive) *pb.WantedDrive {
	return &pb.WantedDrive{DriveId: d.Drive.String(), Device: d.Device, Wwid: d.WWID, Serial: d.Serial, ForceErase: d.ForceErase, Remove: d.Remove}
}

func pbWantedLeg(l cluster.WantedLeg) *pb.WantedLeg {
	return &pb.WantedLeg{
		TreeId: id(l.Tree), Origin: pbOrigin(l.Origin), Flatten: l.Flatten, FlattenWait: l.FlattenWait,
		LegId: l.Leg.String(), DriveId: l.Drive.String(), Column: uint32(l.Column), Copy: uint32(l.Copy), Extents: list(l.Extents, pbExtent), Image: pbImage(l.Image),
		SizeBytes: uint64(l.Size), Revision: l.Revision, Volume: pbVolumeLabel(l.Volume), Remove: l.Remove, Incarnation: l.Incarnation, Blank: l.Blank,
		Process: l.Process, InKernel: l.InKernel,
	}
}

func pbOrigin(o cluster.LegOrigin) *pb.LegOrigin {
	if o.Leg.IsZero() && o.Copy == nil {
		return nil
	}
	out := &pb.LegOrigin{LegId: id(o.Leg.UUID), Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE, Wait: o.Wait}
	switch {
	case o.Copy != nil:
		out.Kind, out.Source = pb.LegOriginKind_LEG_ORIGIN_KIND_COPY, pbCopySource(o.Copy)
	case o.Clone:
		out.Kind = pb.LegOriginKind_LEG_ORIGIN_KIND_CLONE
	case o.Restore:
		out.Kind = pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE
	}
	return out
}

func pbCopySource(c *cluster.CopySource) *pb.CopySource {
	return &pb.CopySource{
		Portals: list(c.Portals, pbPortal), Nqn: string(c.NQN), Host: pbHost(c.Host), Keys: pbKeys(c.Keys), Nsid: c.NSID, Uuid: c.UUID.String(),
		SinceLegId: id(c.Since.UUID), BytesPerSecond: uint64(c.Rate),
	}
}

func pbWantedExport(x cluster.WantedExport) *pb.WantedExport {
	return &pb.WantedExport{
		VolumeId: x.Volume.String(), Epoch: uint64(x.Epoch), Nqn: string(x.NQN), Serial: x.Serial, Host: pbHost(x.Host),
		ReadOnly: x.ReadOnly, Namespaces: list(x.Namespaces, pbWantedNamespace), Keys: pbKeys(x.Keys),
		Process: x.Process, Paths: uint32(x.Paths),
	}
}

func pbWantedNamespace(n cluster.WantedNamespace) *pb.WantedNamespace {
	return &pb.WantedNamespace{Nsid: n.NSID, LegId: n.Leg.String(), Uuid: n.UUID.String()}
}

func initiatorWanted(w cluster.InitiatorWanted) *pb.InitiatorWanted {
	return &pb.InitiatorWanted{Term: w.Term, Generation: w.Generation, ClusterId: w.ClusterID.String(), Attachments: list(w.Attachments, pbWantedAttachment), Scale: parts.Understood()}
}

func pbWantedAttachment(a cluster.WantedAttachment) *pb.WantedAttachment {
	return &pb.WantedAttachment{
		VolumeId: a.Volume.String(), VolumeName: string(a.VolumeName), SizeBytes: uint64(a.Size), Layout: pbLayout(a.Layout),
		LegSizeBytes: uint64(a.LegSize), Epoch: uint64(a.Epoch), Mode: toEnum[pb.AttachMode](pb.AttachMode_value, attachModePrefix, a.Mode),
		BootId: a.BootID, Equalize: a.Equalize, Detach: a.Detach, Legs: list(a.Legs, pbWantedLink), Grant: a.Grant, Scrub: pbWantedScrub(a.Scrub),
		SinceEpoch: uint64(a.SinceEpoch), RebuildBytesPerSecond: uint64(a.RebuildRate), Thin: a.Thin, HealerId: a.Heal, Rail: a.Prefers.Rail, NearGpu: a.Prefers.GPU,
		Holds: list(a.Holds, func(h cluster.WantedHold) *pb.Hold {
			return &pb.Hold{Id: h.ID, Limit: durationpb.New(h.Limit), Freeze: h.Freeze, Prepare: h.Prepare}
		}),
	}
}

func pbWantedLink(l cluster.WantedLink) *pb.WantedLink {
	return &pb.WantedLink{
		LegId: l.Leg.String(), Column: uint32(l.Column), Copy: uint32(l.Copy), State: toEnum[pb.LegState](pb.LegState_value, legStatePrefix, l.State),
		Revision: l.Revision, Node: string(l.Node), Nqn: string(l.NQN), Nsid: l.NSID, Uuid: l.UUID.String(),
		Portals: list(l.Portals, pbPortal), WriteThrough: l.WriteThrough, CopyAll: l.CopyAll, CopyAllSince: l.CopyAllSince, CacheLost: l.CacheLost, AllSince: l.AllSince, Reborn: l.Reborn,
		LeaveOut: l.LeaveOut, Keys: pbKeys(l.Keys), Host: pbHost(l.Host), Paths: uint32(l.Paths),
	}
}

// pbKeys is where the secrets leave the manager: for the two ends of an export alone.
func pbKeys(k block.Keys) *pb.ExportKeys {
	if k.IsZero() {
		return nil
	}
	return &pb.ExportKeys{Host: k.Host.Reveal(), Controller: k.Controller.Reveal()}
}

// ---- from agents ----

// maybe parses an identifier that may be empty.
func maybe[T any](name, text string, parse func(string) (T, error)) (T, error) {
	if text == "" {
		var zero T
		return zero, nil
	}
	return field(name, text, parse)
}

func fromTerm(number uint64, of string) (cluster.Term, error) {
	id, err := maybe("term_cluster_id", of, block.ParseClusterID)
	return cluster.Term{Cluster: id, Number: number}, err
}

// fromPortals leaves out portals of transports that this version does not know: hosts could not
// use them.
func fromPortals(all []*pb.Portal) []block.Portal {
	known := slices.DeleteFunc(slices.Clone(all), func(p *pb.Portal) bool { return pb.Transport_name[int32(p.Transport)] == "" })
	return list(known, fromPortal)
}

func fromPortal(p *pb.Portal) block.Portal {
	out := block.Portal{Transport: block.TCP, Address: p.Address, Port: uint16(p.Port), Rail: p.Rail}
	if p.Transport == pb.Transport_TRANSPORT_RDMA {
		out.Transport = block.RDMA
	}
	if out.Port == 0 {
		out.Port = block.DefaultPort
	}
	return out
}

func fromHost(h *pb.Host) (host block.Host, err error) {
	if h == nil {
		return block.Host{}, nil
	}
	if host.NQN, err = field("host.nqn", h.Nqn, block.ParseNQN); err != nil {
		return host, err
	}
	host.ID, err = field("host.id", h.Id, block.ParseUUID)
	return host, err
}

func fromProblem(p *pb.Problem) cluster.Problem {
	return cluster.Problem{Object: p.Object, Doing: p.Doing, Cause: p.Cause, Since: fromTime(p.Since)}
}

func fromExtent(e *pb.Extent) image.Extent { return image.Extent{Start: e.Start, Count: e.Count} }

func fromDevice(d *pb.Device) (out cluster.Device, err error) {
	out = cluster.Device{
		Path: d.Path, Model: d.Model, Serial: d.Serial, WWID: d.Wwid, Size: block.Size(d.SizeBytes), BlockSize: d.BlockSize,
		NUMANode: d.NumaNode, Rotational: d.Rotational, VolatileCache: d.VolatileCache, ReadOnly: d.ReadOnly,
		Holders: d.Holders, Signatures: d.Signatures, Refused: d.Refused, Unread: d.Unread, Health: fromHealth(d.Health),
	}
	if out.DriveID, err = maybe("devices.drive_id", d.DriveId, block.ParseDriveID); err != nil {
		return out, err
	}
	out.Cluster, err = maybe("devices.cluster_id", d.ClusterId, block.ParseClusterID)
	return out, err
}

func fromRefusals(r *pb.Refusals) cluster.Refusals {
	return cluster.Refusals{
		Count: r.GetCount(), NQN: block.NQN(r.GetNqn()), Host: block.NQN(r.GetHostNqn()), Address: r.GetAddress(), Reason: r.GetReason(),
	}
}

func targetReport(r *pb.TargetReport) (out cluster.TargetReport, err error) {
	trimTarget(r)
	out = cluster.TargetReport{
		Node: block.NodeName(r.Node), Labels: r.Labels, BootID: r.BootId, Version: r.Version, Level: block.SaidLevel(r.Level), Kernel: r.Kernel,
		Portals: fromPortals(r.Portals), ProcessPortals: fromPortals(r.ProcessPortals), Generation: r.Generation, Problems: list(r.Problems, fromProblem), Stopping: r.Stopping, ProcessStops: r.ProcessStops,
		Integrity: r.Integrity, Thin: r.Thin, Authenticates: fromEnum[cluster.Ability](r.Authenticates, abilityPrefix), Refusals: fromRefusals(r.Refusals),
		HandsOver: r.HandsOver, Snapshots: r.Snapshots, PlainSnapshots: r.PlainSnapshots, Copies: r.Copies, KernelMaps: fromEnum[cluster.Ability](r.KernelMaps, abilityPrefix),
	}
	if out.ClusterID, err = maybe("cluster_id", r.ClusterId, block.ParseClusterID); err != nil {
		return out, err
	}
	if out.Highest, err = fromTerm(r.Term, r.TermClusterId); err != nil {
		return out, err
	}
	if out.Devices, err = listErr(r.Devices, fromDevice); err != nil {
		return out, err
	}
	if out.Drives, err = listErr(r.Drives, fromDriveReport); err != nil {
		return out, err
	}
	if out.Legs, err = listErr(r.Legs, fromLegReport); err != nil {
		return out, err
	}
	if out.Admissions, err = listErr(r.Admissions, fromAdmission); err != nil {
		return out, err
	}
	out.Exports, err = listErr(r.Exports, fromExportReport)
	return out, err
}

// fromChange converts what a partial report says beside its entries: which drives stand only
// for some of their labels, and what is gone.
func fromChange(drives []cluster.DriveReport, c parts.Change) (own []cluster.DriveReport, out cluster.Change, err error) {
	out = cluster.Change{Partial: true, Labels: map[block.DriveID][]evidence.LegLabel{}, Gone: cluster.Gone{Labels: map[block.DriveID][]block.LegID{}}}
	for _, d := range drives {
		if len(d.Legs) == 0 {
			own = append(own, d)
			continue
		}
		out.Labels[d.Drive] = append(out.Labels[d.Drive], d.Legs...)
	}
	gone := &out.Gone
	if gone.Legs, err = listErr(c.Gone.Legs, block.ParseLegID); err != nil {
		return nil, out, err
	}
	if gone.Drives, err = listErr(c.Gone.Drives, block.ParseDriveID); err != nil {
		return nil, out, err
	}
	if gone.Admissions, err = listErr(c.Gone.Admissions, block.ParseVolumeID); err != nil {
		return nil, out, err
	}
	for _, nqn := range c.Gone.Exports {
		gone.Exports = append(gone.Exports, block.NQN(nqn))
	}
	for _, label := range c.Gone.Labels {
		drive, err := block.ParseDriveID(label[0])
		if err != nil {
			return nil, out, err
		}
		leg, err := block.ParseLegID(label[1])
		if err != nil {
			return nil, out, err
		}
		gone.Labels[drive] = append(gone.Labels[drive], leg)
	}
	return own, out, nil
}

func fromDriveReport(d *pb.DriveReport) (out cluster.DriveReport, err error) {
	out = cluster.DriveReport{Device: d.Device, Extents: d.Extents, LabelGeneration: d.LabelGeneration, Error: d.Error, Incarnation: d.Incarnation}
	if out.Drive, err = field("drives.drive_id", d.DriveId, block.ParseDriveID); err != nil {
		return out, err
	}
	if out.Cluster, err = maybe("drives.cluster_id", d.ClusterId, block.ParseClusterID); err != nil {
		return out, err
	}
	out.Reserve = list(d.Reserve, fromExtent)
	if out.Trees, err = listErr(d.Trees, fromTreeLabel); err != nil {
		return out, err
	}
	out.Legs, err = listErr(d.Legs, fromLegLabel)
	return out, err
}

func fromTreeLabel(t *pb.TreeLabel) (out cluster.TreeReport, err error) {
	out.Extents = list(t.Extents, fromExtent)
	out.Tree, err = field("drives.trees.tree_id", t.TreeId, block.ParseUUID)
	return out, err
}

func fromLegLabel(l *pb.LegLabel) (out evidence.LegLabel, err error) {
	out = evidence.LegLabel{
		Column: int(l.Column), Copy: int(l.Copy), Image: fromImage(l.Image, l.Extents), Zeroed: l.Zeroed, ZeroedExtents: l.ZeroedExtents, GoingBack: l.GoingBack,
		Revision: l.Revision, AdmittedEpoch: block.Epoch(l.AdmittedEpoch), Boot: l.BootId, Incarnation: l.Incarnation,
		Based: l.Image == pb.ImageKind_IMAGE_KIND_BASED,
	}
	if out.Leg, err = field("drives.legs.leg_id", l.LegId, block.ParseLegID); err != nil {
		return out, err
	}
	if out.Tree, err = maybe("drives.legs.tree_id", l.TreeId, block.ParseUUID); err != nil {
		return out, err
	}
	if l.Volume != nil {
		out.Volume, err = fromVolumeLabel(l.Volume)
	}
	return out, err
}

// pbImage returns the kind of an image.
func pbImage(i image.Image) pb.ImageKind {
	switch i.Kind {
	case image.Checked:
		return pb.ImageKind_IMAGE_KIND_CHECKED
	case image.Mapped:
		return pb.ImageKind_IMAGE_KIND_MAPPED
	case image.Based:
		return pb.ImageKind_IMAGE_KIND_BASED
	}
	return pb.ImageKind_IMAGE_KIND_PLAIN
}

// fromImage keeps an unknown kind under its wire name, so that the image is refused later.
func fromImage(kind pb.ImageKind, extents []*pb.Extent) image.Image {
	out := image.Image{Kind: image.Kind(kind.String()), Extents: list(extents, fromExtent)}
	switch kind {
	case pb.ImageKind_IMAGE_KIND_UNSPECIFIED, pb.ImageKind_IMAGE_KIND_PLAIN, pb.ImageKind_IMAGE_KIND_BASED:
		out.Kind = image.Plain
	case pb.ImageKind_IMAGE_KIND_CHECKED:
		out.Kind = image.Checked
	case pb.ImageKind_IMAGE_KIND_MAPPED:
		out.Kind = image.Mapped
	}
	return out
}

func fromVolumeLabel(v *pb.VolumeLabel) (out evidence.VolumeLabel, err error) {
	out = evidence.VolumeLabel{
		Name: block.VolumeName(v.Name), Size: block.Size(v.SizeBytes), Pool: v.Pool, Spread: v.Spread, Labels: v.Labels,
		Epoch: block.Epoch(v.Epoch), Generation: v.Generation, Clean: v.Clean,
		ExpandingTo: block.Size(v.ExpandingToBytes), Quiet: v.Quiet, Writer: block.NodeName(v.Writer),
		ListsAll: v.ListsAllLegs, Crowded: list(v.CrowdedColumns, func(c uint32) int { return int(c) }),
	}
	if v.Layout != nil {
		out.Layout = block.Layout{
			Stripes: int(v.Layout.Stripes), Copies: int(v.Layout.Copies), Chunk: block.Size(v.Layout.ChunkBytes),
			Data: int(v.Layout.GetData()), Parity: int(v.Layout.GetParity()), Integrity: v.Layout.GetIntegrity(),
		}
	}
	if v.Created != nil {
		out.Created = v.Created.AsTime().UnixNano()
	}
	if out.ID, err = field("drives.legs.volume.volume_id", v.VolumeId, block.ParseVolumeID); err != nil {
		return out, err
	}
	if out.Snapshot, err = fromSnapshotOf(v.Snapshot); err != nil {
		return out, err
	}
	if v.RestoringToId != "" {
		if out.RestoringTo, err = field("drives.legs.volume.restoring_to_id", v.RestoringToId, block.ParseVolumeID); err != nil {
			return out, err
		}
	}
	if out.InSync, err = listErr(v.InSyncLegs, func(text string) (block.LegID, error) {
		return field("drives.legs.volume.in_sync_legs", text, block.ParseLegID)
	}); err != nil {
		return out, err
	}
	if out.Suspect, err = listErr(v.SuspectLegs, func(text string) (block.LegID, error) {
		return field("drives.legs.volume.suspect_legs", text, block.ParseLegID)
	}); err != nil {
		return out, err
	}
	out.Others, err = listErr(v.OtherLegs, func(text string) (block.LegID, error) {
		return field("drives.legs.volume.other_legs", text, block.ParseLegID)
	})
	return out, err
}

func fromLegReport(l *pb.LegReport) (out cluster.LegReport, err error) {
	out = cluster.LegReport{Ready: l.Ready, Zeroed: block.Size(l.ZeroedBytes), Size: block.Size(l.SizeBytes), Error: l.Error, Used: block.Size(l.UsedBytes), Full: l.Full, Returning: block.Size(l.ReturningBytes), Copied: block.Size(l.CopiedBytes)}
	out.Flat, out.FlatLeft, out.FlatWaits = l.Flat, block.Size(l.FlatteningBytes), l.FlatteningWaitsFor
	out.KernelRefuses, out.Damage, out.Unknown = l.KernelRefuses, l.Damage, block.Size(l.UnknownBytes)
	if x := l.Space; x != nil {
		out.Space = &cluster.LegSpace{Referenced: block.Size(x.ReferencedBytes), Freed: block.Size(x.FreedBytes)}
	}
	out.Leg, err = field("legs.leg_id", l.LegId, block.ParseLegID)
	return out, err
}

func fromAdmission(a *pb.Admission) (out cluster.Admission, err error) {
	out.Epoch = block.Epoch(a.Epoch)
	out.Volume, err = field("admissions.volume_id", a.VolumeId, block.ParseVolumeID)
	return out, err
}

func fromExportReport(x *pb.ExportReport) (out cluster.ExportReport, err error) {
	out = cluster.ExportReport{NQN: block.NQN(x.Nqn), Ready: x.Ready}
	out.Legs, err = listErr(x.LegIds, func(text string) (block.LegID, error) {
		return field("exports.leg_ids", text, block.ParseLegID)
	})
	return out, err
}

func initiatorReport(r *pb.InitiatorReport) (out cluster.InitiatorReport, err error) {
	trimInitiator(r)
	out = cluster.InitiatorReport{
		Node: block.NodeName(r.Node), Labels: r.Labels, BootID: r.BootId, Version: r.Version, Level: block.SaidLevel(r.Level), Kernel: r.Kernel,
		Generation: r.Generation, Problems: list(r.Problems, fromProblem), Authenticates: r.Authenticates, Heals: r.HealerId, Freezes: r.Freezes, SeveralPaths: r.SeveralPaths,
	}
	if out.Highest, err = fromTerm(r.Term, r.TermClusterId); err != nil {
		return out, err
	}
	if out.Host, err = fromHost(r.Host); err != nil {
		return out, err
	}
	if out.ClusterID, err = maybe("cluster_id", r.ClusterId, block.ParseClusterID); err != nil {
		return out, err
	}
	if out.Evidence, err = listErr(r.Evidence, fromEvidence); err != nil {
		return out, err
	}
	out.Attachments, err = listErr(r.Attachments, fromAttachmentReport)
	return out, err
}

func fromEvidence(e *pb.Evidence) (out evidence.Note, err error) {
	out.Epoch = block.Epoch(e.Epoch)
	if out.Volume, err = field("evidence.volume_id", e.VolumeId, block.ParseVolumeID); err != nil {
		return out, err
	}
	out.Legs, err = listErr(e.Legs, func(l *pb.EvidenceLeg) (leg evidence.NotedLeg, err error) {
		leg.Revision = l.Revision
		leg.Leg, err = field("evidence.legs.leg_id", l.LegId, block.ParseLegID)
		return leg, err
	})
	return out, err
}

func fromAttachmentReport(a *pb.AttachmentReport) (out cluster.AttachmentReport, err error) {
	out = cluster.AttachmentReport{
		Epoch: block.Epoch(a.Epoch), Grant: a.Grant, Phase: fromEnum[cluster.Phase](a.Phase, phasePrefix), Device: a.Device, WaitingFor: a.WaitingFor,
		ResyncDone: block.Size(a.ResyncDoneBytes), ResyncTotal: block.Size(a.ResyncTotalBytes),
		Size: block.Size(a.SizeBytes), Number: a.DeviceNumber, Scrub: fromScrubReport(a.Scrub), Scrubs: a.Scrubs, Heals: fromHealReport(a.Heals),
		GaveUp: fromGaveUp(a.GetGaveUp()),
	}
	if out.Copies, err = listErr(a.Copies, fromCopyReport); err != nil {
		return out, err
	}
	if out.Volume, err = field("attachments.volume_id", a.VolumeId, block.ParseVolumeID); err != nil {
		return out, err
	}
	if out.Legs, err = listErr(a.Legs, fromLegLink); err != nil {
		return out, err
	}
	for _, h := range a.Holds {
		if out.Holds == nil {
			out.Holds = map[string]cluster.HoldState{}
		}
		if h.GetFsFrozen() || h.GetError() != "" {
			if out.Freezes == nil {
				out.Freezes = map[string]cluster.FreezeReport{}
			}
			out.Freezes[h.GetId()] = cluster.FreezeReport{Frozen: h.GetFsFrozen(), Error: h.GetError()}
		}
		out.Holds[h.GetId()] = fromEnum[cluster.HoldState](h.GetState(), holdStatePrefix)
	}
	out.Tells = a.InUse != nil
	out.InUse, err = listErr(a.GetInUse().GetLegIds(), func(id string) (block.LegID, error) {
		return field("attachments.in_use.leg_ids", id, block.ParseLegID)
	})
	return out, err
}

func fromGaveUp(g *pb.GaveUp) cluster.GaveUp {
	out := cluster.GaveUp{Why: g.GetWhy(), WritesLost: g.GetWritesLost()}
	if r := g.GetReason(); r != pb.GiveUpReason_GIVE_UP_REASON_UNSPECIFIED {
		out.Reason = pb.Word(r)
	}
	return out
}

func fromLegLink(l *pb.LegLink) (out cluster.LegLink, err error) {
	out = cluster.LegLink{Revision: l.Revision, State: fromEnum[cluster.LinkState](l.State, linkStatePrefix), Device: l.Device, Error: l.Error}
	out.Leg, err = field("attachments.legs.leg_id", l.LegId, block.ParseLegID)
	return out, err
}

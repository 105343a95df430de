// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// These agents do at once everything that is wanted of them, and touch nothing. They talk to a real
// manager, so the scripts test it too.

// scriptedTarget is a target agent whose machine has two blank devices.
type scriptedTarget struct {
	node string
	api  pb.AgentsClient

	mu     sync.Mutex
	wanted *pb.TargetWanted
	drives []*pb.WantedDrive // with a label
}

const devicesOfTarget = 2

func (a *scriptedTarget) devices() []*pb.Device {
	var all []*pb.Device
	for i := range devicesOfTarget {
		path := "/dev/nvme" + string(rune('0'+i)) + "n1"
		all = append(all, &pb.Device{Path: path, Model: "MODEL", Serial: a.node + path[5:10], Wwid: "eui." + a.node + path[5:10], SizeBytes: 4 << 30, BlockSize: 512, NumaNode: -1})
	}
	return append(all, &pb.Device{
		Path: "/dev/sdb", SizeBytes: 4 << 30, BlockSize: 512, NumaNode: -1, Serial: a.node + "sdb", Wwid: "naa." + a.node,
		Signatures: []string{`ext4 "data"`}, Refused: `it carries ext4 "data"`,
	})
}

func (a *scriptedTarget) report() *pb.TargetReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.wanted
	r := &pb.TargetReport{
		Node: a.node, BootId: bootOf(a.node), Version: "scripted", Devices: a.devices(), Generation: w.GetGeneration(), ClusterId: w.GetClusterId(),
		Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.1", Port: 4420}}, Admissions: w.GetAdmissions(),
	}
	admitted := map[string]uint64{}
	for _, ad := range w.GetAdmissions() {
		admitted[ad.GetVolumeId()] = ad.GetEpoch()
	}
	for _, d := range w.GetDrives() {
		a.drives = slices.DeleteFunc(a.drives, func(have *pb.WantedDrive) bool { return have.GetDriveId() == d.GetDriveId() })
		if !d.GetRemove() {
			a.drives = append(a.drives, d)
		}
	}
	for _, d := range a.drives {
		report := &pb.DriveReport{DriveId: d.GetDriveId(), ClusterId: w.GetClusterId(), Device: d.GetDevice(), Extents: 15, LabelGeneration: 1}
		for _, l := range w.GetLegs() {
			if l.GetDriveId() == d.GetDriveId() && !l.GetRemove() {
				report.Legs = append(report.Legs, &pb.LegLabel{LegId: l.GetLegId(), Column: l.GetColumn(), Copy: l.GetCopy(), Extents: l.GetExtents(), Zeroed: true, Revision: l.GetRevision(), AdmittedEpoch: admitted[l.GetVolume().GetVolumeId()], Volume: l.GetVolume()})
				r.Legs = append(r.Legs, &pb.LegReport{LegId: l.GetLegId(), Ready: true, SizeBytes: l.GetSizeBytes()})
			}
		}
		r.Drives = append(r.Drives, report)
		for _, device := range r.GetDevices() {
			if device.GetPath() == d.GetDevice() {
				device.DriveId = d.GetDriveId()
			}
		}
	}
	for _, e := range w.GetExports() {
		report := &pb.ExportReport{Nqn: e.GetNqn(), Ready: true}
		for _, n := range e.GetNamespaces() {
			report.LegIds = append(report.LegIds, n.GetLegId())
		}
		r.Exports = append(r.Exports, report)
	}
	return r
}

func (a *scriptedTarget) run(ctx context.Context) error {
	stream, err := a.api.Target(ctx)
	if err != nil {
		return err
	}
	news := receive(stream.Recv, &a.mu, &a.wanted)
	return reportFor(ctx, news, func() error { return stream.Send(a.report()) })
}

// scriptedInitiator is an initiator agent. On a node whose name begins with m its
// volumes are mounted.
type scriptedInitiator struct {
	node string
	api  pb.AgentsClient

	mu     sync.Mutex
	wanted *pb.InitiatorWanted
}

func (a *scriptedInitiator) report() *pb.InitiatorReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	host := block.HostFromID(block.UUID{1, 2, 3, a.node[0]})
	r := &pb.InitiatorReport{
		Node: a.node, BootId: bootOf(a.node), Version: "scripted", Generation: a.wanted.GetGeneration(),
		Host: &pb.Host{Nqn: string(host.NQN), Id: host.ID.String()},
	}
	for _, w := range a.wanted.GetAttachments() {
		r.Attachments = append(r.Attachments, attachmentReport(w, a.node[0] == 'm'))
	}
	return r
}

func attachmentReport(w *pb.WantedAttachment, mounted bool) *pb.AttachmentReport {
	r := &pb.AttachmentReport{VolumeId: w.GetVolumeId(), Epoch: w.GetEpoch(), Grant: w.GetGrant(), Phase: pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING}
	switch {
	case w.GetDetach() && mounted:
		r.Phase, r.WaitingFor = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING, "the file system on /mnt"
	case w.GetDetach():
		r.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
		return r
	}
	r.Device, r.SizeBytes, r.DeviceNumber = "/dev/weft/"+w.GetVolumeName(), w.GetSizeBytes(), "253:4"
	for _, l := range w.GetLegs() {
		r.Legs = append(r.Legs, &pb.LegLink{LegId: l.GetLegId(), Revision: l.GetRevision(), State: pb.LinkState_LINK_STATE_LIVE})
	}
	return r
}

func (a *scriptedInitiator) run(ctx context.Context) error {
	stream, err := a.api.Initiator(ctx)
	if err != nil {
		return err
	}
	news := receive(stream.Recv, &a.mu, &a.wanted)
	return reportFor(ctx, news, func() error { return errors.Join(a.leaveOut(ctx), stream.Send(a.report())) })
}

// leaveOut leaves out the legs that the manager asks for.
func (a *scriptedInitiator) leaveOut(ctx context.Context) error {
	a.mu.Lock()
	wanted := a.wanted
	a.mu.Unlock()
	for _, w := range wanted.GetAttachments() {
		r := &pb.RecordStaleRequest{Node: a.node, VolumeId: w.GetVolumeId(), Epoch: w.GetEpoch()}
		for _, l := range w.GetLegs() {
			if l.GetLeaveOut() != "" {
				r.LegIds = append(r.LegIds, l.GetLegId())
				r.Legs = append(r.Legs, &pb.StaleLeg{LegId: l.GetLegId(), Reason: pb.StaleReason_STALE_REASON_LEFT_OUT, Text: l.GetLeaveOut()})
			}
		}
		if len(r.Legs) > 0 {
			if _, err := a.api.RecordStale(ctx, r); err != nil {
				return err
			}
		}
	}
	return nil
}

// receive keeps the latest message, and signals each one.
func receive[W any](recv func() (W, error), mu *sync.Mutex, wanted *W) <-chan struct{} {
	news := make(chan struct{}, 1)
	go func() {
		for {
			w, err := recv()
			if err != nil {
				return
			}
			mu.Lock()
			*wanted = w
			mu.Unlock()
			ring(news)
		}
	}()
	return news
}

// reportFor sends a report at once, at each change, and each second.
func reportFor(ctx context.Context, news <-chan struct{}, send func() error) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if err := send(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-news:
		case <-tick.C:
		}
	}
}

// again runs an agent until ctx ends; the manager may not be running yet.
func again(ctx context.Context, run func(context.Context) error) {
	for ctx.Err() == nil {
		_ = run(ctx) // the next run makes up for it
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func ring(bell chan<- struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

func bootOf(node string) string {
	return block.UUIDFromRandom([16]byte{0xb0, node[0], node[len(node)-1]}).String()
}

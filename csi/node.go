// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// nodeServer is the node service. It stores nothing about a volume between two calls: the kernel
// tells what is mounted, the manager what is attached.
type nodeServer struct {
	csi.UnimplementedNodeServer
	cfg    Config
	ops    *operations
	kernel mount.Kernel
	making chan struct{} // a slot for each caller whose file system is being made
	asked  *questions    // questions to file systems that may not have been answered yet
	logged sync.Map      // labels omitted from the topology that have been logged
	// took receives the duration of each step.
	took func(step string, took time.Duration)
}

// mostMaking is how many file systems are made at once: each writes as fast as its volume allows.
// One that outlasts its caller no longer counts: it may hang as long as its volume's targets are
// gone, and must not block all other volumes of the node.
const mostMaking = 4

func newNode(cfg Config) *nodeServer { return newNodeOn(cfg, mount.NewLinux()) }

func newNodeOn(cfg Config, k mount.Kernel) *nodeServer {
	return &nodeServer{
		cfg: cfg, ops: newOperations(), kernel: k, making: make(chan struct{}, mostMaking),
		asked: newQuestions(), took: func(string, time.Duration) {},
	}
}

// ---- operations ----

// task is an operation under way. Its work in the kernel cannot be stopped: that continues after
// the caller's time is up, and holds the volume's lock until it ends.
type task struct {
	step atomic.Pointer[step]
	took func(step string, took time.Duration)
}

type step struct {
	kind  string // the first word of the step: "mount"
	doing string
	since time.Time
}

// next announces the next step, unless the caller's time is up: then no new step begins. The text
// begins with a word for its kind.
func (t *task) next(ctx context.Context, format string, args ...any) error {
	doing := fmt.Sprintf(format, args...)
	if ctx.Err() != nil {
		return waitEnded(ctx, doing, "its turn")
	}
	logOf(ctx).Debug("step", "doing", doing)
	kind, _, _ := strings.Cut(format, " ")
	t.end(&step{kind: kind, doing: doing, since: time.Now()})
	return nil
}

// end ends a step, and begins another unless next is nil.
func (t *task) end(next *step) {
	if was := t.step.Swap(next); was != nil && t.took != nil {
		t.took(was.kind, time.Since(was.since))
	}
}

// endTime is how long a cancelled task may take before it counts as hanging.
const endTime = 250 * time.Millisecond

// run does the work of a call in a goroutine of its own, one per volume. If the call's time is up
// first, the answer says what is still under way, with a code that is not final.
func (s *nodeServer) run(ctx context.Context, volume, rpc string, work func(context.Context, *task) error) error {
	end, err := s.ops.start(volume, rpc)
	if err != nil {
		return err
	}
	t := &task{took: s.took}
	done := make(chan error, 1)
	go func() {
		err := guarded(ctx, rpc, func() error { return work(ctx, t) })
		t.end(nil)
		end() // before the answer: the CO's next call may follow at once
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	patience := time.NewTimer(endTime)
	defer patience.Stop()
	select {
	case err := <-done:
		return err
	case <-patience.C:
	}
	now := cmp.Or(t.step.Load(), &step{doing: rpc, since: time.Now()})
	return waitEnded(ctx, rpc, fmt.Sprintf("the kernel, which continues: %s, since %v", now.doing, time.Since(now.since).Round(time.Second)))
}

// guarded turns a panic into an answer: a panic for one volume must not end the calls of all
// others.
func guarded(ctx context.Context, rpc string, work func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			logOf(ctx).Error("panic", "value", p, "stack", string(debug.Stack()))
			err = status.Errorf(codes.Unavailable, "%s: panic: %v", rpc, p)
		}
	}()
	return work()
}

// ---- what requests have in common ----

// checkPath refuses a path that cannot come from the CO.
func (s *nodeServer) checkPath(field, path string) error {
	root := s.cfg.KubeletDir
	switch {
	case path == "":
		return status.Errorf(codes.InvalidArgument, "%s: missing", field)
	case !filepath.IsAbs(path) || filepath.Clean(path) == "/":
		return status.Errorf(codes.InvalidArgument, "%s: %q is not an absolute path", field, path)
	case root != "" && !strings.HasPrefix(filepath.Clean(path)+"/", filepath.Clean(root)+"/"):
		return status.Errorf(codes.InvalidArgument, "%s: %q is not below %s", field, path, root)
	}
	return nil
}

// wanted is the use of a volume on this node that a capability asks for.
type wanted struct {
	mode     pb.AttachMode
	block    bool
	fsType   string // empty: no preference
	flags    []string
	readOnly bool
	alone    bool // one target at most
	sealed   bool // no host writes the volume any more, though its claim is for writing
}

// parseWanted checks a capability; context is the volume's.
func parseWanted(c *csi.VolumeCapability, context map[string]string) (wanted, error) {
	// The controller has checked that the volume's layout supports it.
	mode, err := attachMode(c, 1)
	if err != nil {
		return wanted{}, err
	}
	access := c.GetAccessMode().GetMode()
	return wanted{
		mode: mode, block: c.GetBlock() != nil,
		fsType: cmp.Or(c.GetMount().GetFsType(), context[contextFSType]), flags: c.GetMount().GetMountFlags(),
		readOnly: mode == pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY || access == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		alone:    access == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	}, nil
}

func (w wanted) shared() bool { return w.mode == pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY }

// ---- the volume, as the manager has it ----

func (s *nodeServer) volume(ctx context.Context, id string) (*pb.Volume, error) {
	v, err := s.cfg.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: id})
	if code := status.Code(err); code == codes.InvalidArgument || err == nil && v.Id != id {
		return nil, status.Errorf(codes.NotFound, "volume %q: no volume has this id", id)
	}
	return v, fromManager("look up volume "+id, err)
}

// attachment is a volume on this node: a device at an epoch.
type attachment struct {
	volume *pb.Volume
	*pb.Attachment
	number block.DeviceNumber
}

// attached waits until a volume is attached to this node, at the published epoch or a later one:
// the manager starts a new epoch after the host has rebooted.
func (s *nodeServer) attached(ctx context.Context, t *task, id string, p publication) (a attachment, err error) {
	doing := "wait for the device of volume " + id
	if err := t.next(ctx, "wait for the device of volume %s", id); err != nil {
		return a, err
	}
	err = await(ctx, doing, func() (string, error) {
		v, err := s.volume(ctx, id)
		if err != nil {
			return "", err
		}
		now := attachmentTo(v, string(s.cfg.Node))
		switch {
		case now == nil:
			return "", status.Errorf(codes.FailedPrecondition, "%s: it is not attached to node %s", doing, s.cfg.Node)
		case now.Epoch < uint64(p.epoch):
			return fmt.Sprintf("epoch %d; the manager has %d", p.epoch, now.Epoch), nil
		case attachedMode(now) != p.mode:
			return "", status.Errorf(codes.FailedPrecondition, "%s: it is attached as %s, but %s was requested", doing, modeText(attachedMode(now)), modeText(p.mode))
		case now.State == pb.AttachmentState_ATTACHMENT_STATE_DETACHING:
			return "", status.Errorf(codes.Aborted, "%s: it is being detached", doing)
		case now.State != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED:
			return cmp.Or(now.WaitingFor, "the initiator agent of node "+now.Node), nil
		case now.DeviceNumber == "":
			return "the initiator agent of node " + now.Node + " to report its device", nil
		}
		a = attachment{volume: v, Attachment: now}
		if a.number, err = block.ParseDeviceNumber(now.DeviceNumber); err != nil {
			return "", status.Errorf(codes.Unavailable, "%s: %v", doing, err)
		}
		return "", nil
	})
	return a, err
}

// open opens the device of an attachment. The name alone proves nothing: the device number must be
// the one that the agent reported for this epoch, and must still be so once the device is held
// open, since then no other device can get the number.
func (s *nodeServer) open(ctx context.Context, a attachment) (_ mount.Disk, err error) {
	unavailable := func(format string, args ...any) error {
		return status.Errorf(codes.Unavailable, "volume %s: %s", a.volume.Name, fmt.Sprintf(format, args...))
	}
	d, err := s.kernel.Open(a.Device)
	if err != nil {
		return nil, unavailable("%v", err)
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.Number() != a.number {
		return nil, unavailable("%s is device %s, but the volume's is %s", a.Device, d.Number(), a.number)
	}
	v, err := s.volume(ctx, a.volume.Id)
	if err != nil {
		return nil, err
	}
	now := attachmentTo(v, a.Node)
	if now == nil || now.Epoch != a.Epoch || now.DeviceNumber != a.DeviceNumber || now.State != a.State {
		return nil, unavailable("it was detached or attached again meanwhile")
	}
	size, err := d.Size()
	if err != nil {
		return nil, unavailable("%v", err)
	}
	if size < a.SizeBytes || size == 0 {
		return nil, unavailable("its device has %d of %d bytes", size, a.SizeBytes)
	}
	return d, nil
}

// superseded reports whether a device of a volume can no longer reach the volume: its attachment is
// gone, and the targets have fenced its epoch. If the manager fails, the error is returned and
// nothing is known.
func (s *nodeServer) superseded(ctx context.Context, id string, device block.DeviceNumber) (bool, error) {
	v, err := s.volume(ctx, id)
	if status.Code(err) == codes.NotFound {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	a := attachmentTo(v, string(s.cfg.Node))
	if a == nil {
		return len(v.FenceWaitsFor) == 0, nil
	}
	// An agent that has not reported yet may still have this very device.
	return a.DeviceNumber != "" && a.DeviceNumber != device.String(), nil
}

// ---- what the node is ----

// NodeGetCapabilities lists what is served.
func (s *nodeServer) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	reply := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return reply, nil
}

// NodeGetInfo returns the node's name, how many volumes it may have, and its segments.
func (s *nodeServer) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	cluster, err := s.cfg.Manager.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		return nil, fromManager("look up the cluster", err)
	}
	node, err := s.self(ctx)
	if err != nil {
		return nil, err
	}
	segments, leftOut := nodeSegments(cluster.ClusterId, node.Labels)
	for label, why := range leftOut {
		value := node.Labels[label]
		if _, logged := s.logged.LoadOrStore(label+"="+value, true); !logged { // the call is made again and again
			logOf(ctx).Warn("label left out of the topology", "node", s.cfg.Node, "label", label, "value", value, "why", why)
		}
	}
	return &csi.NodeGetInfoResponse{
		NodeId:             string(s.cfg.Node),
		MaxVolumesPerNode:  int64(s.cfg.MaxVolumes),
		AccessibleTopology: &csi.Topology{Segments: segments},
	}, nil
}

// self is this node as the manager knows it. A node without an initiator agent gets no volumes; the
// CO asks again and finds the agent once it is up.
func (s *nodeServer) self(ctx context.Context) (*pb.Node, error) {
	all, err := s.cfg.Manager.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return nil, fromManager("look up this node", err)
	}
	for _, n := range all.Nodes {
		if n.Name == string(s.cfg.Node) && n.GetInitiator().GetKnown() {
			return n, nil
		}
	}
	return nil, status.Errorf(codes.Unavailable, "node %s: its initiator agent has not reported to the volume manager yet", s.cfg.Node)
}

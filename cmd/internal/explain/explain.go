// SPDX-License-Identifier: Apache-2.0

// Package explain has the commands that say why something is in its state, what it waits for and what
// an operator can do. Of a volume the manager knows that; of the rest it is put together here, from
// what the manager lists.
package explain

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// nearlyFull is the part of a drive or pool that may be taken before it is called nearly full; the
// alerts of cmd/internal/monitoring begin there too.
const (
	nearlyFullPool  = 0.85
	nearlyFullDrive = 0.95
)

// Tools are what these commands share with others.
type Tools struct {
	Drive func(ctx context.Context, api pb.ManagerClient, drive string) (id string, err error) // by the beginning of its id
	Next  func(sentence string) (command string)                                               // that says more about what is wrong
}

// New are the commands.
func New(g *cli.Globals, tools Tools) *cobra.Command {
	drive := func(ctx context.Context, api pb.ManagerClient, name string) (*pb.Explanation, error) {
		id, err := tools.Drive(ctx, api, name)
		if err != nil {
			return nil, err
		}
		return ofDrive(ctx, api, id)
	}
	cluster := func(ctx context.Context, api pb.ManagerClient, _ string) (*pb.Explanation, error) {
		return ofCluster(ctx, api, tools.Next)
	}
	return cli.Group("explain", "Explain a state: its reasons, what it waits for, what you can do",
		explaining(g, "volume VOLUME", "Explain the state of a volume", "  weft explain volume db1", g.CompleteVolumes, ofVolume),
		explaining(g, "snapshot VOLUME@NAME", "Explain the state of a snapshot", "  weft explain snapshot db1@mon", g.CompleteSnapshot, ofVolume),
		explaining(g, "node NODE", "Explain the state of a node: its agents, drives and attachments", "  weft explain node t1", g.CompleteNodes, ofNode),
		explaining(g, "drive DRIVE", "Explain the state of a drive, and whose copies it has", "  weft explain drive 4f1c22aa", g.CompleteDrives, drive),
		explaining(g, "pool POOL", "Explain how full a pool is, and what it lacks", "  weft explain pool default", nil, ofPool),
		explaining(g, "cluster", "Explain what is wrong in the cluster, worst first", "  weft explain cluster", nil, cluster))
}

func ofVolume(ctx context.Context, api pb.ManagerClient, volume string) (*pb.Explanation, error) {
	return api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: volume})
}

// Print prints an explanation.
func Print(x *pb.Explanation, out *cli.Output) error {
	return out.Print(x, func(w io.Writer) {
		fmt.Fprintln(w, x.GetSummary())
		Bullets(w, "because", x.GetFacts())
		Bullets(w, "waiting for", x.GetWaits())
		Bullets(w, "you can", x.GetActions())
	})
}

// Bullets prints a list below a heading; nothing if it is empty.
func Bullets(w io.Writer, heading string, items []string) {
	if len(items) == 0 {
		return
	}
	fmt.Fprintf(w, "%s:\n", heading)
	for _, item := range items {
		fmt.Fprintf(w, "  - %s\n", cli.InLine(item))
	}
}

// explaining is a command that explains one object.
func explaining(g *cli.Globals, use, short, example string, complete cobra.CompletionFunc,
	explain func(ctx context.Context, api pb.ManagerClient, name string) (*pb.Explanation, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Example: example, ValidArgsFunction: complete,
		Args: cli.Takes(strings.Fields(use)[1:]...),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			x, err := explain(ctx, api, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return Print(x, out)
		}),
	}
}

// one returns the object with a name, or an error like the manager's.
func one[T interface{ GetName() string }](kind, name string, all []T) (found T, err error) {
	for _, object := range all {
		if object.GetName() == name {
			return object, nil
		}
	}
	return found, status.Errorf(codes.NotFound, "%s %s: not found", kind, name)
}

func ofNode(ctx context.Context, api pb.ManagerClient, name string) (*pb.Explanation, error) {
	nodes, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	n, err := one("node", name, nodes.GetNodes())
	if err != nil {
		return nil, err
	}
	x := &pb.Explanation{Object: "node " + name}
	var down []string
	for _, a := range []struct {
		kind string
		*pb.AgentStatus
	}{{"target", n.GetTarget()}, {"initiator", n.GetInitiator()}} {
		if !a.GetKnown() && a.GetRefused() == "" {
			continue
		}
		if !a.GetOnline() {
			down = append(down, a.kind)
			x.Actions = append(x.Actions, fmt.Sprintf("bring its %s agent back: is the machine up, does `weft %s` run there and reach the manager?", a.kind, a.kind))
		}
		explainAgent(x, a.kind, a.AgentStatus)
	}
	x.Summary = fmt.Sprintf("node %s is online", name)
	if len(down) > 0 {
		x.Summary = fmt.Sprintf("node %s: its %s agent is offline", name, strings.Join(down, " and its "))
		if !n.GetConfirmedDead() {
			x.Actions = append(x.Actions, "if the machine is off: weft node confirm-dead "+name)
		}
	}
	if n.GetStock() {
		if !n.GetTarget().GetKnown() {
			x.Summary = fmt.Sprintf("node %s is a host without Weft's agent", name)
		}
		x.Facts = append(x.Facts, fmt.Sprintf("its volumes are used with Linux's own NVMe tools, as host %s; whether it runs is not known here", n.GetHost().GetNqn()))
	}
	if n.GetConfirmedDead() {
		x.Facts = append(x.Facts, "an operator has confirmed that the machine is off")
	}
	switch {
	case n.GetDraining():
		x.Facts = append(x.Facts, "it is being drained: it takes no new legs, and those that it has are made again elsewhere; `weft node uncordon "+name+"` ends that")
	case n.GetCordoned():
		x.Facts = append(x.Facts, "it is cordoned: it takes no new legs; `weft node uncordon "+name+"` ends that")
	}
	if until := n.GetMaintainedUntil(); until != nil {
		x.Facts = append(x.Facts, "it is under maintenance until "+until.AsTime().Format("2006-01-02T15:04:05Z"))
	}
	x.Waits = append(x.Waits, n.GetStopWaitsFor()...)
	return x, explainWhatNodeHas(ctx, api, x, name)
}

// explainAgent adds what is known of an agent.
func explainAgent(x *pb.Explanation, kind string, a *pb.AgentStatus) {
	if why := a.GetRefused(); why != "" {
		x.Facts = append(x.Facts, fmt.Sprintf("its %s agent %s", kind, why))
	}
	if a.GetOnline() {
		x.Facts = append(x.Facts, fmt.Sprintf("its %s agent reports, and has version %s", kind, a.GetVersion()))
	}
	for _, p := range a.GetProblems() {
		x.Facts = append(x.Facts, fmt.Sprintf("its %s agent cannot %s of %s: %s; it goes on trying", kind, p.GetDoing(), p.GetObject(), p.GetCause()))
	}
}

// explainWhatNodeHas adds a node's drives, and the volumes that it uses or has copies of.
func explainWhatNodeHas(ctx context.Context, api pb.ManagerClient, x *pb.Explanation, name string) error {
	drives, err := api.ListDrives(ctx, &pb.ListDrivesRequest{Node: name})
	if err != nil {
		return err
	}
	for _, d := range drives.GetDrives() {
		fact := fmt.Sprintf("drive %s (%s) is %s, %s of it taken", cli.ShortID(d.GetId()), d.GetDevice(), pb.Word(d.GetState()), taken(d.GetAllocatedBytes(), d.GetCapacityBytes()))
		if d.GetReason() != "" {
			fact += ": " + d.GetReason()
		}
		x.Facts = append(x.Facts, fact)
		if d.GetState() != pb.DriveState_DRIVE_STATE_READY && d.GetState() != pb.DriveState_DRIVE_STATE_OFFLINE {
			x.Actions = append(x.Actions, "see more: weft explain drive "+cli.ShortID(d.GetId()))
		}
	}
	volumes, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		return err
	}
	snapshots, err := cli.Snapshots(ctx, api, "")
	if err != nil {
		return err
	}
	explainAttachments(x, "volume", name, volumes.GetVolumes())
	explainAttachments(x, "snapshot", name, snapshots.GetVolumes())
	var legs []*pb.Volume
	for _, v := range volumes.GetVolumes() {
		for _, l := range v.GetLegs() {
			if l.GetNode() == name {
				legs = append(legs, v)
				break
			}
		}
	}
	explainCopies(x, legs)
	return nil
}

// explainAttachments adds the volumes or snapshots that are attached to a node.
func explainAttachments(x *pb.Explanation, kind, node string, all []*pb.Volume) {
	for _, v := range all {
		for _, a := range v.GetAttachments() {
			if a.GetNode() == node {
				x.Facts = append(x.Facts, fmt.Sprintf("it has %s %s (%s)", kind, v.GetName(), pb.Word(a.GetState())))
			}
		}
	}
}

// explainCopies adds volumes that have copies on something, and those of them that are not healthy.
func explainCopies(x *pb.Explanation, volumes []*pb.Volume) {
	if len(volumes) > 0 {
		x.Facts = append(x.Facts, fmt.Sprintf("it has copies of %s", cli.Nouns(len(volumes), "volume")))
	}
	for i, v := range volumes {
		if h := v.GetHealth(); h == pb.Health_HEALTH_HEALTHY || h == pb.Health_HEALTH_UNSPECIFIED {
			continue
		}
		x.Facts = append(x.Facts, fmt.Sprintf("volume %s is %s", v.GetName(), pb.Word(v.GetHealth())))
		if i < 8 {
			x.Actions = append(x.Actions, "see more: weft explain volume "+v.GetName())
		}
	}
}

func ofDrive(ctx context.Context, api pb.ManagerClient, id string) (*pb.Explanation, error) {
	drives, err := api.ListDrives(ctx, &pb.ListDrivesRequest{})
	if err != nil {
		return nil, err
	}
	var d *pb.Drive
	for _, each := range drives.GetDrives() {
		if each.GetId() == id {
			d = each
		}
	}
	if d == nil {
		return nil, status.Errorf(codes.NotFound, "drive %s: not found", id)
	}
	x := &pb.Explanation{Object: "drive " + id, Summary: fmt.Sprintf("drive %s (%s on %s) is %s", cli.ShortID(id), d.GetDevice(), d.GetNode(), pb.Word(d.GetState()))}
	if d.GetReason() != "" {
		x.Summary += ": " + d.GetReason()
	}
	x.Facts = append(x.Facts, fmt.Sprintf("%s, %s of %s taken", d.GetModel(), cli.Size(d.GetAllocatedBytes()), cli.Size(d.GetCapacityBytes())))
	if full(d.GetAllocatedBytes(), d.GetCapacityBytes(), nearlyFullDrive) {
		x.Facts = append(x.Facts, "it is nearly full: legs on it can hardly grow")
		x.Actions = append(x.Actions, "move legs to emptier drives: weft pool rebalance POOL --dry-run; legs of thin volumes, which that leaves alone: weft leg move VOLUME LEG")
	}
	switch d.GetState() {
	case pb.DriveState_DRIVE_STATE_OFFLINE:
		x.Actions = append(x.Actions, "see why its target is offline: weft explain node "+d.GetNode())
	case pb.DriveState_DRIVE_STATE_FAILED, pb.DriveState_DRIVE_STATE_MISSING:
		x.Actions = append(x.Actions, "check the drive, its slot and the kernel log on "+d.GetNode(), "if it is gone for good: weft drive evict "+cli.ShortID(id))
	case pb.DriveState_DRIVE_STATE_SUSPECT:
		x.Actions = append(x.Actions, "see its health: weft drive list --health", "replace it before it fails: weft drive evict "+cli.ShortID(id)+", which copies its legs first")
	}
	volumes, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		return nil, err
	}
	var on []*pb.Volume
	for _, v := range volumes.GetVolumes() {
		for _, l := range v.GetLegs() {
			if l.GetDriveId() == id {
				on = append(on, v)
				break
			}
		}
	}
	explainCopies(x, on)
	return x, nil
}

// taken is a part of a capacity in percent.
func taken(allocated, capacity uint64) string {
	if capacity == 0 {
		return "nothing"
	}
	return fmt.Sprintf("%.0f%%", 100*float64(allocated)/float64(capacity))
}

// full reports whether more than a part of a capacity is taken.
func full(allocated, capacity uint64, part float64) bool {
	return float64(allocated) > part*float64(capacity)
}

func ofPool(ctx context.Context, api pb.ManagerClient, name string) (*pb.Explanation, error) {
	pools, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return nil, err
	}
	p, err := one("pool", name, pools.GetPools())
	if err != nil {
		return nil, err
	}
	x := &pb.Explanation{Object: "pool " + name, Summary: fmt.Sprintf("pool %s has %s, and legs take %s of %s", name, cli.Nouns(int(p.GetDrives()), "drive"), cli.Size(p.GetAllocatedBytes()), cli.Size(p.GetCapacityBytes()))}
	if selector := cli.Pairs(p.GetSelector()); selector != "" {
		x.Facts = append(x.Facts, "it has the drives with "+selector)
	}
	switch {
	case p.GetDrives() == 0:
		x.Actions = append(x.Actions, "add drives: weft drive add NODE DEVICE")
	case full(p.GetAllocatedBytes(), p.GetCapacityBytes(), nearlyFullPool):
		x.Facts = append(x.Facts, fmt.Sprintf("it is nearly full: %s is taken", taken(p.GetAllocatedBytes(), p.GetCapacityBytes())))
		x.Actions = append(x.Actions, "add drives: weft drive add NODE DEVICE", "then let legs move to them: weft pool rebalance "+name)
	}
	return x, nil
}

// ofCluster says what `weft status` says, and what is nearly full.
func ofCluster(ctx context.Context, api pb.ManagerClient, more func(sentence string) string) (*pb.Explanation, error) {
	s, err := api.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	x := &pb.Explanation{Object: "cluster " + s.GetClusterId(), Summary: "nothing is wrong in the cluster", Facts: s.GetWrong()}
	for _, sentence := range s.GetWrong() {
		if next := more(sentence); next != "" {
			x.Actions = append(x.Actions, "see more: "+next)
		}
	}
	pools, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil {
		return nil, err
	}
	for _, p := range pools.GetPools() {
		if full(p.GetAllocatedBytes(), p.GetCapacityBytes(), nearlyFullPool) {
			x.Facts = append(x.Facts, fmt.Sprintf("pool %s is nearly full: %s is taken", p.GetName(), taken(p.GetAllocatedBytes(), p.GetCapacityBytes())))
			x.Actions = append(x.Actions, "see more: weft explain pool "+p.GetName())
		}
	}
	if n := len(x.Facts); n > 0 {
		x.Summary = fmt.Sprintf("%s in the cluster, worst first", cli.Nouns(n, "problem"))
	}
	return x, nil
}

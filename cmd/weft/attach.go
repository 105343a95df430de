// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/archive"
	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

type attachOptions struct {
	volume, node, mode string
	rail, nearGPU      string
	wait               bool
}

// modes are the ways to attach a volume.
var modes = map[string]pb.AttachMode{
	"exclusive":        pb.AttachMode_ATTACH_MODE_EXCLUSIVE,
	"shared-read-only": pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY,
	"shared-block":     pb.AttachMode_ATTACH_MODE_SHARED_BLOCK,
}

// mode returns m as --mode spells it.
func mode(m pb.AttachMode) string { return strings.ReplaceAll(pb.Word(m), "_", "-") }

func newAttach(g *cli.Globals) *cobra.Command {
	var o attachOptions
	cmd := &cobra.Command{
		Use:   "attach VOLUME",
		Short: "Attach a volume to a node as a block device and print the device",
		Long: `Attach a volume to a node exclusively and print the device there
(/dev/weft/VOLUME, or /dev/weft/VOLUME+ID beside another cluster's volume of that
name). Progress is reported on stderr. The attachment is a record: it is made
again after a reboot, until "weft detach".

With --mode shared-read-only any number of nodes can attach the volume at once,
and none can write. Mount it with "ro" (xfs: "ro,nouuid"). The last writer must
have unmounted it, or the kernel refuses the mount.

With --mode shared-block several nodes can write to the raw device, for live
migration or a cluster file system. An ordinary file system is destroyed by
that. The volume must have one copy.

A snapshot ("db1@mon") and a sealed volume are attached shared-read-only, which
need not be said.

With --rail or --near-gpu the host reaches this volume through that network, if
the targets have a portal there. That goes before what its agent prefers for all
volumes, and stays until the volume is detached.

A host without Weft's agent ("weft node add") gets no device: the command prints
the NQN that the host connects to.`,
		Example: `  weft attach db1
  mkfs.ext4 "$(weft attach db1)"
  weft attach db1 --node gpu1 --timeout 2m
  weft attach dataset --node gpu1 --mode shared-read-only
  weft attach db1@mon --node backup1
  weft attach scratch3 --node gpu1 --near-gpu 3`,
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteAttachable,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runAttach(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.node, "node", "", "`node` that gets the device (default: this host's name)")
	cmd.Flags().StringVar(&o.mode, "mode", "", "`mode`: exclusive, shared-read-only or shared-block (default: exclusive; of a snapshot or a sealed volume shared-read-only)")
	cmd.Flags().StringVar(&o.rail, "rail", "", "reach the volume through this network `rail`, as portals of targets name it")
	cmd.Flags().StringVar(&o.nearGPU, "near-gpu", "", "reach it through the card nearest to this `GPU` of the node, a number or a PCI address of weft doctor --gpu")
	cmd.Flags().BoolVar(&o.wait, "wait", true, "wait until the device is there")
	_ = cmd.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions(slices.Sorted(maps.Keys(modes)), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("node", g.CompleteNodes)
	return cmd
}

// modeFor is the mode in which a volume or a snapshot is attached; word is as --mode spells it, empty if none
// is given. A snapshot is known by its name. Otherwise the manager chooses, which knows whether the volume is
// sealed.
func modeFor(volume, word string) (m pb.AttachMode, known bool) {
	if word == "" && !cli.IsSnapshotName(volume) {
		return pb.AttachMode_ATTACH_MODE_UNSPECIFIED, true
	}
	m, known = modes[cmp.Or(word, "shared-read-only")]
	return m, known
}

func runAttach(ctx context.Context, api pb.ManagerClient, o attachOptions, out *cli.Output) error {
	node, err := cli.NodeOrThis(o.node)
	if err != nil {
		return err
	}
	how, ok := modeFor(o.volume, o.mode)
	if !ok {
		return cli.UsageError{Err: fmt.Errorf("--mode %q is not known", o.mode), Hint: "use one of: " + strings.Join(slices.Sorted(maps.Keys(modes)), ", ")}
	}
	a, err := api.Attach(ctx, &pb.AttachRequest{Volume: o.volume, Node: node, Mode: how, Rail: o.rail, NearGpu: o.nearGPU})
	if err != nil {
		return err
	}
	if a.GetRail() != o.rail && o.rail != "" || a.GetNearGpu() != o.nearGPU && o.nearGPU != "" {
		out.Warn("the volume manager is of an earlier version: it does not know --rail and --near-gpu, and the volume is attached without")
	}
	if o.wait {
		if a, err = waitForAttachment(ctx, api, a, out); err != nil {
			return err
		}
	}
	return out.Print(a, func(w io.Writer) {
		if name := cmp.Or(a.GetDevice(), a.GetStockNqn()); name != "" {
			fmt.Fprintln(w, name)
		}
	})
}

const attachStands = "the attachment stands; repeat the command to keep waiting, or undo it with `weft detach`"

// waitForAttachment returns once the host has the device.
func waitForAttachment(ctx context.Context, api pb.ManagerClient, a *pb.Attachment, out *cli.Output) (*pb.Attachment, error) {
	volume, node := a.GetVolumeName(), a.GetNode()
	err := cli.Wait(ctx, out, attachStands, func(ctx context.Context) (string, error) {
		if a.GetState() == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			return "", nil
		}
		v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: a.GetVolumeId()})
		if err != nil {
			return "", err
		}
		now := attachmentOf(v, node)
		if now == nil || now.GetState() == pb.AttachmentState_ATTACHMENT_STATE_DETACHING {
			return "", status.Errorf(codes.FailedPrecondition, "volume %q: it was detached from %s meanwhile", volume, node)
		}
		a = now
		return attaching(a), nil
	})
	return a, err
}

// attachmentOf returns the attachment to a node, nil if there is none.
func attachmentOf(v *pb.Volume, node string) *pb.Attachment {
	for _, a := range cli.AttachmentsOf(v) {
		if a.GetNode() == node {
			return a
		}
	}
	return nil
}

// attaching says what an attachment waits for; empty once the device exists.
func attaching(a *pb.Attachment) string {
	if a.GetState() == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
		return ""
	}
	text := cmp.Or(a.GetWaitingFor(), fmt.Sprintf("node %s to connect volume %s", a.GetNode(), a.GetVolumeName()))
	if a.GetResyncTotalBytes() > 0 {
		text += fmt.Sprintf(" (%s copied)", cli.Used(a.GetResyncDoneBytes(), a.GetResyncTotalBytes()))
	}
	return text
}

// archives are the tools of the commands that export and import.
var archives = archive.Tools{Attach: attachHere, Ready: waitForVolume}

// attachHere attaches a volume or a snapshot, name or id, to this machine. What detaches it again does
// nothing if it was attached before.
func attachHere(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) (device string, detach func(context.Context) error, err error) {
	node, err := cli.NodeOrThis("")
	if err != nil {
		return "", nil, err
	}
	before, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
	if err != nil {
		return "", nil, err
	}
	detach = func(ctx context.Context) error {
		return runDetach(ctx, api, detachOptions{volume: before.GetId(), node: node, wait: true}, out)
	}
	if attachmentOf(before, node) != nil {
		detach = func(context.Context) error { return nil }
	}
	how, _ := modeFor(before.GetName(), "")
	a, err := api.Attach(ctx, &pb.AttachRequest{Volume: before.GetId(), Node: node, Mode: how})
	if err == nil {
		a, err = waitForAttachment(ctx, api, a, out)
	}
	if err == nil && a.GetDevice() == "" {
		err = fmt.Errorf("volume %s has no device on %s: it is a host without Weft's agent", volume, node)
	}
	if err != nil {
		after, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return "", nil, errors.Join(err, detach(after))
	}
	return a.GetDevice(), detach, nil
}

type detachOptions struct {
	volume, node        string
	force, wait, cancel bool
}

func newDetach(g *cli.Globals) *cobra.Command {
	var o detachOptions
	cmd := &cobra.Command{
		Use:   "detach VOLUME",
		Short: "Detach a volume from a node",
		Long: `Detach a volume from the node that has it. The node first removes the device,
which is possible only when nothing has it open: unmount it before. A shared
volume is detached from all its nodes, or from the one that --node names.

While a detach waits for a node, --cancel withdraws it: the node keeps the
device, and its users do not notice.

With --force the node is not asked: the targets stop accepting its writes, its
device fails, and data that it has not written yet is lost. Use it when the node
is lost. The next attach makes the copies equal before the device appears.`,
		Example: `  weft detach db1
  weft detach db1 --cancel
  weft detach db1 --node gpu1 --force`,
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteAttachable,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runDetach(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.node, "node", "", "`node` that has the device (default: wherever it is attached)")
	cmd.Flags().BoolVar(&o.force, "force", false, "do not ask the node: fence it at the targets")
	cmd.Flags().BoolVar(&o.cancel, "cancel", false, "withdraw a detach that is waiting for its node")
	cmd.Flags().BoolVar(&o.wait, "wait", true, "wait until the volume is free")
	_ = cmd.RegisterFlagCompletionFunc("node", g.CompleteNodes)
	return cmd
}

func runDetach(ctx context.Context, api pb.ManagerClient, o detachOptions, out *cli.Output) error {
	if o.cancel {
		return runCancelDetach(ctx, api, o, out)
	}
	before, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.volume})
	if err != nil {
		return err
	}
	if o.node != "" && attachmentOf(before, o.node) == nil || len(cli.AttachmentsOf(before)) == 0 {
		out.Say("volume %s is not attached%s", o.volume, attachedElsewhere(before, o.node))
		return nil
	}
	if _, err := api.Detach(ctx, &pb.DetachRequest{Volume: o.volume, Node: o.node, Force: o.force}); err != nil {
		return err
	}
	if o.force {
		out.Say("volume %s is detached by force: its device on %s fails, and data not yet written is lost", o.volume, cmp.Or(o.node, attached(before)))
	}
	if !o.wait {
		return nil
	}
	stands := fmt.Sprintf("the detach continues; to withdraw it: `weft detach %s --cancel`", o.volume)
	return cli.Wait(ctx, out, stands, func(ctx context.Context) (string, error) {
		v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.volume})
		if status.Code(err) == codes.NotFound {
			return "", nil
		}
		for _, a := range cli.AttachmentsOf(v) {
			if (o.node == "" || o.node == a.GetNode()) && a.GetState() == pb.AttachmentState_ATTACHMENT_STATE_DETACHING {
				return cmp.Or(a.GetWaitingFor(), fmt.Sprintf("node %s to release volume %s", a.GetNode(), o.volume)), err
			}
		}
		return "", err
	})
}

// attachedElsewhere completes "volume db1 is not attached".
func attachedElsewhere(v *pb.Volume, node string) string {
	if node == "" {
		return ""
	}
	if where := attached(v); where != "" {
		return fmt.Sprintf(" to %s, but to %s", node, where)
	}
	return " to " + node
}

func runCancelDetach(ctx context.Context, api pb.ManagerClient, o detachOptions, out *cli.Output) error {
	if o.force {
		return cli.UsageError{Err: fmt.Errorf("--cancel: cannot be combined with --force"), Hint: "a forced detach cannot be withdrawn"}
	}
	if _, err := api.Detach(ctx, &pb.DetachRequest{Volume: o.volume, Node: o.node, Cancel: true}); err != nil {
		return err
	}
	if !o.wait {
		return nil
	}
	err := cli.Wait(ctx, out, attachStands, func(ctx context.Context) (string, error) {
		v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.volume})
		if err != nil {
			return "", err
		}
		kept := 0
		for _, a := range cli.AttachmentsOf(v) {
			if o.node != "" && o.node != a.GetNode() {
				continue
			}
			kept++
			if a.GetState() == pb.AttachmentState_ATTACHMENT_STATE_GRANTED {
				return attaching(a), nil
			}
		}
		if kept == 0 {
			return "", status.Errorf(codes.FailedPrecondition, "volume %q: it was detached before the cancellation arrived; attach it again", o.volume)
		}
		return "", nil
	})
	if err == nil {
		out.Say("volume %s stays attached", o.volume)
	}
	return err
}

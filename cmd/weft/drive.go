// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

func newDrive(g *cli.Globals) *cobra.Command {
	return cli.Group("drive", "Manage drives: the devices that Weft uses, and those it could use",
		newDriveDevices(g), g.Watched(newDriveList(g)), newDriveAdd(g), newDriveLabel(g), newDriveDrain(g), newDriveEvict(g), newDrivePolicy(g))
}

func newDriveDevices(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:               "devices NODE",
		Short:             "List a node's block devices, and why some cannot be added",
		Example:           "  weft drive devices t1",
		Args:              cli.Takes("NODE"),
		ValidArgsFunction: g.CompleteNode,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runDriveDevices(ctx, api, args[0], out)
		}),
	}
}

func runDriveDevices(ctx context.Context, api pb.ManagerClient, node string, out *cli.Output) error {
	devices, err := api.ListDevices(ctx, &pb.ListDevicesRequest{Node: node})
	if err != nil {
		return err
	}
	return out.Print(devices, func(w io.Writer) {
		var rows [][]string
		for _, d := range devices.GetDevices() {
			rows = append(rows, []string{
				d.GetPath(), d.GetModel(), d.GetSerial(), cli.Size(d.GetSizeBytes()),
				strings.Join(d.GetSignatures(), ","), strings.Join(d.GetHolders(), ","), cli.ShortID(d.GetDriveId()), d.GetRefused(),
			})
		}
		cli.Table(w, "DEVICE MODEL SERIAL SIZE SIGNATURES HOLDERS DRIVE REFUSED", rows...)
	})
}

type driveListOptions struct {
	node   string
	health bool
}

func newDriveList(g *cli.Globals) *cobra.Command {
	var o driveListOptions
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the drives of the cluster",
		Long: `List the drives of the cluster.

With --health, show what their targets last read of them, which they do once a
minute: the percentage of its life that a drive has used (WEAR), its SPARE
capacity and TEMPerature, its media and data integrity ERRORS, how often its
power was CUT without warning, the bytes WRITTEN to it, and the mean time that a
read or write took in the last minute (LATENCY). A dash stands for what a drive
does not tell.`,
		Example: "  weft drive list\n  weft drive list --node t1\n  weft drive list --health",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runDriveList(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.node, "node", "", "only the drives of this `node`")
	cmd.Flags().BoolVar(&o.health, "health", false, "show wear, spare, temperature, errors and latency")
	return cmd
}

func runDriveList(ctx context.Context, api pb.ManagerClient, o driveListOptions, out *cli.Output) error {
	drives, err := api.ListDrives(ctx, &pb.ListDrivesRequest{Node: o.node})
	if err != nil {
		return err
	}
	return out.Print(drives, func(w io.Writer) {
		if o.health {
			printHealth(w, drives.GetDrives())
			return
		}
		var rows [][]string
		for _, d := range drives.GetDrives() {
			rows = append(rows, []string{
				cli.ShortID(d.GetId()), d.GetNode(), d.GetDevice(), d.GetModel(), cli.Size(d.GetCapacityBytes()),
				cli.Promised(d.GetAllocatedBytes(), d.GetProvisionedBytes(), d.GetCapacityBytes()), pb.Word(d.GetState()), cli.Pairs(d.GetLabels()), d.GetReason(),
			})
		}
		cli.Table(w, "DRIVE NODE DEVICE MODEL CAPACITY USED STATE LABELS REASON", rows...)
	})
}

// printHealth is the table of `weft drive list --health`.
func printHealth(w io.Writer, drives []*pb.Drive) {
	var rows [][]string
	for _, d := range drives {
		row := []string{cli.ShortID(d.GetId()), d.GetNode(), d.GetDevice(), pb.Word(d.GetState())}
		row = append(row, healthColumns(d.GetHealth())...)
		rows = append(rows, append(row, cmp.Or(d.GetReason(), d.GetHealth().GetUnread())))
	}
	cli.Table(w, "DRIVE NODE DEVICE STATE WEAR SPARE TEMP ERRORS CUTS WRITTEN LATENCY REASON", rows...)
}

// healthColumns are what a drive's log says, and its latency.
func healthColumns(h *pb.DriveHealth) []string {
	var latency string
	if h.GetLatency() != nil {
		latency = h.GetLatency().AsDuration().Round(10 * time.Microsecond).String()
	}
	s := h.GetSmart()
	if s == nil {
		return []string{"", "", "", "", "", "", latency}
	}
	spare := fmt.Sprintf("%d%%", s.GetSparePercent())
	if s.GetSparePercent() == 0 && s.GetSpareThresholdPercent() == 0 {
		spare = "" // as virtual drives do
	}
	return []string{
		fmt.Sprintf("%d%%", s.GetUsedPercent()), spare, fmt.Sprintf("%d°C", s.GetCelsius()), fmt.Sprint(s.GetMediaErrors()),
		fmt.Sprint(s.GetUnsafeShutdowns()), cli.Size(s.GetWrittenBytes()), latency,
	}
}

type driveAddOptions struct {
	node, device string
	labels       []string
	forceErase   string
	wait         bool
}

func newDriveAdd(g *cli.Globals) *cobra.Command {
	var o driveAddOptions
	cmd := &cobra.Command{
		Use:   "add NODE DEVICE",
		Short: "Add a device as a drive",
		Long: `Add a device: the node's target agent writes Weft's label on it. A device that
holds anything (a file system, a partition table, another program's label) or
that a program has open is refused. To erase what is there, repeat the command
with --force-erase and exactly the text that the refusal names. A drive of a Weft
cluster may hold the only good copy of a volume: for it, --force-erase must name
the drive and its cluster, "weft drive ID of cluster ID".

Prints the drive's id.`,
		Example: `  weft drive add t1 /dev/nvme0n1 --label class=fast
  weft drive add t1 /dev/sdb --force-erase 'ext4 "data"'`,
		Args:              cli.Takes("NODE", "DEVICE"),
		ValidArgsFunction: g.CompleteDevices,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.node, o.device = args[0], args[1]
			return runDriveAdd(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringArrayVar(&o.labels, "label", nil, "`key=value`, by which pools select drives; may be repeated")
	cmd.Flags().StringVar(&o.forceErase, "force-erase", "", "erase `what` is on the device; use the text of the refusal")
	cmd.Flags().BoolVar(&o.wait, "wait", false, "wait until volumes can use the drive")
	return cmd
}

func runDriveAdd(ctx context.Context, api pb.ManagerClient, o driveAddOptions, out *cli.Output) error {
	labels, err := cli.ParsePairs(o.labels)
	if err != nil {
		return err
	}
	d, err := api.AddDrive(ctx, &pb.AddDriveRequest{Node: o.node, Device: o.device, Labels: labels, ForceErase: o.forceErase})
	if err != nil {
		return err
	}
	if o.wait {
		if d, err = waitForDrive(ctx, api, d, out); err != nil {
			return err
		}
	}
	return out.Print(d, func(w io.Writer) { fmt.Fprintln(w, d.GetId()) })
}

// waitForDrive returns once a drive's label is written.
func waitForDrive(ctx context.Context, api pb.ManagerClient, added *pb.Drive, out *cli.Output) (ready *pb.Drive, err error) {
	err = cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (waitingFor string, err error) {
		drives, err := api.ListDrives(ctx, &pb.ListDrivesRequest{Node: added.GetNode()})
		if err != nil {
			return "", err
		}
		for _, d := range drives.GetDrives() {
			if d.GetId() != added.GetId() {
				continue
			}
			if ready = d; d.GetState() == pb.DriveState_DRIVE_STATE_READY {
				return "", nil
			}
			return strings.TrimSuffix(fmt.Sprintf("%s on %s, which is %s: %s", d.GetDevice(), d.GetNode(), pb.Word(d.GetState()), d.GetReason()), ": "), nil
		}
		return "", fmt.Errorf("drive %s was removed", cli.ShortID(added.GetId()))
	})
	return ready, err
}

func newDriveLabel(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "label DRIVE [KEY=VALUE...]",
		Short: "Replace the labels of a drive",
		Long: `Replace the labels of a drive, by which pools select it. Without labels, remove
all of them. Volumes on the drive stay there.`,
		Example:           "  weft drive label 4f1c22aa class=fast\n  weft drive label 4f1c22aa",
		Args:              cli.TakesMore("DRIVE"),
		ValidArgsFunction: g.CompleteDrives,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runDriveLabel(ctx, api, args[0], args[1:], out)
		}),
	}
}

func runDriveLabel(ctx context.Context, api pb.ManagerClient, drive string, labels []string, out *cli.Output) error {
	parsed, err := cli.ParsePairs(labels)
	if err != nil {
		return err
	}
	id, err := resolveDrive(ctx, api, drive)
	if err != nil {
		return err
	}
	d, err := api.SetDriveLabels(ctx, &pb.SetDriveLabelsRequest{DriveId: id, Labels: parsed})
	if err != nil {
		return err
	}
	out.Say("drive %s has labels %s", cli.ShortID(id), cli.OrNone(cli.Pairs(d.GetLabels())))
	return out.Print(d, nil)
}

func newDriveEvict(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "evict DRIVE",
		Short: "Remove a drive, after its legs were made again elsewhere",
		Long: `Remove a drive and erase Weft's label on it. Its legs are made again elsewhere
first; those of a drive that is gone at once. Refused for a drive with legs of
volumes of one copy, or with the only good copy of a column that cannot be read.`,
		Example:           "  weft drive evict 4f1c22aa",
		Args:              cli.Takes("DRIVE"),
		ValidArgsFunction: g.CompleteDrives,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runDriveEvict(ctx, api, args[0], out)
		}),
	}
}

func runDriveEvict(ctx context.Context, api pb.ManagerClient, drive string, out *cli.Output) error {
	id, err := resolveDrive(ctx, api, drive)
	if err != nil {
		return err
	}
	if _, err := api.EvictDrive(ctx, &pb.EvictDriveRequest{DriveId: id}); err != nil {
		return err
	}
	out.Say("drive %s is being removed", cli.ShortID(id))
	return nil
}

func newDrivePolicy(g *cli.Globals) *cobra.Command {
	return cli.Group("policy", "Manage what becomes a drive by itself", newDrivePolicyCreate(g), newDrivePolicyList(g), newDrivePolicyDelete(g))
}

type drivePolicyOptions struct {
	name, model   string
	least, most   block.Size
	nodes, labels []string
}

func newDrivePolicyCreate(g *cli.Globals) *cobra.Command {
	var o drivePolicyOptions
	cmd := &cobra.Command{
		Use:   "create POLICY",
		Short: "Let devices become drives by themselves, if nothing is on them",
		Long: `Let devices become drives by themselves: those that targets see now, and those
that are put in later. The flags select them; without flags, all are selected.

Only blank devices are taken: what "weft drive add" would refuse stays as it is,
and no policy forces anything. Nor are devices taken that have neither a serial
number nor a WWID (files, loop devices), that several nodes see, that share these
with another device (partitions), or that were evicted since there are policies.
"weft drive add" adds those.`,
		Example: `  weft drive policy create fast --model 'SAMSUNG MZQL2*' --min-size 1TiB --label class=fast
  weft drive policy create rack1 --on rack=r1`,
		Args: cli.Takes("POLICY"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.name = args[0]
			return runDrivePolicyCreate(ctx, api, o, out)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&o.model, "model", "", "`pattern` of the model, in which * stands for any text")
	f.Var(sizeFlag{&o.least}, "min-size", "smallest `size`, such as 1TiB")
	f.Var(sizeFlag{&o.most}, "max-size", "largest `size`")
	f.StringArrayVar(&o.nodes, "on", nil, "`key=value`, a label of the nodes whose devices are taken; may be repeated")
	f.StringArrayVar(&o.labels, "label", nil, "`key=value` that the drives get, by which pools select them; may be repeated")
	return cmd
}

func runDrivePolicyCreate(ctx context.Context, api pb.ManagerClient, o drivePolicyOptions, out *cli.Output) error {
	nodes, err := cli.ParsePairs(o.nodes)
	if err != nil {
		return err
	}
	labels, err := cli.ParsePairs(o.labels)
	if err != nil {
		return err
	}
	p, err := api.CreateDrivePolicy(ctx, &pb.CreateDrivePolicyRequest{Policy: &pb.DrivePolicy{
		Name: o.name, Model: o.model, MinSizeBytes: uint64(o.least), MaxSizeBytes: uint64(o.most), Nodes: nodes, Labels: labels,
	}})
	if err != nil {
		return cli.ArgumentError{Name: "POLICY", Err: err}
	}
	out.Say("drive policy %s is created; `weft drive list` shows the drives", p.GetName())
	return out.Print(p, nil)
}

func newDrivePolicyList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the policies for drives",
		Example: "  weft drive policy list",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runDrivePolicyList(ctx, api, out)
		}),
	}
}

func runDrivePolicyList(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	all, err := api.ListDrivePolicies(ctx, &pb.ListDrivePoliciesRequest{})
	if err != nil {
		return err
	}
	return out.Print(all, func(w io.Writer) {
		var rows [][]string
		for _, p := range all.GetPolicies() {
			rows = append(rows, []string{p.GetName(), p.GetModel(), sizeOrNone(p.GetMinSizeBytes()), sizeOrNone(p.GetMaxSizeBytes()), cli.Pairs(p.GetNodes()), cli.Pairs(p.GetLabels())})
		}
		cli.Table(w, "POLICY MODEL LEAST MOST NODES LABELS", rows...)
	})
}

// sizeOrNone is a bound that may be missing.
func sizeOrNone(bytes uint64) string {
	if bytes == 0 {
		return ""
	}
	return cli.Size(bytes)
}

func newDrivePolicyDelete(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:     "delete POLICY",
		Short:   "End a policy; the drives that it has taken stay",
		Example: "  weft drive policy delete fast",
		Args:    cli.Takes("POLICY"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			policies, err := api.ListDrivePolicies(ctx, &pb.ListDrivePoliciesRequest{})
			if err != nil {
				return err
			}
			if _, err := api.DeleteDrivePolicy(ctx, &pb.DeleteDrivePolicyRequest{Name: args[0]}); err != nil {
				return err
			}
			if slices.Contains(cli.Each(policies.GetPolicies(), (*pb.DrivePolicy).GetName), args[0]) {
				out.Say("drive policy %s is deleted", args[0])
			} else {
				out.Say("drive policy %s does not exist: nothing to delete", args[0])
			}
			return nil
		}),
	}
}

// resolveDrive accepts a drive's id or the beginning of it.
func resolveDrive(ctx context.Context, api pb.ManagerClient, drive string) (string, error) {
	if _, err := block.ParseDriveID(drive); err == nil {
		return drive, nil
	}
	drives, err := api.ListDrives(ctx, &pb.ListDrivesRequest{})
	if err != nil {
		return "", err
	}
	var ids []string
	for _, d := range drives.GetDrives() {
		ids = append(ids, d.GetId())
	}
	return matchID("drive", drive, ids)
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

type volumeExpandOptions struct {
	volume string
	size   block.Size
	wait   bool
}

func newVolumeExpand(g *cli.Globals) *cobra.Command {
	var o volumeExpandOptions
	cmd := &cobra.Command{
		Use:   "expand VOLUME --size SIZE",
		Short: "Expand a volume, in use or not",
		Long: `Expand a volume to SIZE. Its legs grow on their own drives, all of them or none.
Then the attached hosts' devices grow, without stopping I/O. Afterwards grow the
file system with its own tool: resize2fs, xfs_growfs. A volume cannot be made
smaller.

With --wait, the command returns when the volume and every host's device have the
new size.`,
		Example:           "  weft volume expand db1 --size 200GiB --wait && resize2fs /dev/weft/db1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runVolumeExpand(ctx, api, o, out)
		}),
	}
	cmd.Flags().Var(sizeFlag{&o.size}, "size", "new `size` of the volume, such as 20GiB; without a unit, bytes")
	cmd.Flags().BoolVar(&o.wait, "wait", false, "wait until the volume and the devices of attached hosts have the new size")
	return cmd
}

func runVolumeExpand(ctx context.Context, api pb.ManagerClient, o volumeExpandOptions, out *cli.Output) error {
	if o.size == 0 {
		return cli.UsageError{Err: fmt.Errorf("--size: missing or 0"), Hint: "such as --size 20GiB"}
	}
	v, err := api.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: o.volume, SizeBytes: uint64(o.size)})
	if err != nil {
		return err
	}
	if to := v.GetExpandingToBytes(); to != 0 {
		out.Say("volume %s is being expanded from %s to %s", v.GetName(), cli.Size(v.GetSizeBytes()), cli.Size(to))
	} else {
		out.Say("volume %s has %s", v.GetName(), cli.Size(v.GetSizeBytes()))
	}
	if o.wait {
		if v, err = waitForSize(ctx, api, v.GetId(), o.size, out); err != nil {
			return err
		}
	}
	return out.Print(v, nil)
}

// waitForSize returns once a volume and the devices of its hosts have a size.
func waitForSize(ctx context.Context, api pb.ManagerClient, volume string, least block.Size, out *cli.Output) (v *pb.Volume, err error) {
	err = cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
		if v, err = api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume}); err != nil {
			return "", err
		}
		if v.GetSizeBytes() >= uint64(least) {
			return smallDevice(v), nil
		}
		why, err := api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: volume})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("volume %s to grow: %s", v.GetName(), strings.Join(why.GetWaits(), "; ")), nil
	})
	return v, err
}

// smallDevice names a host whose device has not grown yet. Hosts of an older version do not report
// their device's size.
func smallDevice(v *pb.Volume) string {
	for _, a := range v.GetAttachments() {
		if n := a.GetSizeBytes(); n != 0 && n < v.GetSizeBytes() {
			return fmt.Sprintf("host %s, whose device has %s of %s", a.GetNode(), cli.Size(n), cli.Size(v.GetSizeBytes()))
		}
	}
	return ""
}

func newVolumeSet(g *cli.Globals) *cobra.Command {
	var changes []string
	var formatted string
	cmd := &cobra.Command{
		Use:   "set VOLUME [--label KEY=VALUE] [--formatted none]",
		Short: "Change a volume's labels, or what it is recorded to hold",
		Long: `Set labels of a volume with KEY=VALUE, and remove them with KEY-, or all of them
with '*-'. Other labels stay. A volume has at most 64 labels, with keys of up to
317 bytes and values of up to 256, 8 KiB together.

The use of a volume is recorded before it is written: the file system that was
made on it for a pod, or "raw" if it was attached by hand or as a raw device. No
file system is made for a pod on a volume that is recorded as raw. With
--formatted none you state that nothing on the volume is needed, so that a file
system can be made. The volume must not be attached.`,
		Example: `  weft volume set db1 --label tier=gold --label owner-
  weft volume set db1 --formatted none`,
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolumeSet(ctx, api, args[0], changes, formatted, out)
		}),
	}
	cmd.Flags().StringArrayVar(&changes, "label", nil, "`key=value` to set, or key- to remove; may be repeated")
	cmd.Flags().StringVar(&formatted, "formatted", "", "`none` states that nothing on the volume is needed, so that Kubernetes may format it")
	return cmd
}

func runVolumeSet(ctx context.Context, api pb.ManagerClient, volume string, changes []string, formatted string, out *cli.Output) error {
	switch {
	case len(changes) == 0 && formatted == "":
		return cli.UsageError{Err: fmt.Errorf("nothing to change: --label or --formatted is missing"), Hint: "such as --label tier=gold, or --label tier- to remove it"}
	case formatted != "" && formatted != "none":
		return cli.UsageError{Err: fmt.Errorf("--formatted %q is not known", formatted), Hint: "use none: nothing on the volume is needed"}
	}
	r := &pb.UpdateVolumeRequest{Volume: volume, Formatted: formatted}
	var set []string
	for _, change := range changes {
		key, remove := strings.CutSuffix(change, "-")
		if remove && !strings.Contains(change, "=") {
			r.RemoveLabels = append(r.RemoveLabels, key)
			continue
		}
		set = append(set, change)
	}
	var err error
	if r.SetLabels, err = parsePairs(set); err != nil {
		return err
	}
	for _, key := range r.RemoveLabels {
		if _, both := r.SetLabels[key]; both || key == "" {
			return cli.UsageError{Err: fmt.Errorf("label %q: both set and removed", key)}
		}
	}
	v, err := api.UpdateVolume(ctx, r)
	if err != nil {
		return err
	}
	if len(changes) > 0 {
		out.Say("volume %s has labels %s", v.GetName(), cli.OrNone(cli.Pairs(v.GetLabels())))
	}
	if formatted != "" {
		out.Say("Kubernetes may now make a file system on volume %s", v.GetName())
	}
	return out.Print(v, nil)
}

type volumeScrubOptions struct {
	volume string
	rate   block.Size
	stop   bool
}

func newVolumeScrub(g *cli.Globals) *cobra.Command {
	var o volumeScrubOptions
	cmd := &cobra.Command{
		Use:   "scrub VOLUME",
		Short: "Compare the copies of an attached volume while it is in use",
		Long: `Compare the copies of an attached volume while it is in use, in the background:
users' I/O goes first. Nothing is changed. Each of the first 64 ranges that
differ or cannot be read is an event; the log of the volume's host has all of
them. "weft explain volume" shows the progress and the result.

Only hosts with the user-space data path can compare copies. A scrub begins again
when its host, or the agent there, starts anew.`,
		Example:           "  weft volume scrub db1 --rate 100MiB\n  weft volume scrub db1 --stop",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runVolumeScrub(ctx, api, o, out)
		}),
	}
	cmd.Flags().Var(sizeFlag{&o.rate}, "rate", "most that is read of each leg in a second, as a `size`; without it there is no limit")
	cmd.Flags().BoolVar(&o.stop, "stop", false, "stop the scrub that is under way")
	return cmd
}

func runVolumeScrub(ctx context.Context, api pb.ManagerClient, o volumeScrubOptions, out *cli.Output) error {
	v, err := api.ScrubVolume(ctx, &pb.ScrubVolumeRequest{Volume: o.volume, Stop: o.stop, BytesPerSecond: uint64(o.rate)})
	if err != nil {
		return err
	}
	if v.GetScrub() != nil && v.GetScrub().GetEnded() == nil {
		out.Say("the copies of volume %s are being compared", v.GetName())
	} else {
		out.Say("volume %s is not being compared", v.GetName())
	}
	return out.Print(v, nil)
}

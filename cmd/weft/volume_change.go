// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

type volumeExpandOptions struct {
	volume string
	size   block.Size
	wait   bool
}

func newVolumeExpand(g *globals) *cobra.Command {
	var o volumeExpandOptions
	cmd := &cobra.Command{
		Use:   "expand VOLUME --size SIZE",
		Short: "Make a volume larger, in use or not",
		Long: `Makes a volume larger, up to SIZE. Its legs grow on the drives that they are on,
all of them or none; then the device of whoever has it attached grows, without a
stop of I/O. A file system on it is grown after that, by its own tool: resize2fs,
xfs_growfs. A volume is never made smaller.

With --wait, returns when the volume and every host's device have the new size.`,
		Example:           "  weft volume expand db1 --size 200GiB --wait && resize2fs /dev/weft/db1",
		Args:              takes("VOLUME"),
		ValidArgsFunction: g.completeVolumes,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			o.volume = args[0]
			return runVolumeExpand(ctx, api, o, out)
		}),
	}
	cmd.Flags().Var(sizeFlag{&o.size}, "size", "new `size` of the volume, such as 20GiB; without a unit, bytes")
	cmd.Flags().BoolVar(&o.wait, "wait", false, "wait until the volume, and the device of whoever has it, is as large")
	return cmd
}

func runVolumeExpand(ctx context.Context, api pb.ManagerClient, o volumeExpandOptions, out *output) error {
	if o.size == 0 {
		return usageError{err: fmt.Errorf("--size: must be given, and more than 0"), hint: "such as --size 20GiB"}
	}
	v, err := api.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: o.volume, SizeBytes: uint64(o.size)})
	if err != nil {
		return err
	}
	if to := v.GetExpandingToBytes(); to != 0 {
		out.say("volume %s is being expanded from %s to %s", v.GetName(), size(v.GetSizeBytes()), size(to))
	} else {
		out.say("volume %s has %s", v.GetName(), size(v.GetSizeBytes()))
	}
	if o.wait {
		if v, err = waitForSize(ctx, api, v.GetId(), o.size, out); err != nil {
			return err
		}
	}
	return out.print(v, nil)
}

// waitForSize returns once a volume and the devices of its hosts have a size.
func waitForSize(ctx context.Context, api pb.ManagerClient, volume string, least block.Size, out *output) (v *pb.Volume, err error) {
	err = wait(ctx, out, func(ctx context.Context) (string, error) {
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

// smallDevice names a host whose device has not grown yet. Hosts of an older version
// do not say how large theirs is.
func smallDevice(v *pb.Volume) string {
	for _, a := range v.GetAttachments() {
		if n := a.GetSizeBytes(); n != 0 && n < v.GetSizeBytes() {
			return fmt.Sprintf("host %s, whose device has %s of %s", a.GetNode(), size(n), size(v.GetSizeBytes()))
		}
	}
	return ""
}

func newVolumeSet(g *globals) *cobra.Command {
	var changes []string
	var formatted string
	cmd := &cobra.Command{
		Use:   "set VOLUME [--label KEY=VALUE] [--formatted none]",
		Short: "Change what may change of a volume",
		Long: `Sets labels of a volume, and takes away those that are given as KEY-. Others
stay.

What a volume was used for is recorded before it is written: the file system that
was made on it for a pod, or "raw" if it was attached by hand or as a raw device.
For a pod no file system is made on such a one. With --formatted none you say
that nothing on it is of use, so that one may be made. It must not be attached.`,
		Example: `  weft volume set db1 --label tier=gold --label owner-
  weft volume set db1 --formatted none`,
		Args:              takes("VOLUME"),
		ValidArgsFunction: g.completeVolumes,
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error {
			return runVolumeSet(ctx, api, args[0], changes, formatted, out)
		}),
	}
	cmd.Flags().StringArrayVar(&changes, "label", nil, "`key=value` to set, or key- to take away; may be repeated")
	cmd.Flags().StringVar(&formatted, "formatted", "", "none: forget what was made on the volume, since it holds nothing of use")
	return cmd
}

func runVolumeSet(ctx context.Context, api pb.ManagerClient, volume string, changes []string, formatted string, out *output) error {
	switch {
	case len(changes) == 0 && formatted == "":
		return usageError{err: fmt.Errorf("--label: must be given, or --formatted"), hint: "such as --label tier=gold, or --label tier- to take it away"}
	case formatted != "" && formatted != "none":
		return usageError{err: fmt.Errorf("--formatted %q is not known", formatted), hint: "none is: the volume holds nothing of use"}
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
			return usageError{err: fmt.Errorf("label %q: set and taken away at once", key)}
		}
	}
	v, err := api.UpdateVolume(ctx, r)
	if err != nil {
		return err
	}
	if len(changes) > 0 {
		out.say("volume %s has labels %s", v.GetName(), pairs(v.GetLabels()))
	}
	if formatted != "" {
		out.say("a file system may be made on volume %s", v.GetName())
	}
	return out.print(v, nil)
}

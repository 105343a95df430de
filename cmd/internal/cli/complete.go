// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

// complete asks the manager for names, for at most one second, since a shell waits for them.
func (g *Globals) complete(cmd *cobra.Command, prefix string, ask func(context.Context, pb.ManagerClient) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	conn, err := g.dial(cmd)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer conn.Close()
	parent := cmd.Context()
	if parent == nil {
		parent = context.Background()
	}
	ctx, cancel := context.WithTimeout(parent, time.Second)
	defer cancel()
	all, err := ask(ctx, pages.Client(conn))
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var found []string
	for _, name := range all {
		if strings.HasPrefix(name, prefix) {
			found = append(found, name)
		}
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// CompleteVolumes completes a volume as a command's first argument.
func (g *Globals) CompleteVolumes(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return g.complete(cmd, prefix, volumeNames)
}

func volumeNames(ctx context.Context, api pb.ManagerClient) ([]string, error) {
	r, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{})
	return Each(r.GetVolumes(), (*pb.Volume).GetName), err
}

func snapshotNames(ctx context.Context, api pb.ManagerClient) ([]string, error) {
	r, err := Snapshots(ctx, api, "")
	return Each(r.GetVolumes(), (*pb.Volume).GetName), err
}

// CompleteSnapshots completes a snapshot in any position.
func (g *Globals) CompleteSnapshots(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, snapshotNames)
}

// CompleteSnapshot completes a snapshot as a command's first argument.
func (g *Globals) CompleteSnapshot(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return g.CompleteSnapshots(cmd, args, prefix)
}

// CompleteNewSnapshots completes the volumes of which snapshots are taken, in any position. The name of
// the snapshot follows after an "@", unless --name gives it.
func (g *Globals) CompleteNewSnapshots(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	found, directive := g.complete(cmd, prefix, volumeNames)
	if name := cmd.Flag("name"); name != nil && name.Changed {
		return found, directive
	}
	return Each(found, func(volume string) string { return volume + "@" }), directive | cobra.ShellCompDirectiveNoSpace
}

// CompleteAttachable completes a volume or a snapshot as a command's first argument.
func (g *Globals) CompleteAttachable(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		volumes, err := volumeNames(ctx, api)
		if err != nil {
			return nil, err
		}
		snapshots, err := snapshotNames(ctx, api)
		return append(volumes, snapshots...), err
	})
}

// CompleteNodes completes a node in any position.
func (g *Globals) CompleteNodes(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
		return Each(r.GetNodes(), (*pb.Node).GetName), err
	})
}

// CompleteNode completes a node as a command's first argument.
func (g *Globals) CompleteNode(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return g.CompleteNodes(cmd, args, prefix)
}

// CompleteDevices completes a node, then one of its devices that can be added.
func (g *Globals) CompleteDevices(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return g.CompleteNode(cmd, args, prefix)
	}
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListDevices(ctx, &pb.ListDevicesRequest{Node: args[0]})
		var paths []string
		for _, d := range r.GetDevices() {
			if d.GetRefused() == "" && d.GetDriveId() == "" {
				paths = append(paths, d.GetPath())
			}
		}
		return paths, err
	})
}

// CompleteDrives completes a drive's id.
func (g *Globals) CompleteDrives(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListDrives(ctx, &pb.ListDrivesRequest{})
		return Each(r.GetDrives(), (*pb.Drive).GetId), err
	})
}

// CompletePools completes a pool.
func (g *Globals) CompletePools(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
		return Each(r.GetPools(), (*pb.Pool).GetName), err
	})
}

// Each returns get of every item.
func Each[T any](items []T, get func(T) string) []string {
	var all []string
	for _, item := range items {
		all = append(all, get(item))
	}
	return all
}

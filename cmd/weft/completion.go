// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

func newCompletion() *cobra.Command {
	return &cobra.Command{
		Use:       "completion bash|zsh|fish",
		Short:     "Print a shell completion script",
		Example:   "  source <(weft completion bash)\n  weft completion fish > ~/.config/fish/completions/weft.fish",
		Args:      takes("SHELL"),
		ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), cmd.OutOrStdout()
			switch args[0] {
			case "bash":
				if _, err := io.WriteString(out, bashWords); err != nil {
					return err
				}
				return root.GenBashCompletionV2(out, true)
			case "zsh":
				return root.GenZshCompletion(out)
			case "fish":
				return root.GenFishCompletion(out, true)
			}
			return usageError{err: fmt.Errorf("shell %q: must be bash, zsh or fish", args[0])}
		},
	}
}

// bashWords stands in for the two functions of the package bash-completion that the
// script calls, where that package is not installed.
const bashWords = `if ! declare -F _get_comp_words_by_ref >/dev/null; then
    _get_comp_words_by_ref() {
        words=("${COMP_WORDS[@]}") cword=$COMP_CWORD
        cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
    }
fi
if ! declare -F __ltrim_colon_completions >/dev/null; then
    __ltrim_colon_completions() { :; }
fi
`

// complete asks the manager for names, for one second at most: a shell waits.
func (g *globals) complete(cmd *cobra.Command, prefix string, ask func(context.Context, pb.ManagerClient) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	conn, err := daemon.Dial(g.askedManager(cmd), g.tls)
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

func (g *globals) completeVolumes(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{})
		return each(r.GetVolumes(), (*pb.Volume).GetName), err
	})
}

func (g *globals) completeNodes(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListNodes(ctx, &pb.ListNodesRequest{})
		return each(r.GetNodes(), (*pb.Node).GetName), err
	})
}

// completeNode completes a command's first argument, a node.
func (g *globals) completeNode(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return g.completeNodes(cmd, args, prefix)
}

// completeDevices completes a node, and then a device of it that can be added.
func (g *globals) completeDevices(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return g.completeNode(cmd, args, prefix)
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

func (g *globals) completeDrives(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListDrives(ctx, &pb.ListDrivesRequest{})
		return each(r.GetDrives(), (*pb.Drive).GetId), err
	})
}

func (g *globals) completePools(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return g.complete(cmd, prefix, func(ctx context.Context, api pb.ManagerClient) ([]string, error) {
		r, err := api.ListPools(ctx, &pb.ListPoolsRequest{})
		return each(r.GetPools(), (*pb.Pool).GetName), err
	})
}

// each is what get gives of every item.
func each[T any](items []T, get func(T) string) []string {
	var all []string
	for _, item := range items {
		all = append(all, get(item))
	}
	return all
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/kubeapi"
	"weft.dev/weft/csi"
)

// nodeReader reads a Kubernetes Node.
type nodeReader interface {
	Node(ctx context.Context, name string) (*kubeapi.Node, error)
}

func newKubernetes(g *cli.Globals) *cobra.Command {
	return cli.Group("kubernetes", "Helpers for Weft's own pods; used by the manifests",
		newKubernetesLabels(g), newKubernetesWait(g), newKubernetesGuard())
}

func newKubernetesLabels(g *cli.Globals) *cobra.Command {
	var node, file string
	var take []string
	cmd := &cobra.Command{
		Use:   "labels",
		Short: "Print a node's labels as failure domains, for --labels-file of the agents",
		Long: `Read a node's labels from the Kubernetes API, in a pod on that node, and print
the requested ones under Weft's names, one KEY=VALUE per line. A label that the
node lacks is left out.`,
		Example: "  weft kubernetes labels --node gpu1 --take topology.kubernetes.io/zone=zone --write /labels/labels",
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := kubeapi.InCluster()
			if err != nil {
				return err
			}
			return runKubernetesLabels(cmd.Context(), api, node, take, file, g.Stdout)
		},
	}
	cmd.Flags().StringVar(&node, "node", os.Getenv("NODE_NAME"), "`name` of the node (default: this host's name) [NODE_NAME]")
	cmd.Flags().StringArrayVar(&take, "take", nil, "`label=key`: the node's label that is failure domain KEY; may be repeated")
	cmd.Flags().StringVar(&file, "write", "", "write to this `file` instead")
	return cmd
}

func runKubernetesLabels(ctx context.Context, api nodeReader, node string, take []string, file string, stdout io.Writer) error {
	domains, err := cli.ParsePairs(take)
	if err != nil {
		return err
	}
	if node, err = cli.NodeOrThis(node); err != nil {
		return err
	}
	n, err := api.Node(ctx, node)
	if err != nil {
		return err
	}
	text := ""
	for _, label := range slices.Sorted(maps.Keys(domains)) {
		if value := n.Labels[label]; value != "" {
			text += domains[label] + "=" + value + "\n"
		}
	}
	if file == "" {
		_, err := io.WriteString(stdout, text)
		return err
	}
	// Renamed into place, so that no reader sees half of it.
	if err := os.WriteFile(file+".new", []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", filepath.Clean(file))
}

func newKubernetesWait(g *cli.Globals) *cobra.Command {
	var node string
	cmd := &cobra.Command{
		Use:   "wait-detached",
		Short: "Wait until a node that is leaving has no Weft volumes",
		Long: `Return at once if the node stays. If it is being drained, shut down or removed,
wait until no Weft volume is attached to it. The driver's pod ends with this
command, so until then the driver is there to unmount the volumes. Otherwise
Kubernetes would take volumes from a node that has gone only after six minutes.`,
		Example: "  weft kubernetes wait-detached --node gpu1 --timeout 50s",
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := kubeapi.InCluster()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			if g.Timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, g.Timeout)
				defer cancel()
			}
			return runKubernetesWait(ctx, api, node, detachedEvery, g.Stderr)
		},
	}
	cmd.Flags().StringVar(&node, "node", os.Getenv("NODE_NAME"), "`name` of the node (default: this host's name) [NODE_NAME]")
	return cmd
}

// detachedEvery is how often the command asks Kubernetes, which updates the list each second.
const detachedEvery = 2 * time.Second

func runKubernetesWait(ctx context.Context, api nodeReader, node string, every time.Duration, stderr io.Writer) error {
	node, err := cli.NodeOrThis(node)
	if err != nil {
		return err
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for said := ""; ; {
		n, err := api.Node(ctx, node)
		var left []string
		if err == nil {
			if left = n.AttachedOf(csi.DriverName); !n.Leaving || len(left) == 0 {
				return nil
			}
		}
		if now := waitingFor(left, err); now != said {
			fmt.Fprintln(stderr, now)
			said = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait until node %s has no volumes: %w; %s", node, context.Cause(ctx), said)
		}
	}
}

func waitingFor(left []string, err error) string {
	if err != nil {
		return err.Error()
	}
	return "still attached: " + strings.Join(left, ", ")
}

func newKubernetesGuard() *cobra.Command {
	return &cobra.Command{
		Use:   "guard",
		Short: "Stand on a storage node until it may be drained",
		Long: `Wait until the process is told to end. Kubernetes does not drain a node before
all its pods but those of DaemonSets are gone, and evicts this one only when the
volumes in use can do without the node: "weft csi --drain-guards" asks the volume
manager.`,
		Example: "  weft kubernetes guard",
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			<-cmd.Context().Done()
			return nil
		},
	}
}

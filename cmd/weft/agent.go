// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pb"
)

// agentOptions are the flags that both agents have.
type agentOptions struct {
	daemon.Options
	node    string
	labels  []string
	manager string

	labelsFile string
	tls        daemon.TLSFiles
}

func (o *agentOptions) addFlags(cmd *cobra.Command) {
	o.AddFlags(cmd)
	cmd.Flags().StringVar(&o.node, "node", "", "`name` of this node (default: this host's name)")
	cmd.Flags().StringArrayVar(&o.labels, "label", nil, "`key=value`, a failure domain of this node such as rack=r1; may be repeated")
	cmd.Flags().StringVar(&o.labelsFile, "labels-file", "", "`file` with more labels, one per line")
}

// allLabels returns the labels from the flags and from the file.
func (o *agentOptions) allLabels() (map[string]string, error) {
	pairs := slices.Clone(o.labels)
	if o.labelsFile != "" {
		text, err := os.ReadFile(o.labelsFile)
		if err != nil {
			return nil, fmt.Errorf("--labels-file: %w", err)
		}
		pairs = append(pairs, strings.Fields(string(text))...)
	}
	return parsePairs(pairs)
}

// agentBase is the configuration that agents of both kinds share.
type agentBase struct {
	log     *slog.Logger
	node    block.NodeName
	labels  map[string]string
	manager pb.AgentsClient
	next    func() // switches to another manager
}

// agent is a target or an initiator agent. If it is also a prometheus.Collector, its metrics are
// served.
type agent interface {
	Run(context.Context) error
}

// runAgent loads the kernel modules that an agent needs, makes the agent, and runs it until ctx
// ends.
func runAgent(ctx context.Context, o agentOptions, stderr io.Writer, need []kmod.Module, build func(agentBase) (agent, error)) error {
	base, conn, err := o.prepare(stderr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := (kmod.Loader{}).Need(ctx, need...); err != nil {
		return err
	}
	a, err := build(base)
	if err != nil {
		return err
	}
	parts, err := daemon.ServeMetrics(o.Options, base.log, daemon.NewMetrics(), a)
	if err != nil {
		return err
	}
	parts = append(parts, daemon.Part{Name: "agent", Run: a.Run})
	base.log.Info("starting", "node", base.node, "manager", o.manager, "version", version())
	return daemon.Run(ctx, base.log, parts...)
}

func (o *agentOptions) prepare(stderr io.Writer) (agentBase, *managers.Conn, error) {
	log, err := o.Logger(stderr)
	if err != nil {
		return agentBase{}, nil, cli.UsageError{Err: err}
	}
	name, err := cli.NodeOrThis(o.node)
	if err != nil {
		return agentBase{}, nil, err
	}
	node, err := block.ParseNodeName(name)
	if err != nil {
		return agentBase{}, nil, cli.UsageError{Err: err, Hint: "give --node"}
	}
	labels, err := o.allLabels()
	if err != nil {
		return agentBase{}, nil, err
	}
	conn, err := daemon.Dial(o.manager, o.tls)
	if err != nil {
		return agentBase{}, nil, cli.UsageError{Err: err}
	}
	return agentBase{log: log, node: node, labels: maps.Clone(labels), manager: pb.NewAgentsClient(conn), next: conn.Next}, conn, nil
}

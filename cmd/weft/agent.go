// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/proto/block"
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

// allLabels are those of the flags and of the file.
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

// agentBase is what an agent of either kind is made with.
type agentBase struct {
	log     *slog.Logger
	node    block.NodeName
	labels  map[string]string
	manager pb.AgentsClient
}

// agent is what both kinds of agent can do. One that is a prometheus.Collector
// has its metrics served.
type agent interface {
	Run(context.Context) error
}

// runAgent loads the kernel parts that an agent needs, makes it, and runs it
// until ctx ends.
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
	parts, err := serveMetrics(o.Options, base.log, daemon.NewMetrics(), a)
	if err != nil {
		return err
	}
	parts = append(parts, daemon.Part{Name: "agent", Run: a.Run})
	base.log.Info("starting", "node", base.node, "manager", o.manager, "version", version())
	return daemon.Run(ctx, base.log, parts...)
}

func (o *agentOptions) prepare(stderr io.Writer) (agentBase, *grpc.ClientConn, error) {
	log, err := o.Logger(stderr)
	if err != nil {
		return agentBase{}, nil, usageError{err: err}
	}
	name, err := nodeOrThis(o.node)
	if err != nil {
		return agentBase{}, nil, err
	}
	node, err := block.ParseNodeName(name)
	if err != nil {
		return agentBase{}, nil, usageError{err: err, hint: "give --node"}
	}
	labels, err := o.allLabels()
	if err != nil {
		return agentBase{}, nil, err
	}
	conn, err := daemon.Dial(o.manager, o.tls)
	if err != nil {
		return agentBase{}, nil, usageError{err: err}
	}
	return agentBase{log: log, node: node, labels: maps.Clone(labels), manager: pb.NewAgentsClient(conn)}, conn, nil
}

// serveMetrics serves what can be measured of a component, if metrics were asked for.
func serveMetrics(o daemon.Options, log *slog.Logger, m *daemon.Metrics, component any) ([]daemon.Part, error) {
	if o.MetricsListen == "" {
		return nil, nil
	}
	if c, ok := component.(prometheus.Collector); ok {
		if err := m.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	listener, err := net.Listen("tcp", o.MetricsListen)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	return []daemon.Part{m.Serve(log, listener)}, nil
}

// kernelText reads a one-line file of the kernel, such as its release.
func kernelText(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
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
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/proto/support"
)

// agentOptions are the flags that both agents have.
type agentOptions struct {
	daemon.Options
	node    string
	labels  []string
	manager string

	labelsFile string
	tls        daemon.TLSFiles
	plain      bool
	join       string // file with a token
	stateDir   string
	role       access.Role

	takesOver bool // from another process, which serves until then
}

func (o *agentOptions) addFlags(cmd *cobra.Command) {
	o.AddFlags(cmd)
	cmd.Flags().StringVar(&o.node, "node", "", "`name` of this node (default: this host's name)")
	cmd.Flags().StringArrayVar(&o.labels, "label", nil, "`key=value`, a failure domain of this node such as rack=r1; may be repeated")
	cmd.Flags().StringVar(&o.labelsFile, "labels-file", "", "`file` with more labels, one per line")
	addJoin(cmd, &o.join)
}

func addJoin(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "join", os.Getenv("WEFT_JOIN"), "`file` with a token, - for standard input, to join the cluster at the first start; or kubernetes, to join as the pod's service account [WEFT_JOIN]")
}

// enter makes an agent a member of its cluster, and returns the part that keeps it one. Neither is
// needed for a socket, with TLS files, or over plain TCP.
func enter(ctx context.Context, o daemon.Options, e member.Entry, tls daemon.TLSFiles, plain bool) (files daemon.TLSFiles, keep []daemon.Part, err error) {
	if plain || !tls.Off() || daemon.OnSockets(e.Managers) {
		return tls, nil, nil
	}
	err = daemon.WhileWaiting(ctx, o, e.Log, daemon.Readers{}, func(ctx context.Context) (err error) {
		files, err = e.Enter(ctx)
		return err
	})
	if errors.Is(err, member.ErrNoIdentity) {
		return files, nil, cli.RefusedError{Err: err, Hints: []string{
			fmt.Sprintf("an admin prints a token with `weft token create --node %s --role %s`: store it in a file, and give that with --join", e.Node, e.Role),
			"a manager that was started with --insecure-plain-tcp needs that flag here, too",
		}}
	}
	return files, []daemon.Part{member.Renewing(e.Log, e.Managers, files)}, err
}

// connectMember is enter, and then connects the agent to the managers. Its metrics tell when its
// certificate ends.
func connectMember(ctx context.Context, o daemon.Options, e member.Entry, tls daemon.TLSFiles, plain bool, metrics *daemon.Metrics) (conn *managers.Conn, files daemon.TLSFiles, keep []daemon.Part, err error) {
	if files, keep, err = enter(ctx, o, e, tls, plain); err != nil {
		return nil, files, nil, err
	}
	metrics.ShowCertificate(files)
	if conn, err = daemon.Dial(e.Managers, files); err != nil {
		return nil, files, nil, cli.UsageError{Err: err}
	}
	return conn, files, keep, nil
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
	return cli.ParsePairs(pairs)
}

// agentBase is the configuration that agents of both kinds share.
type agentBase struct {
	log     *slog.Logger
	node    block.NodeName
	labels  map[string]string
	manager pb.AgentsClient
	next    func() // switches to another manager
	tls     daemon.TLSFiles
	support func(context.Context) []support.File
}

// agent is a target or an initiator agent. If it is also a prometheus.Collector, its metrics are
// served.
type agent interface {
	Run(context.Context) error
}

// runAgent loads the kernel modules that an agent needs, makes the agent, and runs it until ctx
// ends.
func runAgent(ctx context.Context, o agentOptions, stderr io.Writer, need []kmod.Module, build func(agentBase) (agent, error)) error {
	metrics := daemon.NewMetrics()
	base, conn, keep, err := o.prepare(ctx, stderr, metrics)
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
	parts, err := daemon.ServeMetrics(o.Options, base.log, metrics, a, daemon.Readers{TLS: base.tls, Plain: o.plain})
	if err != nil {
		return err
	}
	parts = append(parts, keep...)
	parts = append(parts, daemon.Part{Name: "agent", Run: a.Run})
	base.log.Info("starting", "node", base.node, "manager", o.manager, "version", version())
	return daemon.Run(ctx, base.log, parts...)
}

// prepare connects an agent to the managers. keep are parts that keep it connected.
func (o *agentOptions) prepare(ctx context.Context, stderr io.Writer, metrics *daemon.Metrics) (base agentBase, conn *managers.Conn, keep []daemon.Part, err error) {
	log, err := o.Logger(stderr)
	if err != nil {
		return base, nil, nil, cli.UsageError{Err: err}
	}
	name, err := cli.NodeOrThis(o.node)
	if err != nil {
		return base, nil, nil, err
	}
	node, err := block.ParseNodeName(name)
	if err != nil {
		return base, nil, nil, cli.UsageError{Err: err, Hint: "give --node"}
	}
	labels, err := o.allLabels()
	if err != nil {
		return base, nil, nil, err
	}
	e := member.Entry{Managers: o.manager, Path: pki.IdentityIn(o.stateDir), TokenFile: o.join, Role: o.role, Node: name, Log: log}
	options := o.Options
	if o.takesOver { // the other process has the address of the metrics
		options.MetricsListen = ""
	}
	conn, files, keep, err := connectMember(ctx, options, e, o.tls, o.plain, metrics)
	if err != nil {
		return base, nil, nil, err
	}
	return agentBase{log: log, node: node, labels: maps.Clone(labels), manager: pb.NewAgentsClient(conn), next: conn.Next, tls: files, support: supportOf(o.Recent)}, conn, keep, nil
}

// supportOf returns what an agent tells in support bundles: what weft doctor reports, and the newest
// lines of the log.
func supportOf(log *daemon.Recent) func(context.Context) []support.File {
	return func(context.Context) []support.File {
		return []support.File{{Name: "doctor.txt", Data: diagnose()}, {Name: "log.txt", Data: log.Lines()}}
	}
}

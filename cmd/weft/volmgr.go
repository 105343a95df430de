// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/console"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/manager"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr"
	"weft.dev/weft/volmgr/cluster"
)

// defaultDataDir is where a manager keeps its store.
const defaultDataDir = "/var/lib/weft/volmgr"

type volmgrOptions struct {
	daemon.Options
	dataDir, listen string
	advertised      string
	awaitStore      bool
	tls             daemon.TLSFiles
	plain           bool
	replaceAfter    time.Duration
	healAfter       time.Duration
	evacuateAfter   time.Duration
	holdFor         time.Duration
	overcommit      float64
	kubernetes      manager.Kubernetes
	console         console.Served
}

func newVolmgr(g *cli.Globals) *cobra.Command {
	var o volmgrOptions
	cmd := &cobra.Command{
		Use:   "volmgr",
		Short: "Run the volume manager",
		Long: `Run the volume manager. It holds the cluster's state, which all agents and
commands use. Only one manager may run on a data directory. Attached volumes keep
serving while it is stopped; only changes wait.

Three or five managers keep the state together ("weft volmgr join"): the one that
leads answers, and when it is lost, another one leads within seconds.

It answers only members of its cluster: nodes and people who have joined with a
token ("weft token create"), and on a socket beside the data directory root and
its own user. With --tls-ca, --tls-cert and --tls-key it answers clients with a
certificate of that authority instead. With --insecure-plain-tcp everyone who
reaches it may do everything; it then answers on the loopback address, unless
--listen names another one.

It never creates a cluster by itself. If the data directory has no store, it says
what to do and ends; with --await-store it waits for a store instead.`,
		Example: `  weft volmgr init --data-dir /var/lib/weft/volmgr
  weft volmgr --data-dir /var/lib/weft/volmgr
  weft volmgr --listen 192.0.2.10:4480 --metrics-listen 9480 --log-format json
  weft volmgr --console :8480 --console-cert m1.crt --console-key m1.key`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.NeedsVerb(cmd, args)
			}
			o.tls, o.plain = g.TLS, g.Plain
			return runVolmgr(cmd.Context(), o, g.Stderr)
		},
	}
	o.AddFlags(cmd)
	cmd.Flags().StringVar(&o.dataDir, "data-dir", defaultDataDir, "`directory` of the store, created by \"weft volmgr init\"")
	cmd.Flags().BoolVar(&o.awaitStore, "await-store", false, "if there is no store, wait for one instead of ending")
	cmd.Flags().DurationVar(&o.holdFor, "snapshot-hold", cluster.DefaultHoldFor, "for a snapshot, have hosts hold I/O for this `duration` at most; 1m0s at most")
	cmd.Flags().Float64Var(&o.overcommit, "overcommit", cluster.DefaultOvercommit, "let a drive promise so many `times` its size to volumes, thin and others; 1 means no more than it has")
	cmd.Flags().DurationVar(&o.replaceAfter, "replace-after", cluster.DefaultReplaceAfter, "make a leg again elsewhere after it was away for this `duration`; 0 means never")
	cmd.Flags().DurationVar(&o.healAfter, "heal-after", cluster.DefaultHealAfter, "have a host copy to the legs of a volume that lacks a copy and was detached for this `duration`; 0 means never")
	cmd.Flags().DurationVar(&o.evacuateAfter, "evacuate-suspect-after", 0, "make the legs of a drive again elsewhere after it was suspect for this `duration`, such as 48h; without it, or with 0, never")
	cmd.Flags().StringVar(&o.console.Listen, "console", "", "`address` at which to show the cluster in browsers; see \"weft console --at\"")
	cmd.Flags().StringVar(&o.console.Cert, "console-cert", "", "`file` of a certificate that browsers trust; without one, the console is at a loopback address")
	cmd.Flags().StringVar(&o.console.Key, "console-key", "", "`file` of its private key")
	o.addListen(cmd, "`address` to answer on")
	o.addAdvertised(cmd)
	o.kubernetes.AddFlags(cmd)
	cmd.AddCommand(newVolmgrInit(g), newVolmgrJoin(g), g.Watched(newVolmgrList(g)), newVolmgrRemove(g), newVolmgrReplace(g), newVolmgrTransfer(g),
		newVolmgrBackup(g), newVolmgrRestore(g), newVolmgrRebuild(g), newVolmgrRecover(g))
	return cmd
}

func runVolmgr(ctx context.Context, o volmgrOptions, stderr io.Writer) error {
	log, err := o.Logger(stderr)
	if err != nil {
		return cli.UsageError{Err: err}
	}
	if err := o.console.Check(); err != nil {
		return err
	}
	if err := o.needStore(ctx, log); err != nil {
		return err
	}
	listener, err := o.open(log)
	if err != nil {
		return err
	}
	defer listener.Close()
	return o.serve(ctx, listener, log)
}

func (o *volmgrOptions) addListen(cmd *cobra.Command, usage string) {
	cmd.Flags().StringVar(&o.listen, "listen", "", usage+" (default :4480, with --insecure-plain-tcp "+cli.DefaultManager+")")
}

func (o *volmgrOptions) addAdvertised(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.advertised, "address", "", "`address` at which agents, commands and other managers reach it (default that of --listen, or this machine's name)")
}

// reachedAt is where others reach the manager, which need not run yet.
func (o *volmgrOptions) reachedAt() (string, error) {
	if o.advertised != "" {
		return o.advertised, nil
	}
	host, port, err := net.SplitHostPort(o.address())
	if err != nil {
		return "", cli.UsageError{Err: fmt.Errorf("--listen %s: %w", o.address(), err)}
	}
	if ip := net.ParseIP(host); host != "" && (ip == nil || !ip.IsUnspecified()) {
		return o.address(), nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", cli.UsageError{Err: err, Hint: "give --address"}
	}
	return net.JoinHostPort(name, port), nil
}

// address is where the manager listens.
func (o *volmgrOptions) address() string {
	if o.listen == "" && (!o.plain || !o.tls.Off()) {
		return ":4480"
	}
	return cmp.Or(o.listen, cli.DefaultManager)
}

// open listens on the address, and warns if that lets everyone in.
func (o *volmgrOptions) open(log *slog.Logger) (net.Listener, error) {
	if path, socket := strings.CutPrefix(o.address(), daemon.Unix); socket {
		return daemon.ListenUnix(path)
	}
	listener, err := openAddress("listen", o.address())
	if err != nil {
		return nil, err
	}
	at, ok := listener.Addr().(*net.TCPAddr)
	if ok && !at.IP.IsLoopback() && o.plain && o.tls.Off() {
		log.Warn("plain TCP: everyone who reaches this address may do everything with the cluster",
			"address", at.String(), "do", "start the manager without --insecure-plain-tcp, or set --listen to an address in a network that only Weft's nodes reach")
	}
	return listener, nil
}

// onSocket reports whether the manager listens on a socket only, whose file says who may open it.
func (o *volmgrOptions) onSocket() bool { return strings.HasPrefix(o.address(), daemon.Unix) }

// keys opens the keys of the cluster's own authority, which the manager then uses for TLS. There
// are none if TLS files are given, or plain TCP, or on a socket.
func (o *volmgrOptions) keys() (*pki.Keyring, error) {
	if o.plain || !o.tls.Off() || o.onSocket() {
		return nil, nil
	}
	keys, err := pki.OpenKeyring(volmgr.KeysOf(o.dataDir), time.Now)
	if errors.Is(err, pki.ErrNoKeys) {
		return nil, cli.RefusedError{Err: err, Hints: []string{
			fmt.Sprintf("for a store of an older version, or a rebuilt one: `weft ca init --data-dir %s`, on one manager", o.dataDir),
			"for a further manager: `weft volmgr join` with a token",
			"to let everyone who reaches the manager do everything: --insecure-plain-tcp",
		}}
	}
	if err == nil {
		err = keys.Refresh()
	}
	if err != nil {
		return nil, err
	}
	o.tls.Identity = keys.Identity()
	return keys, nil
}

// serve runs a manager on a listener until ctx ends.
func (o *volmgrOptions) serve(ctx context.Context, listener net.Listener, log *slog.Logger) error {
	keys, err := o.keys()
	if err != nil {
		return err
	}
	c := manager.Config{Options: o.Options, DataDir: o.dataDir, TLS: o.tls, Plain: o.plain, Version: version(), ReplaceAfter: o.replaceAfter, HealAfter: o.healAfter, EvacuateAfter: o.evacuateAfter, HoldFor: o.holdFor, Overcommit: o.overcommit, Address: o.advertised,
		Keys: keys}
	if err := o.kubernetes.Apply(&c); err != nil {
		return err
	}
	if !o.onSocket() {
		c.Socket = volmgr.SocketOf(o.dataDir)
	}
	if o.replaceAfter == 0 {
		c.ReplaceAfter = -1
	}
	if o.healAfter == 0 {
		c.HealAfter = -1
	}
	if x := o.overcommit; x != 0 && !(x >= 1 && x <= cluster.MaxOvercommit) { // 0 is the default, too
		return fmt.Errorf("--overcommit %v: must be from 1 to %v", o.overcommit, cluster.MaxOvercommit)
	}
	if o.holdFor < 0 || o.holdFor > cluster.MaxHoldFor {
		return fmt.Errorf("--snapshot-hold %v: must be %v at most", o.holdFor, cluster.MaxHoldFor)
	}
	more, err := o.consoleParts(keys, listener, log)
	if err != nil {
		return err
	}
	return storeError(o.dataDir, c.Serve(ctx, listener, log, more))
}

// consoleParts serve the console, if that was asked for. It needs the cluster's own authority, which
// browsers get their credentials from.
func (o *volmgrOptions) consoleParts(keys *pki.Keyring, listener net.Listener, log *slog.Logger) (func() ([]daemon.Part, error), error) {
	if o.console.Listen == "" {
		return nil, nil
	}
	if keys == nil {
		return nil, cli.UsageError{Err: errors.New("--console: this manager has no authority of its own, whose tokens let browsers in"),
			Hint: "start it without --tls-ca and --insecure-plain-tcp, or run `weft console` on your machine"}
	}
	served := o.console
	served.Manager, served.Version = reachedHere(listener), version()
	return func() ([]daemon.Part, error) { return served.Parts(log) }, nil
}

// reachedHere is where programs of this machine reach a listener.
func reachedHere(listener net.Listener) string {
	at, ok := listener.Addr().(*net.TCPAddr)
	if !ok || !at.IP.IsUnspecified() {
		return listener.Addr().String()
	}
	return net.JoinHostPort("localhost", strconv.Itoa(at.Port))
}

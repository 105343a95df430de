// SPDX-License-Identifier: Apache-2.0

// Package console shows a cluster in a browser, and changes it.
//
//	browser ── pages, forms ──► Door ─► Server ── the RPCs of the command line ──► volume manager
//	        ◄─ one stream a tab ────────┘          with the person's credential
//
// It holds no state of the cluster and decides nothing. It calls what the commands call, with the
// credential of the person who uses it, so the manager's table of roles is the only one: what the
// person may not do, the manager refuses, and the page shows its words. Each action shows the command
// that does the same.
//
// A Door lets browsers in. That of "weft console" has one Server, whose person started it. That of a
// manager joins the cluster with the token that a browser shows, as "weft login" does: each browser
// has a Server with the credential of its person, which is in memory until the session ends. It
// calls the managers over TCP as from anywhere else, and the manager in whose process it runs too.
//
// Pages are templates that the server fills in, with small drawings in SVG. They can be read without
// scripts. With scripts, a tab holds one stream of server-sent events: when something has changed,
// the server sends the page's live part again, and the tab replaces the sections that differ.
// Everything is embedded; nothing is loaded from elsewhere.
//
// A browser gets in with a link that is good once. Its code is in the link's fragment, so that
// nothing on the way logs it, and is exchanged for a cookie that scripts cannot read.
package console

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

// New makes the command "weft console".
func New(g *cli.Globals) *cobra.Command {
	var listen, at string
	cmd := &cobra.Command{
		Use:   "console",
		Short: "Show the cluster in a browser",
		Long: `Serve the console to a browser on this machine, and print a link to it. The link
is good once, for 15 minutes: whoever opens it may do what you may do. The
console calls the manager as this command does, with your context and your role.
Press Ctrl-C to end it.

The console listens on the loopback address only. To reach it on another
machine, forward a port over SSH: start it there with --listen 127.0.0.1:8480,
connect with "ssh -L 8480:127.0.0.1:8480 MACHINE", and open the link here.

With --at, print a link to the console that a manager serves there ("weft volmgr
--console"), and serve nothing here. Any manager will do, and any browser that
reaches it. The link is a token for you, with your name and your role.`,
		Example: `  weft console
  weft console --listen 127.0.0.1:8480
  weft console --at https://m1.example:8480`,
		Args: cli.Takes(),
	}
	cmd.RunE = g.CallForLong(func(ctx context.Context, caller cli.Caller) error {
		if at == "" {
			return run(ctx, g, caller, listen)
		}
		if cmd.Flags().Changed("listen") {
			return cli.UsageError{Err: errors.New("--at and --listen: give one of them")}
		}
		return linkTo(ctx, g, caller, at)
	})
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "loopback `address` to listen on; port 0 is any that is free")
	cmd.Flags().StringVar(&at, "at", "", "`URL` of a manager's console to print a link to")
	return cmd
}

// onlyHere returns an error if an address, which an option has, can be reached from other machines.
func onlyHere(option, address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%s %q: must be HOST:PORT", option, address)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("%s %s: must be a loopback address: the console speaks plain HTTP", option, address)
	}
	return nil
}

// listenLoopback listens on an address that only this machine reaches.
func listenLoopback(address string) (net.Listener, error) {
	if err := onlyHere("--listen", address); err != nil {
		return nil, cli.UsageError{Err: err, Hint: "use a port of 127.0.0.1, such as 127.0.0.1:8480, and forward it over SSH"}
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	return listener, nil
}

// run serves the console until ctx ends.
func run(ctx context.Context, g *cli.Globals, caller cli.Caller, listen string) error {
	listener, err := listenLoopback(listen)
	if err != nil {
		return err
	}
	defer listener.Close() // once more, if it was served
	log := slog.New(slog.NewTextHandler(g.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	s, links := NewServer(Config{
		Clients: Clients{Manager: pages.Client(caller.Conn), Identities: pb.NewIdentitiesClient(caller.Conn)},
		Who:     caller.Who, Managers: caller.Managers, Version: g.Version, Log: log,
	}), &links{now: time.Now}
	door := NewDoor(links.admit(s), "`weft console` prints a link that fills this in. It is good once, for 15 minutes.", time.Now, log)
	if _, err := s.read.status(ctx); err != nil { // rather than a page that says so
		return err
	}
	fmt.Fprintf(g.Stdout, "http://%s/login#%s\n", listener.Addr(), links.make())
	g.Out().Say("open the link in a browser on this machine; it is good once, for %d minutes. Ctrl-C ends the console", int(linkLife.Minutes()))
	parts := []daemon.Part{
		{Name: "events", Run: s.Run},
		{Name: "sessions", Run: door.Run},
		{Name: "credential", Run: func(ctx context.Context) error { return renewing(ctx, caller) }},
		daemon.ServeHTTP(log, "console", listener, door.Handler()),
	}
	return daemon.Run(ctx, log, parts...) // Ctrl-C is how it ends, and no error
}

// linkTo prints a link to the console that a manager serves at a URL.
func linkTo(ctx context.Context, g *cli.Globals, caller cli.Caller, at string) error {
	if !strings.Contains(at, "://") {
		at = "https://" + at
	}
	to, err := url.Parse(at)
	if err == nil && (to.Scheme != "https" && to.Scheme != "http" || to.Host == "" || strings.Trim(to.Path, "/") != "" || to.RawQuery != "" || to.Fragment != "" || to.User != nil) {
		err = errors.New("must be the address of a console")
	}
	if err != nil {
		return cli.UsageError{Err: fmt.Errorf("--at %q: %w", at, err), Hint: "such as https://m1.example:8480"}
	}
	made, err := pb.NewIdentitiesClient(caller.Conn).CreateOwnToken(ctx, &pb.CreateOwnTokenRequest{})
	if err != nil {
		return err
	}
	fmt.Fprintf(g.Stdout, "%s://%s/login#%s\n", to.Scheme, to.Host, made.GetToken())
	g.Out().Say("open the link in a browser; it is good once, until %s, and whoever opens it may do what you may do", made.GetCreated().GetExpires().AsTime().Local().Format(time.DateTime))
	return nil
}

// renewEvery is how often a person's credential is looked at.
const renewEvery = time.Hour

// renewing keeps the person's credential good as long as the console runs.
func renewing(ctx context.Context, caller cli.Caller) error {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			caller.Refresh(ctx)
		}
	}
}

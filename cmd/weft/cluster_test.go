// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

// startCluster runs a real manager on a directory of the script, with a scripted agent for each
// node named: "cluster t1 t2 c1". Names that begin with t are targets, others initiators. It sets
// WEFT_MANAGER.
func startCluster(ts *testscript.TestScript, neg bool, nodes []string) {
	if neg || len(nodes) == 0 {
		ts.Fatalf("usage: cluster NODE...")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	address := listener.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	var group sync.WaitGroup
	ts.Defer(func() {
		stop()
		group.Wait()
	})
	o := volmgrOptions{plain: true, dataDir: filepath.Join(ts.Getenv("WORK"), "cluster")}
	_, err = volmgr.Init(volmgr.Config{Dir: o.dataDir})
	ts.Check(err)
	group.Go(func() {
		if err := o.serve(ctx, listener, slog.New(slog.DiscardHandler)); err != nil {
			slog.Error("manager of a script ended", "script", ts.Name(), "err", err)
		}
	})
	conn, err := daemon.Dial(address, daemon.TLSFiles{})
	ts.Check(err)
	ts.Defer(func() { conn.Close() })
	api := pb.NewAgentsClient(conn)
	for _, node := range nodes {
		run := (&scriptedInitiator{node: node, api: api}).run
		if node[0] == 't' {
			run = (&scriptedTarget{node: node, api: api}).run
		}
		group.Go(func() { again(ctx, run) })
	}
	ts.Setenv("WEFT_MANAGER", address)
	for _, node := range nodes {
		eventually(ts, false, []string{"^" + node + ` .*\bonline`, "node", "list"})
	}
}

// freePort sets a variable to a port that nobody listens on.
func freePort(env *testscript.Env, name string) error {
	address, err := operator.FreeAddress()
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(address)
	env.Setenv(name, port)
	return err
}

// scrape writes the content of a URL to stdout.
func scrape(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: scrape URL")
	}
	reply, err := http.Get(args[0])
	for deadline := time.Now().Add(10 * time.Second); errors.Is(err, syscall.ECONNREFUSED) && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond) // a daemon that has just started may not listen yet
		reply, err = http.Get(args[0])
	}
	ts.Check(err)
	defer reply.Body.Close()
	_, err = io.Copy(ts.Stdout(), reply.Body)
	ts.Check(err)
}

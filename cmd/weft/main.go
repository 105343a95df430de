// SPDX-License-Identifier: Apache-2.0

// Command weft is all of Weft in one program: the operators' commands (noun, then verb: "weft
// volume create db1 --size 10GiB") and the daemons ("weft volmgr", "weft target", "weft initiator",
// "weft csi").
//
// The operators' commands hold no state and decide nothing: each makes a few calls to the volume
// manager and prints the answer. Results go to stdout; progress, warnings and errors go to stderr.
// Each command has a newX that describes it and a runX that carries it out with a client and an
// output; tests call runX. testdata/*.txt specifies what the program promises.
package main

import (
	"context"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/dev"
	"weft.dev/weft/volmgr"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

// managerHere finds a manager that this user may use without having logged in: that of weft dev, or
// the one on this machine, whose socket root can open.
func managerHere() (address string, ok bool) {
	if address, ok := dev.LocalManager(); ok {
		return address, ok
	}
	for _, store := range []string{filepath.Join(defaultDataDir, "store"), defaultDataDir} { // as the units have it, and as commands do
		if conn, err := net.Dial("unix", volmgr.SocketOf(store)); err == nil {
			return daemon.Unix + volmgr.SocketOf(store), conn.Close() == nil
		}
	}
	return "", false
}

func run(args []string) int {
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-signals
		// A second signal kills the program.
		signal.Stop(signals)
		stop(cli.ErrInterrupted)
	}()

	g := &cli.Globals{Stdout: os.Stdout, Stderr: os.Stderr, Version: version(), Local: managerHere}
	root := newRoot(g)
	root.SetArgs(args)
	root.SetOut(os.Stdout)
	root.SetErr(os.Stderr)
	err := root.ExecuteContext(ctx)
	if cli.Interrupted(ctx, err) {
		err = cli.ErrInterrupted
	}
	if err != nil {
		cli.PrintError(os.Stderr, g.Format, err)
	}
	return cli.ExitCode(err)
}

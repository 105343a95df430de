// SPDX-License-Identifier: Apache-2.0

// Command weft is all of Weft in one program: the operators' commands (noun,
// then verb: "weft volume create db1 --size 10GiB") and the daemons ("weft
// volmgr", "weft target", "weft initiator", "weft csi").
//
// The operators' commands hold no state and decide nothing: each makes a few
// calls to the volume manager and prints the answer. What a script wants goes
// to stdout; progress, warnings and errors go to stderr. Each command is a
// newX that describes it and a runX that does it, given a client and an output;
// tests call runX. testdata/*.txt specifies what the program promises.
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

// errInterrupted is the cause of a context that SIGINT or SIGTERM has ended.
var errInterrupted = errors.New("interrupted")

func run(args []string) int {
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-signals
		// A second signal ends the program as if nobody listened.
		signal.Stop(signals)
		stop(errInterrupted)
	}()

	g := &globals{stdout: os.Stdout, stderr: os.Stderr}
	root := newRoot(g)
	root.SetArgs(args)
	root.SetOut(os.Stdout)
	root.SetErr(os.Stderr)
	err := root.ExecuteContext(ctx)
	if interrupted(ctx, err) {
		err = errInterrupted
	}
	if err != nil {
		printError(os.Stderr, g.format, err)
	}
	return exitCode(err)
}

// interrupted reports whether err is only what a signal made of a call.
func interrupted(ctx context.Context, err error) bool {
	return errors.Is(context.Cause(ctx), errInterrupted) && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled)
}

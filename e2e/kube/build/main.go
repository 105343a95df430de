// SPDX-License-Identifier: Apache-2.0

// Command build builds the parts of Kubernetes that the tests of e2e/kube run. Parts that
// are in the cache are not built again. It can be interrupted and continues where it
// stopped. The first run takes about 12 minutes on two cores.
//
//	go run ./e2e/kube/build [-jobs N] [-examples]
//
// With -examples it also builds the images that deploy/kubernetes/examples need.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"weft.dev/weft/e2e/kube/parts"
)

func main() {
	jobs := flag.Int("jobs", 0, "packages to compile in parallel; 0: as many as there are processors")
	examples := flag.Bool("examples", false, "build the images that the examples need, too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	say := func(format string, args ...any) { fmt.Printf("kube: "+format+"\n", args...) }
	o := parts.Options{Jobs: *jobs, Say: say}
	err := parts.Build(ctx, o)
	if err == nil && *examples {
		err = parts.BuildExamples(ctx, o)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "kube: error: %v\n", err)
		stop()
		os.Exit(1)
	}
}

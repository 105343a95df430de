// SPDX-License-Identifier: Apache-2.0

// Command build builds the parts of Kubernetes that the tests of e2e/kube run. Parts that
// are in the cache are not built again. It can be interrupted and continues where it
// stopped. The first run takes about 12 minutes on two cores.
//
//	go run ./e2e/kube/build [-jobs N]
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
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	say := func(format string, args ...any) { fmt.Printf("kube: "+format+"\n", args...) }
	if err := parts.Build(ctx, parts.Options{Jobs: *jobs, Say: say}); err != nil {
		fmt.Fprintf(os.Stderr, "kube: error: %v\n", err)
		stop()
		os.Exit(1)
	}
}

// SPDX-License-Identifier: Apache-2.0

package parts

// differences is a tool for backups, as far as it asks for the differences of snapshots: with the library
// that upstream's own tools use. It prints JSON. Without -previous it asks which ranges hold data.
const differences = `package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	config := flag.String("kubeconfig", "", "")
	args := iterator.Args{Emitter: &iterator.JSONEmitter{Writer: os.Stdout}}
	flag.StringVar(&args.Namespace, "namespace", "default", "")
	flag.StringVar(&args.SnapshotName, "snapshot", "", "")
	flag.StringVar(&args.PrevSnapshotName, "previous", "", "")
	flag.Parse()
	args.MaxResults = 3 // several messages
	if err := run(*config, args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(config string, args iterator.Args) error {
	rest, err := clientcmd.BuildConfigFromFlags("", config)
	if err != nil {
		return err
	}
	if args.Clients, err = iterator.BuildClients(rest); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return iterator.GetSnapshotMetadata(ctx, args)
}
`

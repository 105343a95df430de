// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/store"
)

// Restore makes a store in cfg.Dir, which must be empty, of what Backup wrote.
// A damaged backup leaves nothing behind. See [cluster.Restored] for what is not
// as it was.
func Restore(cfg Config, backup io.Reader) error {
	cfg = cfg.withDefaults()
	records, err := store.ReadBackup(backup)
	if err != nil {
		return err
	}
	if records, err = cluster.Restored(cfg.Now(), records); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	return store.Create(cfg.Dir, records, cfg.Log)
}

// Rebuild makes a store anew from the labels on the drives, in the manager's
// place: targets report to it as they would to a manager, and are told nothing,
// so they leave everything as it is.
type Rebuild struct {
	pb.UnimplementedAgentsServer

	cfg   Config
	nodes []block.NodeName
	news  chan struct{} // of size 1

	mu      sync.Mutex
	reports map[block.NodeName]cluster.TargetReport // the newest of each node
}

// NewRebuild prepares a rebuild of a store in cfg.Dir, which must be empty, from
// the drives of the named nodes. Name every target there is: the newest word on
// a volume may be on any of them.
func NewRebuild(cfg Config, nodes []block.NodeName) (*Rebuild, error) {
	if cfg.Dir == "" {
		return nil, errors.New("rebuild: Dir: missing")
	}
	if len(nodes) == 0 {
		return nil, errors.New("rebuild: nodes: missing")
	}
	if err := store.CheckEmpty(cfg.Dir); err != nil {
		return nil, fmt.Errorf("rebuild: %w", err)
	}
	return &Rebuild{cfg: cfg.withDefaults(), nodes: nodes, news: make(chan struct{}, 1), reports: map[block.NodeName]cluster.TargetReport{}}, nil
}

// Register adds the service that targets report to.
func (b *Rebuild) Register(r grpc.ServiceRegistrar) { pb.RegisterAgentsServer(r, b) }

// Target takes the reports of a target agent.
func (b *Rebuild) Target(stream grpc.BidiStreamingServer[pb.TargetReport, pb.TargetWanted]) error {
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		report, err := targetReport(r)
		if err != nil {
			return toStatus(err)
		}
		b.mu.Lock()
		if _, known := b.reports[report.Node]; !known {
			b.cfg.Log.Info("target reported", "node", report.Node, "drives", len(report.Drives))
		}
		b.reports[report.Node] = report
		b.mu.Unlock()
		poke(b.news)
	}
}

// Run waits until every node has reported, makes the store, and returns what a
// person should know about it. If ctx ends first nothing is made.
func (b *Rebuild) Run(ctx context.Context) (text string, err error) {
	for missing := b.missing(); len(missing) > 0; missing = b.missing() {
		select {
		case <-b.news:
		case <-ctx.Done():
			return "", fmt.Errorf("rebuild from drives: wait for reports of %v: %w", missing, context.Cause(ctx))
		}
	}
	state, text, err := cluster.Rebuild(b.cfg.Now(), b.collected())
	if err != nil {
		return "", fmt.Errorf("rebuild from drives: %w", err)
	}
	return text, store.Create(b.cfg.Dir, state.Records(), b.cfg.Log)
}

// missing lists the nodes that have not reported.
func (b *Rebuild) missing() (nodes []block.NodeName) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range b.nodes {
		if _, ok := b.reports[n]; !ok {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// collected is all reports by node, also those that nobody asked for.
func (b *Rebuild) collected() (reports []cluster.TargetReport) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range slices.Sorted(maps.Keys(b.reports)) {
		reports = append(reports, b.reports[n])
	}
	return reports
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/store"
)

// Restore creates a store in cfg.Dir, which must be empty, from what Backup wrote. A damaged
// backup is refused and creates nothing. [cluster.Restored] says what differs from the
// backed up state.
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

// HostPatience is how long a rebuild waits, once all targets have reported, for hosts that
// the labels name and the operator did not. A running agent looks for its manager every two
// seconds.
const HostPatience = 10 * time.Second

// DrivePatience is how long a rebuild waits, once all targets have reported, for drives that
// they have but could not read. A drive that hangs may answer again: Linux gives it 30 s for
// a command.
const DrivePatience = 40 * time.Second

// Rebuild makes a new store from the labels on the drives. It runs instead of the manager:
// targets and hosts report to it as they would to a manager, and get no wanted state, so
// they change nothing.
type Rebuild struct {
	pb.UnimplementedAgentsServer

	cfg            Config
	targets, hosts []block.NodeName
	news           chan struct{} // of size 1

	mu      sync.Mutex
	reports map[block.NodeName]cluster.TargetReport    // the newest of each target
	words   map[block.NodeName]cluster.InitiatorReport // the newest of each host
}

// NewRebuild prepares a rebuild of a store in cfg.Dir, which must be empty, from the drives
// of the named targets and the notes of the named hosts. Name every target there is: the
// newest label of a volume may be on any of them. Reports of agents that are not named are
// used too.
func NewRebuild(cfg Config, targets, hosts []block.NodeName) (*Rebuild, error) {
	if cfg.Dir == "" {
		return nil, errors.New("rebuild: Dir: missing")
	}
	if len(targets) == 0 {
		return nil, errors.New("rebuild: targets: missing")
	}
	if err := store.CheckEmpty(cfg.Dir); err != nil {
		return nil, fmt.Errorf("rebuild: %w", err)
	}
	return &Rebuild{
		cfg: cfg.withDefaults(), targets: targets, hosts: hosts, news: make(chan struct{}, 1),
		reports: map[block.NodeName]cluster.TargetReport{}, words: map[block.NodeName]cluster.InitiatorReport{},
	}, nil
}

// Register adds the service that agents report to.
func (b *Rebuild) Register(r grpc.ServiceRegistrar) { pb.RegisterAgentsServer(r, b) }

// Target takes the reports of a target agent.
func (b *Rebuild) Target(stream grpc.BidiStreamingServer[pb.TargetReport, pb.TargetWanted]) error {
	speaks := func(r cluster.TargetReport) error { return access.Speaks(stream.Context(), access.Target, r.Node) }
	return hear(parts.Wanting(stream), targetReport, speaks, func(r cluster.TargetReport) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if _, known := b.reports[r.Node]; !known {
			b.cfg.Log.Info("target reported", "node", r.Node, "drives", len(r.Drives))
		}
		b.reports[r.Node] = r
		poke(b.news)
	})
}

// Initiator takes the reports of an initiator agent.
func (b *Rebuild) Initiator(stream grpc.BidiStreamingServer[pb.InitiatorReport, pb.InitiatorWanted]) error {
	speaks := func(r cluster.InitiatorReport) error {
		return access.Speaks(stream.Context(), access.Initiator, r.Node)
	}
	return hear(parts.Wanting(stream), initiatorReport, speaks, func(r cluster.InitiatorReport) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if _, known := b.words[r.Node]; !known {
			b.cfg.Log.Info("host reported", "node", r.Node, "volumes", len(r.Evidence))
		}
		b.words[r.Node] = r
		poke(b.news)
	})
}

// hear keeps every report of a stream until it ends. speaks refuses reports for other nodes.
func hear[Message, Wanted parts.State, Report any](agent *parts.Stream[Wanted, Message], parse func(Message) (Report, error), speaks func(Report) error, keep func(Report)) error {
	for {
		m, err := agent.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if m.GetScale().GetUnchanged() {
			continue
		}
		report, err := parse(m)
		if err != nil {
			return toStatus(err)
		}
		if err := speaks(report); err != nil {
			return err
		}
		keep(report)
	}
}

// Run waits until every named target and host has reported. Then it waits for a while for
// drives that could not be read, and for hosts that only the labels name. Then it creates the
// store, and returns what an operator should know about it. If ctx ends before all named
// agents have reported, it creates nothing.
func (b *Rebuild) Run(ctx context.Context) (text string, err error) {
	for missing := b.missing(); len(missing) > 0; missing = b.missing() {
		select {
		case <-b.news:
		case <-ctx.Done():
			return "", fmt.Errorf("rebuild from drives: wait for a report from %s: %w", strings.Join(missing, ", "), context.Cause(ctx))
		}
	}
	b.waitWhile(ctx, DrivePatience, func(targets []cluster.TargetReport, _ []cluster.InitiatorReport) bool {
		return len(cluster.Unread(targets)) > 0
	})
	b.waitWhile(ctx, HostPatience, func(targets []cluster.TargetReport, hosts []cluster.InitiatorReport) bool {
		return len(cluster.AwaitedHosts(targets, hosts)) > 0
	})
	targets, hosts := b.collected()
	state, text, err := cluster.Rebuild(b.cfg.Now(), targets, hosts)
	if err != nil {
		return "", fmt.Errorf("rebuild from drives: %w", err)
	}
	return heard(targets, hosts) + "\n" + text, store.Create(b.cfg.Dir, state.Records(), b.cfg.Log)
}

// waitWhile gives agents some time to report what is still lacking.
func (b *Rebuild) waitWhile(ctx context.Context, patience time.Duration, lacking func([]cluster.TargetReport, []cluster.InitiatorReport) bool) {
	over := time.NewTimer(patience)
	defer over.Stop()
	for lacking(b.collected()) {
		select {
		case <-b.news:
		case <-over.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// missing lists the agents that were named and have not reported.
func (b *Rebuild) missing() (agents []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range b.targets {
		if _, ok := b.reports[n]; !ok {
			agents = append(agents, "target "+string(n))
		}
	}
	for _, n := range b.hosts {
		if _, ok := b.words[n]; !ok {
			agents = append(agents, "host "+string(n))
		}
	}
	return agents
}

// collected returns all reports by node, also of agents that were not named.
func (b *Rebuild) collected() (targets []cluster.TargetReport, hosts []cluster.InitiatorReport) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range slices.Sorted(maps.Keys(b.reports)) {
		targets = append(targets, b.reports[n])
	}
	for _, n := range slices.Sorted(maps.Keys(b.words)) {
		hosts = append(hosts, b.words[n])
	}
	return targets, hosts
}

// heard names the agents whose reports the store is made from, and the hosts whose notes are
// missing.
func heard(targets []cluster.TargetReport, hosts []cluster.InitiatorReport) string {
	lines := []string{
		"targets heard: " + named(targets, func(r cluster.TargetReport) block.NodeName { return r.Node }),
		"hosts heard: " + named(hosts, func(r cluster.InitiatorReport) block.NodeName { return r.Node }),
	}
	if awaited := cluster.AwaitedHosts(targets, hosts); len(awaited) > 0 {
		lines = append(lines, "hosts that had a volume last and have not reported, so their notes on good copies are missing: "+
			named(awaited, func(n block.NodeName) block.NodeName { return n }))
	}
	return strings.Join(lines, "\n")
}

func named[T any](all []T, name func(T) block.NodeName) string {
	var names []string
	for _, x := range all {
		names = append(names, string(name(x)))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

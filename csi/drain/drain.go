// SPDX-License-Identifier: Apache-2.0

// Package drain lets Kubernetes drain a storage node when the volumes in use can do without it, and
// not before.
//
// A drain does not evict the target's pod, since that belongs to a DaemonSet. So there is another pod
// on each storage node, its guard, which does nothing. The guards belong to a StatefulSet, so each has a
// name of its own. A PodDisruptionBudget forbids their eviction, but for those that this package takes
// out of it by name:
//
//	the node is cordoned    the manager is asked whether the volumes in use can do without it, and at
//	                        the same time without the nodes that may leave or have left already
//	it may leave            the budget does not cover its guard: the drain can evict it
//	it has left             the manager is told: the node is under maintenance, for an hour at most
//	it has a guard again    the maintenance is over
//
// The budget is changed only if nobody has changed it since it was read, and nothing but the budget says
// who may leave: so several drivers can do this at once. While the manager does not answer, no node may
// leave.
//
// A StatefulSet deletes pods without asking the budget when it has too many, or when they have changed.
// So there are never fewer guards than before while a node is cordoned, and they are replaced only when
// somebody deletes them.
package drain

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/pb"
)

// Stage is how far the drain of a node is.
type Stage string

// The stages.
const (
	MayLeave Stage = "may leave" // its guard can be evicted
	Left     Stage = "left"      // its guard is gone, and the manager knows
)

// Guards are the guards of a cluster, as Kubernetes has them.
type Guards struct {
	Version   string           // of the budget
	Stages    map[string]Stage // of nodes, as noted with the budget
	Permitted []string         // the pods that the budget does not cover
	Nodes     int              // how many nodes have a target
	Replicas  int              // how many guards are wanted
	Cordoned  []string         // the nodes with a target that take no pods
	Former    []string         // nodes with a stage that are no nodes with a target any more
	// On are the guards on nodes that are cordoned or have a stage, without those that are ending. They
	// were looked for after the budget was read.
	On map[string][]Guard
}

// Guard is the pod of a node.
type Guard struct{ Pod, UID string }

// ErrChanged is returned by Permit if the budget has another version by now.
var ErrChanged = errors.New("the budget has been changed meanwhile")

// Kubernetes is what there is of guards in a cluster.
type Kubernetes interface {
	Guards(ctx context.Context) (Guards, error)
	// Permit takes pods out of the budget, and notes the stages with it.
	Permit(ctx context.Context, version string, pods []string, stages map[string]Stage) error
	// Scale sets how many guards are wanted.
	Scale(ctx context.Context, replicas int) error
	// Tell posts a warning about a guard. Posting one with the same name again is no error.
	Tell(ctx context.Context, g Guard, name, reason, message string) error
}

// Config is what drains are decided with.
type Config struct {
	Kubernetes Kubernetes
	Manager    pb.ManagerClient
	Log        *slog.Logger
}

const (
	// every is the time between two looks; kubectl drain tries every five seconds.
	every = 3 * time.Second
	// settled is how long the answer has to be the same before a node may leave: the volume of a pod that
	// moves is in use by nobody for a moment.
	settled = 10 * time.Second
	// away is how long the legs of a drained node may be away before they are made again elsewhere.
	away = time.Hour
	// answer is how long the manager may take for all answers of one look.
	answer = 20 * time.Second
	// warnEvery is the least time between two events that differ about one guard.
	warnEvery = time.Minute
)

// Serve watches over drains until ctx ends.
func Serve(ctx context.Context, c Config) error {
	d := newDriver(c, settled)
	tick := time.NewTicker(every)
	defer tick.Stop()
	said := ""
	for {
		err := d.once(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		now := ""
		if err != nil && !errors.Is(err, ErrChanged) {
			now = err.Error()
		}
		if now != said && now != "" {
			c.Log.Warn("no answer to drains of storage nodes; trying again", "err", err)
		}
		said = now
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// driver is one of those that look. It is used by one goroutine.
type driver struct {
	Config
	settled time.Duration
	since   map[string]time.Time // since when a node could leave
	told    map[string]warning   // by pod
	bare    map[string]bool      // cordoned nodes without a guard that were logged
}

type warning struct {
	text string
	at   time.Time
}

func newDriver(c Config, settled time.Duration) *driver {
	return &driver{Config: c, settled: settled, since: map[string]time.Time{}, told: map[string]warning{}, bare: map[string]bool{}}
}

// once compares what is with what should be, and does the difference.
func (d *driver) once(ctx context.Context) error {
	k, err := d.Kubernetes.Guards(ctx)
	if err != nil {
		return err
	}
	if k.Replicas < k.Nodes || k.Replicas > k.Nodes && len(k.Cordoned)+len(k.Stages) == 0 {
		err = d.Kubernetes.Scale(ctx, k.Nodes)
	}
	within, cancel := context.WithTimeout(ctx, answer)
	next, refused, e := d.decide(within, k)
	cancel()
	err = errors.Join(err, e)
	pods := permitted(k, next)
	if slices.ContainsFunc(k.Permitted, func(pod string) bool { return !slices.Contains(pods, pod) }) {
		// That pod may be evicted until this is done. Others are permitted in the next round, which
		// sees whether it was.
		maps.DeleteFunc(next, func(node string, _ Stage) bool { return k.Stages[node] == "" })
		pods = slices.DeleteFunc(pods, func(pod string) bool { return !slices.Contains(k.Permitted, pod) })
	}
	if !maps.Equal(next, k.Stages) || !slices.Equal(pods, k.Permitted) {
		if e := d.Kubernetes.Permit(ctx, k.Version, pods, next); e != nil {
			return errors.Join(err, e)
		}
		for _, node := range slices.Sorted(maps.Keys(next)) {
			if k.Stages[node] != next[node] {
				d.Log.Info("drain of a storage node", "node", node, "stage", string(next[node]))
			}
		}
	}
	for _, node := range slices.Sorted(maps.Keys(refused)) {
		err = errors.Join(err, d.tell(ctx, node, k.On[node], refused[node]))
	}
	return err
}

// permitted are the guards of the nodes that may leave, by name.
func permitted(k Guards, next map[string]Stage) (pods []string) {
	for node, stage := range next {
		for _, g := range k.On[node] {
			if stage == MayLeave {
				pods = append(pods, g.Pod)
			}
		}
	}
	slices.Sort(pods)
	return pods
}

// nodeSets sorts the nodes that are cordoned or have a stage.
type nodeSets struct {
	here []string // cordoned, with a guard
	gone []string // without a guard, also those that nobody asked for
	left []string // of these, those that may leave: the manager does not know yet that they have
	back []string // with a guard again, and not cordoned
}

func sortNodes(k Guards) (s nodeSets) {
	all := slices.Concat(k.Cordoned, slices.Collect(maps.Keys(k.Stages)))
	slices.Sort(all)
	for _, node := range slices.Compact(all) {
		if slices.Contains(k.Former, node) {
			continue // its stage is forgotten, so that there is no guard for it any more
		}
		cordoned, guarded, stage := slices.Contains(k.Cordoned, node), len(k.On[node]) > 0, k.Stages[node]
		switch {
		case guarded && cordoned:
			s.here = append(s.here, node)
		case guarded && stage == Left:
			s.back = append(s.back, node)
		case !guarded:
			s.gone = append(s.gone, node)
			if cordoned && stage == MayLeave {
				s.left = append(s.left, node)
			}
		}
	}
	slices.SortStableFunc(s.here, func(a, b string) int { // who may leave already comes first
		return strings.Compare(string(k.Stages[b]), string(k.Stages[a]))
	})
	return s
}

// decide returns the next stages, and why other nodes may not be drained. It tells the manager which
// nodes have left or are back. After an error, no node may leave whose guard is there.
func (d *driver) decide(ctx context.Context, k Guards) (next map[string]Stage, refused map[string]string, err error) {
	s := sortNodes(k)
	d.note(k, s)
	next, refused = map[string]Stage{}, map[string]string{}
	for _, node := range slices.Concat(s.gone, s.back) {
		if k.Stages[node] != "" {
			next[node] = k.Stages[node]
		}
	}
	if len(k.Cordoned)+len(k.Stages) == 0 {
		return next, nil, nil
	}
	nodes, err := d.nodes(ctx)
	if err != nil {
		return next, d.noAnswer(s.here), err
	}
	for _, node := range s.left {
		e := d.left(ctx, nodes[node])
		if e == nil {
			next[node] = Left
		}
		err = errors.Join(err, e)
	}
	for _, node := range s.back {
		e := d.back(ctx, nodes[node])
		if e == nil {
			delete(next, node)
		}
		err = errors.Join(err, e)
	}
	gone := s.gone
	for i, node := range s.here {
		why, e := d.needed(ctx, append(slices.Clone(gone), node))
		switch {
		case e != nil:
			maps.DeleteFunc(next, func(node string, stage Stage) bool { return stage == MayLeave && slices.Contains(s.here, node) })
			maps.Copy(refused, d.noAnswer(s.here[i:]))
			return next, refused, errors.Join(err, e)
		case why != "":
			refused[node] = why
			delete(d.since, node)
		case k.Stages[node] == MayLeave || d.stays(node):
			next[node] = MayLeave
			gone = append(gone, node)
		}
	}
	return next, refused, err
}

// stays reports whether a node could leave for long enough.
func (d *driver) stays(node string) bool {
	if d.since[node].IsZero() {
		d.since[node] = time.Now()
	}
	return time.Since(d.since[node]) >= d.settled
}

// noAnswer says of nodes that the manager has not answered.
func (d *driver) noAnswer(nodes []string) map[string]string {
	refused := map[string]string{}
	for _, node := range nodes {
		refused[node] = "the volume manager does not answer"
		delete(d.since, node)
	}
	return refused
}

// note forgets what was known of other nodes, and logs which cordoned ones have no guard: they are
// drained unasked.
func (d *driver) note(k Guards, s nodeSets) {
	maps.DeleteFunc(d.since, func(node string, _ time.Time) bool { return !slices.Contains(s.here, node) })
	maps.DeleteFunc(d.bare, func(node string, _ bool) bool { return !slices.Contains(s.gone, node) })
	for _, node := range s.gone {
		if k.Stages[node] == "" && !d.bare[node] {
			d.bare[node] = true
			d.Log.Warn("a cordoned storage node has no guard, and can be drained although volumes need it: which taint does the guard not tolerate?", "node", node)
		}
	}
}

// nodes are those that the manager knows.
func (d *driver) nodes(ctx context.Context) (map[string]*pb.Node, error) {
	all, err := d.Manager.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	known := map[string]*pb.Node{}
	for _, n := range all.GetNodes() {
		known[n.GetName()] = n
	}
	return known, nil
}

// left announces that a node is away.
func (d *driver) left(ctx context.Context, n *pb.Node) error {
	if n == nil || n.GetMaintainedUntil().AsTime().After(time.Now().Add(away)) {
		return nil // it has nothing, or an operator has announced more
	}
	if _, err := d.Manager.MaintainNode(ctx, &pb.MaintainNodeRequest{Node: n.GetName(), Seconds: uint32(away / time.Second)}); err != nil {
		return fmt.Errorf("announce that drained node %s is away: %w", n.GetName(), err)
	}
	return nil
}

// back ends the maintenance of a node that takes pods again. A node that an operator has cordoned or
// drained in Weft stays so.
func (d *driver) back(ctx context.Context, n *pb.Node) error {
	if n.GetMaintainedUntil() == nil || n.GetCordoned() || n.GetDraining() {
		return nil
	}
	if _, err := d.Manager.UncordonNode(ctx, &pb.UncordonNodeRequest{Node: n.GetName()}); err != nil {
		return fmt.Errorf("end the maintenance of node %s: %w", n.GetName(), err)
	}
	return nil
}

// namedVolumes is how many volumes a refusal names.
const namedVolumes = 5

// needed says which volumes in use would stop without some nodes; empty: none.
func (d *driver) needed(ctx context.Context, nodes []string) (string, error) {
	x, err := d.Manager.GetDependents(ctx, &pb.GetDependentsRequest{Nodes: nodes})
	if err != nil {
		return "", fmt.Errorf("ask what needs %s: %w", strings.Join(nodes, ", "), err)
	}
	all := x.GetVolumes()
	if len(all) == 0 {
		return "", nil
	}
	text := strings.Join(all[:min(len(all), namedVolumes)], ", ")
	if more := len(all) - namedVolumes; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Sprintf("volumes in use would stop without %s: %s", strings.Join(nodes, ", "), text), nil
}

// tell says why a node may not be drained: once, and what has changed not at once.
func (d *driver) tell(ctx context.Context, node string, all []Guard, why string) error {
	var errs []error
	for _, g := range all {
		message := fmt.Sprintf("node %s cannot be drained yet: %s (weft what-if lose %s)", node, why, node)
		if last := d.told[g.Pod]; last.text == message || time.Since(last.at) < warnEvery {
			continue
		}
		id := fnv.New32a()
		id.Write([]byte(message)) //nolint:errcheck // it cannot fail
		err := d.Kubernetes.Tell(ctx, g, fmt.Sprintf("%s.%08x", g.Pod, id.Sum32()), "DrainRefused", message)
		if err == nil {
			d.told[g.Pod] = warning{message, time.Now()}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

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

// every is the time between two looks; kubectl drain tries every five seconds.
const every = 3 * time.Second

// away is how long the legs of a drained node may be away before they are made again elsewhere.
const away = time.Hour

// Serve watches over drains until ctx ends.
func Serve(ctx context.Context, c Config) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	said := ""
	for {
		err := c.once(ctx)
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

// once compares what is with what should be, and does the difference.
func (c Config) once(ctx context.Context) error {
	k, err := c.Kubernetes.Guards(ctx)
	if err != nil {
		return err
	}
	if k.Replicas != k.Nodes {
		err = c.Kubernetes.Scale(ctx, k.Nodes)
	}
	next, refused, e := c.decide(ctx, k)
	err = errors.Join(err, e)
	pods := permitted(k, next)
	if slices.ContainsFunc(k.Permitted, func(pod string) bool { return !slices.Contains(pods, pod) }) {
		// That pod may be evicted until this is done. Others are permitted in the next round, which
		// sees whether it was.
		maps.DeleteFunc(next, func(node string, _ Stage) bool { return k.Stages[node] == "" })
		pods = slices.DeleteFunc(pods, func(pod string) bool { return !slices.Contains(k.Permitted, pod) })
	}
	if !maps.Equal(next, k.Stages) || !slices.Equal(pods, k.Permitted) {
		if e := c.Kubernetes.Permit(ctx, k.Version, pods, next); e != nil {
			return errors.Join(err, e)
		}
		for _, node := range slices.Sorted(maps.Keys(next)) {
			if k.Stages[node] != next[node] {
				c.Log.Info("drain of a storage node", "node", node, "stage", string(next[node]))
			}
		}
	}
	for _, node := range slices.Sorted(maps.Keys(refused)) {
		err = errors.Join(err, c.tell(ctx, node, k.On[node], refused[node]))
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
func (c Config) decide(ctx context.Context, k Guards) (next map[string]Stage, refused map[string]string, err error) {
	s := sortNodes(k)
	next, refused = map[string]Stage{}, map[string]string{}
	for _, node := range slices.Concat(s.gone, s.back) {
		if k.Stages[node] != "" {
			next[node] = k.Stages[node]
		}
	}
	if len(k.Cordoned)+len(k.Stages) == 0 {
		return next, nil, nil
	}
	nodes, err := c.nodes(ctx)
	if err != nil {
		return next, nil, err
	}
	for _, node := range s.left {
		if err := c.left(ctx, nodes[node]); err != nil {
			return next, nil, err
		}
		next[node] = Left
	}
	for _, node := range s.back {
		if err := c.back(ctx, nodes[node]); err != nil {
			return next, nil, err
		}
		delete(next, node)
	}
	gone := s.gone
	for _, node := range s.here {
		why, err := c.needed(ctx, nodes, append(slices.Clone(gone), node))
		switch {
		case err != nil:
			return next, refused, err
		case why != "":
			refused[node] = why
		default:
			next[node] = MayLeave
			gone = append(gone, node)
		}
	}
	return next, refused, nil
}

// nodes are those that the manager knows.
func (c Config) nodes(ctx context.Context) (map[string]*pb.Node, error) {
	all, err := c.Manager.ListNodes(ctx, &pb.ListNodesRequest{})
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
func (c Config) left(ctx context.Context, n *pb.Node) error {
	if n == nil {
		return nil // it has nothing
	}
	if _, err := c.Manager.MaintainNode(ctx, &pb.MaintainNodeRequest{Node: n.GetName(), Seconds: uint32(away / time.Second)}); err != nil {
		return fmt.Errorf("announce that drained node %s is away: %w", n.GetName(), err)
	}
	return nil
}

// back ends the maintenance of a node that takes pods again. A node that an operator has cordoned or
// drained in Weft stays so.
func (c Config) back(ctx context.Context, n *pb.Node) error {
	if n.GetMaintainedUntil() == nil || n.GetCordoned() || n.GetDraining() {
		return nil
	}
	if _, err := c.Manager.UncordonNode(ctx, &pb.UncordonNodeRequest{Node: n.GetName()}); err != nil {
		return fmt.Errorf("end the maintenance of node %s: %w", n.GetName(), err)
	}
	return nil
}

// namedVolumes is how many volumes a refusal names.
const namedVolumes = 5

// needed says which volumes in use would stop without some nodes; empty: none.
func (c Config) needed(ctx context.Context, known map[string]*pb.Node, nodes []string) (string, error) {
	nodes = slices.DeleteFunc(nodes, func(n string) bool { return known[n] == nil })
	if len(nodes) == 0 {
		return "", nil
	}
	x, err := c.Manager.WhatIf(ctx, &pb.WhatIfRequest{Nodes: nodes})
	if err != nil {
		return "", fmt.Errorf("ask what is needed of %s: %w", strings.Join(nodes, ", "), err)
	}
	var stop []string
	for _, v := range x.GetVolumes() {
		if v.GetHosts() != "" && v.GetAfter() == pb.Health_HEALTH_UNAVAILABLE && v.GetBefore() != pb.Health_HEALTH_UNAVAILABLE {
			stop = append(stop, v.GetVolumeName())
		}
	}
	switch {
	case len(stop) == 0 && x.GetVolumesLeftOut() > 0 && x.GetVolumesUnavailable()+x.GetVolumesLosingData() > uint32(len(x.GetVolumes())):
		return "too many volumes would stop to name them all", nil
	case len(stop) == 0:
		return "", nil
	}
	text := strings.Join(stop[:min(len(stop), namedVolumes)], ", ")
	if more := len(stop) - namedVolumes; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Sprintf("volumes in use would stop without %s: %s", strings.Join(nodes, ", "), text), nil
}

// tell says once for each reason why a node may not be drained.
func (c Config) tell(ctx context.Context, node string, all []Guard, why string) error {
	var errs []error
	for _, g := range all {
		message := fmt.Sprintf("node %s cannot be drained yet: %s (weft what-if lose %s)", node, why, node)
		id := fnv.New32a()
		id.Write([]byte(message)) //nolint:errcheck // it cannot fail
		errs = append(errs, c.Kubernetes.Tell(ctx, g, fmt.Sprintf("%s.%08x", g.Pod, id.Sum32()), "DrainRefused", message))
	}
	return errors.Join(errs...)
}

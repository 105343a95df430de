// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
)

// world is a cluster of Kubernetes and Weft's manager.
type world struct {
	pb.ManagerClient
	nodes     []string
	cordoned  map[string]bool
	guards    map[string]string // pods by node
	version   int
	replicas  int
	stages    map[string]Stage
	permitted []string
	warnings  map[string]string // by pod

	volumes    map[string]map[string]bool // in use: the nodes with a copy that is in sync
	maintained map[string]bool
	cordonedBy map[string]bool // in Weft, by an operator
	silent     bool            // the manager
	refuses    bool            // it refuses maintenance
	hangs      bool            // it answers nothing about volumes, for ever

	between func() // before each call
}

// newWorld has a guard on each node.
func newWorld(nodes ...string) *world {
	w := &world{
		nodes: nodes, cordoned: map[string]bool{}, guards: map[string]string{}, replicas: len(nodes), stages: map[string]Stage{},
		warnings: map[string]string{}, volumes: map[string]map[string]bool{}, maintained: map[string]bool{}, cordonedBy: map[string]bool{},
		between: func() {},
	}
	w.schedule()
	return w
}

// schedule is Kubernetes' controller and scheduler.
func (w *world) schedule() {
	for i := range w.replicas {
		pod := fmt.Sprintf("guard-%d", i)
		if slices.Contains(slices.Collect(maps.Values(w.guards)), pod) {
			continue
		}
		for _, n := range w.nodes {
			if w.guards[n] == "" && !w.cordoned[n] {
				w.guards[n] = pod
				break
			}
		}
	}
}

// evict is what a drain does.
func (w *world) evict(node string) error {
	if pod := w.guards[node]; pod != "" && !slices.Contains(w.permitted, pod) {
		return errors.New("it would violate the pod's disruption budget")
	}
	delete(w.guards, node)
	w.schedule()
	return nil
}

func (w *world) uncordon(node string) {
	delete(w.cordoned, node)
	w.schedule()
}

func (w *world) Guards(context.Context) (Guards, error) {
	w.between()
	k := Guards{
		Version: strconv.Itoa(w.version), Stages: maps.Clone(w.stages), Permitted: slices.Clone(w.permitted),
		Replicas: w.replicas, Nodes: len(w.nodes), On: map[string][]Guard{},
	}
	w.between()
	k.Cordoned = slices.Collect(maps.Keys(w.cordoned))
	for _, n := range slices.Concat(k.Cordoned, slices.Collect(maps.Keys(k.Stages))) {
		k.On[n] = nil
		if pod := w.guards[n]; pod != "" {
			k.On[n] = []Guard{{Pod: pod}}
		}
		if !slices.Contains(w.nodes, n) && !w.cordoned[n] {
			k.Former = append(k.Former, n)
		}
	}
	return k, nil
}

func (w *world) Scale(_ context.Context, replicas int) error {
	w.between()
	w.replicas = replicas
	w.schedule()
	return nil
}

func (w *world) Permit(_ context.Context, version string, pods []string, stages map[string]Stage) error {
	w.between()
	if version != strconv.Itoa(w.version) {
		return ErrChanged
	}
	w.version++
	w.stages, w.permitted = maps.Clone(stages), pods
	return nil
}

func (w *world) Tell(_ context.Context, g Guard, _, reason, message string) error {
	w.warnings[g.Pod] = reason + ": " + message
	return nil
}

var (
	errSilent  = errors.New("no manager answers")
	errRefused = errors.New("volumes in use would stop without it")
)

func (w *world) ListNodes(context.Context, *pb.ListNodesRequest, ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	w.between()
	if w.silent {
		return nil, errSilent
	}
	all := &pb.ListNodesResponse{}
	for _, name := range w.nodes {
		n := &pb.Node{Name: name, Cordoned: w.cordonedBy[name]}
		if w.maintained[name] {
			n.MaintainedUntil = timestamppb.New(time.Now().Add(time.Hour))
		}
		all.Nodes = append(all.Nodes, n)
	}
	return all, nil
}

// stop are the volumes that stop without some nodes.
func (w *world) stop(nodes ...string) (all []string) {
	for name, in := range w.volumes {
		left := maps.Clone(in)
		maps.DeleteFunc(left, func(n string, _ bool) bool { return slices.Contains(nodes, n) })
		if len(left) == 0 && len(in) > 0 {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

func (w *world) GetDependents(ctx context.Context, r *pb.GetDependentsRequest, _ ...grpc.CallOption) (*pb.GetDependentsResponse, error) {
	w.between()
	if w.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if w.silent {
		return nil, errSilent
	}
	return &pb.GetDependentsResponse{Volumes: w.stop(r.GetNodes()...)}, nil
}

func (w *world) MaintainNode(_ context.Context, r *pb.MaintainNodeRequest, _ ...grpc.CallOption) (*pb.Node, error) {
	w.between()
	if all := w.stop(r.GetNode()); len(all) > 0 || w.silent || w.refuses {
		return nil, fmt.Errorf("%w: %v", errRefused, all)
	}
	w.maintained[r.GetNode()] = true
	return &pb.Node{}, nil
}

func (w *world) UncordonNode(_ context.Context, r *pb.UncordonNodeRequest, _ ...grpc.CallOption) (*pb.Node, error) {
	w.between()
	if w.silent {
		return nil, errSilent
	}
	delete(w.maintained, r.GetNode())
	delete(w.cordonedBy, r.GetNode())
	return &pb.Node{}, nil
}

func (w *world) driver() *driver {
	return newDriver(Config{Kubernetes: w, Manager: w, Log: slog.New(slog.DiscardHandler)}, 0)
}

// look runs a driver until it has nothing more to do.
func (w *world) look(t *testing.T) {
	t.Helper()
	for range 3 {
		if err := w.driver().once(t.Context()); err != nil && !errors.Is(err, errSilent) && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
	}
}

func in(nodes ...string) map[string]bool {
	all := map[string]bool{}
	for _, n := range nodes {
		all[n] = true
	}
	return all
}

func TestANodeIsDrainedWhenItsVolumesCanDoWithoutIt(t *testing.T) {
	w := newWorld("t1", "t2", "t3")
	w.volumes["db1"] = in("t1", "t2")
	if w.look(t); w.evict("t1") == nil {
		t.Fatal("the guard of a node that is not cordoned is evicted")
	}
	w.cordoned["t1"] = true
	if w.look(t); w.evict("t1") != nil {
		t.Fatal("a node that is not needed cannot be drained")
	}
	w.look(t)
	if !w.maintained["t1"] {
		t.Error("drained, t1 is not under maintenance")
	}
	w.cordoned["t2"] = true
	if w.look(t); w.evict("t2") == nil {
		t.Fatal("both copies are drained at once")
	}
	if said, want := w.warnings[w.guards["t2"]], "DrainRefused: node t2 cannot be drained yet: volumes in use would stop without t1, t2: db1 (weft what-if lose t2)"; said != want {
		t.Errorf("it is said %q, want %q", said, want)
	}
	w.uncordon("t1")
	w.look(t)
	if w.maintained["t1"] || w.guards["t1"] == "" {
		t.Errorf("back, t1 is under maintenance: %t; guards are %v", w.maintained["t1"], w.guards)
	}
	if w.evict("t2") != nil {
		t.Error("the other node cannot be drained after the first one")
	}
}

// There are as many guards as storage nodes. Of too many, a StatefulSet deletes the last ones, wherever
// they are, and asks no budget: so their number stays while a node is cordoned.
func TestThereIsAGuardForEachNode(t *testing.T) {
	w := newWorld("t1", "t2")
	w.nodes = append(w.nodes, "t3")
	if w.look(t); len(w.guards) != 3 {
		t.Errorf("guards are %v", w.guards)
	}
	w.cordoned["t3"], w.nodes = true, []string{"t2", "t3"}
	if w.look(t); w.replicas != 3 {
		t.Errorf("while a node is cordoned, the guards become %d", w.replicas)
	}
	w.uncordon("t3")
	if w.look(t); w.replicas != 2 {
		t.Errorf("of 2 nodes, the guards stay %d", w.replicas)
	}
}

// A node that was drained, and is then taken out of the cluster, keeps no stage, and no guard waits for it.
func TestADrainedNodeCanBeRemoved(t *testing.T) {
	w := newWorld("t1", "t2")
	w.cordoned["t2"] = true
	w.look(t)
	if err := w.evict("t2"); err != nil {
		t.Fatal(err)
	}
	if w.look(t); w.stages["t2"] != Left {
		t.Fatalf("the drained node has the stage %q, want %q", w.stages["t2"], Left)
	}
	w.nodes = []string{"t1"}
	w.uncordon("t2") // with its node
	w.look(t)
	w.look(t)
	if len(w.stages) != 0 || w.replicas != 1 {
		t.Errorf("after the node was removed the stages are %v, and %d guards are wanted; want none and 1", w.stages, w.replicas)
	}
}

// A manager that takes a call and never answers is as silent as one that is not there.
func TestAManagerThatHangsLetsNobodyLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("t1", "t2")
		w.cordoned["t1"] = true
		w.look(t)
		w.hangs = true
		if w.look(t); w.evict("t1") == nil {
			t.Error("it leaves")
		}
		if said := w.warnings[w.guards["t1"]]; !strings.Contains(said, "the volume manager does not answer") {
			t.Errorf("it is said %q", said)
		}
	})
}

// The volume of a pod that moves is in use by nobody for a moment. That is no answer yet.
func TestAnAnswerHasToLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld("t1", "t2")
		w.volumes["scratch"] = in("t1")
		w.cordoned["t1"] = true
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- Serve(ctx, Config{Kubernetes: w, Manager: w, Log: slog.New(slog.DiscardHandler)})
		}()
		time.Sleep(30 * time.Second)
		synctest.Wait()
		delete(w.volumes, "scratch")
		time.Sleep(settled - 2*every)
		synctest.Wait()
		w.volumes["scratch"] = in("t1")
		time.Sleep(time.Minute)
		synctest.Wait()
		if w.evict("t1") == nil {
			t.Error("a node leaves while the volume there moves from pod to pod")
		}
		delete(w.volumes, "scratch")
		time.Sleep(settled + 2*every)
		synctest.Wait()
		if err := w.evict("t1"); err != nil {
			t.Error("a node that nothing needs any more:", err)
		}
		cancel()
		<-ended
	})
}

// The absence of one node may be refused when its guard is gone. The others are answered all the same.
func TestARefusedAbsenceIsNoAnswerForOthers(t *testing.T) {
	w := newWorld("t1", "t2", "t3")
	w.cordoned["t1"] = true
	w.look(t)
	if err := w.evict("t1"); err != nil {
		t.Fatal(err)
	}
	w.refuses = true
	w.cordoned["t2"] = true
	d := w.driver()
	for range 3 {
		if err := d.once(t.Context()); !errors.Is(err, errRefused) {
			t.Errorf("the refusal is not told: %v", err)
		}
	}
	if err := w.evict("t2"); err != nil {
		t.Error("another node cannot be drained:", err)
	}
	w.refuses = false
	if w.look(t); !w.maintained["t1"] {
		t.Error("the absence is not announced later")
	}
}

func TestNoNodeLeavesWithoutAnAnswer(t *testing.T) {
	w := newWorld("t1", "t2")
	w.cordoned["t1"], w.silent = true, true
	if w.look(t); w.evict("t1") == nil {
		t.Error("it leaves although no manager has answered")
	}
	w.silent = false
	w.look(t)
	w.silent = true
	if w.look(t); w.evict("t1") == nil {
		t.Error("it leaves although the manager has become silent")
	}
}

func TestALostCopyTakesThePermissionBack(t *testing.T) {
	w := newWorld("t1", "t2")
	w.volumes["db1"] = in("t1", "t2")
	w.cordoned["t1"] = true
	w.look(t)
	w.volumes["db1"] = in("t1")
	if w.look(t); w.evict("t1") == nil {
		t.Error("the last copy leaves")
	}
}

// What an operator has asked of Weft is not undone by an uncordon in Kubernetes.
func TestANodeStaysCordonedInWeft(t *testing.T) {
	w := newWorld("t1", "t2")
	w.cordoned["t1"], w.cordonedBy["t1"] = true, true
	w.look(t)
	if err := w.evict("t1"); err != nil {
		t.Fatal(err)
	}
	w.look(t)
	w.uncordon("t1")
	if w.look(t); !w.cordonedBy["t1"] || w.guards["t1"] == "" {
		t.Error("t1 takes legs again, or has no guard")
	}
}

// Two drivers look at the same time, each call of one between two of the other; operators cordon and
// drain as they like. No volume in use loses all the nodes with its copies.
func TestDriversAtTheSameTime(t *testing.T) {
	drains := 0
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld("t1", "t2", "t3", "t4")
		for _, name := range []string{"db1", "db2"} {
			two := r.Perm(4)
			w.volumes[name] = in(w.nodes[two[0]], w.nodes[two[1]])
		}
		var log []string
		depth := 0
		gone := func() (all []string) {
			for _, n := range w.nodes {
				if w.guards[n] == "" && w.cordoned[n] {
					all = append(all, n)
				}
			}
			return all
		}
		happen := func() {
			n := w.nodes[r.IntN(4)]
			switch r.IntN(4) {
			case 0: // no node in the seconds in which it has no guard yet, or one that has just left another
				if w.guards[n] == "" || slices.Contains(w.permitted, w.guards[n]) && w.stages[n] == "" {
					break
				}
				w.cordoned[n] = true
				log = append(log, "cordon "+n)
			case 1:
				w.uncordon(n)
				log = append(log, "uncordon "+n)
			default:
				if w.cordoned[n] && w.guards[n] != "" && w.evict(n) == nil {
					drains++
					log = append(log, "drained "+n)
				}
			}
			if stop := w.stop(gone()...); len(stop) > 0 {
				t.Fatalf("seed %d: %v stop after\n%s", seed, stop, strings.Join(log, "\n"))
			}
		}
		w.between = func() {
			if depth < 2 && r.IntN(4) == 0 {
				depth++
				_ = w.driver().once(t.Context())
				depth--
			}
			if r.IntN(4) == 0 {
				happen()
			}
		}
		for range 20 {
			_ = w.driver().once(t.Context()) // what it could not do is done in the next round
			happen()
		}
	}
	if drains < 3000 {
		t.Errorf("only %d drains", drains)
	}
}

// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// lifeOfAVolume lists the calls of a volume's life, in order.
var lifeOfAVolume = []string{
	"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ControllerExpandVolume", "NodeExpandVolume",
	"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume",
}

// TestKubeRestarts kills a process in the middle of each call of a volume's life.
// Kubernetes repeats the call, and the volume must keep the data written to it.
func TestKubeRestarts(t *testing.T) {
	l := Start(t, Options{})
	for _, death := range []struct {
		name    string
		methods []string
		// strike handles the first call of a method.
		strike func(Call) error
	}{
		{"the driver dies while it works", lifeOfAVolume, l.killedAtWork},
		{"the driver dies when it has answered, and the answer is lost", lifeOfAVolume, l.answerLost},
		{"volmgr dies", lifeOfAVolume, l.volmgrKilled},
		// In user space a mounted volume ends with its agent, so the agent dies only while
		// nothing is mounted.
		{"the node's initiator agent dies", []string{"ControllerPublishVolume", "NodeStageVolume", "NodeUnstageVolume", "ControllerUnpublishVolume"}, l.initiatorKilled},
	} {
		l.part(t, death.name, func(t *testing.T) {
			start := time.Now()
			struck := l.strikeOnce(death.methods, death.strike)
			defer l.OnCall(nil)
			live(t, l)
			nothingLeft(l)
			if missed := struck(); len(missed) > 0 {
				t.Errorf("no process died in %v: these were not called", missed)
			}
			t.Logf("the volume's life has taken %v", time.Since(start).Round(time.Second))
		})
	}
}

// live takes a volume through its whole life.
func live(t *testing.T, l *Lab) {
	l.Apply(class("restarts", "csi.storage.k8s.io/fstype: xfs", "") + claim{name: "life", class: "restarts", size: "512Mi"}.String() + pod{name: "life", claim: "life", node: "n1"}.String())
	ready(l, "life")
	sh(l, "life", "echo survives > /data/file; sync")
	l.Kubectl("patch", "pvc", "life", "--patch={\"spec\":{\"resources\":{\"requests\":{\"storage\":\"1Gi\"}}}}")
	l.Kubectl("wait", "pvc/life", "--for=jsonpath={.status.capacity.storage}=1Gi", "--timeout=180s")
	remove(l, "pod/life")
	l.Apply(pod{name: "later", claim: "life", node: "n2"}.String())
	ready(l, "later")
	is(t, "the file", sh(l, "later", "cat /data/file"), "survives")
	remove(l, "pod/later", "pvc/life", "storageclass/restarts")
}

// strikeOnce lets strike handle the first call of each method; missed returns the methods
// that were not called.
func (l *Lab) strikeOnce(methods []string, strike func(Call) error) (missed func() []string) {
	var mu sync.Mutex
	left := slices.Clone(methods)
	l.OnCall(func(c Call) error {
		mu.Lock()
		i := slices.Index(left, c.Method)
		if i >= 0 {
			left = slices.Delete(left, i, i+1)
		}
		mu.Unlock()
		if i < 0 {
			return c.Forward()
		}
		return strike(c)
	})
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return left
	}
}

// lostAnswer is the error that Kubernetes sees when a call's answer is lost.
var lostAnswer = status.Error(codes.Unavailable, "the connection is lost")

func (l *Lab) killedAtWork(c Call) error {
	answered := make(chan error, 1)
	go func() { answered <- c.Forward() }()
	select {
	case <-time.After(10 * time.Millisecond): // in the middle of the call
	case <-answered:
		answered <- nil
	}
	l.restartDriver(c.Where)
	<-answered
	return lostAnswer
}

func (l *Lab) answerLost(c Call) error {
	_ = c.Forward()
	l.restartDriver(c.Where)
	return lostAnswer
}

func (l *Lab) volmgrKilled(c Call) error {
	l.must(l.Weft.Manager().Kill())
	answered := make(chan error, 1)
	go func() { answered <- c.Forward() }()
	l.must(l.Weft.StartManager())
	return <-answered
}

func (l *Lab) initiatorKilled(c Call) error {
	n := l.Nodes[0] // the controller serves the call; the volume's first life is on this node
	if i := slices.IndexFunc(l.Nodes, func(n *Node) bool { return n.Name == c.Where }); i >= 0 {
		n = l.Nodes[i]
	}
	l.must(n.Program("initiator").Kill())
	answered := make(chan error, 1)
	go func() { answered <- c.Forward() }()
	l.must(n.StartInitiator())
	return <-answered
}

// restartDriver kills and restarts the driver's process in one place.
func (l *Lab) restartDriver(where string) {
	if where == "controller" {
		l.must(l.Controller().Kill())
		l.must(l.StartController())
		return
	}
	for _, n := range l.Nodes {
		if n.Name == where {
			l.must(n.Program("csi").Kill())
			l.must(n.StartDriver())
		}
	}
}

// must is for goroutines other than the test's.
func (l *Lab) must(err error) {
	if err != nil {
		l.t.Error(err)
	}
}

func TestSidecarsAreReadFromTheDeployment(t *testing.T) {
	sidecars, err := readSidecars(snapshotManifests)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter"} {
		if !slices.ContainsFunc(sidecars[name], func(a string) bool { return strings.HasPrefix(a, "--csi-address=") }) {
			t.Errorf("the arguments of %s are %v, want --csi-address among them", name, sidecars[name])
		}
	}
	l := &Lab{dir: "/lab"}
	got := fmt.Sprint(l.sidecarArgs("csi-attacher", []string{"--csi-address=/csi/csi.sock", "--leader-election-namespace=$(NAMESPACE)"}))
	is(t, "the arguments in the lab", got, "[--csi-address=/lab/csi.sock --leader-election-namespace=weft-system --kubeconfig=/lab/account.kubeconfig]")
}

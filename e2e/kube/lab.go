// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/e2e/kube/parts"
)

// Options describe a lab. The zero value is two nodes.
type Options struct {
	Nodes int    // 0: 2
	Gates string // feature gates for all of Kubernetes: "CSIVolumeHealth=true"
	Suite bool   // with the images that Kubernetes' own suite needs
	Plain bool   // without the driver and its sidecars
	Empty bool   // without any part of Weft
	Weft  WeftOptions
}

// kubeletGates are the gates in the syntax of the kubelet's configuration.
func (o Options) kubeletGates() string { return strings.ReplaceAll(o.Gates, "=", ": ") }

// Lab is a running cluster.
type Lab struct {
	Kubeconfig string // an administrator's
	Nodes      []*Node
	Weft       *Weft

	t       testing.TB
	options Options
	place   place
	parts   parts.Parts
	dir     string
	logs    string
	secrets secrets
	env     []string // of the programs of the lab
	calls   calls

	mu       sync.Mutex
	programs map[string]*Process
}

// Start starts a cluster, which ends with the test. Where none can run, it skips the test
// with the reason; with WEFT_KUBE=required it fails the test.
func Start(t testing.TB, o Options) *Lab {
	t.Helper()
	l := &Lab{t: t, options: o, place: thisPlace(), programs: make(map[string]*Process)}
	if os.Getenv(wantVar) == "" {
		t.Skip("runs a whole Kubernetes cluster, for minutes: make kube-test, kube-lost-node or kube-e2e starts it")
	}
	if why := l.place.Missing; why != "" {
		if os.Getenv(wantVar) == "required" {
			t.Fatal("no Kubernetes cluster here: ", why)
		}
		t.Skip("no Kubernetes cluster here: ", why)
	}
	if l.options.Nodes == 0 {
		l.options.Nodes = 2
	}
	start := time.Now()
	if err := l.prepare(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.end() })
	if err := l.run(); err != nil {
		t.Fatal(err)
	}
	t.Logf("the cluster is up after %v", time.Since(start).Round(time.Millisecond))
	return l
}

func (l *Lab) prepare() (err error) {
	if l.parts, err = parts.Find(); err != nil {
		return err
	}
	if l.dir, err = os.MkdirTemp(l.place.Dir, ""); err != nil {
		return err
	}
	l.logs = filepath.Join(l.place.Dir, "log", strings.ReplaceAll(l.t.Name(), "/", "-"))
	if err := os.MkdirAll(l.logs, 0o755); err != nil {
		return err
	}
	l.Kubeconfig = filepath.Join(l.dir, "kubeconfig")
	l.env = []string{"KUBECONFIG=" + l.Kubeconfig}
	return nil
}

// run starts everything. Nodes need the API server only at the end, so their images are
// imported while it starts.
func (l *Lab) run() error {
	for n := 1; n <= l.options.Nodes; n++ {
		node, err := startNode(l, n, l.options.Nodes)
		if node != nil {
			l.Nodes = append(l.Nodes, node)
		}
		if err != nil {
			return err
		}
	}
	if err := l.startControlPlane(); err != nil {
		return err
	}
	if err := l.startNodes(); err != nil {
		return err
	}
	if !l.options.Empty {
		if err := l.startWeft(); err != nil {
			return err
		}
	}
	for _, n := range l.Nodes {
		for _, what := range []string{"create", "condition=Ready"} {
			if _, err := l.TryKubectl("wait", "node/"+n.Name, "--for="+what, "--timeout=60s"); err != nil {
				return err
			}
		}
	}
	// Pods are refused until the controllers have created it.
	if _, err := l.TryKubectl("wait", "serviceaccount/default", "--for=create", "--timeout=60s"); err != nil || l.options.Plain || l.options.Empty {
		return err
	}
	return l.startDriver()
}

// startNodes has all nodes start Kubernetes, at once.
func (l *Lab) startNodes() error {
	failed := make(chan error, len(l.Nodes))
	for _, n := range l.Nodes {
		go func() { failed <- n.startKubernetes() }()
	}
	var errs []error
	for range l.Nodes {
		errs = append(errs, <-failed)
	}
	return errors.Join(errs...)
}

// end kills everything at once. Nothing of it is needed any more, and tests of an orderly
// shutdown do that themselves.
func (l *Lab) end() {
	for _, n := range l.Nodes {
		if err := n.Kill(); err != nil {
			l.t.Error(err)
		}
	}
	for _, p := range l.programs {
		if err := p.Kill(); err != nil {
			l.t.Error(err)
		}
	}
	if l.t.Failed() {
		l.t.Log("the logs of its programs are in ", l.logs)
	}
}

// TryKubectl runs kubectl and returns its output.
func (l *Lab) TryKubectl(args ...string) (string, error) { return l.kubectl("", args...) }

func (l *Lab) kubectl(in string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(l.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, l.parts.Program("kubectl"), args...)
	cmd.Env = append(os.Environ(), l.env...)
	cmd.Stdin = strings.NewReader(in)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Kubectl runs a kubectl command that must succeed, and returns its output.
func (l *Lab) Kubectl(args ...string) string {
	l.t.Helper()
	out, err := l.TryKubectl(args...)
	if err != nil {
		l.t.Fatal(err)
	}
	return out
}

// Apply creates or updates objects.
func (l *Lab) Apply(manifest string) {
	l.t.Helper()
	if _, err := l.kubectl(manifest, "apply", "--filename=-"); err != nil {
		l.t.Fatalf("%v\n%s", err, manifest)
	}
}

// Trouble is the output that an operator would look at when something is wrong.
func (l *Lab) Trouble() string {
	var out strings.Builder
	for _, args := range [][]string{
		{"get", "pod,pvc,pv,volumeattachment", "--output=wide"},
		{"get", "volumesnapshot,volumesnapshotcontent", "--output=wide", "--ignore-not-found"},
		{"get", "event", "--field-selector=involvedObject.kind!=Node,type!=Normal", "--sort-by=.lastTimestamp", "--output=custom-columns=TIME:.lastTimestamp,OBJECT:.involvedObject.name,REASON:.reason,MESSAGE:.message"},
	} {
		text, err := l.TryKubectl(args...)
		fmt.Fprintf(&out, "$ kubectl %s\n%s", strings.Join(args, " "), text)
		if err != nil {
			fmt.Fprintln(&out, err)
		}
	}
	if l.Weft == nil {
		return out.String()
	}
	return out.String() + l.Weft.State()
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/kubeapi"
)

// nodes answers with one node after another, and repeats the last one for ever; nil is an error.
type nodes []*kubeapi.Node

func (n *nodes) Node(context.Context, string) (*kubeapi.Node, error) {
	now := (*n)[0]
	if len(*n) > 1 {
		*n = (*n)[1:]
	}
	if now == nil {
		return nil, errors.New("no answer")
	}
	return now, nil
}

func TestLabelsThatANodeHasBecomeFailureDomains(t *testing.T) {
	api := &nodes{{Labels: map[string]string{"topology.kubernetes.io/zone": "z1", "rack.example/no": "7", "other": "x"}}}
	take := []string{"topology.kubernetes.io/zone=zone", "rack.example/no=rack", "topology.kubernetes.io/region=region"}
	var stdout bytes.Buffer
	if err := runKubernetesLabels(t.Context(), api, "n1", take, "", &stdout); err != nil {
		t.Fatal(err)
	}
	if want := "rack=7\nzone=z1\n"; stdout.String() != want {
		t.Errorf("labels = %q, want %q", stdout.String(), want)
	}
	file := filepath.Join(t.TempDir(), "labels")
	if err := runKubernetesLabels(t.Context(), api, "n1", take, file, nil); err != nil {
		t.Fatal(err)
	}
	// The agents read what the command writes.
	o := agentOptions{labels: []string{"rail=a"}, labelsFile: file}
	got, err := o.allLabels()
	if want := map[string]string{"rack": "7", "zone": "z1", "rail": "a"}; err != nil || !maps.Equal(got, want) {
		t.Errorf("an agent has labels %v, %v, want %v", got, err, want)
	}
}

func TestALabelsFileThatIsNotThereIsAnError(t *testing.T) {
	o := agentOptions{labelsFile: filepath.Join(t.TempDir(), "none")}
	if got, err := o.allLabels(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("labels = %v, %v, want that the file is not there", got, err)
	}
}

func nodeWith(leaving bool, ids ...string) *kubeapi.Node {
	n := &kubeapi.Node{Leaving: leaving, Attached: []string{"kubernetes.io/csi/other^v9"}}
	for _, id := range ids {
		n.Attached = append(n.Attached, "kubernetes.io/csi/csi.weft.dev^"+id)
	}
	return n
}

func TestANodeThatStaysIsNotWaitedFor(t *testing.T) {
	var stderr bytes.Buffer
	if err := runKubernetesWait(t.Context(), &nodes{nodeWith(false, "v1")}, "n1", time.Hour, &stderr); err != nil {
		t.Errorf("wait = %v, want that it ends at once", err)
	}
}

func TestTheVolumesOfALeavingNodeAreWaitedFor(t *testing.T) {
	var stderr bytes.Buffer
	api := &nodes{nodeWith(true, "v1", "v2"), nil, nodeWith(true, "v2"), nodeWith(true, "v2"), nodeWith(true)}
	if err := runKubernetesWait(t.Context(), api, "n1", time.Microsecond, &stderr); err != nil {
		t.Errorf("wait = %v, want that it ends when all are gone", err)
	}
	if want := "still attached: v1, v2\nno answer\nstill attached: v2\n"; stderr.String() != want {
		t.Errorf("it said %q, want %q", stderr.String(), want)
	}
}

func TestTheWaitEndsInTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err := runKubernetesWait(ctx, &nodes{nodeWith(true, "v1")}, "n1", time.Millisecond, new(bytes.Buffer))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "v1") {
		t.Errorf("wait = %v, want the deadline, and the volume named", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/store"
)

// An empty directory may be a disk that is not mounted, or the place for a new cluster.
func TestAClusterIsBegunOnlyByInit(t *testing.T) {
	empty, foreign := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Join(empty, "missing"), empty, foreign} {
		before, _ := os.ReadDir(dir)
		if m, err := New(Config{Dir: dir}); !errors.Is(err, ErrNoStore) {
			t.Errorf("New(%s) = %v, %v; want ErrNoStore", dir, m, err)
		}
		if after, _ := os.ReadDir(dir); len(after) != len(before) {
			t.Errorf("New(%s) has left %v there", dir, after)
		}
	}
	if _, err := Init(Config{Dir: foreign}); !errors.Is(err, store.ErrNotEmpty) {
		t.Errorf("Init where there is a file = %v, want ErrNotEmpty", err)
	}
	dir := filepath.Join(empty, "volmgr")
	id, err := Init(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Init(Config{Dir: dir}); !errors.Is(err, store.ErrNotEmpty) {
		t.Errorf("Init over a cluster = %v, want ErrNotEmpty", err)
	}
	r := &rig{t: t, dir: dir}
	r.start()
	defer r.stop()
	if got, err := r.GetStatus(t.Context(), &pb.GetStatusRequest{}); err != nil || got.ClusterId != id.String() {
		t.Errorf("the manager's cluster is %v, %v; want %v, which Init gave", got.GetClusterId(), err, id)
	}
}

// An Init that was cut before its last rename has no effect.
func TestAnInitThatWasCutIsDoneAnew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volmgr")
	if _, err := Init(Config{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(dir, dir+".restoring"); err != nil { // cut just before the rename
		t.Fatal(err)
	}
	if _, err := New(Config{Dir: dir}); !errors.Is(err, ErrNoStore) {
		t.Errorf("New after a cut Init = %v, want ErrNoStore", err)
	}
	if err := os.Truncate(filepath.Join(dir+".restoring", "MANIFEST"), 3); err != nil { // cut earlier
		t.Fatal(err)
	}
	if _, err := Init(Config{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	m, err := New(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(left) != 1 {
		t.Errorf("beside the store there is %v, %v", left, err)
	}
}

// The refusal carries the facts that the agent tells its operator.
func TestAnAgentOfAnotherClusterIsRefused(t *testing.T) {
	r := newRig(t)
	own, err := r.GetStatus(t.Context(), &pb.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := r.agents.Initiator(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	report := &pb.InitiatorReport{
		Node: "c1", BootId: "boot", ClusterId: "12345678-9abc-4def-8123-456789abcdef",
		Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:12345678-9abc-4def-8123-456789abcdef", Id: "12345678-9abc-4def-8123-456789abcdef"},
	}
	if err := stream.Send(report); err != nil {
		t.Fatal(err)
	}
	wanted, err := stream.Recv()
	if id, refused := pb.OtherCluster(err); wanted != nil || !refused || id != own.ClusterId {
		t.Errorf("the agent gets %v, %v; want a refusal by cluster %s", wanted, err, own.ClusterId)
	}
	nodes, err := r.ListNodes(t.Context(), &pb.ListNodesRequest{})
	if err != nil || len(nodes.Nodes) != 1 || !strings.Contains(nodes.Nodes[0].GetInitiator().GetRefused(), report.ClusterId) {
		t.Errorf("nodes are %v, %v; want c1 with the reason", nodes, err)
	}
}

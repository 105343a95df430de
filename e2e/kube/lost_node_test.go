// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/kube/parts"
	"weft.dev/weft/proto/pb"
)

// The control plane loses a node whose pod continues to write. An operator marks the node
// as out of service, and Kubernetes starts the pod on the other node.
func TestKubeLostNode(t *testing.T) {
	loseNode(Start(t, Options{})).nothingIsLost(t)
}

// The lost node also has the manager that leads. Another one leads then, and the pod moves all the
// same. The lost manager and the pod beside it are together on their side of the cut, where nothing
// may be recorded any more.
func TestKubeLostNodeWithTheLeader(t *testing.T) {
	l := Start(t, Options{Weft: WeftOptions{NodeManagers: true}})
	s := loseNode(l)
	eventually(l, 30*time.Second, "another manager leads", func(ctx context.Context) error {
		at, err := l.Weft.leader(ctx)
		if err == nil && at == s.lost.managerAddress() {
			err = fmt.Errorf("the manager of the lost node, at %s, does", at)
		}
		return err
	})
	const island = "island"
	out, err := s.lost.Run(l.place.Weft, "pool", "create", island, "--manager", s.lost.managerAddress(), "--timeout", "10s")
	if err == nil {
		t.Errorf("the manager of the lost node has recorded something: %s", out)
	}
	s.nothingIsLost(t)
	l.must(l.Weft.awaitVotes())
	pools, err := l.Weft.API.ListPools(t.Context(), &pb.ListPoolsRequest{})
	if err != nil || slices.ContainsFunc(pools.GetPools(), func(p *pb.Pool) bool { return p.GetName() == island }) {
		t.Errorf("the pools are %v, %v", pools, err)
	}
}

// nothingIsLost checks that every write of the lost pod that was acknowledged is on the volume, that
// none was once the other pod was ready, and that the lost node cleans up when it is back.
func (s *lostNode) nothingIsLost(t *testing.T) {
	t.Helper()
	l := s.l
	s.overlap(t, 10*time.Second)
	zombie := readWriter(t, s.lost)
	if n := zombie.ackedAfter(s.grant); n > 0 {
		t.Errorf("%d writes of the lost node were acknowledged after the pod was ready on the other one", n)
	}
	// The lost pod's next write fails, or waits for a volmgr that it cannot reach.
	found := s.files(t, zombie.id)
	for _, n := range slices.Sorted(maps.Keys(zombie.acked)) {
		if found[n] != strconv.Itoa(n) {
			t.Fatalf("write %d was acknowledged on the lost node, and reads %q on the other one; %d were acknowledged", n, found[n], len(zombie.acked))
		}
	}
	t.Logf("all %d acknowledged writes of the lost pod are on the volume; %d later ones failed", len(zombie.acked), zombie.failed)

	// The node returns and cleans up what it still has of the volume. The driver ends if it registers
	// before the agent is known, and in the lab nothing would start it again.
	l.must(s.lost.MendControl())
	eventually(l, 30*time.Second, "the lost node's agent reports", func(ctx context.Context) error {
		return l.Weft.reports(ctx, s.lost)
	})
	l.must(s.lost.StartKubelet())
	l.Kubectl("wait", "node/"+s.lost.Name, "--for=condition=Ready", "--timeout=60s")
	eventually(l, 90*time.Second, "the lost node has nothing left of the volume", func(context.Context) error {
		if left := s.lost.leftovers(); left != "" {
			return errors.New(left)
		}
		return nil
	})
	l.Kubectl("taint", "node", s.lost.Name, outOfService+"-")
	s.takeAway(t)
	if out, err := s.fsck(t); err != nil {
		t.Errorf("the file system is damaged: %v\n%s", err, out)
	}
	nothingLeft(l)
}

// The same with targets that do not fence, to prove that the test above can fail.
func TestKubeLostNodeUnfenced(t *testing.T) {
	if os.Getenv(wantVar) == "" || thisPlace().Missing != "" {
		Start(t, Options{}) // skips with the reason
	}
	target := filepath.Join(t.TempDir(), "weft-unfenced")
	build := exec.Command("go", "build", "-tags", "weft_unfenced", "-o", target, "weft.dev/weft/cmd/weft")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build weft without its fence: %v\n%s", err, out)
	}
	l := Start(t, Options{Weft: WeftOptions{Target: target}})
	s := loseNode(l)
	eventually(l, time.Minute, "both nodes have written some 300 times", func(context.Context) error {
		lost, safe := readWriter(t, s.lost), readWriter(t, s.safe)
		if n, m := lost.ackedAfter(s.grant), len(safe.acked)+safe.failed; n < 300 || m < 300 {
			return fmt.Errorf("the lost one has %d times (%d failed), the other %d", n, lost.failed, m)
		}
		return nil
	})
	s.takeAway(t)
	// The lost node's cached file system metadata must reach the drives now, at the latest.
	// Left alone, the kernel may wait for longer than this test.
	if out, err := s.lost.Run("sh", "-c", "sync -f /var/lib/kubelet/plugins/kubernetes.io/csi/"+driverName+"/*/globalmount"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := s.lost.Kill(); err != nil { // otherwise the check would see new writes
		t.Fatal(err)
	}
	out, err := s.fsck(t)
	if err == nil {
		t.Errorf("two nodes have written to one file system, and it is undamaged\n%s", out)
	}
	t.Logf("e2fsck: %v, %d lines of damage, the first: %.300s", err, strings.Count(out, "\n"), out)
}

const outOfService = "node.kubernetes.io/out-of-service"

// lostNode is the volume of a pod that has moved away from a lost node.
type lostNode struct {
	l          *Lab
	lost, safe *Node
	volume     *pb.Volume
	grant      time.Time // when the pod on the safe node was ready
}

func loseNode(l *Lab) *lostNode {
	t := l.t
	t.Helper()
	l.Apply(fmt.Sprintf(statefulSet, parts.Busybox))
	l.Kubectl("wait", "pod/db-0", "--for=create", "--timeout=30s")
	ready(l, "db-0")
	s := &lostNode{l: l, lost: l.Nodes[0], safe: l.Nodes[1], volume: volumeOf(l, "data-db-0")}
	if l.Kubectl("get", "pod", "db-0", "--output=jsonpath={.spec.nodeName}") != s.lost.Name {
		s.lost, s.safe = s.safe, s.lost
	}
	eventually(l, 30*time.Second, "the pod writes", func(context.Context) error {
		if w := readWriter(t, s.lost); len(w.acked) < 20 {
			return fmt.Errorf("%d writes are acknowledged", len(w.acked))
		}
		return nil
	})
	if l.options.Weft.NodeManagers {
		eventually(l, 30*time.Second, "the node's manager leads", func(ctx context.Context) error { return l.Weft.lead(ctx, s.lost) })
	}
	if err := errors.Join(s.lost.Program("kubelet").Kill(), s.lost.CutControl()); err != nil {
		t.Fatal(err)
	}
	lost := time.Now()
	l.Kubectl("wait", "node/"+s.lost.Name, "--for=condition=Ready=Unknown", "--timeout=90s")
	t.Logf("Kubernetes sees the loss of node %s after %v", s.lost.Name, time.Since(lost).Round(time.Second))
	if readWriter(t, s.lost).ackedAfter(lost.Add(5*time.Second)) == 0 {
		t.Fatal("the lost node's pod has stopped writing, so the test would prove nothing")
	}
	tainted := time.Now()
	l.Kubectl("taint", "node", s.lost.Name, outOfService+"=nodeshutdown:NoExecute")
	eventually(l, 3*time.Minute, "the pod is ready on the other node", func(context.Context) error {
		out, err := l.TryKubectl("get", "pod", "db-0", "--output=jsonpath={.spec.nodeName} {.status.conditions[?(@.type=='Ready')].status}")
		if err == nil && out != s.safe.Name+" True" {
			err = errors.New(out)
		}
		return err
	})
	s.grant = time.Now()
	t.Logf("the pod is ready on node %s %v after the taint", s.safe.Name, s.grant.Sub(tainted).Round(100*time.Millisecond))
	return s
}

// overlap lets both pods try to write for the given time, and until the safe node's pod has
// had a write acknowledged after it.
func (s *lostNode) overlap(t *testing.T, span time.Duration) {
	t.Helper()
	end := time.Now().Add(span)
	eventually(s.l, span+30*time.Second, "the pod on the other node writes", func(context.Context) error {
		if readWriter(t, s.safe).ackedAfter(end) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
}

// files are the first lines written by a writer, by number.
func (s *lostNode) files(t *testing.T, writer string) map[int]string {
	t.Helper()
	found := make(map[int]string)
	for line := range strings.Lines(sh(s.l, "db-0", "grep -r -m1 . /data/"+writer+" || true")) {
		file, text, _ := strings.Cut(strings.TrimSpace(line), ":")
		n, err := strconv.Atoi(filepath.Base(file))
		if err != nil {
			t.Fatalf("file %s: %v", file, err)
		}
		found[n] = text
	}
	return found
}

// takeAway ends the pod, and waits until the volume is detached.
func (s *lostNode) takeAway(t *testing.T) {
	t.Helper()
	s.l.Kubectl("delete", "statefulset", "db", "--cascade=orphan")
	remove(s.l, "pod/db-0", "--force")
	eventually(s.l, 2*time.Minute, "the volume is detached", func(ctx context.Context) error {
		v, err := s.l.Weft.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: s.volume.Id})
		if err == nil && v.Attachment != nil {
			err = fmt.Errorf("it is attached to %s", v.Attachment.Node)
		}
		return err
	})
}

// fsck checks the detached volume's file system on the safe node. An error means that the
// file system is damaged.
func (s *lostNode) fsck(t *testing.T) (string, error) {
	t.Helper()
	out, err := s.l.Weft.Try("attach", s.volume.Name, "--node", s.safe.Name, "--timeout", "50s")
	if err != nil {
		t.Fatal(err)
	}
	device := strings.TrimSpace(out)
	report, damage := s.safe.Run("e2fsck", "-f", "-n", device)
	if _, err := s.l.Weft.Try("detach", s.volume.Name); err != nil {
		t.Fatal(err)
	}
	remove(s.l, "pvc/data-db-0")
	return report, damage
}

// writer is the log of a pod: the numbers of the acknowledged writes, and their times.
type writer struct {
	id     string
	acked  map[int]time.Time
	failed int
}

func (w writer) ackedAfter(t time.Time) (n int) {
	for _, when := range w.acked {
		if when.After(t) {
			n++
		}
	}
	return n
}

// readWriter reads a pod's log from the node, which keeps it.
func readWriter(t testing.TB, n *Node) writer {
	t.Helper()
	w := writer{acked: make(map[int]time.Time)}
	logs, err := filepath.Glob(n.file("var/log/pods/default_db-0_*/c/*.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range logs {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			w.line(lines.Text())
		}
		f.Close()
	}
	return w
}

// line parses a line such as "2026-11-21T19:00:00.0Z stdout F ack 12".
func (w *writer) line(text string) {
	fields := strings.Fields(text)
	if len(fields) != 5 {
		return
	}
	when, err := time.Parse(time.RFC3339Nano, fields[0])
	if err != nil {
		return
	}
	switch n, _ := strconv.Atoi(fields[4]); fields[3] {
	case "writer":
		w.id = fields[4]
	case "ack":
		w.acked[n] = when
	case "fail":
		w.failed++
	}
}

const statefulSet = `apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 1
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: c
        image: %s
        command:
        - sh
        - -c
        - |
          id=$(cat /proc/sys/kernel/random/uuid); echo writer $id; mkdir /data/$id; n=0
          while true; do
            n=$((n+1))
            if yes $n | head -c 20000 | dd of=/data/$id/$n bs=20000 iflag=fullblock conv=fsync 2>/dev/null; then echo ack $n; else echo fail $n; fi
            mkdir -p /data/d$((n %% 50))/$n; rm -rf /data/d$(((n+25) %% 50))
            usleep 10000
          done
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {storageClassName: weft-mirrored, accessModes: [ReadWriteOnce], resources: {requests: {storage: 512Mi}}}
`

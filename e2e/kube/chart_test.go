// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"sigs.k8s.io/yaml"

	"weft.dev/weft/e2e/kube/parts"
)

// apiService is the address of the API server's Service. The test does kube-proxy's work.
const apiService = "10.0.0.1"

// chartManagers is how many the chart runs.
const chartManagers = 3

// managerPod is the pod of a manager, and managerService its Service's name, which hosts files give the
// address managerIP: the lab has no DNS.
func managerPod(i int) string     { return fmt.Sprintf("weft-volmgr-%d", i) }
func managerService(i int) string { return managerPod(i) + "." + namespace + ".svc" }
func managerIP(i int) string      { return fmt.Sprintf("10.0.0.%d", 20+i) }

// TestChartRunsWeft runs everything that the chart installs, as pods of the image; the lab
// runs no Weft process itself. At first the cluster has no snapshots. It changes the manifests in four places: the managers' names are in the
// pods' hosts files, two managers may be on one of the lab's two nodes, the machine's /lib/modules is
// not mounted, and a file serves as drive.
func TestChartRunsWeft(t *testing.T) {
	l := Start(t, Options{Empty: true})
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(l.podsTrouble())
		}
	})
	l.must(l.serve(apiService+":443", func() (string, error) { return controlAddress + ":6443", nil }))
	for i := range chartManagers {
		l.must(l.serve(managerIP(i)+":4480", func() (string, error) {
			ip, err := l.TryKubectl("--namespace="+namespace, "get", "pod", managerPod(i), "--output=jsonpath={.status.podIP}")
			return ip + ":4480", err
		}))
	}
	for _, n := range l.Nodes {
		_, network, err := net.ParseCIDR(podNetwork(n.id.N))
		l.must(err)
		l.must(netlink.RouteAdd(&netlink.Route{Dst: network, Gw: net.ParseIP(nodeAddress(n.id.N))}))
		for i := range chartManagers {
			store := n.file(fmt.Sprintf("var/store%d", i))
			l.must(os.MkdirAll(store, 0o755))
			l.must(os.Chmod(store, 0o777))
		}
		_, err = n.Run("truncate", "--size=4G", "/dev/weft/drive")
		l.must(err)
	}
	l.importChart()
	start := time.Now()
	l.Kubectl("label", "node", "--all", "weft.dev/storage=true")
	for i := range chartManagers {
		l.Apply(storeVolume(i, l.Nodes[i%len(l.Nodes)].Name))
	}
	for _, file := range []string{"namespace", "csidriver", "rbac-controller", "rbac-node", "rbac-volmgr", "storageclasses", "volmgr", "target", "guard", "node", "controller"} {
		l.Apply(chartFile(t, file))
	}
	beginCluster(l)
	for _, what := range []string{"statefulset/weft-volmgr", "daemonset/weft-target", "daemonset/weft-node", "deployment/weft-controller"} {
		l.rolledOut(what)
	}
	guardsStand(l)
	t.Logf("Weft runs after %v", time.Since(start).Round(time.Millisecond))
	onlyMembersAreAnswered(l)
	for _, n := range l.Nodes {
		eventually(l, time.Minute, "a drive is added", func(context.Context) error {
			_, err := weft(l, "drive", "add", n.Name, "/dev/weft/drive")
			return err
		})
		is(t, "the node's failure domain", zoneOf(l, n.Name), n.Zone)
	}
	l.must(l.awaitDriver())

	l.Apply(claim{name: "data", class: "weft-mirrored"}.String() + pod{name: "user", claim: "data", node: "n1"}.String())
	ready(l, "user")
	sh(l, "user", "echo here it is > /data/file; sync")
	t.Logf("a pod has its volume after %v", time.Since(start).Round(time.Millisecond))
	is(t, "the file", sh(l, "user", "cat /data/file"), "here it is")
	sample(t, l)
	claimIsTold(l)
	leaderDies(l)
	remove(l, "pod/train", "pvc/checkpoints") // one of its volumes has a single copy
	storageNodesAreDrained(l)
	upgrade(t, l)
	snapshotsAreThere(l)
	l.nobodyWasForbidden()
	remove(l, "pod/user", "pvc/data")
	eventually(l, time.Minute, "the volume is deleted", func(context.Context) error {
		out, err := l.TryKubectl("get", "pv", "--output=name")
		if err == nil && strings.Count(out, "\n") != chartManagers { // their stores
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
}

// beginCluster does what the guide says, once: it makes the cluster, lets the other managers join, and
// logs a person in.
func beginCluster(l *Lab) {
	l.t.Helper()
	const store = "--data-dir=/var/lib/weft/volmgr/store"
	exec := func(in string, i int, args ...string) (string, error) {
		return l.kubectl(in, append([]string{"--namespace=" + namespace, "exec", "--stdin", managerPod(i), "--", "weft"}, args...)...)
	}
	var all []string
	for i := range chartManagers {
		all = append(all, managerService(i)+":4480")
		eventually(l, 3*time.Minute, managerPod(i)+" has a store", func(context.Context) error {
			if i == 0 {
				_, err := exec("", 0, "volmgr", "init", store)
				return err
			}
			token, err := exec("", 0, "token", "create", "--node="+managerPod(i), "--role=manager")
			if err != nil {
				return err
			}
			_, err = exec(token, i, "volmgr", "join", "--join=-", "--manager="+all[0], "--address="+all[i], store)
			return err
		})
	}
	token, err := exec("", 0, "token", "create", "--person=ada", "--role=admin")
	l.must(err)
	_, err = exec(token, 0, "login", "--token-file=-", "--manager="+strings.Join(all, ","))
	l.must(err)
}

// leaderDies deletes the pod of the manager that leads: another one leads, and a claim gets its volume.
func leaderDies(l *Lab) {
	l.t.Helper()
	eventually(l, time.Minute, "all managers vote", func(context.Context) error {
		out, err := weft(l, "volmgr", "list")
		if n := len(regexp.MustCompile(` (leader|follower) `).FindAllString(out, -1)); err == nil && n != chartManagers {
			err = fmt.Errorf("%d do:\n%s", n, out)
		}
		return err
	})
	eventually(l, time.Minute, "the second one leads", func(context.Context) error { // commands run in the first one's pod
		_, err := weft(l, "volmgr", "transfer", managerService(1)+":4480")
		return err
	})
	before := time.Now()
	eventually(l, time.Minute, "its pod is deleted", func(context.Context) error {
		_, err := l.TryKubectl("--namespace="+namespace, "delete", "pod", managerPod(1), "--grace-period=0", "--force", "--ignore-not-found")
		return err
	})
	sh(l, "user", "echo and more >> /data/file; sync")
	l.Apply(claim{name: "late", class: "weft-mirrored"}.String() + pod{name: "late", claim: "late"}.String())
	ready(l, "late")
	l.t.Logf("a pod has a new volume %v after the loss of the manager that led", time.Since(before).Round(time.Millisecond))
	remove(l, "pod/late", "pvc/late")
}

// onlyMembersAreAnswered checks that the manager refuses a stranger, and that pods have joined.
func onlyMembersAreAnswered(l *Lab) {
	l.t.Helper()
	if out, err := weft(l, "status", "--manager=127.0.0.1:4480", "--insecure-plain-tcp", "--timeout=5s"); err == nil {
		l.t.Errorf("a stranger is answered:\n%s", out)
	}
	eventually(l, 3*time.Minute, "the pods have joined", func(context.Context) error {
		out, err := weft(l, "access", "list")
		for _, want := range []string{"person ada (admin)", "node n1 (target)", "node n1 (initiator)", "node n2 (csi)"} {
			if err == nil && !strings.Contains(out, want) {
				err = fmt.Errorf("%s has not:\n%s", want, out)
			}
		}
		return err
	})
}

// sample runs the GPU pod of the examples, without the GPU and with another image.
// Otherwise only sizes are changed.
func sample(t *testing.T, l *Lab) {
	t.Helper()
	l.Kubectl("patch", "node", "n2", "--subresource=status", "--type=merge", `--patch={"status":{"capacity":{"nvidia.com/gpu":"1"}}}`)
	text, err := os.ReadFile(filepath.Join(manifests, "examples/gpu-pod.yaml"))
	l.must(err)
	manifest := regexp.MustCompile(`image: \S+`).ReplaceAllString(string(text), "image: "+parts.Busybox)
	l.Apply(regexp.MustCompile(`storage: \d+Gi`).ReplaceAllString(manifest, "storage: 1Gi"))
	ready(l, "train")
	is(t, "the pod's node", l.Kubectl("get", "pod", "train", "--output=jsonpath={.spec.nodeName}"), "n2")
	for _, dir := range []string{"/scratch", "/checkpoints"} {
		is(t, "the file system on "+dir, sh(l, "train", "grep ' "+dir+" ' /proc/mounts | cut -d' ' -f3"), "xfs")
		sh(l, "train", "echo written > "+dir+"/by-user-1000") // allowed by fsGroup
	}
}

// claimIsTold checks the events on a claim: they report that its volume lost a copy with a
// target, and that the copy was restored. The target's node stops being a storage node
// meanwhile: a pod that is only deleted may return before its absence is noticed.
func claimIsTold(l *Lab) {
	l.t.Helper()
	for _, step := range []struct{ label, event string }{
		{"weft.dev/storage-", "CopyLost"},
		{"weft.dev/storage=true", "CopyRebuilt"},
	} {
		l.Kubectl("label", "node", "n1", step.label)
		eventually(l, 90*time.Second, "the claim tells "+step.event, func(context.Context) error {
			out, err := l.TryKubectl("describe", "pvc", "data")
			if err == nil && !strings.Contains(out, step.event) {
				err = fmt.Errorf("it says\n%s", out)
			}
			return err
		})
	}
}

// storageNodesAreDrained drains both storage nodes, of their guards only: the second one waits until the
// first one is back and has its copy again.
func storageNodesAreDrained(l *Lab) {
	l.t.Helper()
	drain := func(node, timeout string) (string, error) {
		return l.TryKubectl("drain", node, "--pod-selector=app.kubernetes.io/component=guard", "--timeout="+timeout)
	}
	begin := time.Now()
	if out, err := drain("n1", "60s"); err != nil {
		l.t.Fatalf("n1 cannot be drained: %v\n%s", err, out)
	}
	l.t.Logf("a storage node is drained after %v", time.Since(begin).Round(time.Millisecond))
	eventually(l, 30*time.Second, "n1 is under maintenance", func(context.Context) error {
		out, err := weft(l, "explain", "node", "n1")
		if err == nil && !strings.Contains(out, "under maintenance until") {
			err = errors.New(out)
		}
		return err
	})
	if out, err := drain("n2", "15s"); err == nil {
		l.t.Fatalf("n2 is drained, although it has the only copy that is in sync:\n%s", out)
	}
	eventually(l, 30*time.Second, "the reason is told", func(context.Context) error {
		out, err := l.TryKubectl("--namespace="+namespace, "get", "events", "--field-selector=reason=DrainRefused", "--output=jsonpath={.items[*].message}")
		if err == nil && !strings.Contains(out, "node n2 cannot be drained yet: volumes in use would stop without n1, n2: pvc-") {
			err = fmt.Errorf("it says %q", out)
		}
		return err
	})
	sh(l, "user", "echo while a node is drained >> /data/file; sync")
	l.Kubectl("uncordon", "n1")
	begin = time.Now()
	if out, err := drain("n2", "120s"); err != nil {
		l.t.Fatalf("n2 cannot be drained although n1 is back: %v\n%s", err, out)
	}
	l.t.Logf("the other storage node is drained %v after the first one is back", time.Since(begin).Round(time.Millisecond))
	l.Kubectl("uncordon", "n2")
	guardsStand(l)
	eventually(l, 2*time.Minute, "all copies are back", func(context.Context) error {
		out, err := weft(l, "volume", "list")
		if err == nil && strings.Count(out, "healthy") != 1 {
			err = errors.New(out)
		}
		return err
	})
}

// snapshotsAreThere takes a snapshot and makes a claim from it: the pods of the controller have the
// sidecar and the rights, which they got with the upgrade.
func snapshotsAreThere(l *Lab) {
	l.t.Helper()
	start := time.Now()
	l.Apply(strings.Replace(class("thin", "copies: '2', thin: 'true'", ""), "WaitForFirstConsumer", "Immediate", 1) +
		claim{name: "origin", class: "thin"}.String() + snapshotOf("monday", "origin") + claim{name: "restored", class: "thin", from: "volumesnapshot/monday"}.String())
	for _, what := range [][]string{
		{"volumesnapshot/monday", "--for=jsonpath={.status.readyToUse}=true"},
		{"pvc/restored", "--for=jsonpath={.status.phase}=Bound"},
	} {
		l.Kubectl(append([]string{"wait", "--timeout=90s"}, what...)...)
	}
	l.t.Logf("a claim is made from a snapshot of another one after %v", time.Since(start).Round(time.Millisecond))
	remove(l, "volumesnapshot/monday", "pvc/origin", "pvc/restored")
}

// guardsStand waits until each node has its guard.
func guardsStand(l *Lab) {
	l.t.Helper()
	eventually(l, time.Minute, "each node has a guard", func(context.Context) error {
		out, err := l.TryKubectl("--namespace="+namespace, "get", "statefulset", "weft-guard", "--output=jsonpath={.status.readyReplicas}")
		if err == nil && out != strconv.Itoa(len(l.Nodes)) {
			err = fmt.Errorf("%q are ready", out)
		}
		return err
	})
}

// nobodyWasForbidden looks for RBAC rights that a sidecar lacks.
func (l *Lab) nobodyWasForbidden() {
	l.t.Helper()
	out := l.Kubectl("logs", "--namespace="+namespace, "--selector=app.kubernetes.io/component=controller", "--all-containers", "--prefix", "--tail=-1", "--max-log-requests=50")
	for line := range strings.Lines(out) {
		if strings.Contains(line, "forbidden") {
			l.t.Error("the chart's rights are not sufficient: ", line)
		}
	}
	if !strings.Contains(out, "Successfully acquired lease") {
		l.t.Errorf("no sidecar holds its lease:\n%s", out)
	}
}

// weft runs a command in the manager's pod, as the guide shows it.
func weft(l *Lab, args ...string) (string, error) {
	return l.TryKubectl(append([]string{"--namespace=" + namespace, "exec", "weft-volmgr-0", "--", "weft"}, args...)...)
}

func zoneOf(l *Lab, node string) string {
	l.t.Helper()
	var list struct {
		Nodes []struct {
			Name   string
			Labels map[string]string
		}
	}
	text, err := weft(l, "node", "list", "--output=json")
	l.must(err)
	l.must(yaml.Unmarshal([]byte(text), &list))
	for _, n := range list.Nodes {
		if n.Name == node {
			return n.Labels["zone"]
		}
	}
	return "no node " + node
}

func chartFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(manifests, name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var hosts strings.Builder
	hosts.WriteString("      hostAliases:\n")
	for i := range chartManagers {
		fmt.Fprintf(&hosts, "        - {ip: %s, hostnames: [%s]}\n", managerIP(i), managerService(i))
	}
	manifest := strings.NewReplacer(
		"path: /lib/modules", "path: /var/lib/modules",
		"      serviceAccountName:", hosts.String()+"      serviceAccountName:",
	).Replace(string(text))
	if name == "volmgr" {
		manifest = regexp.MustCompile(`(?s)      affinity:\n.*?(      priorityClassName:)`).ReplaceAllString(manifest, "${1}")
	}
	if name == "target" {
		manifest = strings.Replace(manifest, "- --datapath=auto\n", "- --datapath=auto\n            - --drive-file=/dev/weft/drive\n", 1)
	}
	return manifest
}

// storeVolume is the volume for the claim of a manager.
func storeVolume(i int, node string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: store%[1]d}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: weft-system, name: store-weft-volmgr-%[1]d}
  hostPath: {path: /var/store%[1]d}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[2]s]}]
`, i, node)
}

// importChart builds Weft's image, and images of the sidecar programs, and imports them on
// the nodes.
func (l *Lab) importChart() {
	l.t.Helper()
	archives := []string{l.buildImage(imageTag, l.place.Weft)}
	text, err := os.ReadFile(snapshotManifests)
	l.must(err)
	for _, m := range regexp.MustCompile(`image: (\S+/(csi-[a-z]+):\S+)`).FindAllStringSubmatch(string(text), -1) {
		archive := l.file(m[2] + ".tar")
		f, err := os.Create(archive)
		l.must(err)
		l.must(parts.WriteProgram(f, m[1], l.parts.Program(m[2])))
		l.must(f.Close())
		archives = append(archives, archive)
	}
	l.importImages(archives...)
}

// imageTag is the tag of Weft's image in the manifests.
const imageTag = "0.1.0"

// buildImage builds Weft's image from a program, and returns the archive.
func (l *Lab) buildImage(tag, program string) string {
	l.t.Helper()
	l.must(os.MkdirAll(l.file(tag), 0o755))
	build := exec.Command("go", "run", "../../deploy/image", "-program", program, "-version", tag, "-out", l.file(tag))
	if out, err := build.CombinedOutput(); err != nil {
		l.t.Fatalf("build the image: %v\n%s", err, out)
	}
	return l.file(tag + "/weft-image.tar")
}

// importImages imports archives of images on the nodes.
func (l *Lab) importImages(archives ...string) {
	l.t.Helper()
	for _, n := range l.Nodes {
		for _, archive := range archives {
			_, err := n.Run(l.parts.Program("ctr"), "--address", n.file("c.sock"), "--namespace", "k8s.io", "images", "import", archive)
			l.must(err)
		}
	}
}

// serve forwards connections to a service's address to the server behind it.
func (l *Lab) serve(address string, behind func() (string, error)) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if err := addAddresses(bridgeName, host+"/32"); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	l.t.Cleanup(func() { listener.Close() })
	go func() {
		at := lookup{ask: behind}
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed
			}
			go relay(conn, at.get)
		}
	}()
	return nil
}

// lookup finds out where a server is, once a second at most: while a manager's pod is away, all others
// connect to it again and again, and a kubectl for each of these connections takes the whole machine.
type lookup struct {
	ask     func() (string, error)
	mu      sync.Mutex
	asked   time.Time
	address string
	err     error
}

func (l *lookup) get() (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.asked) > time.Second {
		l.address, l.err = l.ask()
		l.asked = time.Now()
	}
	return l.address, l.err
}

func relay(conn net.Conn, behind func() (string, error)) {
	defer conn.Close()
	address, err := behind()
	if err != nil {
		return // the client sees that the server is gone, and retries
	}
	other, err := net.DialTimeout("tcp", address, 5*time.Second)
	if err != nil {
		return
	}
	defer other.Close()
	go func() {
		_, _ = io.Copy(other, conn)
		_ = other.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(conn, other)
}

func (l *Lab) rolledOut(what string) {
	l.t.Helper()
	if _, err := l.TryKubectl("--namespace="+namespace, "rollout", "status", what, "--timeout=180s"); err != nil {
		// A DaemonSet with the update strategy OnDelete has no rollout status.
		if !strings.Contains(err.Error(), "OnDelete") && !strings.Contains(err.Error(), "RollingUpdate") {
			l.t.Fatal(err)
		}
		eventually(l, 3*time.Minute, what+" is ready", func(context.Context) error {
			out, err := l.TryKubectl("--namespace="+namespace, "get", what, "--output=jsonpath={.status.numberReady}/{.status.desiredNumberScheduled}")
			if err == nil && out != fmt.Sprintf("%d/%d", len(l.Nodes), len(l.Nodes)) {
				err = fmt.Errorf("ready are %s", out)
			}
			return err
		})
	}
}

// podsTrouble is the output that an operator would look at first.
func (l *Lab) podsTrouble() string {
	var all strings.Builder
	for _, args := range [][]string{
		{"get", "pods,pvc,pv,csinode", "--all-namespaces", "--output=wide"},
		{"get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"},
		{"logs", "--namespace=" + namespace, "--selector=app.kubernetes.io/name=weft", "--all-containers", "--prefix", "--tail=25", "--max-log-requests=50"},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		cmd := exec.CommandContext(ctx, l.parts.Program("kubectl"), args...)
		cmd.Env = append(os.Environ(), l.env...)
		out, err := cmd.CombinedOutput()
		cancel()
		fmt.Fprintf(&all, "$ kubectl %s\n%s%v\n", strings.Join(args, " "), out, err)
	}
	return all.String()
}

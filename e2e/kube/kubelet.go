// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"weft.dev/weft/e2e/kube/parts"
)

func (n *Node) file(name string) string { return filepath.Join(n.id.Dir, name) }

// startKubernetes starts containerd and the kubelet, and imports the images.
func (n *Node) startKubernetes() error {
	files := map[string]string{
		"cni/10-pods.conflist": fmt.Sprintf(cniConfig, n.Name, n.file("ipam"), podNetwork(n.id.N)),
		"containerd.toml":      fmt.Sprintf(containerdConfig, n.file("c/root"), n.file("c/state"), n.file("c.sock"), parts.Pause, n.lab.parts.CNI(), n.file("cni")),
		"kubelet.yaml":         fmt.Sprintf(kubeletConfig, n.file("c.sock"), nodeAddress(n.id.N), nodeAddress(n.id.N), n.group(), n.lab.options.kubeletGates()),
	}
	for name, text := range files {
		if err := os.WriteFile(n.file(name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := n.lab.writeKubeconfig(n.file("kubeconfig"), n.lab.secrets.tokens["system:node:"+n.Name]); err != nil {
		return err
	}
	if err := n.start("containerd", n.lab.parts.Program("containerd"), "--config", n.file("containerd.toml")); err != nil {
		return err
	}
	if err := n.importImages(); err != nil {
		return err
	}
	return n.StartKubelet()
}

// StartKubelet starts or restarts the kubelet.
func (n *Node) StartKubelet() error {
	return n.start("kubelet", n.lab.parts.Program("kubelet"), "--config="+n.file("kubelet.yaml"), "--kubeconfig="+n.file("kubeconfig"),
		"--hostname-override="+n.Name, "--node-ip="+nodeAddress(n.id.N), "--node-labels=topology.kubernetes.io/zone="+n.Zone,
		"--root-dir=/var/lib/kubelet", "--cert-dir="+n.file("pki"), "--v=3")
}

func (n *Node) importImages() error {
	ctx, cancel := context.WithTimeout(n.lab.t.Context(), 2*time.Minute)
	defer cancel()
	ctr := []string{n.lab.parts.Program("ctr"), "--address", n.file("c.sock")}
	err := poll(ctx, 50*time.Millisecond, func() error {
		_, err := n.Run(append(ctr, "version")...)
		return err
	})
	if err != nil {
		return err
	}
	for _, archive := range n.lab.parts.Images() {
		if filepath.Base(archive) == "agnhost.tar" && !n.lab.options.Suite {
			continue // large, and only used by the suite's pods
		}
		if _, err := n.Run(append(ctr, "--namespace", "k8s.io", "images", "import", archive)...); err != nil {
			return err
		}
	}
	return nil
}

const cniConfig = `{"cniVersion": "0.4.0", "name": "pods-%s", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
  "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q}]]}},
 {"type": "loopback"}]}
`

// restrict_oom_score_adj: the machine's root may lack CAP_SYS_RESOURCE.
const containerdConfig = `version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = %q
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = %q
    conf_dir = %q
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
`

// syncFrequency: the kubelet checks growing volumes only as often as it syncs pods.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://%s
address: %s
healthzBindAddress: %s
cgroupDriver: cgroupfs
cgroupRoot: /%s
failCgroupV1: false
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: 100Mi, nodefs.available: "1%%", imagefs.available: "1%%", nodefs.inodesFree: "1%%"}
imageGCHighThresholdPercent: 99
imageGCLowThresholdPercent: 98
nodeStatusUpdateFrequency: 5s
nodeLeaseDurationSeconds: 12
volumeStatsAggPeriod: 10s
syncFrequency: 5s
clusterDNS: [10.0.0.10]
clusterDomain: cluster.local
maxPods: 60
featureGates: {%s}
`

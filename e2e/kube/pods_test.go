// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"
	"testing"
)

func TestKubePodsRunOnBothNodes(t *testing.T) {
	l := Start(t, Options{Plain: true})
	for _, n := range l.Nodes {
		l.Apply(fmt.Sprintf(plainPod, n.Name, n.Name))
	}
	l.Kubectl("wait", "pod", "--all", "--for=condition=Ready", "--timeout=60s")
	for _, n := range l.Nodes {
		if got := strings.TrimSpace(l.Kubectl("exec", "plain-"+n.Name, "--", "cat", "/proc/sys/kernel/hostname")); got != "plain-"+n.Name {
			t.Errorf("the host's name in the pod of %s is %s", n.Name, got)
		}
	}
}

const plainPod = `apiVersion: v1
kind: Pod
metadata: {name: plain-%s}
spec:
  nodeName: %s
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: registry.k8s.io/e2e-test-images/busybox:1.37.0-2
    command: [sleep, infinity]
`

// SPDX-License-Identifier: Apache-2.0

// Package kube runs a real Kubernetes cluster with Weft in it on one machine, for
// the tests of the CSI driver: etcd, the API server, the controllers and the
// scheduler, two nodes with containerd and a kubelet each, volmgr, target agents
// that serve files as drives, and on each node the initiator agent and the
// driver's node service. The programs come from package parts; the tests are
// started by make kube-test, kube-lost-node and kube-e2e.
//
//	test binary                  started by go test: checks the machine, cleans up
//	└─ lab        its own mount, pid and network namespaces; 10.77.0.1 is the control
//	   │          plane's and volmgr's address, 10.77.1.1 the targets'
//	   ├─ the tests, and what they start: etcd … kube-scheduler, sidecars, volmgr, targets
//	   ├─ node n1   its own mount, pid, network, IPC and UTS namespaces; 10.77.0.11
//	   │  └─ containerd, kubelet, weft initiator, weft csi --mode node; pods
//	   └─ node n2   10.77.0.12
//
// A node is a pid namespace, so that it can be killed with everything that runs in it, as
// by a power cut. It is also a network namespace, so that it can be cut off from the
// control plane while its data path works. All nodes share one kernel: it cannot crash, and
// all nodes see the same loop devices.
//
// When the lab's first process ends, for whatever reason, the kernel ends everything in the
// lab. The process outside removes what is not in a namespace (control groups, loop
// devices).
package kube

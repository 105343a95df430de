// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

const (
	driverName = "csi.weft.dev"
	namespace  = "weft-system"
	account    = "weft-controller"
	manifests  = "../../deploy/kubernetes"

	// What the component for snapshots changes, with whole objects.
	snapshotManifests = manifests + "/snapshots/changed.yaml"
)

// startDriver applies the product's own manifests, except for those that run programs. The
// programs run as processes here, with the arguments of the manifests and the rights of
// their ServiceAccount.
func (l *Lab) startDriver() error {
	for _, file := range []string{"namespace.yaml", "rbac-controller.yaml", "csidriver.yaml", "storageclasses.yaml"} {
		if _, err := l.TryKubectl("apply", "--filename="+filepath.Join(manifests, file)); err != nil {
			return err
		}
	}
	if err := l.prepareSnapshots(); err != nil {
		return err
	}
	if err := l.writeAccountConfig(l.accountConfig(), namespace, account); err != nil {
		return err
	}
	if err := l.StartController(); err != nil {
		return err
	}
	if err := l.calls.listen(l, "controller", l.controllerSocket(), l.file("csi.sock")); err != nil {
		return err
	}
	for _, n := range l.Nodes {
		if err := n.StartDriver(); err != nil {
			return err
		}
		if err := l.calls.listen(l, n.Name, n.file("var/"+driverSocket), n.file("var/"+kubeletSocket)); err != nil {
			return err
		}
	}
	if err := l.startSidecars(); err != nil {
		return err
	}
	return l.awaitDriver()
}

// prepareSnapshots gives the cluster what it needs for snapshots, and the driver its rights and class.
func (l *Lab) prepareSnapshots() error {
	if err := l.startSnapshotController(); err != nil {
		return err
	}
	changed, err := os.ReadFile(snapshotManifests)
	if err != nil {
		return err
	}
	objects := strings.Split(string(changed), "\n---\n")
	rights := slices.DeleteFunc(objects, func(o string) bool { return strings.Contains(o, "\nkind: Deployment\n") })
	if _, err := l.kubectl(strings.Join(rights, "\n---\n"), "apply", "--filename=-"); err != nil {
		return err
	}
	_, err = l.TryKubectl("apply", "--filename="+filepath.Join(manifests, "snapshots/added.yaml"))
	return err
}

// startSnapshotController installs the CRDs, and starts the controller that a cluster has once for all
// drivers.
func (l *Lab) startSnapshotController() error {
	if _, err := l.TryKubectl("apply", "--kustomize="+l.parts.CRDs()); err != nil {
		return err
	}
	if _, err := l.TryKubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s"); err != nil {
		return err
	}
	return l.start("snapshot-controller", "snapshot-controller", "--kubeconfig="+l.Kubeconfig, "--kube-api-qps=100", "--kube-api-burst=100", "--v=2")
}

func (l *Lab) file(name string) string  { return filepath.Join(l.dir, name) }
func (l *Lab) accountConfig() string    { return l.file("account.kubeconfig") }
func (l *Lab) controllerSocket() string { return l.file("controller.sock") }

// StartController starts or restarts the driver's controller service.
func (l *Lab) StartController() error {
	return l.start("controller", l.place.Weft, "csi", "--mode", "controller", "--manager", l.managerAddresses(), "--endpoint", "unix://"+l.controllerSocket(), "--log-level", "debug")
}

// Controller is the process of the driver's controller service.
func (l *Lab) Controller() *Process { return l.program("controller") }

// The socket of the driver's node service, below /var, and the one that the kubelet uses.
const (
	driverSocket  = "lib/weft/csi.sock"
	kubeletSocket = "lib/kubelet/plugins/" + driverName + "/csi.sock"
)

// StartDriver starts or restarts the driver's node service.
func (n *Node) StartDriver() error {
	for _, d := range []string{filepath.Dir(kubeletSocket), "lib/kubelet/plugins_registry"} {
		if err := os.MkdirAll(n.file("var/"+d), 0o755); err != nil {
			return err
		}
	}
	return n.start("csi", n.lab.place.Weft, "csi", "--mode", "node", "--node", n.Name, "--manager", n.lab.managerAddresses(),
		"--endpoint", "unix:///var/"+driverSocket, "--kubelet-socket", "/var/"+kubeletSocket, "--log-level", "debug")
}

// again is a script that runs a program once more whenever it has ended, as a kubelet does: a
// sidecar exits when it could not renew its lease.
const again = `while :; do "$@"; echo "lab: exit code $?, it starts again"; sleep 1; done`

// startSidecars starts the sidecars with the Deployment's arguments.
func (l *Lab) startSidecars() error {
	sidecars, err := readSidecars(snapshotManifests)
	if err != nil {
		return err
	}
	env := l.env
	l.env = append(env, "NAMESPACE="+namespace, "POD_NAME=lab")
	defer func() { l.env = env }()
	for name, args := range sidecars {
		command := append([]string{"-c", again, name, l.parts.Program(name)}, l.sidecarArgs(name, args)...)
		if err := l.start(name, "/bin/sh", command...); err != nil {
			return err
		}
	}
	return nil
}

// sidecarArgs replaces the pod's paths in the Deployment's arguments by the lab's.
func (l *Lab) sidecarArgs(name string, args []string) []string {
	var all []string
	for _, a := range args {
		key, _, _ := strings.Cut(a, "=")
		switch key {
		case "--csi-address":
			a = key + "=" + l.file("csi.sock")
		case "--tls-cert":
			a = key + "=" + l.secrets.file("metadata.crt")
		case "--tls-key":
			a = key + "=" + l.secrets.file("metadata.key")
		case "--capacity-ownerref-level":
			a = key + "=-1" // there is no pod to own the objects
		}
		all = append(all, strings.ReplaceAll(a, "$(NAMESPACE)", namespace))
	}
	all = append(all, "--kubeconfig="+l.accountConfig())
	if name == "csi-provisioner" {
		all = append(all, "--capacity-poll-interval=5s")
	}
	if name == "csi-provisioner" && l.options.Suite {
		// Each case of the suite has a class, and each class one object per zone. By
		// default the sidecar writes only one object per second.
		all = append(all, "--kube-api-capacity-qps=100", "--kube-api-capacity-burst=100", "--capacity-threads=4")
	}
	return all
}

// readSidecars reads each sidecar's arguments from the controller's Deployment.
func readSidecars(file string) (map[string][]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	sidecars := make(map[string][]string)
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var object struct {
			Kind string
			Spec struct {
				Template struct {
					Spec struct {
						Containers []struct {
							Name string
							Args []string
						}
					}
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, c := range object.Spec.Template.Spec.Containers {
			if object.Kind == "Deployment" && strings.HasPrefix(c.Name, "csi-") {
				sidecars[c.Name] = c.Args
			}
		}
	}
	if len(sidecars) == 0 {
		return nil, fmt.Errorf("%s: no Deployment has a container csi-*", file)
	}
	return sidecars, nil
}

// awaitDriver waits until the kubelets have registered the driver.
func (l *Lab) awaitDriver() error {
	ctx, cancel := context.WithTimeout(l.t.Context(), time.Minute)
	defer cancel()
	return poll(ctx, 200*time.Millisecond, func() error {
		out, err := l.TryKubectl("get", "csinode", "--output=jsonpath={.items[*].spec.drivers[*].name}")
		if err == nil && strings.Count(out, driverName) < len(l.Nodes) {
			err = errors.New("the driver is not registered on all nodes; the nodes have: " + out)
		}
		return err
	})
}

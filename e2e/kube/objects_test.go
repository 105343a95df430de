// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/kube/parts"
	"weft.dev/weft/proto/pb"
)

// claim is a PersistentVolumeClaim.
type claim struct {
	name, class, size string // size "": 256Mi
	block             bool
	mode              string // "": ReadWriteOnce
	volume            string // name of an existing PersistentVolume
	attributes        string // name of a VolumeAttributesClass
	from              string // what it begins as: "pvc/a" or "volumesnapshot/a"
}

func (c claim) String() string {
	extra := ""
	if c.block {
		extra += "\n  volumeMode: Block"
	}
	if c.volume != "" {
		extra += "\n  volumeName: " + c.volume
	}
	if c.attributes != "" {
		extra += "\n  volumeAttributesClassName: " + c.attributes
	}
	switch kind, name, _ := strings.Cut(c.from, "/"); kind {
	case "pvc":
		extra += "\n  dataSource: {kind: PersistentVolumeClaim, name: " + name + "}"
	case "volumesnapshot":
		extra += "\n  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: " + name + "}"
	}
	return fmt.Sprintf(`---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec:
  storageClassName: %q
  accessModes: [%s]
  resources: {requests: {storage: %s}}%s
`, c.name, c.class, cmp.Or(c.mode, "ReadWriteOnce"), cmp.Or(c.size, "256Mi"), extra)
}

// pod has its claim mounted on /data, or as the device /dev/volume.
type pod struct {
	name, claim, node string // node "": the scheduler's choice
	command           string // of sh; "": sleeps
	capability        string // one that containers do not have by default, "SYS_ADMIN"
	block, readOnly   bool
}

func (p pod) String() string {
	node, volume := "", "volumeMounts: [{name: v, mountPath: /data}]"
	if p.node != "" {
		node = "\n  nodeSelector: {kubernetes.io/hostname: " + p.node + "}"
	}
	if p.block {
		volume = "volumeDevices: [{name: v, devicePath: /dev/volume}]"
	}
	if p.capability != "" {
		volume += "\n    securityContext: {capabilities: {add: [" + p.capability + "]}}"
	}
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1%s
  containers:
  - name: c
    image: %s
    command: [sh, -c, %q]
    %s
  volumes: [{name: v, persistentVolumeClaim: {claimName: %s, readOnly: %v}}]
`, p.name, node, parts.Busybox, cmp.Or(p.command, "sleep 1000000"), volume, p.claim, p.readOnly)
}

// ready waits until pods are ready.
func ready(l *Lab, pods ...string) {
	l.t.Helper()
	args := []string{"wait", "--for=condition=Ready", "--timeout=120s"}
	for _, p := range pods {
		args = append(args, "pod/"+p)
	}
	if _, err := l.TryKubectl(args...); err != nil {
		l.t.Fatalf("%v\n%s", err, l.Trouble())
	}
}

// sh runs a command in a pod that must succeed.
func sh(l *Lab, pod, command string) string {
	l.t.Helper()
	return strings.TrimSpace(l.Kubectl("exec", pod, "--", "sh", "-c", command))
}

// remove deletes objects, "pod/a", and waits until they are gone.
func remove(l *Lab, objects ...string) {
	l.t.Helper()
	args := append([]string{"delete", "--wait=true", "--timeout=120s"}, objects...)
	if _, err := l.TryKubectl(args...); err != nil {
		l.t.Fatalf("%v\n%s", err, l.Trouble())
	}
}

// eventually waits until check returns nil.
func eventually(l *Lab, atMost time.Duration, what string, check func(context.Context) error) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), atMost)
	defer cancel()
	if err := poll(ctx, 200*time.Millisecond, func() error { return check(ctx) }); err != nil {
		l.t.Fatalf("waited %v until %s: %v\n%s", atMost, what, err, l.Trouble())
	}
}

// volumeOf is Weft's volume of a bound claim.
func volumeOf(l *Lab, claim string) *pb.Volume {
	l.t.Helper()
	id := l.Kubectl("get", "pv", l.Kubectl("get", "pvc", claim, "--output=jsonpath={.spec.volumeName}"), "--output=jsonpath={.spec.csi.volumeHandle}")
	v, err := l.Weft.API.GetVolume(l.t.Context(), &pb.GetVolumeRequest{Volume: id})
	if err != nil {
		l.t.Fatal(err)
	}
	return v
}

// nothingLeft fails the test unless all volumes and snapshots are gone, in Kubernetes and in Weft, and
// all space is free.
func nothingLeft(l *Lab) {
	l.t.Helper()
	eventually(l, time.Minute, "no volume is left", func(ctx context.Context) error {
		for _, kind := range []string{"pvc", "pv", "volumeattachment", "volumesnapshot", "volumesnapshotcontent", "volumegroupsnapshotcontent"} {
			out, err := l.TryKubectl("get", kind, "--output=name")
			if err != nil {
				return err
			}
			if out != "" {
				return fmt.Errorf("there is %s", out)
			}
		}
		for _, snapshots := range []bool{false, true} {
			list, err := l.Weft.API.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: snapshots})
			if err != nil {
				return err
			}
			if len(list.Volumes) > 0 {
				return fmt.Errorf("volmgr has %v", list.Volumes)
			}
		}
		st, err := l.Weft.API.GetStatus(ctx, &pb.GetStatusRequest{})
		if err == nil && st.AllocatedBytes > 0 {
			err = fmt.Errorf("of the drives, %d bytes are in use", st.AllocatedBytes)
		}
		if err != nil {
			return err
		}
		for _, n := range l.Nodes {
			if left := n.leftovers(); left != "" {
				return fmt.Errorf("node %s has %s", n.Name, left)
			}
		}
		return nil
	})
}

// is fails the test unless got equals want.
func is(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s = %q, want %q", what, got, want)
	}
}

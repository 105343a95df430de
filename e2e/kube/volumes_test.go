// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/pb"
)

// TestKubeVolumes takes volumes through everything that Kubernetes does with them. The
// parts share a cluster, and each removes what it created.
func TestKubeVolumes(t *testing.T) {
	l := Start(t, Options{Gates: "CSIVolumeHealth=true"})
	for _, part := range []struct {
		name string
		run  func(*testing.T, *Lab)
	}{
		{"the API server takes the manifests", manifestsApply},
		{"a file system outlives its pod and follows it to another node", fileSystem},
		{"a raw block device", rawBlock},
		{"an xfs volume grows under a pod that writes", expand},
		{"a VolumeAttributesClass changes labels and copies", attributes},
		{"a volume for which there is no room is not scheduled", capacity},
		{"allowed topologies are where pods and legs are", topology},
		{"one file system read by pods on two nodes", readOnlyMany},
		{"one raw device written by pods on two nodes", sharedBlock},
		{"a trimmed file system gives its space back", trim},
		{"snapshots and clones of a claim that is written", snapshots},
		{"a snapshot of two claims at one moment", groupSnapshot},
		{"a backup of what differs between two snapshots", differences},
		{"a pod is told that its volume has lost a copy", health},
	} {
		l.part(t, part.name, func(t *testing.T) { part.run(t, l) })
	}
}

// part runs a part of a test on a shared lab. It cleans up after a part that fails, for the
// sake of the next one.
func (l *Lab) part(t *testing.T, name string, run func(*testing.T)) {
	t.Run(name, func(t *testing.T) {
		outer := l.t
		l.t = t // the lab logs to the running part
		t.Cleanup(func() { l.t = outer })
		run(t)
		nothingLeft(l)
	})
	if t.Failed() {
		_, _ = l.TryKubectl("delete", "statefulset,pod,pvc,volumegroupsnapshot,volumesnapshot,pv", "--all", "--force", "--timeout=60s")
	}
}

// manifestsApply dry-runs all manifests; startDriver has applied some of them for real.
func manifestsApply(t *testing.T, l *Lab) {
	out := l.Kubectl("apply", "--dry-run=server", "--validate=strict", "--kustomize="+manifests)
	for _, object := range []string{"daemonset.apps/weft-node", "deployment.apps/weft-controller", "statefulset.apps/weft-volmgr", "daemonset.apps/weft-target"} {
		if !strings.Contains(out, object+" created") {
			t.Errorf("the API server has not accepted %s:\n%s", object, out)
		}
	}
}

func fileSystem(t *testing.T, l *Lab) {
	start := time.Now()
	l.Apply(claim{name: "fs", class: "weft-mirrored"}.String() + pod{name: "first", claim: "fs", node: "n1"}.String())
	ready(l, "first")
	t.Logf("from nothing to a pod with its volume: %v", time.Since(start).Round(time.Millisecond))
	sh(l, "first", "echo here it is > /data/file; sync")
	is(t, "the attachment", l.Kubectl("get", "volumeattachment", "--output=jsonpath={range .items[*]}{.spec.nodeName} {.status.attached}{end}"), "n1 true")
	v := volumeOf(l, "fs")
	if v.Formatted != "ext4" || v.Attachment.GetNode() != "n1" {
		t.Errorf("volmgr has the volume as %q, attached to %s; want ext4 on n1", v.Formatted, v.Attachment.GetNode())
	}
	start = time.Now()
	remove(l, "pod/first")
	l.Apply(pod{name: "second", claim: "fs", node: "n2"}.String())
	ready(l, "second")
	t.Logf("from the pod's deletion to one on another node: %v", time.Since(start).Round(time.Millisecond))
	is(t, "the file on the other node", sh(l, "second", "cat /data/file"), "here it is")
	remove(l, "pod/second", "pvc/fs")
}

// trim deletes a file and runs fstrim in the pod: the space of its data is free again on both copies.
func trim(t *testing.T, l *Lab) {
	const size = 64 << 20
	l.Apply(claim{name: "trim", class: "weft-thin"}.String() + pod{name: "trim", claim: "trim", capability: "SYS_ADMIN"}.String()) // for fstrim
	ready(l, "trim")
	uses := func(what string, right func(used uint64) bool) (used uint64) {
		eventually(l, time.Minute, what, func(context.Context) error {
			if used = volumeOf(l, "trim").UsedBytes; !right(used) {
				return fmt.Errorf("the volume uses %d bytes", used)
			}
			return nil
		})
		return used
	}
	sh(l, "trim", "dd if=/dev/urandom of=/data/file bs=1M count=64 2>/dev/null && sync")
	with := uses("the volume has the file's space", func(used uint64) bool { return used >= 2*size })
	sh(l, "trim", "rm /data/file && sync")
	start := time.Now()
	sh(l, "trim", "fstrim /data && sync") // the drives have a cache, and their space is free after a flush
	without := uses("the file's space is free", func(used uint64) bool { return used <= with-2*size*9/10 })
	t.Logf("of %d bytes, fstrim gave back %d within %v", with, with-without, time.Since(start).Round(time.Millisecond))
	remove(l, "pod/trim", "pvc/trim")
}

func rawBlock(t *testing.T, l *Lab) {
	l.Apply(claim{name: "raw", class: "weft-mirrored", block: true, mode: "ReadWriteOncePod"}.String() + pod{name: "raw", claim: "raw", node: "n2", block: true}.String())
	ready(l, "raw")
	is(t, "the device's size", sh(l, "raw", "blockdev --getsize64 /dev/volume"), fmt.Sprint(256<<20))
	sum := sh(l, "raw", "head -c 1000000 /dev/urandom > /tmp/f; dd if=/tmp/f of=/dev/volume bs=1M conv=fsync 2>/dev/null; md5sum < /tmp/f")
	remove(l, "pod/raw")
	l.Apply(pod{name: "again", claim: "raw", node: "n1", block: true}.String())
	ready(l, "again")
	is(t, "what the device holds on the other node", sh(l, "again", "head -c 1000000 /dev/volume | md5sum"), sum)
	if v := volumeOf(l, "raw"); v.Formatted != "raw" {
		t.Errorf("a raw volume is recorded as %q", v.Formatted)
	}
	remove(l, "pod/again", "pvc/raw")
}

// expand: ext4 cannot grow online here, because CAP_SYS_RESOURCE is missing.
func expand(t *testing.T, l *Lab) {
	l.Apply(class("xfs", "csi.storage.k8s.io/fstype: xfs", "") + claim{name: "grow", class: "xfs", size: "512Mi"}.String() +
		pod{name: "grow", claim: "grow", command: "while true; do date >> /data/log || echo failed; sync; usleep 20000; done"}.String())
	ready(l, "grow")
	size := func() int64 {
		kib, err := strconv.ParseInt(sh(l, "grow", "df -P -k /data | tail -1 | awk '{print $2}'"), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return kib << 10
	}
	before := size()
	start := time.Now()
	l.Kubectl("patch", "pvc", "grow", "--patch={\"spec\":{\"resources\":{\"requests\":{\"storage\":\"2Gi\"}}}}")
	eventually(l, 2*time.Minute, "the file system has grown", func(context.Context) error {
		if now := size(); now < 2<<30-(200<<20) {
			return fmt.Errorf("it has %d bytes, want more than before: %d", now, before)
		}
		return nil
	})
	t.Logf("from the request to the file system's new size: %v", time.Since(start).Round(time.Millisecond))
	is(t, "what the writer says", l.Kubectl("logs", "grow"), "")
	eventually(l, time.Minute, "the claim says so", func(context.Context) error {
		got := l.Kubectl("get", "pvc", "grow", "--output=jsonpath={.status.capacity.storage}")
		if got != "2Gi" {
			return errors.New(got)
		}
		return nil
	})
	remove(l, "pod/grow", "pvc/grow", "storageclass/xfs")
}

func attributes(t *testing.T, l *Lab) {
	l.Apply(fmt.Sprintf(attributesClass, "silver", "labels.tier: silver"))
	l.Apply(fmt.Sprintf(attributesClass, "gold", "labels.tier: gold, copies: '3'"))
	l.Apply(claim{name: "tier", class: "weft-mirrored", attributes: "silver"}.String() + pod{name: "tier", claim: "tier"}.String())
	ready(l, "tier")
	is(t, "the label at first", volumeOf(l, "tier").Labels["tier"], "silver")
	l.Kubectl("patch", "pvc", "tier", "--patch={\"spec\":{\"volumeAttributesClassName\":\"gold\"}}")
	l.Kubectl("wait", "pvc/tier", "--for=jsonpath={.status.currentVolumeAttributesClassName}=gold", "--timeout=60s")
	is(t, "the label after the change", volumeOf(l, "tier").Labels["tier"], "gold")
	is(t, "the copies after the change", fmt.Sprint(volumeOf(l, "tier").Layout.Copies), "3")
	remove(l, "pod/tier", "pvc/tier", "volumeattributesclass/silver", "volumeattributesclass/gold")
}

const attributesClass = `---
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: %s}
driverName: csi.weft.dev
parameters: {%s}
`

func capacity(t *testing.T, l *Lab) {
	eventually(l, time.Minute, "the free space is published", func(context.Context) error {
		out := l.Kubectl("get", "csistoragecapacity", "--all-namespaces", "--output=jsonpath={range .items[*]}{.storageClassName}={.capacity} {end}")
		if !strings.Contains(out, "weft-mirrored=") {
			return fmt.Errorf("it is for %q", out)
		}
		return nil
	})
	l.Apply(claim{name: "huge", class: "weft-mirrored", size: "10Ti"}.String() + pod{name: "huge", claim: "huge"}.String())
	eventually(l, time.Minute, "the scheduler refuses the pod", func(context.Context) error {
		out := l.Kubectl("get", "pod", "huge", "--output=jsonpath={.status.conditions[?(@.type=='PodScheduled')].message}")
		if !strings.Contains(out, "did not have enough free storage") {
			return fmt.Errorf("it says %q", out)
		}
		return nil
	})
	remove(l, "pod/huge", "pvc/huge")
}

func topology(t *testing.T, l *Lab) {
	l.Apply(class("zone2", "copies: '2'", "allowedTopologies: [{matchLabelExpressions: [{key: topology.weft.dev/zone, values: [z2]}]}]"))
	l.Apply(claim{name: "near", class: "zone2"}.String() + pod{name: "near", claim: "near"}.String())
	ready(l, "near")
	is(t, "the pod's node", l.Kubectl("get", "pod", "near", "--output=jsonpath={.spec.nodeName}"), "n2")
	for _, leg := range volumeOf(l, "near").Legs {
		if leg.Node != "t2" && leg.Node != "t4" {
			t.Errorf("a leg is on %s, want one of t2 and t4, which are in zone z2", leg.Node)
		}
	}
	remove(l, "pod/near", "pvc/near", "storageclass/zone2")
}

func class(name, parameters, more string) string {
	return fmt.Sprintf(`---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %s}
provisioner: csi.weft.dev
parameters: {%s}
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
%s
`, name, parameters, more)
}

// readOnlyMany writes a volume once, seals it, and then serves it to readers on all nodes through a second
// PersistentVolume. CSI has no volume that is both.
func readOnlyMany(t *testing.T, l *Lab) {
	l.Apply(claim{name: "writer", class: "weft-dataset"}.String() + pod{name: "writer", claim: "writer"}.String())
	ready(l, "writer")
	sh(l, "writer", "echo for all > /data/file; sync")
	v := volumeOf(l, "writer")
	volume := l.Kubectl("get", "pvc", "writer", "--output=jsonpath={.spec.volumeName}")
	remove(l, "pod/writer", "pvc/writer", "pv/"+volume) // the class retains the volume
	eventually(l, time.Minute, "the volume is detached and sealed", func(ctx context.Context) error {
		_, err := l.Weft.API.SealVolume(ctx, &pb.SealVolumeRequest{Volume: v.Id})
		return err
	})
	l.Apply(fmt.Sprintf(staticVolume, v.Id) + claim{name: "readers", mode: "ReadOnlyMany", volume: "dataset"}.String())
	for _, n := range l.Nodes {
		l.Apply(pod{name: "reader-" + n.Name, claim: "readers", node: n.Name, readOnly: true}.String())
	}
	ready(l, "reader-n1", "reader-n2")
	for _, n := range l.Nodes {
		is(t, "the file on "+n.Name, sh(l, "reader-"+n.Name, "cat /data/file"), "for all")
		if _, err := l.TryKubectl("exec", "reader-"+n.Name, "--", "touch", "/data/new"); err == nil {
			t.Errorf("a reader on %s can write", n.Name)
		}
	}
	remove(l, "pod/reader-n1", "pod/reader-n2", "pvc/readers", "pv/dataset")
	eventually(l, time.Minute, "the volume is detached", func(ctx context.Context) error {
		_, err := l.Weft.API.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.Id})
		return err
	})
}

const staticVolume = `---
apiVersion: v1
kind: PersistentVolume
metadata: {name: dataset}
spec:
  storageClassName: ""
  capacity: {storage: 256Mi}
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  csi: {driver: csi.weft.dev, volumeHandle: %s, readOnly: true, fsType: ext4}
`

// sharedBlock does what live migration of a virtual machine needs.
func sharedBlock(t *testing.T, l *Lab) {
	l.Apply(class("shared", "copies: '1'", "") + claim{name: "shared", class: "shared", block: true, mode: "ReadWriteMany"}.String())
	for _, n := range l.Nodes {
		l.Apply(pod{name: "writer-" + n.Name, claim: "shared", node: n.Name, block: true}.String())
	}
	ready(l, "writer-n1", "writer-n2")
	for i, n := range l.Nodes {
		// Each writes its own block, bypassing the cache, and reads the other's.
		sh(l, "writer-"+n.Name, fmt.Sprintf("yes %s | head -c 4096 > /tmp/b; dd if=/tmp/b of=/dev/volume bs=4096 seek=%d oflag=direct conv=fsync 2>/dev/null", n.Name, i))
	}
	for i, n := range l.Nodes {
		other := l.Nodes[1-i]
		got := sh(l, "writer-"+n.Name, fmt.Sprintf("dd if=/dev/volume bs=4096 skip=%d count=1 iflag=direct 2>/dev/null | head -n 1", 1-i))
		is(t, "what "+n.Name+" reads of "+other.Name+"'s", got, other.Name)
	}
	remove(l, "pod/writer-n1", "pod/writer-n2", "pvc/shared", "storageclass/shared")
}

// health is alpha in Kubernetes 1.37, behind the gate CSIVolumeHealth.
func health(t *testing.T, l *Lab) {
	l.Apply(claim{name: "ill", class: "weft-mirrored"}.String() + pod{name: "ill", claim: "ill", command: "while true; do date > /data/file; sync; usleep 100000; done"}.String())
	ready(l, "ill")
	node := volumeOf(l, "ill").Legs[0].Node
	i, err := strconv.Atoi(strings.TrimPrefix(node, "t"))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Weft.Target(i).Kill(); err != nil {
		t.Fatal(err)
	}
	told := func(want bool) {
		eventually(l, 2*time.Minute, fmt.Sprintf("the pod's status says that the volume is degraded: %v", want), func(context.Context) error {
			out := l.Kubectl("get", "pod", "ill", "--output=jsonpath={.status.volumeHealth}")
			if strings.Contains(out, "Degraded") != want {
				return fmt.Errorf("it says %q", out)
			}
			return nil
		})
	}
	told(true)
	if err := l.Weft.StartTarget(i); err != nil {
		t.Fatal(err)
	}
	told(false)
	remove(l, "pod/ill", "pvc/ill")
}

// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/kube/parts"
)

// snapshotOf is a VolumeSnapshot of a claim, with the class that the manifests have. So has the claim: out
// of the box, claims of weft-thin have snapshots.
func snapshotOf(name, claim string) string {
	return fmt.Sprintf(`---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: %s}
spec:
  volumeSnapshotClassName: weft
  source: {persistentVolumeClaimName: %s}
`, name, claim)
}

// numbers writes numbers to a file, one at a time, and prints each that is durable.
const numbers = `i=0; while :; do i=$((i+1)); echo $i >> /data/log && sync -d /data/log && echo $i || echo failed; usleep 10000; done`

// snapshots takes a snapshot and a clone of a claim while a pod writes it. Pods on both nodes read what
// was there at each moment, whatever happens to the claim afterwards.
func snapshots(t *testing.T, l *Lab) {
	l.Apply(claim{name: "origin", class: "weft-thin"}.String() +
		pod{name: "writer", claim: "origin", node: "n1", command: numbers}.String())
	ready(l, "writer")
	sh(l, "writer", "echo monday > /data/day; sync -d /data/day")
	written := func() int { // so many numbers are durable
		all := strings.Fields(l.Kubectl("logs", "writer"))
		if len(all) == 0 || all[len(all)-1] != fmt.Sprint(len(all)) {
			t.Fatalf("the writer says %q", all)
		}
		return len(all)
	}
	before := written()
	start := time.Now()
	l.Apply(snapshotOf("monday", "origin"))
	l.Kubectl("wait", "volumesnapshot/monday", "--for=jsonpath={.status.readyToUse}=true", "--timeout=60s")
	t.Logf("from nothing to a snapshot that can be used: %v", time.Since(start).Round(time.Millisecond))
	is(t, "the snapshot's size", l.Kubectl("get", "volumesnapshot", "monday", "--output=jsonpath={.status.restoreSize}"), "256Mi")
	atMost := written()

	sh(l, "writer", "echo tuesday > /data/day; sync -d /data/day")
	atLeast := written()
	start = time.Now()
	l.Apply(claim{name: "restored", class: "weft-thin", from: "volumesnapshot/monday", size: "512Mi"}.String() + pod{name: "restored", claim: "restored", node: "n2"}.String() +
		claim{name: "clone", class: "weft-thin", from: "pvc/origin"}.String() + pod{name: "clone", claim: "clone", node: "n1"}.String())
	ready(l, "restored", "clone")
	t.Logf("from nothing to pods with the claims that begin as it: %v", time.Since(start).Round(time.Millisecond))
	is(t, "what the snapshot has", sh(l, "restored", "cat /data/day"), "monday")
	is(t, "what the clone has", sh(l, "clone", "cat /data/day"), "tuesday")
	if last, gap := count(t, sh(l, "restored", "cat /data/log")); gap != "" || last < before || last > atMost+1 {
		t.Errorf("the snapshot has numbers up to %d, with a gap %q; want %d to %d", last, gap, before, atMost+1)
	}
	if last, gap := count(t, sh(l, "clone", "cat /data/log")); gap != "" || last < atLeast {
		t.Errorf("the clone has numbers up to %d, with a gap %q; want %d at least", last, gap, atLeast)
	}
	eventually(l, 10*time.Second, "the writer goes on", func(context.Context) error {
		if n := written(); n <= atLeast {
			return fmt.Errorf("it has written %d", n)
		}
		return nil
	})

	// Each outlives what it was made from, and is its own.
	remove(l, "pod/writer", "pvc/origin")
	remove(l, "volumesnapshot/monday")
	sh(l, "restored", "echo mine > /data/day; sync -d /data/day")
	is(t, "what the clone has in the end", sh(l, "clone", "cat /data/day"), "tuesday")
	remove(l, "pod/restored", "pod/clone", "pvc/restored", "pvc/clone")
}

// group is a class and a VolumeGroupSnapshot of the claims with a label. The chart has the class where
// the cluster has groups.
const group = `---
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshotClass
metadata: {name: weft}
driver: csi.weft.dev
deletionPolicy: Delete
---
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshot
metadata: {name: both}
spec:
  volumeGroupSnapshotClassName: weft
  source: {selector: {matchLabels: {of: shop}}}
`

// twoClaims is a pod that writes each number to the first claim, and then to the second.
const twoClaims = `---
apiVersion: v1
kind: Pod
metadata: {name: shop}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: %s
    command: [sh, -c, 'i=0; while :; do i=$((i+1)); for v in first second; do printf %%08d $i | dd of=/dev/$v bs=8 conv=fsync 2>/dev/null || echo failed; done; done']
    volumeDevices: [{name: first, devicePath: /dev/first}, {name: second, devicePath: /dev/second}]
  volumes:
  - {name: first, persistentVolumeClaim: {claimName: first}}
  - {name: second, persistentVolumeClaim: {claimName: second}}
`

// groupSnapshot takes snapshots of two claims at one moment: no write is in one of them without those
// that were acknowledged before it in the other.
func groupSnapshot(t *testing.T, l *Lab) {
	l.Apply(claim{name: "first", class: "weft-thin", block: true}.String() + claim{name: "second", class: "weft-thin", block: true}.String() +
		fmt.Sprintf(twoClaims, parts.Busybox))
	l.Kubectl("label", "pvc", "first", "second", "of=shop")
	ready(l, "shop")
	eventually(l, time.Minute, "the pod writes", func(context.Context) error {
		n, err := strconv.Atoi(sh(l, "shop", "head -c 8 /dev/second"))
		if err == nil && n < 5 {
			err = fmt.Errorf("it has written %d", n)
		}
		return err
	})
	l.Apply(group)
	l.Kubectl("wait", "volumegroupsnapshot/both", "--for=jsonpath={.status.readyToUse}=true", "--timeout=60s")
	var snapshots []string
	for line := range strings.Lines(l.Kubectl("get", "volumesnapshot", "--output=jsonpath={range .items[*]}{.spec.source.persistentVolumeClaimName} {.metadata.name}{'\\n'}{end}")) {
		claimed, snapshot, _ := strings.Cut(strings.TrimSpace(line), " ")
		snapshots = append(snapshots, claimed)
		l.Apply(claim{name: "of-" + claimed, class: "weft-thin", from: "volumesnapshot/" + snapshot, block: true}.String() + pod{name: "of-" + claimed, claim: "of-" + claimed, block: true}.String())
	}
	if slices.Sort(snapshots); !slices.Equal(snapshots, []string{"first", "second"}) {
		t.Fatalf("the group has snapshots of %q\n%s", snapshots, l.Trouble())
	}
	ready(l, "of-first", "of-second")
	number := func(pod string) int {
		n, err := strconv.Atoi(sh(l, pod, "head -c 8 /dev/volume"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if first, second := number("of-first"), number("of-second"); second == 0 || first != second && first != second+1 {
		t.Errorf("the first snapshot has number %d and the second one %d, which was written after the same in the first", first, second)
	}
	is(t, "what the writer says", l.Kubectl("logs", "shop"), "")
	remove(l, "volumegroupsnapshot/both", "volumegroupsnapshotclass/weft", "pod/shop", "pod/of-first", "pod/of-second", "pvc/first", "pvc/second", "pvc/of-first", "pvc/of-second")
}

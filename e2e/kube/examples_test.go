// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/kube/parts"
)

// TestKubeExamples runs the manifests in deploy/kubernetes/examples that serve a volume to many. Their
// volumes are smaller, and their images are built here under the names of the public ones.
func TestKubeExamples(t *testing.T) {
	l := Start(t, Options{})
	archives, err := parts.FindExamples()
	l.must(err)
	l.importImages(archives...)
	l.part(t, "a data set from a snapshot, read by pods on two nodes", func(t *testing.T) { exampleDataset(t, l) })
	l.part(t, "an NFS server that moves to another node", func(t *testing.T) { exampleNFS(t, l) })
	l.part(t, "an S3 server that moves to another node", func(t *testing.T) { exampleS3(t, l) })
}

// example applies a manifest of the examples.
func (l *Lab) example(name string) {
	l.t.Helper()
	l.Apply(l.exampleText(name))
}

func (l *Lab) exampleText(name string) string {
	l.t.Helper()
	text, err := os.ReadFile(filepath.Join("../../deploy/kubernetes/examples", name))
	l.must(err)
	return strings.NewReplacer("busybox:1.37", parts.Busybox, "50Gi", "256Mi", "100Gi", "256Mi").Replace(string(text))
}

// removeExample deletes what example has applied, and waits until it is gone.
func (l *Lab) removeExample(name string) {
	l.t.Helper()
	if _, err := l.kubectl(l.exampleText(name), "delete", "--wait=true", "--timeout=120s", "--filename=-"); err != nil {
		l.t.Fatalf("%v\n%s", err, l.Trouble())
	}
}

// podsOf are the names, nodes and addresses of the ready pods of an app.
func podsOf(l *Lab, app string) (all [][]string) {
	l.t.Helper()
	l.Kubectl("rollout", "status", "deployment/"+app, "--timeout=180s")
	out := l.Kubectl("get", "pod", "--selector=app="+app, "--field-selector=status.phase=Running",
		"--output=jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName} {.status.podIP}{'\\n'}{end}")
	for line := range strings.Lines(out) {
		all = append(all, strings.Fields(line))
	}
	return all
}

func exampleDataset(t *testing.T, l *Lab) {
	l.example("dataset-snapshot.yaml")
	l.Kubectl("wait", "--for=condition=complete", "job/dataset-v1", "--timeout=120s")
	start := time.Now()
	l.example("dataset-snapshot-read.yaml")
	readers := podsOf(l, "dataset-readers")
	t.Logf("from nothing to a snapshot and two pods with clones of it: %v", time.Since(start).Round(time.Millisecond))
	nodes := map[string]bool{}
	for _, r := range readers {
		nodes[r[1]] = true
		is(t, "the data set of "+r[0], sh(l, r[0], "cat /data/version"), "version 1")
		if _, err := l.TryKubectl("exec", r[0], "--", "touch", "/data/new"); err == nil {
			t.Errorf("the reader %s can write", r[0])
		}
	}
	if len(readers) != 2 || len(nodes) != 2 {
		t.Errorf("the readers are %v, want two on two nodes", readers)
	}
	l.removeExample("dataset-snapshot-read.yaml")
	l.removeExample("dataset-snapshot.yaml")
}

// move has the only pod of a Deployment run on another node, and returns its address.
func move(t *testing.T, l *Lab, app string) string {
	t.Helper()
	before := podsOf(l, app)
	if len(before) != 1 {
		t.Fatalf("%s has the pods %v, want one", app, before)
	}
	to := "n1"
	if before[0][1] == "n1" {
		to = "n2"
	}
	start := time.Now()
	l.Kubectl("patch", "deployment", app, "--patch={\"spec\":{\"template\":{\"spec\":{\"nodeSelector\":{\"kubernetes.io/hostname\":\""+to+"\"}}}}}")
	var after [][]string
	eventually(l, 2*time.Minute, app+" runs on the other node", func(context.Context) error {
		after = podsOf(l, app)
		if len(after) != 1 || after[0][1] != to {
			return fmt.Errorf("its pods are %v", after)
		}
		return nil
	})
	t.Logf("%s from %s to %s: %v", app, before[0][1], to, time.Since(start).Round(time.Millisecond))
	return after[0][2]
}

// clientPod is a pod without a volume. With the label, it may connect to the NFS server.
func clientPod(image string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: client, labels: {nfs-client: "true"}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: %q, command: [sleep, infinity]}
`, image)
}

func exampleNFS(t *testing.T, l *Lab) {
	l.example("nfs.yaml")
	l.Apply(clientPod(parts.NFSClient))
	ready(l, "client")
	at := podsOf(l, "nfs")[0][2]
	sum := sh(l, "client", "head -c 3000000 /dev/urandom > /tmp/f; md5sum < /tmp/f")
	sh(l, "client", "nfsclient "+at+":2049 write /file < /tmp/f")
	is(t, "the file over NFS", sh(l, "client", "nfsclient "+at+":2049 read /file | md5sum"), sum)
	at = move(t, l, "nfs")
	is(t, "the file from the other node", sh(l, "client", "nfsclient "+at+":2049 read /file | md5sum"), sum)
	sh(l, "client", "echo more | nfsclient "+at+":2049 write /second")
	is(t, "a file written there", sh(l, "client", "nfsclient "+at+":2049 read /second"), "more")
	remove(l, "pod/client")
	l.removeExample("nfs.yaml")
}

func exampleS3(t *testing.T, l *Lab) {
	l.Kubectl("create", "secret", "generic", "s3", "--from-literal=id=weft", "--from-literal=secret=a-key-of-this-test")
	l.example("s3.yaml")
	l.Apply(clientPod("rclone/rclone:1.76.0"))
	ready(l, "client")
	rclone := func(at, key, command string) string {
		return fmt.Sprintf("rclone --config=/tmp/none --s3-provider=Rclone --s3-access-key-id=weft --s3-secret-access-key=%s --s3-endpoint=http://%s:8080 --retries=1 %s", key, at, command)
	}
	const key = "a-key-of-this-test"
	at := podsOf(l, "s3")[0][2]
	sum := sh(l, "client", "head -c 3000000 /dev/urandom > /tmp/f; md5sum < /tmp/f")
	sh(l, "client", rclone(at, key, "mkdir :s3:models")+" && "+rclone(at, key, "rcat :s3:models/first < /tmp/f"))
	is(t, "the object", sh(l, "client", rclone(at, key, "cat :s3:models/first")+" | md5sum"), sum)
	if out, err := l.TryKubectl("exec", "client", "--", "sh", "-c", rclone(at, "another", "cat :s3:models/first")); err == nil {
		t.Errorf("an object of %d bytes was read with another key", len(out))
	}
	at = move(t, l, "s3")
	is(t, "the object from the other node", sh(l, "client", rclone(at, key, "cat :s3:models/first")+" | md5sum"), sum)
	remove(l, "pod/client", "secret/s3")
	l.removeExample("s3.yaml")
}

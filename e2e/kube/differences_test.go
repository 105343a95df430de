// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"weft.dev/weft/e2e/kube/parts"
)

// everything is the file that the chart renders with each option enabled. SnapshotMetadata is one of them.
const everything = "../../deploy/manifests/testdata/everything.yaml"

// backupTool is an account with the rights of upstream's role for tools that make backups.
const backupTool = `---
apiVersion: v1
kind: ServiceAccount
metadata: {name: backup}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: backup}
rules:
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots, volumesnapshotcontents], verbs: [get, list, watch]}
- {apiGroups: [cbt.storage.k8s.io], resources: [snapshotmetadataservices], verbs: [get, list]}
- {apiGroups: [""], resources: [serviceaccounts/token], verbs: [create, get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: backup}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: backup}
subjects: [{kind: ServiceAccount, name: backup, namespace: default}]
`

// backupPod has two claims as /dev/old and /dev/new.
const backupPod = `---
apiVersion: v1
kind: Pod
metadata: {name: backup}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: %s
    command: [sh, -c, sleep 1000000]
    volumeDevices: [{name: old, devicePath: /dev/old}, {name: new, devicePath: /dev/new}]
  volumes:
  - {name: old, persistentVolumeClaim: {claimName: old}}
  - {name: new, persistentVolumeClaim: {claimName: new}}
`

// differences asks, as a tool for backups does, what differs between two snapshots, and writes no more
// than that onto a claim that begins as the first one: then it is as the second one.
func differences(t *testing.T, l *Lab) {
	l.Apply(backupTool)
	l.startSnapshotMetadata(t)
	l.Apply(claim{name: "origin", class: "weft-thin", block: true}.String() + pod{name: "writer", claim: "origin", block: true}.String())
	ready(l, "writer")
	write := func(mib ...int) {
		for _, at := range mib {
			sh(l, "writer", fmt.Sprintf("dd if=/dev/urandom of=/dev/volume bs=4096 seek=%d count=6 conv=notrunc,fsync 2>/dev/null", at*256+3))
		}
	}
	snapshot := func(name string) {
		l.Apply(snapshotOf(name, "origin"))
		l.Kubectl("wait", "volumesnapshot/"+name, "--for=jsonpath={.status.readyToUse}=true", "--timeout=60s")
	}
	write(0, 17, 100, 101, 255)
	snapshot("monday")
	write(17, 60, 200, 254)
	snapshot("tuesday")

	held, all := l.differences(t, "monday", "")
	changed, delta := l.differences(t, "tuesday", "monday")
	t.Logf("monday holds %d bytes in %d ranges; on tuesday %d bytes in %d ranges are others", all, len(held), delta, len(changed))
	if most := int64(2 << 20); all == 0 || all > most || delta == 0 || delta > most {
		t.Errorf("of 256 MiB, %d bytes are held and %d differ, want some and %d at most: 120 KiB and 96 KiB were written", all, delta, most)
	}
	l.Apply(claim{name: "old", class: "weft-thin", from: "volumesnapshot/monday", block: true}.String() + claim{name: "new", class: "weft-thin", from: "volumesnapshot/tuesday", block: true}.String() +
		fmt.Sprintf(backupPod, parts.Busybox))
	ready(l, "backup")
	if sh(l, "backup", "cmp -s /dev/old /dev/new && echo same || echo different") != "different" {
		t.Error("the snapshots are the same before anything was copied")
	}
	var copies strings.Builder
	for _, r := range changed {
		fmt.Fprintf(&copies, "dd if=/dev/new of=/dev/old bs=4096 skip=%d seek=%d count=%d conv=notrunc 2>/dev/null && ", r.Offset/4096, r.Offset/4096, r.Size/4096)
	}
	is(t, "after the increment was copied, the snapshots are", sh(l, "backup", copies.String()+"cmp /dev/old /dev/new && echo the same"), "the same")

	// Whoever may not read the snapshots is told nothing.
	l.Kubectl("create", "serviceaccount", "stranger")
	l.Kubectl("create", "clusterrole", "stranger", "--verb=get,list,create", "--resource=snapshotmetadataservices.cbt.storage.k8s.io,serviceaccounts/token,volumesnapshotcontents.snapshot.storage.k8s.io")
	l.Kubectl("create", "clusterrolebinding", "stranger", "--clusterrole=stranger", "--serviceaccount=default:stranger")
	if out, err := l.askDifferences("stranger", "tuesday", "monday"); err == nil || !strings.Contains(err.Error(), "ermission") && !strings.Contains(err.Error(), "forbidden") {
		t.Errorf("a stranger asks what differs and gets %s, %v; want a refusal", out, err)
	}

	l.Kubectl("delete", "clusterrolebinding", "backup", "stranger")
	l.Kubectl("delete", "clusterrole", "backup", "stranger")
	remove(l, "pod/writer", "pod/backup", "pvc/old", "pvc/new", "volumesnapshot/monday", "volumesnapshot/tuesday", "pvc/origin",
		"serviceaccount/backup", "serviceaccount/stranger")
}

// startSnapshotMetadata starts the sidecar with the arguments, rights and service of the chart, at an
// address of the lab and with a certificate of its own.
func (l *Lab) startSnapshotMetadata(t *testing.T) {
	t.Helper()
	const address = "127.0.0.1:50051"
	c := &x509.Certificate{
		SerialNumber: big.NewInt(3), Subject: pkix.Name{CommonName: "weft-snapshot-metadata"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	if _, err := l.secrets.certificate("metadata", c, c, nil); err != nil {
		t.Fatal(err)
	}
	authority, err := os.ReadFile(l.secrets.file("metadata.crt"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(everything)
	if err != nil {
		t.Fatal(err)
	}
	applied := 0
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatal(err)
		}
		switch o.Kind + " " + o.Metadata.Name {
		case "ClusterRole weft-csi-snapshot-metadata", "ClusterRoleBinding weft-csi-snapshot-metadata":
			l.Apply(document)
			applied++
		case "SnapshotMetadataService csi.weft.dev":
			l.Apply(document)
			l.Kubectl("patch", "snapshotmetadataservice", o.Metadata.Name, "--type=merge",
				fmt.Sprintf(`--patch={"spec":{"address":%q,"caCert":%q}}`, address, base64.StdEncoding.EncodeToString(authority)))
			applied++
		}
	}
	if applied != 3 {
		t.Fatalf("%s has %d of the three objects of SnapshotMetadata", everything, applied)
	}
	sidecars, err := readSidecars(everything)
	if err != nil {
		t.Fatal(err)
	}
	const name = "csi-snapshot-metadata"
	if len(sidecars[name]) == 0 {
		t.Fatalf("%s has no %s", everything, name)
	}
	if err := l.start(name, name, l.sidecarArgs(name, sidecars[name])...); err != nil {
		t.Fatal(err)
	}
	eventually(l, 30*time.Second, "the sidecar listens", func(context.Context) error {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err
	})
}

// blocks is a range of a snapshot, in bytes.
type blocks struct {
	Offset int64 `json:"byte_offset"`
	Size   int64 `json:"size_bytes"`
}

// differences asks the service as an account that may ask. It returns the ranges and the sum of their sizes.
func (l *Lab) differences(t *testing.T, snapshot, previous string) (all []blocks, size int64) {
	t.Helper()
	out, err := l.askDifferences("backup", snapshot, previous)
	if err != nil {
		t.Fatal(err)
	}
	var records []struct {
		Capacity int64    `json:"volume_capacity_bytes"`
		Blocks   []blocks `json:"block_metadata"`
	}
	if err := json.Unmarshal(out, &records); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, r := range records {
		if r.Capacity != 256<<20 {
			t.Errorf("a record says that the volume has %d bytes, want 256 MiB", r.Capacity)
		}
		all = append(all, r.Blocks...)
	}
	for _, b := range all {
		size += b.Size
	}
	return all, size
}

// askDifferences asks as an account.
func (l *Lab) askDifferences(account, snapshot, previous string) ([]byte, error) {
	config := l.file(account + ".kubeconfig")
	if err := l.writeAccountConfig(config, "default", account); err != nil {
		return nil, err
	}
	args := []string{"-kubeconfig=" + config, "-snapshot=" + snapshot}
	if previous != "" {
		args = append(args, "-previous="+previous)
	}
	cmd := exec.Command(l.parts.Program("differences"), args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.Bytes(), errors.New(strings.TrimSpace(stderr.String()))
	}
	return stdout.Bytes(), nil
}

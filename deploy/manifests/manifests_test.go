// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func root(t *testing.T) string {
	t.Helper()
	dir, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestManifestsAreThoseOfTheChart(t *testing.T) {
	dir := root(t)
	want, err := record(os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, outputDir, recordFile))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("chart or manifests have changed since the manifests were made: run \"make manifests\"\n%s", diff)
	}
}

// builtHelm is a current helm program. If there is none, only CI builds it, since that
// takes a minute.
func builtHelm(t *testing.T) helm {
	t.Helper()
	h := helm(helmPath())
	if _, err := os.Stat(string(h)); err != nil && os.Getenv("CI") != "true" {
		t.Skipf("helm has not been built here; make manifests builds it")
	}
	if err := h.build(t.Context(), root(t)); err != nil {
		t.Fatal(err)
	}
	return h
}

func TestChartRendersToTheManifests(t *testing.T) {
	dir, h := root(t), builtHelm(t)
	want, err := manifests(t.Context(), h, dir)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, file := range append(keptFiles(t), filepath.Join(dir, testOutput)) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got[strings.TrimPrefix(file, dir+"/")] = string(text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the chart renders (-) something other than the committed files (+): run \"make manifests\"\n%s", diff)
	}
}

func TestTheChartRefusesWhatCanNotWork(t *testing.T) {
	dir, h := root(t), builtHelm(t)
	for set, want := range map[string]string{
		"volmgr.storage.type=hostPath":                      "needs volmgr.nodeSelector",
		"volmgr.storage.storageClassName=weft-mirrored":     "cannot wait for itself",
		"volmgr.enabled=false":                              "managerAddress is empty",
		"volmgr.replicas=2":                                 "replicas",
		"networkPolicy.enabled=true":                        "lock them out",
		"serviceMonitor.enabled=true":                       "needs a certificate of the cluster",
		"tls.enabled=true,insecurePlainTCP=true":            "set one of them",
		"volmgr.enabled=false,managerAddress=m1:4480":       "cannot be asked to trust its pods",
		"logLevel=loud":                                     "logLevel",
		"target.datapath=nvmet":                             "datapath",
		"node.blockDevice=iscsi":                            "blockDevice",
		"controler.replicas=3":                              "controler",
		"node.csi.maxVolumes=-1":                            "maxVolumes",
		"storageClasses[0].name=a,storageClasses[0].kind=b": "kind",
		"kubeletDir=var/lib/kubelet":                        "kubeletDir",
		"image.digest=latest":                               "digest",
		"managerAddress=m1":                                 "managerAddress",
		"volumeAttributesClasses[0].name=a":                 "parameters",
		"snapshots.enabled=maybe":                           "enabled",
		"snapshotMetadata.enabled=true":                     "needs snapshots",
		"snapshots.enabled=true,snapshotMetadata.enabled=true,snapshotMetadata.certificate.secretName=a": "set both",
		"snapshotMetadata.certificate.caCert=a":                                                          "caCert",
		"snapshots.classes[0].name=a,snapshots.classes[0].parameters.b=c":                                "parameters",
		"storageClasses[0].name=a,storageClasses[0].parameters.stripes=4":                                "stripes",
	} {
		_, err := h.template(t.Context(), filepath.Join(dir, chartDir), "--set", set)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("helm template --set %s = %v, want an error with %q", set, err, want)
		}
	}
}

// Without the CRDs the sidecar would end at once, and the API server knows no VolumeSnapshotClass.
func TestSnapshotsAreOnlyWhereTheClusterHasThem(t *testing.T) {
	dir, h := root(t), builtHelm(t)
	for _, c := range []struct {
		flags []string
		want  bool
	}{
		{nil, false},
		{[]string{"--api-versions", "snapshot.storage.k8s.io/v1"}, true},
		{[]string{"--api-versions", "snapshot.storage.k8s.io/v1", "--set", "snapshots.enabled=false"}, false},
		{[]string{"--set", "snapshots.enabled=true"}, true},
		{[]string{"--set", "snapshots.enabled=true,controller.enabled=false"}, false},
	} {
		out, err := h.template(t.Context(), filepath.Join(dir, chartDir), c.flags...)
		if err != nil {
			t.Fatal(err)
		}
		for _, what := range []string{"name: csi-snapshotter", "kind: VolumeSnapshotClass", "name: weft-csi-snapshotter", "external-snapshotter-leader-csi-weft-dev", "resources: [volumesnapshots]"} {
			if got := strings.Contains(out, what); got != c.want {
				t.Errorf("helm template %v: has %q: %v, want %v", c.flags, what, got, c.want)
			}
		}
	}
}

// What tools for backups ask is there if the values say so, and only then. The certificate that the chart
// makes is valid for the address and by the authority that the tools are told.
func TestSnapshotMetadataIsThereWhereItIsAskedFor(t *testing.T) {
	dir, h := root(t), builtHelm(t)
	parts := []string{"name: csi-snapshot-metadata", "kind: SnapshotMetadataService", "weft-csi-snapshot-metadata", "snapshotmetadataservices", "secretName: weft-snapshot-metadata", "kind: Secret"}
	for _, c := range []struct {
		set  string
		want bool
	}{
		{"snapshots.enabled=true", false},
		{"snapshots.enabled=true,snapshotMetadata.enabled=true", true},
		{"snapshotMetadata.enabled=true,controller.enabled=false", false},
	} {
		out, err := h.template(t.Context(), filepath.Join(dir, chartDir), "--set", c.set)
		if err != nil {
			t.Fatal(err)
		}
		for _, what := range parts {
			if got := strings.Contains(out, what); got != c.want {
				t.Errorf("helm template --set %s: has %q: %v, want %v", c.set, what, got, c.want)
			}
		}
		if c.want {
			checkServed(t, out)
		}
	}
	out, err := h.template(t.Context(), filepath.Join(dir, chartDir), "--set", "snapshots.enabled=true,snapshotMetadata.enabled=true,snapshotMetadata.certificate.secretName=own,"+
		"snapshotMetadata.certificate.caCert=-----BEGIN CERTIFICATE-----")
	if err != nil || strings.Contains(out, "kind: Secret") || !strings.Contains(out, "secretName: own") || !strings.Contains(out, base64.StdEncoding.EncodeToString([]byte("-----BEGIN CERTIFICATE-----"))) {
		t.Errorf("with a certificate of one's own: %v\n%s", err, out)
	}
}

// checkServed finds a certificate that tools would refuse, or a port that nobody serves.
func checkServed(t *testing.T, rendered string) {
	t.Helper()
	field := func(name string) string {
		t.Helper()
		found := regexp.MustCompile(`(?m)^ *` + regexp.QuoteMeta(name) + `: "?([^"\n]+)"?$`).FindStringSubmatch(rendered)
		if found == nil {
			t.Fatalf("no field %s", name)
		}
		return found[1]
	}
	text := func(name string) []byte {
		t.Helper()
		b, err := base64.StdEncoding.DecodeString(field(name))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return b
	}
	pair, err := tls.X509KeyPair(text("tls.crt"), text("tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	authority := x509.NewCertPool()
	if !authority.AppendCertsFromPEM(text("caCert")) {
		t.Fatal("caCert is no certificate")
	}
	host, _, err := net.SplitHostPort(field("address"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: authority}); err != nil {
		t.Error(err)
	}
	port := regexp.MustCompile(`port: 6443\n +targetPort: (\S+)`).FindStringSubmatch(rendered)
	if port == nil || !regexp.MustCompile(`- name: `+port[1]+`\n +containerPort: `).MatchString(rendered) {
		t.Errorf("no container has the Service's port %q", port)
	}
}

func TestGroupsHaveAClassWhereTheClusterHasThem(t *testing.T) {
	dir, h := root(t), builtHelm(t)
	for api, want := range map[string]bool{"groupsnapshot.storage.k8s.io/v1": true, "groupsnapshot.storage.k8s.io/v1beta2": false} {
		out, err := h.template(t.Context(), filepath.Join(dir, chartDir), "--set", "snapshots.enabled=true", "--api-versions", api)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(out, "kind: VolumeGroupSnapshotClass"); got != want {
			t.Errorf("with %s there is a class of groups: %v, want %v", api, got, want)
		}
	}
}

func TestAComponentHasWhatChangesAndWhatIsNew(t *testing.T) {
	object := func(kind, name, data string) string {
		return "---\n# Source: weft/templates/a.yaml\napiVersion: v1\nkind: " + kind + "\nmetadata:\n  name: " + name + "\n  labels:\n    a: b\ndata: " + data + "\n"
	}
	files, err := component(object("A", "x", "1")+object("A", "y", "1"), object("A", "x", "1")+object("A", "y", "2")+object("B", "x", "1"))
	if err != nil {
		t.Fatal(err)
	}
	bare := func(object string) string { return header + strings.SplitN(object, "\n", 3)[2] }
	if diff := cmp.Diff(map[string]string{
		"added.yaml":         bare(object("B", "x", "1")),
		"changed.yaml":       bare(object("A", "y", "2")),
		"kustomization.yaml": files["kustomization.yaml"],
	}, files); diff != "" {
		t.Errorf("component (-want +got):\n%s", diff)
	}
}

func TestSplitGivesEachTemplateAFile(t *testing.T) {
	files, err := split("---\n# Source: weft/templates/b.yaml\nkind: B\nmetadata:\n  labels:\n    app.kubernetes.io/managed-by: Helm\n    a: b  \n   \n---\n# Source: weft/templates/a.yaml\nkind: A\n---\n# Source: weft/templates/b.yaml\nkind: C\n")
	if err != nil {
		t.Fatal(err)
	}
	if want := header + "kind: B\nmetadata:\n  labels:\n    a: b\n---\nkind: C\n"; files["b.yaml"] != want {
		t.Errorf("b.yaml = %q, want %q", files["b.yaml"], want)
	}
	names := slices.Sorted(maps.Keys(files))
	if want := []string{"a.yaml", "b.yaml", "kustomization.yaml", namespaceFile}; !slices.Equal(names, want) {
		t.Errorf("files = %v, want %v", names, want)
	}
	if list := files["kustomization.yaml"]; !strings.HasSuffix(list, "resources:\n  - namespace.yaml\n  - a.yaml\n  - b.yaml\n") {
		t.Errorf("kustomization.yaml = %q, want it to name all, the namespace first", list)
	}
}

func TestSplitRefusesWhatHasNoSource(t *testing.T) {
	if _, err := split("---\nkind: A\n"); err == nil {
		t.Error("split = nil for an object of no template, want an error")
	}
}

func TestRecordTellsEveryChange(t *testing.T) {
	tree := fstest.MapFS{
		chartDir + "/values.yaml": {Data: []byte("a: 1\n")},
		outputDir + "/node.yaml":  {Data: []byte("kind: A\n")},
		outputDir + "/SHA256SUMS": {Data: []byte("not itself")},
		testValues:                {Data: []byte("a: 2\n")},
	}
	sum := func() string {
		t.Helper()
		s, err := record(tree)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := sum()
	if lines := strings.Count(before, "\n"); lines != 3 {
		t.Errorf("record has %d lines, want 3:\n%s", lines, before)
	}
	for file := range tree {
		old := tree[file].Data
		tree[file].Data = append(slices.Clone(old), ' ')
		if changed := sum() != before; changed != !strings.HasSuffix(file, recordFile) {
			t.Errorf("record changed = %v with %s", changed, file)
		}
		tree[file].Data = old
	}
}

// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/mod/modfile"
)

func TestKubernetesIsBuiltAsItsOwnTreeIs(t *testing.T) {
	theirs := parse(t, `module k8s.io/kubernetes
go 1.26.0
godebug default=go1.26
require (
	k8s.io/api v0.0.0
	k8s.io/utils v0.0.0-20260626114624-be93311217bd
	example.com/x v1.2.3
)
replace (
	k8s.io/api => ./staging/src/k8s.io/api
	example.com/x => example.com/fork v1.2.4
	example.com/y => ./y
)
`)
	wantGoMod(t, modules()[0], theirs, ownReplacements(theirs), `module weft.test/kube/kubernetes

go 1.26.0

godebug default=go1.26

require k8s.io/kubernetes v1.37.1

replace k8s.io/api => k8s.io/api v0.37.1

replace example.com/x => example.com/fork v1.2.4
`)
}

func TestSidecarsTakeTheLibrariesOfKubernetes(t *testing.T) {
	theirs := parse(t, `module github.com/kubernetes-csi/external-attacher/v4
go 1.26.0
require k8s.io/api v0.37.0
replace k8s.io/api => k8s.io/api v0.37.0
`)
	list := `weft.test/kube/kubernetes
example.com/x v1.2.3 => example.com/fork v1.2.4
k8s.io/api v0.0.0 => k8s.io/api v0.37.1
k8s.io/kubernetes v1.37.1
`
	wantGoMod(t, modules()[1], theirs, sameLibraries(list), `module weft.test/kube/sidecars

go 1.26.0

require (
	github.com/kubernetes-csi/external-attacher/v4 v4.13.0
	github.com/kubernetes-csi/external-resizer/v2 v2.3.0
	github.com/kubernetes-csi/external-snapshotter/v8 v8.7.0
)

replace example.com/x => example.com/fork v1.2.4

replace k8s.io/api => k8s.io/api v0.37.1

replace k8s.io/kubernetes => k8s.io/kubernetes v1.37.1
`)
}

func TestProgramsAreFoundWhereGoPutsThem(t *testing.T) {
	for _, c := range []struct {
		program program
		want    string
	}{
		{program{name: "etcd", pkg: "go.etcd.io/etcd/server/v3"}, "server"},
		{program{name: "ginkgo", pkg: "github.com/onsi/ginkgo/v2/ginkgo"}, "ginkgo"},
		{program{name: "pause", pkg: "./e2e/kube/pause"}, "pause"},
		{program{name: "e2e.test", pkg: "./suite", test: true}, "e2e.test"},
	} {
		if got := c.program.output(); got != c.want {
			t.Errorf("output of %+v = %s, want %s", c.program, got, c.want)
		}
	}
}

func parse(t *testing.T, text string) *modfile.File {
	t.Helper()
	f, err := modfile.Parse("go.mod", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func wantGoMod(t *testing.T, m module, theirs *modfile.File, replacements []modfile.Replace, want string) {
	t.Helper()
	got, err := m.goMod(theirs, replacements)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("go.mod of %s (-want +got)\n%s", m.name, diff)
	}
}

func TestAnImageIsOneLayerUnderItsNames(t *testing.T) {
	var archive bytes.Buffer
	files := []entry{{name: "bin/", mode: 0o755}, {name: "bin/pause", mode: 0o755, content: []byte("program")}, {name: "bin/sh", link: "pause"}}
	if err := writeImage(&archive, []string{"a:1", "b:2"}, []string{"/bin/pause"}, files); err != nil {
		t.Fatal(err)
	}
	outer := readTar(t, &archive)
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(outer["manifest.json"].content, &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || len(manifest[0].Layers) != 1 || cmp.Diff(manifest[0].RepoTags, []string{"a:1", "b:2"}) != "" {
		t.Fatalf("manifest = %+v, want one image of one layer under both names", manifest)
	}
	if config := string(outer[manifest[0].Config].content); !strings.Contains(config, `"Entrypoint":["/bin/pause"]`) {
		t.Errorf("config = %s, want the entrypoint in it", config)
	}
	layer := readTar(t, bytes.NewReader(outer[manifest[0].Layers[0]].content))
	if got := layer["bin/pause"]; string(got.content) != "program" || got.mode != 0o755 {
		t.Errorf("bin/pause = %+v, want the program, executable", got)
	}
	if got := layer["bin/sh"].link; got != "pause" {
		t.Errorf("bin/sh leads to %q, want pause", got)
	}
}

func readTar(t *testing.T, r io.Reader) map[string]entry {
	t.Helper()
	all := make(map[string]entry)
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		all[h.Name] = entry{h.Name, h.Linkname, h.Mode, content}
	}
}

func TestPartsAreFoundOnlyWhenAllAreThere(t *testing.T) {
	t.Setenv("WEFT_CACHE", t.TempDir())
	if _, err := Find(); err == nil || !strings.Contains(err.Error(), "make kube-bins") {
		t.Errorf("Find() in an empty cache = %v, want a hint at make kube-bins", err)
	}
	dir, err := directory()
	if err != nil {
		t.Fatal(err)
	}
	all := Parts{dir}.all()
	for i, file := range all {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := Find(); err == nil {
			t.Fatalf("Find() = nil error with %d of %d files", i, len(all))
		}
		if err := os.WriteFile(file, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	p, err := Find()
	if err != nil {
		t.Fatalf("Find() with all files: %v", err)
	}
	if got, want := p.Program("runc"), filepath.Join(dir, "debian/usr/sbin/runc"); got != want {
		t.Errorf("Program(runc) = %s, want %s", got, want)
	}
}

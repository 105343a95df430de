// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"fmt"
	"path"
	"strings"

	"golang.org/x/mod/modfile"
	modver "golang.org/x/mod/module"
)

// module is a generated Go module in which programs are built.
type module struct {
	name     string // also the name of its directory
	requires []modver.Version
	programs []program
	suite    bool             // includes the program of the external-storage suite
	replaces []modver.Version // used in place of all other versions
	// of is a module whose library versions this one uses as far as possible, so that
	// shared packages are compiled once. nil: the versions that the module requires.
	of *module
}

// program is a main package or, with test set, a package whose test program is built.
type program struct {
	name, pkg string
	test      bool
	main      string // what is in pkg, if that is a directory of the generated module
}

// output is the file that go build writes for a main package.
func (p program) output() string {
	if p.test {
		return p.name
	}
	if prefix, _, ok := modver.SplitPathVersion(p.pkg); ok {
		return path.Base(prefix)
	}
	return path.Base(p.pkg)
}

// crds are the modules with the CustomResourceDefinitions of snapshots. The second one has versions of
// its own, and not every version that the sidecar asks for can be had.
var crds = []modver.Version{
	{Path: "github.com/kubernetes-csi/external-snapshotter/client/v8", Version: Snapshotter},
	{Path: "github.com/kubernetes-csi/external-snapshot-metadata/client", Version: "v1.0.0"},
}

// modules are built in this order.
func modules() []module {
	const k, c = "k8s.io/kubernetes/", "github.com/kubernetes-csi/external-"
	kubernetes := module{
		name:     "kubernetes",
		requires: []modver.Version{{Path: "k8s.io/kubernetes", Version: Kubernetes}},
		suite:    true,
		programs: []program{
			// etcd and ginkgo in the versions that Kubernetes requires.
			{name: "etcd", pkg: "go.etcd.io/etcd/server/v3"},
			{name: "kube-apiserver", pkg: k + "cmd/kube-apiserver"},
			{name: "kube-controller-manager", pkg: k + "cmd/kube-controller-manager"},
			{name: "kube-scheduler", pkg: k + "cmd/kube-scheduler"},
			{name: "kubelet", pkg: k + "cmd/kubelet"},
			{name: "kubectl", pkg: k + "cmd/kubectl"},
			{name: "agnhost", pkg: k + "test/images/agnhost"},
			{name: "ginkgo", pkg: "github.com/onsi/ginkgo/v2/ginkgo"},
			{name: "e2e.test", pkg: "./" + suiteDir, test: true},
		},
	}
	// On their own, these would use the same libraries in slightly different versions: for
	// each of them, a thousand more packages to compile.
	sidecars := module{
		name:     "sidecars",
		requires: []modver.Version{{Path: c + "attacher/v4", Version: Attacher}, {Path: c + "resizer/v2", Version: Resizer}, {Path: c + "snapshotter/v8", Version: Snapshotter}},
		programs: []program{
			{name: "csi-attacher", pkg: c + "attacher/v4/cmd/csi-attacher"},
			{name: "csi-resizer", pkg: c + "resizer/v2/cmd/csi-resizer"},
			{name: "csi-snapshotter", pkg: c + "snapshotter/v8/cmd/csi-snapshotter"},
			{name: "snapshot-controller", pkg: c + "snapshotter/v8/cmd/snapshot-controller"},
		},
		of: &kubernetes,
	}
	// It does not compile with Kubernetes' client-go v0.37.
	provisioner := module{
		name:     "provisioner",
		requires: []modver.Version{{Path: c + "provisioner/v6", Version: Provisioner}},
		programs: []program{{name: "csi-provisioner", pkg: c + "provisioner/v6/cmd/csi-provisioner"}},
	}
	// It compiles only with the version of the CSI specification that it asks for: it includes a part of
	// csi-test, which implements each of its services.
	metadata := module{
		name:     "metadata",
		requires: []modver.Version{{Path: c + "snapshot-metadata", Version: Metadata}},
		replaces: []modver.Version{crds[1], {Path: "github.com/container-storage-interface/spec", Version: "v1.12.0"}, {Path: "github.com/kubernetes-csi/csi-test/v5", Version: "v5.4.0"}},
		programs: []program{
			{name: "csi-snapshot-metadata", pkg: c + "snapshot-metadata/cmd/csi-snapshot-metadata"},
			{name: "differences", pkg: "./differences", main: differences},
		},
		of: &kubernetes,
	}
	return []module{kubernetes, sidecars, metadata, provisioner}
}

// goMod is the go.mod of a module in which m's programs are built. theirs is the go.mod of
// the first module that m requires. Its replacements do not apply to modules that require
// it, so they are repeated.
func (m module) goMod(theirs *modfile.File, replacements []modfile.Replace) ([]byte, error) {
	if theirs.Go == nil {
		return nil, fmt.Errorf("%s/go.mod names no version of Go", m.requires[0].Path)
	}
	var f modfile.File
	if err := f.AddModuleStmt("weft.test/kube/" + m.name); err != nil {
		return nil, err
	}
	if err := f.AddGoStmt(theirs.Go.Version); err != nil {
		return nil, err
	}
	for _, g := range theirs.Godebug {
		if err := f.AddGodebug(g.Key, g.Value); err != nil {
			return nil, err
		}
	}
	for _, r := range m.requires {
		if err := f.AddRequire(r.Path, r.Version); err != nil {
			return nil, err
		}
	}
	for _, r := range m.replaces {
		replacements = append(replacements, replacement(r.Path, r.Version))
	}
	for _, r := range replacements {
		if err := f.AddReplace(r.Old.Path, r.Old.Version, r.New.Path, r.New.Version); err != nil {
			return nil, err
		}
	}
	f.Cleanup()
	return f.Format()
}

// ownReplacements are the replacements in a module's go.mod. A replacement by a directory
// is one of Kubernetes' staging modules, published under the version that belongs to
// Kubernetes'.
func ownReplacements(theirs *modfile.File) []modfile.Replace {
	var all []modfile.Replace
	for _, r := range theirs.Replace {
		switch {
		case r.New.Version != "":
			all = append(all, *r)
		case strings.HasPrefix(r.New.Path, "./staging/src/"):
			all = append(all, replacement(r.Old.Path, "v0."+strings.TrimPrefix(Kubernetes, "v1.")))
		}
	}
	return all
}

func replacement(path, version string) modfile.Replace {
	return modfile.Replace{Old: modver.Version{Path: path}, New: modver.Version{Path: path, Version: version}}
}

// sameLibraries pins each library to the version that another module uses, given the output
// of "go list -m all" there.
func sameLibraries(list string) []modfile.Replace {
	var all []modfile.Replace
	for line := range strings.Lines(list) {
		if f := strings.Fields(line); len(f) > 1 {
			// PATH VERSION, or PATH VERSION => PATH VERSION; the module itself is PATH.
			r := replacement(f[0], f[len(f)-1])
			if len(f) > 3 {
				r.New.Path = f[len(f)-2]
			}
			all = append(all, r)
		}
	}
	return all
}

// toolsGo imports the programs, so that go mod tidy keeps their dependencies.
func (m module) toolsGo() []byte {
	var b strings.Builder
	b.WriteString("//go:build tools\n\npackage tools\n\nimport (\n")
	for _, p := range m.programs {
		if !p.test && p.main == "" {
			fmt.Fprintf(&b, "\t_ %q\n", p.pkg)
		}
	}
	b.WriteString(")\n")
	return []byte(b.String())
}

// ldflags set Kubernetes' version. Without them it is v0.0.0-master, and Kubernetes refuses
// others as too new.
func (m module) ldflags() string {
	flags := "-s -w"
	if m.name != "kubernetes" {
		return flags
	}
	numbers := strings.Split(strings.TrimPrefix(Kubernetes, "v"), ".")
	for _, p := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(" -X %s.gitVersion=%s -X %s.gitMajor=%s -X %s.gitMinor=%s -X %s.gitTreeState=clean", p, Kubernetes, p, numbers[0], p, numbers[1], p)
	}
	return flags
}

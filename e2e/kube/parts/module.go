// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"fmt"
	"strings"

	"golang.org/x/mod/modfile"
)

// module is a Go module whose programs are built.
type module struct {
	path, version string
	programs      []program
	staging       bool // it needs k8s.io/* modules at v0.0.0, which it keeps in its own tree
}

// program is a main package, or with test a package whose test program is made.
type program struct {
	name, pkg string
	test      bool
}

// modules are built in this order: what compiles most comes first, so that the
// others find it compiled.
func modules() []module {
	const k, c = "k8s.io/kubernetes/", "github.com/kubernetes-csi/external-"
	return []module{
		{path: "k8s.io/kubernetes", version: Kubernetes, staging: true, programs: []program{
			// etcd and ginkgo in the versions that Kubernetes itself asks for.
			{name: "etcd", pkg: "go.etcd.io/etcd/server/v3"},
			{name: "kube-apiserver", pkg: k + "cmd/kube-apiserver"},
			{name: "kube-controller-manager", pkg: k + "cmd/kube-controller-manager"},
			{name: "kube-scheduler", pkg: k + "cmd/kube-scheduler"},
			{name: "kubelet", pkg: k + "cmd/kubelet"},
			{name: "kubectl", pkg: k + "cmd/kubectl"},
			{name: "agnhost", pkg: k + "test/images/agnhost"},
			{name: "ginkgo", pkg: "github.com/onsi/ginkgo/v2/ginkgo"},
			{name: "e2e.test", pkg: k + "test/e2e", test: true},
		}},
		{path: c + "attacher/v4", version: Attacher, programs: []program{{name: "csi-attacher", pkg: c + "attacher/v4/cmd/csi-attacher"}}},
		{path: c + "resizer/v2", version: Resizer, programs: []program{{name: "csi-resizer", pkg: c + "resizer/v2/cmd/csi-resizer"}}},
		{path: c + "provisioner/v6", version: Provisioner, programs: []program{{name: "csi-provisioner", pkg: c + "provisioner/v6/cmd/csi-provisioner"}}},
	}
}

// name is short, and a folder.
func (m module) name() string {
	elements := strings.Split(m.path, "/")
	if len(elements) > 2 {
		return elements[2]
	}
	return elements[1]
}

// goMod is the go.mod of a module in which m's programs are built as in m's own
// tree. A requirement does not bring a module's replacements with it, so they are
// repeated here; those by a folder are staging modules, published under the
// version that belongs to m's.
func (m module) goMod(own []byte) ([]byte, error) {
	theirs, err := modfile.Parse(m.path+"/go.mod", own, nil)
	if err != nil {
		return nil, err
	}
	var f modfile.File
	if err := f.AddModuleStmt("weft.test/kube/" + m.name()); err != nil {
		return nil, err
	}
	if theirs.Go == nil {
		return nil, fmt.Errorf("%s/go.mod names no version of Go", m.path)
	}
	if err := f.AddGoStmt(theirs.Go.Version); err != nil {
		return nil, err
	}
	for _, g := range theirs.Godebug {
		if err := f.AddGodebug(g.Key, g.Value); err != nil {
			return nil, err
		}
	}
	if err := f.AddRequire(m.path, m.version); err != nil {
		return nil, err
	}
	for _, r := range m.replacements(theirs) {
		if err := f.AddReplace(r.Old.Path, r.Old.Version, r.New.Path, r.New.Version); err != nil {
			return nil, err
		}
	}
	f.Cleanup()
	return f.Format()
}

func (m module) replacements(theirs *modfile.File) []modfile.Replace {
	var all []modfile.Replace
	for _, r := range theirs.Replace {
		if r.New.Version != "" {
			all = append(all, *r)
		}
	}
	if !m.staging {
		return all
	}
	for _, r := range theirs.Require {
		if strings.HasPrefix(r.Mod.Path, "k8s.io/") && r.Mod.Version == "v0.0.0" {
			var s modfile.Replace
			s.Old.Path, s.New.Path = r.Mod.Path, r.Mod.Path
			s.New.Version = "v0." + strings.TrimPrefix(m.version, "v1.")
			all = append(all, s)
		}
	}
	return all
}

// toolsGo imports the programs, for go mod tidy to keep what they need.
func (m module) toolsGo() []byte {
	var b strings.Builder
	b.WriteString("//go:build tools\n\npackage tools\n\nimport (\n")
	for _, p := range m.programs {
		fmt.Fprintf(&b, "\t_ %q\n", p.pkg)
	}
	b.WriteString(")\n")
	return []byte(b.String())
}

// ldflags give Kubernetes its version: without, it is v0.0.0-master, and refuses
// others as too new.
func (m module) ldflags() string {
	flags := "-s -w"
	if !m.staging {
		return flags
	}
	numbers := strings.Split(strings.TrimPrefix(m.version, "v"), ".")
	for _, p := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(" -X %s.gitVersion=%s -X %s.gitMajor=%s -X %s.gitMinor=%s -X %s.gitTreeState=clean", p, m.version, p, numbers[0], p, numbers[1], p)
	}
	return flags
}

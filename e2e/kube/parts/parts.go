// SPDX-License-Identifier: Apache-2.0

// Package parts builds and finds the programs and container images for e2e/kube's
// Kubernetes cluster. Kubernetes, etcd and the CSI sidecars are built from their Go
// modules. The container runtime comes from the distribution's packages, unpacked but not
// installed. The images are made of these programs. No image registry is used, and this
// module's go.mod lists none of it: each program is built in a generated module in the
// cache. Attacher, resizer and the sidecars of snapshots are compiled with Kubernetes' versions of the
// libraries, not with their own.
//
//	<cache>/kube/<key of the versions>/
//	    src/<module>/   go.mod, go.sum, tools.go
//	    new/            programs that are being built
//	    bin/            programs
//	    crds/           a kustomization of the CRDs of snapshots
//	    debian/         the unpacked packages
//	    images/         docker archives, for ctr images import
//
// Each appears only when it is complete, so that an interrupted build can continue.
package parts

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// The versions to build. Kubernetes' staging modules are v0.37.1.
const (
	Kubernetes  = "v1.37.1"
	Attacher    = "v4.13.0"
	Resizer     = "v2.3.0"
	Snapshotter = "v8.7.0" // sidecar, controller and CRDs
	Metadata    = "v1.1.0" // sidecar and client of SnapshotMetadata
	Provisioner = "v6.3.0"
)

// Names of the images in pods.
const (
	Pause   = "registry.k8s.io/pause:3.10.2"
	Busybox = "registry.k8s.io/e2e-test-images/busybox:1.37.0-2"
	Nginx   = "registry.k8s.io/e2e-test-images/nginx:1.27.0-2" // contains Busybox; the suite's pods run nothing of nginx
	Agnhost = "registry.k8s.io/e2e-test-images/agnhost:2.66.1"
)

// format is part of the key; raise it when the same versions are built differently.
const format = "2"

// Parts is a complete set.
type Parts struct{ dir string }

// Find returns the parts if they are complete. The error names what is missing and how to
// build it.
func Find() (Parts, error) {
	dir, err := directory()
	if err != nil {
		return Parts{}, err
	}
	p := Parts{dir}
	for _, file := range p.all() {
		if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
			return Parts{}, fmt.Errorf("%s is not built: make kube-bins does it", filepath.Base(file))
		} else if err != nil {
			return Parts{}, err
		}
	}
	return p, nil
}

// Program is the path of a program: etcd, kubelet, csi-attacher, containerd, ….
func (p Parts) Program(name string) string {
	for _, deb := range debianPrograms {
		if filepath.Base(deb) == name {
			return filepath.Join(p.dir, "debian", deb)
		}
	}
	return filepath.Join(p.dir, "bin", name)
}

// CNI is the directory of the network plugins.
func (p Parts) CNI() string { return filepath.Join(p.dir, "debian/usr/lib/cni") }

// Images are the archives to import on each node.
func (p Parts) Images() []string {
	var all []string
	for _, i := range images {
		all = append(all, filepath.Join(p.dir, "images", i.file+".tar"))
	}
	return all
}

// Programs are the directories of the programs, for PATH.
func (p Parts) Programs() []string {
	return []string{filepath.Join(p.dir, "bin"), filepath.Join(p.dir, "debian/usr/bin"), filepath.Join(p.dir, "debian/usr/sbin")}
}

// CRDs is the directory of a kustomization of the CustomResourceDefinitions of snapshots.
func (p Parts) CRDs() string { return filepath.Join(p.dir, "crds") }

func (p Parts) all() []string {
	files := append(p.Images(), filepath.Join(p.CRDs(), "kustomization.yaml"))
	for _, m := range modules() {
		for _, b := range m.programs {
			files = append(files, p.Program(b.name))
		}
	}
	for _, deb := range debianPrograms {
		files = append(files, filepath.Join(p.dir, "debian", deb))
	}
	return files
}

// directory is the cache directory of the present versions.
func directory() (string, error) {
	root := os.Getenv("WEFT_CACHE")
	if root == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find the cache: %w; set WEFT_CACHE", err)
		}
		root = filepath.Join(user, "weft")
	}
	return filepath.Abs(filepath.Join(root, "kube", key()))
}

func key() string {
	h := sha256.New()
	fmt.Fprintln(h, format, runtime.Version(), runtime.GOARCH, strings.Join(debianPackages, " "))
	fmt.Fprint(h, suiteTest)
	fmt.Fprintln(h, crds)
	for _, m := range modules() {
		fmt.Fprintln(h, m.requires, m.replaces, m.programs)
		for _, p := range m.programs {
			fmt.Fprint(h, p.main)
		}
	}
	for _, i := range images {
		fmt.Fprintln(h, i.file, i.names, i.entrypoint)
	}
	return fmt.Sprintf("%s-%x", Kubernetes, h.Sum(nil)[:4])
}

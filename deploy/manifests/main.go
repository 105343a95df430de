// SPDX-License-Identifier: Apache-2.0

// Command manifests writes deploy/kubernetes: the manifests that the Helm chart renders
// with its default values, for users without Helm. deploy/kubernetes/snapshots is a component
// for kustomizations: what the chart changes and adds in a cluster with the CRDs of snapshots.
// It also writes SHA256SUMS, a record of the inputs and outputs, with which a test can check
// without Helm that chart and manifests match.
//
// Helm's packages are in a module of their own, testdata/helm: they bring half of
// Kubernetes along, and nothing else in Weft needs them.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
)

// The inputs of the rendering.
const (
	kubeVersion = "1.37.1"
	release     = "weft"
	namespace   = "weft-system"

	chartDir  = "deploy/helm/weft"
	outputDir = "deploy/kubernetes"

	// The component for clusters with the CRDs of snapshots.
	snapshotsDir = "snapshots"

	// The program that renders; the record includes its source.
	helmDir = "deploy/manifests/testdata/helm"

	// Tests read what the chart renders with these values.
	testValues = "deploy/manifests/testdata/values.yaml"
	testOutput = "deploy/manifests/testdata/everything.yaml"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "manifests:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	h := helm(helmPath())
	if err := h.build(ctx, root); err != nil {
		return err
	}
	files, err := manifests(ctx, h, root)
	if err != nil {
		return err
	}
	return write(root, files)
}

// manifests are all files to write, by path from the module's root.
func manifests(ctx context.Context, h helm, root string) (map[string]string, error) {
	rendered, err := h.template(ctx, filepath.Join(root, chartDir))
	if err != nil {
		return nil, err
	}
	parts, err := split(rendered)
	if err != nil {
		return nil, err
	}
	files := map[string]string{}
	for name, text := range parts {
		files[path.Join(outputDir, name)] = text
	}
	more, err := h.template(ctx, filepath.Join(root, chartDir), "--set", "snapshots.enabled=true")
	if err != nil {
		return nil, err
	}
	if parts, err = component(rendered, more); err != nil {
		return nil, err
	}
	for name, text := range parts {
		files[path.Join(outputDir, snapshotsDir, name)] = text
	}
	everything, err := h.template(ctx, filepath.Join(root, chartDir), "--values", filepath.Join(root, testValues))
	files[testOutput] = header + tidy(strings.TrimPrefix(everything, "---\n"))
	return files, err
}

// moduleRoot is the directory of go.mod at or above this one.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("find the module: no go.mod at or above %s", dir)
		}
	}
}

// helm is the path of the program built from helmDir.
type helm string

// helmPath is where the program is kept between runs.
func helmPath() string {
	base, err := os.UserCacheDir()
	if err != nil {
		base = os.TempDir()
	}
	return filepath.Join(cmp.Or(os.Getenv("WEFT_CACHE"), filepath.Join(base, "weft")), "helm", "helm")
}

// build builds the program if it is not current.
func (h helm) build(ctx context.Context, root string) error {
	if _, err := os.Stat(string(h)); err != nil {
		fmt.Println("manifests: building", helmDir, "(a minute, once)")
	}
	// Debug information would take an eighth of the build time.
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-gcflags=all=-dwarf=false", "-ldflags=-s -w", "-o", string(h), ".")
	build.Dir = filepath.Join(root, helmDir)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", helmDir, err, out)
	}
	return nil
}

// template renders a chart as the API server would get it: with its default values, unless
// flags change them.
func (h helm) template(ctx context.Context, chart string, flags ...string) (string, error) {
	args := []string{"template", release, chart, "--namespace", namespace, "--kube-version", kubeVersion}
	render := exec.CommandContext(ctx, string(h), append(args, flags...)...)
	out, err := render.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		return "", fmt.Errorf("helm template: %w: %s", err, exit.Stderr)
	}
	return string(out), err
}

// SPDX-License-Identifier: Apache-2.0

// Command manifests writes deploy/kubernetes: what the Helm chart gives with its
// default values, for those who do not use Helm, and SHA256SUMS, a record of what
// went in and what came out. With it a test can tell, without Helm, that chart
// and manifests belong together.
//
// Helm is built from its module, outside of this one: it brings half of
// Kubernetes along, and nothing of Weft needs it.
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

// What the manifests are rendered with.
const (
	helmVersion = "v3.22.0"
	kubeVersion = "1.37.1"
	release     = "weft"
	namespace   = "weft-system"

	chartDir  = "deploy/helm/weft"
	outputDir = "deploy/kubernetes"

	// What the chart makes of these values tests read.
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
	if err := h.install(ctx); err != nil {
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

// helm is the path of a helm program.
type helm string

// helmPath is where helm is kept between runs.
func helmPath() string {
	base, err := os.UserCacheDir()
	if err != nil {
		base = os.TempDir()
	}
	return filepath.Join(cmp.Or(os.Getenv("WEFT_CACHE"), filepath.Join(base, "weft")), "helm", helmVersion, "helm")
}

// install builds helm if it is not there.
func (h helm) install(ctx context.Context) error {
	if _, err := os.Stat(string(h)); err == nil {
		return nil
	}
	fmt.Println("manifests: building helm", helmVersion, "(minutes, once)")
	build := exec.CommandContext(ctx, "go", "install", "-trimpath", "helm.sh/helm/v3/cmd/helm@"+helmVersion)
	build.Dir = os.TempDir() // outside of our module
	build.Env = append(os.Environ(), "GOBIN="+filepath.Dir(string(h)), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build helm %s: %w\n%s", helmVersion, err, out)
	}
	return nil
}

// template renders a chart as the API server would get it: with its default
// values, if no flags say otherwise.
func (h helm) template(ctx context.Context, chart string, flags ...string) (string, error) {
	args := []string{"template", release, chart, "--namespace", namespace, "--kube-version", kubeVersion}
	render := exec.CommandContext(ctx, string(h), append(args, flags...)...)
	// Helm reads plugins and repositories of its user; here there are none.
	empty := filepath.Join(filepath.Dir(string(h)), "none")
	render.Env = append(os.Environ(), "HELM_CONFIG_HOME="+empty, "HELM_DATA_HOME="+empty, "HELM_CACHE_HOME="+empty)
	out, err := render.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		return "", fmt.Errorf("helm template: %w: %s", err, exit.Stderr)
	}
	return string(out), err
}

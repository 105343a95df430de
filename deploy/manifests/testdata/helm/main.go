// SPDX-License-Identifier: Apache-2.0

// Command helm is the part of Helm that "make manifests" and its tests need: it renders a
// chart as "helm template" does, with Helm's own packages. Helm's whole command line would
// compile two and a half times as many packages.
//
//	helm template RELEASE CHART --namespace NS --kube-version V [--api-versions A] [--values FILE] [--set KEY=VALUE,…]
//
// It is a module of its own, to keep Helm out of Weft's go.mod. It refuses charts with
// hooks or CRDs; Weft's chart has none.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"helm.sh/helm/v3/pkg/strvals"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) < 3 || args[0] != "template" {
		return errors.New("usage: helm template RELEASE CHART [flags]")
	}
	flags := flag.NewFlagSet("template", flag.ContinueOnError)
	namespace := flags.String("namespace", "default", "the release's namespace")
	kube := flags.String("kube-version", "", "the cluster's version")
	api := flags.String("api-versions", "", "a version of the API that the cluster has besides Kubernetes' own")
	values := flags.String("values", "", "file of values")
	set := flags.String("set", "", "values that override the file's")
	if err := flags.Parse(args[3:]); err != nil {
		return err
	}
	given, err := valuesOf(*values, *set)
	if err != nil {
		return err
	}
	options := chartutil.ReleaseOptions{Name: args[1], Namespace: *namespace, Revision: 1, IsInstall: true}
	cluster, err := capabilities(*kube, *api)
	if err != nil {
		return err
	}
	return render(args[2], given, options, cluster, out)
}

func valuesOf(file, set string) (map[string]any, error) {
	given := map[string]any{}
	if file != "" {
		values, err := chartutil.ReadValuesFile(file)
		if err != nil {
			return nil, err
		}
		given = values
	}
	if err := strvals.ParseInto(set, given); err != nil {
		return nil, fmt.Errorf("--set: %w", err)
	}
	return given, nil
}

func capabilities(kube, api string) (*chartutil.Capabilities, error) {
	version, err := chartutil.ParseKubeVersion(kube)
	if err != nil {
		return nil, fmt.Errorf("--kube-version: %w", err)
	}
	cluster := chartutil.DefaultCapabilities.Copy()
	cluster.KubeVersion = *version
	if api != "" {
		cluster.APIVersions = append(cluster.APIVersions, api)
	}
	return cluster, nil
}

func render(dir string, given map[string]any, options chartutil.ReleaseOptions, cluster *chartutil.Capabilities, out io.Writer) error {
	chart, err := loader.Load(dir)
	if err != nil {
		return err
	}
	values, err := chartutil.ToRenderValues(chart, given, options, cluster)
	if err != nil {
		return err
	}
	files, err := engine.Render(chart, values)
	if err != nil {
		return err
	}
	maps.DeleteFunc(files, func(name, _ string) bool { return path.Base(name) == "NOTES.txt" })
	hooks, manifests, err := releaseutil.SortManifests(files, cluster.APIVersions, releaseutil.InstallOrder)
	if err != nil {
		return err
	}
	if len(hooks) > 0 || len(chart.CRDObjects()) > 0 {
		return errors.New("the chart has hooks or CRDs, which are not rendered here")
	}
	for _, m := range manifests {
		if _, err := fmt.Fprintf(out, "---\n# Source: %s\n%s\n", m.Name, m.Content); err != nil {
			return err
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// object is the part of a Kubernetes object that the tests check. Whether objects have the
// API's form is checked by the API server, in e2e/kube.
type object struct {
	Kind       string
	Metadata   struct{ Name, Namespace string }
	Rules      []rule
	RoleRef    struct{ Kind, Name string }
	Subjects   []struct{ Kind, Name, Namespace string }
	Parameters map[string]any // of a StorageClass
	Spec       struct {
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     podSpec
		}
		Selector any
	}
}

type rule struct {
	APIGroups, Resources, ResourceNames, Verbs []string
}

type podSpec struct {
	ServiceAccountName            string
	PriorityClassName             string
	HostNetwork, HostPID, HostIPC bool
	AutomountServiceAccountToken  *bool
	SecurityContext               securityContext
	InitContainers, Containers    []container
	Volumes                       []volume
	DNSPolicy                     string
	TerminationGracePeriodSeconds int
	NodeSelector                  map[string]string
}

type container struct {
	Name, Image              string
	Command, Args            []string
	SecurityContext          securityContext
	VolumeMounts             []volumeMount
	LivenessProbe            *struct{}
	TerminationMessagePolicy string
}

type securityContext struct {
	Privileged, AllowPrivilegeEscalation, ReadOnlyRootFilesystem, RunAsNonRoot *bool
	Capabilities                                                               struct{ Add, Drop []string }
	SeccompProfile                                                             struct{ Type string }
}

type volume struct {
	Name      string
	HostPath  *struct{ Path string }
	Projected struct {
		Sources []struct {
			ServiceAccountToken struct{ Audience string }
		}
	}
}

type volumeMount struct {
	Name, MountPath, MountPropagation string
	ReadOnly                          bool
}

// keptFiles are the manifests in deploy/kubernetes and its component, but no examples.
func keptFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root(t), outputDir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob(filepath.Join(root(t), outputDir, snapshotsDir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return append(files, more...)
}

// kept are the objects in deploy/kubernetes. The component's objects are the wider ones, so they
// stand for those that they replace.
func kept(t *testing.T) []object {
	t.Helper()
	var all []object
	for _, file := range keptFiles(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range parse(t, string(text)) {
			i := slices.IndexFunc(all, func(a object) bool { return a.Kind == o.Kind && a.Metadata == o.Metadata })
			if i >= 0 && filepath.Base(file) == changedFile {
				all[i] = o
				continue
			}
			all = append(all, o)
		}
	}
	if len(all) < 20 {
		t.Fatalf("%s has %d objects, want all", outputDir, len(all))
	}
	return all
}

func parse(t *testing.T, text string) []object {
	t.Helper()
	var all []object
	for part := range strings.SplitSeq(text, "\n---\n") {
		var o object
		if err := yaml.Unmarshal([]byte(part), &o); err != nil {
			t.Fatalf("parse: %v in\n%s", err, part)
		}
		if o.Kind != "" {
			all = append(all, o)
		}
	}
	return all
}

// pods are the pod specs, by the name of the object that creates the pods.
func pods(objects []object) map[string]podSpec {
	all := map[string]podSpec{}
	for _, o := range objects {
		if len(o.Spec.Template.Spec.Containers) > 0 {
			all[o.Metadata.Name] = o.Spec.Template.Spec
		}
	}
	return all
}

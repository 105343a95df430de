// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// claim is a claim in an example, also one within a pod.
type claim struct {
	StorageClassName *string
	VolumeName       string
}

type example struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		claim
		CSI     *struct{ Driver string }
		Volumes []struct {
			Ephemeral *struct {
				VolumeClaimTemplate struct{ Spec claim }
			}
		}
	}
	DriverName string
}

func TestExamplesUseWhatIsInstalled(t *testing.T) {
	classes := map[string]bool{"": true} // an existing volume
	for _, o := range kept(t) {
		if o.Kind == "StorageClass" {
			classes[o.Metadata.Name] = true
		}
	}
	files, err := filepath.Glob(filepath.Join(root(t), outputDir, "examples/*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	claims := 0
	check := func(file string, c claim) {
		claims++
		if c.StorageClassName == nil || !classes[*c.StorageClassName] {
			t.Errorf("%s: a claim has a class that is not installed: %v", file, c)
		}
		if c.StorageClassName != nil && *c.StorageClassName == "" && c.VolumeName == "" {
			t.Errorf("%s: a claim without a class names no volume", file)
		}
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for part := range strings.SplitSeq(string(text), "\n---\n") {
			var e example
			if err := yaml.Unmarshal([]byte(part), &e); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if e.Kind == "PersistentVolumeClaim" {
				check(file, e.Spec.claim)
			}
			for _, v := range e.Spec.Volumes {
				if v.Ephemeral != nil {
					check(file, v.Ephemeral.VolumeClaimTemplate.Spec)
				}
			}
			if e.Spec.CSI != nil && e.Spec.CSI.Driver != "csi.weft.dev" || e.Kind == "VolumeAttributesClass" && e.DriverName != "csi.weft.dev" {
				t.Errorf("%s: %s %s belongs to another driver", file, e.Kind, e.Metadata.Name)
			}
		}
	}
	if claims < 5 {
		t.Errorf("found %d claims in %d examples, want more", claims, len(files))
	}
}

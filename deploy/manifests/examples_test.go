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
		volumes
		CSI      *struct{ Driver string }
		Source   struct{ PersistentVolumeClaimName string } // of a VolumeSnapshot
		Template struct{ Spec volumes }                     // of a Deployment or a Job
	}
	DriverName string
}

// volumes are a pod's.
type volumes struct {
	Volumes []struct {
		Ephemeral *struct {
			VolumeClaimTemplate struct{ Spec claim }
		}
	}
}

// examples are the objects of each file.
func examples(t *testing.T) map[string][]example {
	files, err := filepath.Glob(filepath.Join(root(t), outputDir, "examples/*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]example{}
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
			all[file] = append(all[file], e)
		}
	}
	return all
}

func TestExamplesUseWhatIsInstalled(t *testing.T) {
	classes := map[string]bool{"": true} // an existing volume
	for _, o := range kept(t) {
		if o.Kind == "StorageClass" {
			classes[o.Metadata.Name] = true
		}
	}
	all := examples(t)
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
	for file, objects := range all {
		for _, e := range objects {
			if e.Kind == "PersistentVolumeClaim" {
				check(file, e.Spec.claim)
			}
			for _, v := range append(e.Spec.Volumes, e.Spec.Template.Spec.Volumes...) {
				if v.Ephemeral != nil {
					check(file, v.Ephemeral.VolumeClaimTemplate.Spec)
				}
			}
			if e.Spec.CSI != nil && e.Spec.CSI.Driver != "csi.weft.dev" || e.Kind == "VolumeAttributesClass" && e.DriverName != "csi.weft.dev" {
				t.Errorf("%s: %s %s belongs to another driver", file, e.Kind, e.Metadata.Name)
			}
		}
	}
	if claims < 9 {
		t.Errorf("found %d claims in %d examples, want more", claims, len(all))
	}
}

// Targets with the kernel's data path, which they choose where they can, take snapshots of thin volumes
// alone.
func TestAnInstalledClassHasSnapshotsOnBothDataPaths(t *testing.T) {
	thin := map[string]bool{}
	for _, o := range kept(t) {
		if o.Kind == "StorageClass" && o.Parameters["thin"] == "true" && o.Parameters["copies"] == "2" {
			thin[o.Metadata.Name] = true
		}
	}
	if len(thin) == 0 {
		t.Error("no installed class is thin and mirrored")
	}
	all := examples(t)
	claims, snapshots := map[string]bool{}, 0
	for _, objects := range all {
		for _, e := range objects {
			if class := e.Spec.StorageClassName; e.Kind == "PersistentVolumeClaim" && class != nil && thin[*class] {
				claims[e.Metadata.Name] = true
			}
		}
	}
	for file, objects := range all {
		for _, e := range objects {
			if e.Kind != "VolumeSnapshot" {
				continue
			}
			snapshots++
			if of := e.Spec.Source.PersistentVolumeClaimName; !claims[of] {
				t.Errorf("%s: the snapshot %s is of the claim %s, whose class is not thin", file, e.Metadata.Name, of)
			}
		}
	}
	if snapshots == 0 {
		t.Error("no example has a snapshot")
	}
}

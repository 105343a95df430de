// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"encoding/json"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// TestClassesOfTheChartAreAccepted takes each class of deploy as the provisioner passes it on,
// which keeps the file system's type to itself.
func TestClassesOfTheChartAreAccepted(t *testing.T) {
	classes := 0
	for _, file := range []string{"../deploy/kubernetes/storageclasses.yaml", "../deploy/manifests/testdata/everything.yaml"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for part := range strings.SplitSeq(string(text), "\n---\n") {
			var class struct {
				Kind       string
				Metadata   struct{ Name string }
				Parameters map[string]string
			}
			if err := yaml.Unmarshal([]byte(part), &class); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			switch class.Kind {
			case "StorageClass":
				delete(class.Parameters, provisionerPrefix+"fstype")
				_, err = parseParameters(class.Parameters)
			case "VolumeAttributesClass":
				_, err = parseMutable(class.Parameters)
			default:
				continue
			}
			classes++
			if err != nil {
				t.Errorf("%s %s: %v", class.Kind, class.Metadata.Name, err)
			}
		}
	}
	if classes < 6 {
		t.Errorf("found %d classes, want those of the chart", classes)
	}
}

// TestTheChartTakesAllParameters: its schema refuses those that it does not name.
func TestTheChartTakesAllParameters(t *testing.T) {
	text, err := os.ReadFile("../deploy/helm/weft/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type classes struct {
		Items struct {
			Properties struct {
				Parameters struct {
					Properties    map[string]any
					PropertyNames struct{ Pattern string }
				}
			}
		}
	}
	var schema struct {
		Properties struct{ StorageClasses, VolumeAttributesClasses classes }
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	got := slices.Sorted(maps.Keys(schema.Properties.StorageClasses.Items.Properties.Parameters.Properties))
	want := slices.Sorted(slices.Values(append(volumeParameters(), provisionerPrefix+"fstype")))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("parameters of a StorageClass (-driver +chart):\n%s", diff)
	}
	names := regexp.MustCompile(schema.Properties.VolumeAttributesClasses.Items.Properties.Parameters.PropertyNames.Pattern)
	for _, name := range append(slices.Sorted(maps.Keys(mutable)), mutableLabel+"a") {
		if !names.MatchString(name) {
			t.Errorf("the chart refuses %s in a VolumeAttributesClass, which the driver takes", name)
		}
	}
}

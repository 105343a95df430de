// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"os"
	"strings"
	"testing"

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

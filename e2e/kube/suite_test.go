// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// Of the suite, what disrupts is done over ssh to machines that have systemd;
// TestKubeLostNode and TestKubeRestarts are in its place.
const suiteSkip = `\[Disruptive\]|\[Slow\]|\[Serial\]|Feature:Windows|ntfs`

// TestKubeSuite runs Kubernetes' own external-storage suite. WEFT_KUBE_FOCUS
// chooses among its cases, WEFT_KUBE_FSTYPE the file system (ext4 or xfs).
func TestKubeSuite(t *testing.T) {
	l := Start(t, Options{Suite: true})
	fsType := cmp.Or(os.Getenv("WEFT_KUBE_FSTYPE"), "ext4")
	l.Apply(class("suite", "copies: '2', csi.storage.k8s.io/fstype: "+fsType, "") + fmt.Sprintf(attributesClass, "suite", "suite"))
	// Each case makes a class, for which the scheduler would wait until its
	// capacity is known; TestKubeVolumes is about that.
	l.Kubectl("patch", "csidriver", driverName, "--patch={\"spec\":{\"storageCapacity\":false}}")
	definition, err := filepath.Abs("testdata/driver.yaml")
	if err != nil {
		t.Fatal(err)
	}
	report := filepath.Join(l.logs, "suite.json")
	out, err := os.Create(filepath.Join(l.logs, "suite.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	start := time.Now()
	suite := exec.CommandContext(t.Context(), l.parts.Program("ginkgo"), "--procs="+cmp.Or(os.Getenv("WEFT_KUBE_PROCS"), "4"), "--no-color", "--timeout=80m",
		"--focus=External.Storage.*("+cmp.Or(os.Getenv("WEFT_KUBE_FOCUS"), ".")+")", "--skip="+suiteSkip,
		"--output-dir="+l.logs, "--json-report=suite.json", l.parts.Program("e2e.test"), "--",
		"-storage.testdriver="+definition, "--kubeconfig="+l.Kubeconfig, "--provider=skeleton", "--num-nodes=2")
	suite.Env = append(os.Environ(), l.env...)
	suite.Stdout, suite.Stderr = out, out
	suiteErr := suite.Run()
	cases, err := readReport(report)
	if err != nil {
		t.Fatalf("%v; the suite ended with %v, its output is in %s", err, suiteErr, out.Name())
	}
	passed := 0
	for _, c := range cases {
		switch {
		case c.State == "passed":
			passed++
		case limits.MatchString(c.name()):
			t.Logf("failed, as it must on a machine without CAP_SYS_RESOURCE: %s", c.name())
		default:
			t.Errorf("%s after %v: %s\n%s", c.State, c.RunTime.Round(time.Second), c.name(), c.Failure.Message)
		}
	}
	if passed == 0 {
		t.Errorf("no case passed; the suite ended with %v, its output is in %s", suiteErr, out.Name())
	}
	t.Logf("%d of %d cases passed in %v", passed, len(cases), time.Since(start).Round(time.Second))
}

// limits are cases that can not pass on a machine of the kind that this was
// written on. They are run all the same, and may pass elsewhere.
var limits = regexp.MustCompile(`ext4\)\] volume-expand .*online|Generic Ephemeral-volume \(default fs\).*online`)

// suiteCase is a case that was run.
type suiteCase struct {
	ContainerHierarchyTexts []string
	LeafNodeText            string
	LeafNodeType            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (c suiteCase) name() string {
	return strings.Join(append(slices.Clone(c.ContainerHierarchyTexts), c.LeafNodeText), " ")
}

// readReport reads the cases that were run from ginkgo's report.
func readReport(file string) ([]suiteCase, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var suites []struct{ SpecReports []suiteCase }
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var all []suiteCase
	for _, s := range suites {
		for _, c := range s.SpecReports {
			if c.State != "skipped" && c.State != "pending" && (c.LeafNodeType == "It" || c.State != "passed") {
				all = append(all, c)
			}
		}
	}
	return all, nil
}

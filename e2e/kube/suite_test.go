// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The suite's disruptive cases need ssh to machines with systemd; TestKubeLostNode and
// TestKubeRestarts replace them.
const suiteSkip = `\[Disruptive\]|\[Slow\]|\[Serial\]|Feature:Windows|ntfs`

// TestKubeSuite runs Kubernetes' own external-storage suite. WEFT_KUBE_FOCUS selects cases,
// WEFT_KUBE_FSTYPE the file system (ext4 or xfs), and WEFT_KUBE_THIN whether volumes are thin (true or
// false).
func TestKubeSuite(t *testing.T) {
	l := Start(t, Options{Suite: true})
	fsType, thin := cmp.Or(os.Getenv("WEFT_KUBE_FSTYPE"), "ext4"), cmp.Or(os.Getenv("WEFT_KUBE_THIN"), "true")
	parameters := "copies: '2'"
	if thin == "true" { // else the class does not say: what a claim begins as may be thin all the same
		parameters += ", thin: 'true'"
	}
	l.Apply(class("suite", parameters+", csi.storage.k8s.io/fstype: "+fsType, "") + fmt.Sprintf(attributesClass, "suite", "labels.tier: suite"))
	// Each case creates a class, and the scheduler would wait until its capacity is known.
	// TestKubeVolumes tests capacities.
	l.Kubectl("patch", "csidriver", driverName, "--patch={\"spec\":{\"storageCapacity\":false}}")
	skip := suiteSkip
	if fsType == "ext4" && !hasCapability(t, unix.CAP_SYS_RESOURCE) {
		t.Logf("skipped, since ext4 grows while mounted only with CAP_SYS_RESOURCE, which this machine's root lacks: %s", grownInUse)
		skip += "|" + grownInUse
	}
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
		"--focus=External.Storage.*("+cmp.Or(os.Getenv("WEFT_KUBE_FOCUS"), ".")+")", "--skip="+skip,
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
		if c.State == "passed" {
			passed++
			t.Logf("passed after %v: %s", c.RunTime.Round(time.Second), strings.TrimPrefix(c.name(), "External Storage "))
			continue
		}
		t.Errorf("%s after %v: %s\n%s", c.State, c.RunTime.Round(time.Second), c.name(), c.Failure.Message)
	}
	if passed == 0 {
		t.Errorf("no case passed; the suite ended with %v, its output is in %s", suiteErr, out.Name())
	}
	t.Logf("%d of %d cases passed in %v", passed, len(cases), time.Since(start).Round(time.Second))
}

// grownInUse are the cases that grow a mounted file system. With xfs they run everywhere.
const grownInUse = `\(default fs\).*(edited while pod is using it|pvcs created for ephemeral pvcs)`

// hasCapability reports whether this process has a capability.
func hasCapability(t *testing.T, number uint) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "CapEff:")
	effective, err := strconv.ParseUint(strings.Fields(after)[0], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return effective&(1<<number) != 0
}

// suiteCase is a case of the suite that has run.
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

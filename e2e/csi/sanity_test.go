// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"

	"weft.dev/weft/csi"
	"weft.dev/weft/proto/block"
)

// skips lists the parts of csi-sanity that do not apply, by its own reason, and why.
var skips = map[string]string{
	"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported":     "every node reaches every volume, whatever it begins as",
	"ControllerPublishVolume.readonly field not supported": "a node mounts read-only; targets refuse writes for MULTI_NODE_READER_ONLY only",
}

// All of csi-sanity, once for file systems on thin volumes and once for raw block volumes that are not thin.
func TestSanity(t *testing.T) {
	needDevices(t)
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
	socket := c.startDriver(csi.Config{Mode: csi.ModeAll, Node: "n1", Version: "test", MaxVolumes: 4})
	for _, access := range []string{"mount", "block"} {
		cfg := sanity.NewTestConfig()
		cfg.Address = socket
		cfg.TestVolumeAccessType = access
		cfg.TestVolumeSize, cfg.TestVolumeExpandSize = int64(320*block.MiB), int64(512*block.MiB)
		cfg.TestVolumeParameters = map[string]string{"copies": "2", "stripes": "1", "fsType": "xfs"} // xfs grows while mounted, whatever the process's capabilities
		if access == "mount" {
			cfg.TestVolumeParameters["thin"] = "true"
		}
		cfg.TestVolumeMutableParameters = map[string]string{"labels.tier": "gold"}
		cfg.TestNodeVolumeAttachLimit = true
		cfg.TargetPath, cfg.StagingPath = filepath.Join(c.dir, access, "target"), filepath.Join(c.dir, access, "staging")
		if err := os.MkdirAll(filepath.Join(c.dir, access), 0o700); err != nil {
			t.Fatal(err)
		}
		ginkgo.Describe(access, func() { sanity.GinkgoTest(&cfg) })
	}
	ginkgo.ReportAfterSuite("skips", func(r ginkgo.Report) { checkSpecs(t, r) })
	gomega.RegisterFailHandler(ginkgo.Fail)
	suite, reporter := ginkgo.GinkgoConfiguration()
	suite.Timeout = 3 * time.Minute // csi-sanity's calls have no deadline
	reporter.NoColor, reporter.Succinct = true, true
	if !ginkgo.RunSpecs(t, "csi-sanity", suite, reporter) {
		t.Error("csi-sanity: see above; look at the first failure, which may have caused the later ones")
	}
}

// checkSpecs checks that only the listed parts were skipped, and that anything ran at all.
func checkSpecs(t *testing.T, r ginkgo.Report) {
	passed := 0
	met := map[string]bool{}
	for _, spec := range r.SpecReports {
		switch why := spec.Failure.Message; {
		case spec.State.String() == "passed":
			passed++
		case spec.State.String() == "skipped" && skips[why] == "":
			t.Errorf("skipped %q: %q is not among the reasons", spec.FullText(), why)
		case spec.State.String() == "skipped":
			met[why] = true
		}
	}
	for why := range skips {
		if !met[why] {
			t.Errorf("no spec was skipped because of %q: remove it from the list", why)
		}
	}
	t.Logf("csi-sanity: %d specs passed", passed)
	if passed < 180 {
		t.Errorf("only %d specs ran", passed)
	}
}

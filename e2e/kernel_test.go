// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/e2e/vm"
)

// kernelSuite is a suite of tests and the options of its machine.
type kernelSuite struct {
	suite   vm.Suite
	machine []vm.MachineOption
}

// TestKernel runs the packages that speak to the kernel on the kernel of
// WEFT_KERNEL, one machine each, several at a time. To run one of them, or some tests of it:
//
//	WEFT_RUN=TestFence go test -count=1 -v -run 'TestKernel$/target/nvmet' ./e2e
func TestKernel(t *testing.T) {
	vm.Require(t)
	suites := []kernelSuite{
		{
			vm.Suite{Package: "./raid/dm"},
			[]vm.MachineOption{vm.Modules("dm_mod", "dm_mirror", "dm_zero", "dm_flakey", "loop", "brd rd_nr=8 rd_size=65536")},
		},
		{
			vm.Suite{
				Package: "./raid/dm/mirror",
				// Random histories of a simulated kernel: minutes in a guest that is emulated.
				Args: []string{"-test.skip=^(TestAcknowledgedWritesAreOnEveryLegInSync|TestBrokenRulesAreCaught)$"},
			},
			[]vm.MachineOption{vm.Modules("dm_mod", "dm_mirror", "loop")},
		},
		{
			vm.Suite{Package: "./target/nvmet", Args: []string{"-test.skip=OnTheFake$"}},
			[]vm.MachineOption{vm.Modules("nvmet", "nvmet_tcp", "loop", "brd rd_nr=8 rd_size=65536"), vm.NVMe("1GiB", "K1")},
		},
		{
			vm.Suite{
				Package: "./target/drive",
				// On drives in memory, which no kernel sees: minutes in a guest that is emulated.
				Args: []string{"-test.skip=^(TestACutAnywhereLeavesTheOldLabelOrTheNew|TestASecondCutInTheRepairLeavesAGoodLabelToo|TestAFormatThatWasCutCanBeRepeated|TestACutEraseNeverBringsAnOldLabelBack|TestGrowthThatIsCutAnywhereCanBeRepeated|TestAFullLabelCanStillBeFenced|TestALabelThatDoesNotFitIsRefused|TestWhatLegsLeftOnAnErasedDriveIsNobodys)$"},
				// The images are too large for a tmpfs. Some media are in memory, and Go
				// would keep more garbage of them than the guest has room for.
				Env:     []string{"TMPDIR=/var/lib/weft", "GOMEMLIMIT=600MiB"},
				MaySkip: map[string]string{"TestWhatToolsMakeIsRecognised/.*": "the guests have the tools of this machine"},
			},
			[]vm.MachineOption{vm.Memory(2560), vm.StateDiskOf("8GiB"), vm.Modules("dm_mod", "loop"), vm.NVMe("2GiB", "K1"), vm.NVMe("2GiB", "K2")},
		},
		{
			vm.Suite{Package: "./target/written", Env: []string{"TMPDIR=/var/lib/weft"}},
			[]vm.MachineOption{vm.StateDiskOf("8GiB"), vm.Modules("dm_mod", "loop")},
		},
		{
			vm.Suite{Package: "./initiator/fabrics"},
			[]vm.MachineOption{vm.Modules("nvme_tcp", "nvmet_tcp", "loop", "brd rd_nr=8 rd_size=65536", "tcp_diag")},
		},
		{
			vm.Suite{Package: "./target", Run: "OnTheKernel|OldEpoch"}, // its other tests need no kernel
			[]vm.MachineOption{vm.Modules("dm_mod", "dm_zero", "dm_flakey", "nvmet", "nvmet_tcp", "nvme_tcp"), vm.NVMe("1GiB", "K1")},
		},
		blockdevSuite(),
	}
	for _, s := range suites {
		t.Run(strings.TrimPrefix(s.suite.Package, "./"), func(t *testing.T) {
			t.Parallel() // each machine has one processor
			if !hasTests(s.suite.Package) {
				t.Fatalf("%s has no tests", s.suite.Package)
			}
			m := vm.NewCluster(t).Start("k", append([]vm.MachineOption{vm.Memory(1024)}, s.machine...)...)
			s.suite.Run = cmp.Or(os.Getenv("WEFT_RUN"), s.suite.Run)
			vm.GoTest(t, m, s.suite)
		})
	}
}

// blockdevSuite makes block devices in every way that the kernel supports; Debian's 6.1 has
// no ublk.
func blockdevSuite() kernelSuite {
	s := kernelSuite{
		vm.Suite{Package: "./initiator/blockdev", Env: []string{"TMPDIR=/var/lib/weft"}},
		[]vm.MachineOption{vm.StateDiskOf("8GiB"), vm.Modules("nbd", "loop", "fuse", "ublk_drv")},
	}
	const noRing = "FUSE can use io_uring from Linux 6.14 on"
	s.suite.MaySkip = map[string]string{
		"TestKernelBlockdevUBLK/ItGrowsWhileOpen": "the ublk driver can resize from Linux 6.16 on",
		"TestFUSEOverURing":                       noRing,
		"TestFUSEGivesUpIOURingThatDoesNotAnswer": noRing + ", and this needs two processors",
		"TestFUSEGoesOnWithoutIOURing/.*":         noRing,
		"TestARingTakesMessagesOfOtherThreads":    "rings take messages from Linux 6.13 on",
	}
	if vm.KernelVersion() == "6.1" {
		s.machine[1] = vm.Modules("nbd", "loop", "fuse")
		s.suite.MaySkip["TestFUSEOutlivesItsProcess"] = "FUSE sends the requests of a dead process again from Linux 6.9 on"
		delete(s.suite.MaySkip, "TestKernelBlockdevUBLK/ItGrowsWhileOpen")
		s.suite.MaySkip["TestKernelBlockdevUBLK"] = "this kernel was built without ublk"
		s.suite.MaySkip["TestARingIsNotMapped"] = "needs Linux 6.5"
	}
	return s
}

// hasTests checks for tests first, since a boot is expensive.
func hasTests(pkg string) bool {
	files, err := filepath.Glob(filepath.Join("..", pkg, "*_test.go"))
	return err == nil && len(files) > 0
}

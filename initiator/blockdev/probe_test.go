// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// container is a machine whose kernel has FUSE and loop devices, as seen by a process in a
// container with these capabilities and this /dev.
func container(t *testing.T, capabilities string, devices ...string) system {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	s := system{dev: filepath.Join(t.TempDir(), "dev"), proc: filepath.Join(t.TempDir(), "proc")}
	files := map[string]string{
		filepath.Join(s.proc, "filesystems"): "nodev\tsysfs\n\text4\nnodev\tfuse\n",
		filepath.Join(s.proc, "misc"):        "229 fuse\n237 loop-control\n",
		filepath.Join(s.proc, "self/status"): "Name:\tweft\nCapPrm:\t0\nCapEff:\t" + capabilities + "\nCapBnd:\t0\n",
	}
	for _, name := range devices {
		files[filepath.Join(s.dev, name)] = ""
	}
	for name, text := range files {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

const (
	allCapabilities = "000001ffffffffff"
	asDockerGives   = "00000000a80425fb" // without CAP_SYS_ADMIN
)

func TestProbeSaysWhatAContainerMustBeGiven(t *testing.T) {
	for _, c := range []struct {
		what, capabilities string
		devices            []string
		usable             bool
		reason, fix        string
	}{
		{"all", allCapabilities, []string{"fuse", "loop-control"}, true, "available", ""},
		{"no capability", asDockerGives, []string{"fuse", "loop-control"}, false, "CAP_SYS_ADMIN", "CAP_SYS_ADMIN"},
	} {
		a := container(t, c.capabilities, c.devices...).probe(FUSE)
		if a.Usable != c.usable || !strings.Contains(a.Reason, c.reason) || !strings.Contains(a.Fix, c.fix) {
			t.Errorf("%s: %+v, want usable %v, reason %q, fix %q", c.what, a, c.usable, c.reason, c.fix)
		}
	}
}

func TestADeviceThatIsNotInDevIsKnownFromTheKernel(t *testing.T) {
	s := container(t, allCapabilities)
	if !s.misc("loop-control") || s.misc("ublk-control") || s.misc("loop") {
		t.Errorf("misc: loop-control %v, ublk-control %v, loop %v; want true, false, false", s.misc("loop-control"), s.misc("ublk-control"), s.misc("loop"))
	}
}

func TestVersionsOfTheKernelAreCompared(t *testing.T) {
	for release, want := range map[string]bool{"6.9.0": true, "6.12.4-arch1\n": true, "7.0": true, "6.8.12": false, "5.15.0-91-generic": false, "": false, "wrong": false} {
		s := fakeMachine(t, map[string]string{"sys/kernel/osrelease": release})
		s.proc = s.sys
		if got := s.kernelSince(6, 9); got != want {
			t.Errorf("%q since 6.9: %v, want %v", release, got, want)
		}
	}
}

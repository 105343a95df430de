// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/deploy/binary"
)

const root = "../.."

// packages builds the packages once for all tests. Outside CI that is done only where "make
// packages" has built the tool before.
var packages = sync.OnceValues(func() (map[string]*pack, error) {
	dir, err := os.MkdirTemp("", "weft-packages-test-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	files, err := build(context.Background(), root, options{out: dir, release: "v0.1.0-rc1-7-gabcdef0", arch: runtime.GOARCH})
	if err != nil {
		return nil, err
	}
	all := map[string]*pack{}
	for _, f := range files {
		kind, read := "deb", readDeb
		if filepath.Ext(f) == ".rpm" {
			kind, read = "rpm", readRPM
		}
		if all[kind], err = read(f); err != nil {
			return nil, err
		}
	}
	return all, nil
})

func each(t *testing.T, check func(t *testing.T, kind string, p *pack)) {
	t.Helper()
	needsTool(t)
	all, err := packages()
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"deb", "rpm"} {
		t.Run(kind, func(t *testing.T) {
			if all[kind] == nil {
				t.Fatal("it was not built")
			}
			check(t, kind, all[kind])
		})
	}
}

func needsTool(t *testing.T) {
	t.Helper()
	made, err := built(filepath.Join(root, "bin/packages"))
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("CI") == "" && len(made) == 0 {
		t.Skip("nfpm has not been built here; make packages builds it")
	}
}

func TestTheProgramAndItsServicesAreWhereTheSystemLooks(t *testing.T) {
	want := map[string]int64{
		"/usr/bin/weft": 0o755,
		"/usr/lib/systemd/system/weft-volmgr-init.service":    0o644,
		"/usr/lib/systemd/system/weft-volmgr.service":         0o644,
		"/usr/lib/systemd/system/weft-target.service":         0o644,
		"/usr/lib/systemd/system/weft-initiator.service":      0o644,
		"/usr/lib/systemd/system/weft-initiator-hold.service": 0o644,
		"/usr/lib/sysusers.d/weft.conf":                       0o644,
		"/usr/lib/udev/rules.d/11-weft.rules":                 0o644,
		"/usr/lib/udev/rules.d/65-weft.rules":                 0o644,
		"/etc/weft/volmgr.env":                                0o644,
		"/etc/weft/target.env":                                0o644,
		"/etc/weft/initiator.env":                             0o644,
		"/usr/share/bash-completion/completions/weft":         0o644,
		"/usr/share/fish/vendor_completions.d/weft.fish":      0o644,
		"/usr/share/man/man1/weft.1.gz":                       0o644,
		"/usr/share/man/man1/weft-volume-create.1.gz":         0o644,
		"/usr/share/doc/weft/README.md":                       0o644,
		"/usr/share/doc/weft/copyright":                       0o644,
		"/usr/share/doc/weft/licences/go/LICENSE":             0o644,
		"/usr/share/doc/weft/docs/operations.md":              0o644,
		"/usr/share/doc/weft/docs/images/walk-1-healthy.png":  0o644,
	}
	zsh := map[string]string{"deb": "/usr/share/zsh/vendor-completions/_weft", "rpm": "/usr/share/zsh/site-functions/_weft"}
	each(t, func(t *testing.T, kind string, p *pack) {
		want := maps.Clone(want)
		want[zsh[kind]] = 0o644
		for name, mode := range want {
			f, ok := p.files[name]
			if !ok {
				t.Errorf("%s is missing", name)
			} else if f.mode != mode || f.owner != "root" {
				t.Errorf("%s has mode %o and owner %s, want %o and root", name, f.mode, f.owner, mode)
			}
		}
		for name, f := range p.files {
			if f.mode != 0o644 && name != "/usr/bin/weft" {
				t.Errorf("%s has mode %o; only the program is to be executable", name, f.mode)
			}
		}
	})
}

func TestAnOperatorsSettingsSurviveAnUpgrade(t *testing.T) {
	each(t, func(t *testing.T, kind string, p *pack) {
		var kept []string
		for name, f := range p.files {
			if f.kept {
				kept = append(kept, name)
			}
		}
		slices.Sort(kept)
		want := []string{"/etc/weft/initiator.env", "/etc/weft/target.env", "/etc/weft/volmgr.env"}
		if diff := cmp.Diff(want, kept); diff != "" {
			t.Errorf("kept files (-want +got):\n%s", diff)
		}
	})
}

// TestSettingsDoNothingUntilSomebodyWritesThem: all lines are comments, so that a package never
// says for a machine where its manager is.
func TestSettingsDoNothingUntilSomebodyWritesThem(t *testing.T) {
	files, err := filepath.Glob("etc/*.env")
	if err != nil || len(files) != 3 {
		t.Fatalf("settings are %q, %v; want three files", files, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "#") {
				t.Errorf("%s has the line %q, want comments only", f, line)
			}
		}
	}
}

func TestBothPackagesRunTheScriptsOfTheTree(t *testing.T) {
	each(t, func(t *testing.T, kind string, p *pack) {
		for name, got := range p.scripts {
			want, err := os.ReadFile(filepath.Join("scripts", name))
			if err != nil {
				t.Fatal(err)
			}
			if strings.TrimSpace(got) != strings.TrimSpace(string(want)) {
				t.Errorf("script %s is %q, want that of the tree", name, got)
			}
		}
	})
}

func TestAPackageSaysItsVersionItsMachineAndItsNeeds(t *testing.T) {
	arch := map[string]map[string]string{"deb": {"amd64": "amd64", "arm64": "arm64"}, "rpm": {"amd64": "x86_64", "arm64": "aarch64"}}
	each(t, func(t *testing.T, kind string, p *pack) {
		if want := "0.1.0~rc1+7.gabcdef0"; strings.TrimSuffix(p.version, "-1") != want {
			t.Errorf("version is %s, want %s", p.version, want)
		}
		if want := arch[kind][runtime.GOARCH]; p.arch != want {
			t.Errorf("architecture is %s, want %s", p.arch, want)
		}
		for _, want := range []string{"systemd", "kmod"} {
			if !slices.Contains(p.needs, want) {
				t.Errorf("it needs %q, want %s among them", p.needs, want)
			}
		}
	})
}

func TestNothingOfTheMachineThatBuiltThemIsInside(t *testing.T) {
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	goroot, err := exec.Command("go", "env", "GOROOT", "GOMODCACHE", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	places := append([]string{here, os.TempDir() + "/weft-packages"}, strings.Fields(string(goroot))...)
	each(t, func(t *testing.T, kind string, p *pack) {
		for name, f := range p.files {
			content := f.content
			if strings.HasSuffix(name, ".gz") {
				if content, err = gunzip(content); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			for _, place := range places {
				if bytes.Contains(content, []byte(place)) {
					t.Errorf("%s contains %s", name, place)
				}
			}
		}
		if kind == "rpm" && p.buildHost != "weft.dev" {
			t.Errorf("the host that built it is %q, want weft.dev", p.buildHost)
		}
	})
}

func TestTheSameSourcesGiveTheSameBytes(t *testing.T) {
	needsTool(t)
	var sums []map[string][]byte
	for range 2 {
		files, err := build(t.Context(), root, options{out: t.TempDir(), release: "v0.1.0", arch: runtime.GOARCH})
		if err != nil {
			t.Fatal(err)
		}
		sum := map[string][]byte{}
		for _, f := range files {
			if sum[filepath.Base(f)], err = os.ReadFile(f); err != nil {
				t.Fatal(err)
			}
		}
		sums = append(sums, sum)
	}
	if len(sums[0]) != 2 {
		t.Errorf("built %d packages, want 2", len(sums[0]))
	}
	for name, first := range sums[0] {
		if !bytes.Equal(first, sums[1][name]) {
			t.Errorf("%s differs between two builds", name)
		}
	}
}

var commandSection = regexp.MustCompile(`(?m)^## (weft .*)$`)

// TestEachCommandOfTheReferenceHasAManualPage compares with docs/cli.md, which is made from the
// same commands.
func TestEachCommandOfTheReferenceHasAManualPage(t *testing.T) {
	reference, err := os.ReadFile(filepath.Join(root, "docs/cli.md"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"weft"}
	for _, m := range commandSection.FindAllStringSubmatch(string(reference), -1) {
		want = append(want, strings.ReplaceAll(m[1], " ", "-"))
	}
	slices.Sort(want)
	each(t, func(t *testing.T, kind string, p *pack) {
		var got []string
		for name := range p.files {
			if page, ok := strings.CutPrefix(name, "/usr/share/man/man1/"); ok {
				got = append(got, strings.TrimSuffix(page, ".1.gz"))
			}
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("manual pages (-want +got):\n%s", diff)
		}
	})
}

func TestCompletionsAreScriptsOfTheirShells(t *testing.T) {
	each(t, func(t *testing.T, kind string, p *pack) {
		bash, err := exec.LookPath("bash")
		if err != nil {
			t.Skip("bash is not installed")
		}
		check := exec.CommandContext(t.Context(), bash, "-n")
		check.Stdin = bytes.NewReader(p.files["/usr/share/bash-completion/completions/weft"].content)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("bash does not read its script: %v\n%s", err, out)
		}
		for name, f := range p.files {
			if strings.HasSuffix(name, "/_weft") && !bytes.HasPrefix(f.content, []byte("#compdef weft\n")) {
				t.Errorf("%s begins with %.40q, want #compdef weft", name, f.content)
			}
		}
	})
}

func TestVersionsSortAsCommitsDo(t *testing.T) {
	source := binary.Source{Revision: "0123456789abcdef", Created: time.Date(2026, 11, 23, 20, 0, 0, 0, time.UTC)}
	ascending := []struct{ release, want string }{
		{"", "0.0.0~20261123200000.g0123456789ab"},
		{"v0.1.0-rc1", "0.1.0~rc1"},
		{"v0.1.0-rc1-7-gabcdef0", "0.1.0~rc1+7.gabcdef0"},
		{"v0.1.0", "0.1.0"},
		{"v0.1.0-2-gabcdef0", "0.1.0+2.gabcdef0"},
		{"v0.1.0-12-gabcdef0+changes", "0.1.0+12.gabcdef0.changes"},
		{"v0.2.0", "0.2.0"},
	}
	dpkg, missing := exec.LookPath("dpkg")
	before := ""
	for _, v := range ascending {
		got := packageVersion(v.release, source)
		if got != v.want {
			t.Errorf("packageVersion(%q) = %q, want %q", v.release, got, v.want)
		}
		if missing == nil && before != "" {
			if err := exec.CommandContext(t.Context(), dpkg, "--compare-versions", before, "lt", got).Run(); err != nil {
				t.Errorf("dpkg: %s is not before %s", before, got)
			}
		}
		before = got
	}
}

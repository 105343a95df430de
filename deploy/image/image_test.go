// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// shelf is a set of packages for tests.
type shelf map[string]*debian

func (s shelf) get(_ context.Context, name string) (*debian, error) {
	p, ok := s[name]
	if !ok {
		return nil, errNoPackage
	}
	p.name = name
	return p, nil
}

func text(s string) file { return file{mode: 0o644, content: []byte(s)} }

func TestOnlyWhatIsWantedIsTakenAndWhatItLeadsTo(t *testing.T) {
	from := shelf{"tools": {control: []byte("Package: tools\n"), files: tree{
		"usr/sbin/mkfs.a":                {link: "/sbin/mkfs"},
		"usr/sbin/mkfs":                  text("#!/bin/sh\n"),
		"usr/sbin/other":                 text("not wanted"),
		"usr/share/doc/tools/copyright":  text("GPL"),
		"usr/share/doc/tools/changelog":  text("not wanted"),
		"usr/share/man/man8/mkfs.8.gz":   text("not wanted"),
		"usr/share/locale/de/tools.mo":   text("not wanted"),
		"usr/share/doc/tools/extra/file": text("not wanted"),
	}}}
	got, err := collect(t.Context(), from, map[string]string{"usr/sbin/mkfs.a": "tools"})
	if err != nil {
		t.Fatal(err)
	}
	want := tree{
		"usr/sbin/mkfs.a":               {link: "mkfs"},
		"usr/sbin/mkfs":                 text("#!/bin/sh\n"),
		"usr/share/doc/tools/copyright": text("GPL"),
		"var/lib/dpkg/status.d/tools":   text("Package: tools\n"),
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(file{})); diff != "" {
		t.Errorf("collect (-want +got):\n%s", diff)
	}
}

func TestThereIsNothingWithoutItsLicence(t *testing.T) {
	from := shelf{"tools": {files: tree{"usr/sbin/mkfs": text("#!/bin/sh\n")}}}
	_, err := collect(t.Context(), from, map[string]string{"usr/sbin/mkfs": "tools"})
	if err == nil || !strings.Contains(err.Error(), "tools has no license") {
		t.Errorf("collect = %v, want that tools has no license", err)
	}
}

func TestOnePackageHasTheLicenceOfSeveral(t *testing.T) {
	from := shelf{
		"tools": {files: tree{"usr/sbin/mkfs": text("#!/bin/sh\n"), "usr/share/doc/tools": {link: "libtools1"}}},
		"libtools1": {files: tree{
			"usr/share/doc/libtools1/copyright": text("LGPL"),
			"usr/lib/libtools.so.1":             text("not wanted"),
		}},
	}
	got, err := collect(t.Context(), from, map[string]string{"usr/sbin/mkfs": "tools"})
	if err != nil {
		t.Fatal(err)
	}
	if f := got["usr/share/doc/tools/copyright"]; string(f.content) != "LGPL" || len(got) != 3 {
		t.Errorf("collect = %v, want the program, its description and the license of libtools1", got)
	}
}

func TestWhatIsNotThereIsNamed(t *testing.T) {
	from := shelf{"tools": {files: tree{}}}
	if _, err := collect(t.Context(), from, map[string]string{"usr/sbin/mkfs": "tools"}); err == nil || !strings.Contains(err.Error(), "usr/sbin/mkfs") {
		t.Errorf("collect = %v, want it to name the file", err)
	}
	if _, err := collect(t.Context(), from, map[string]string{"usr/sbin/mkfs": "gone"}); !errors.Is(err, errNoPackage) {
		t.Errorf("collect = %v, want errNoPackage", err)
	}
}

func TestTheImageHasWhatTheProgramRuns(t *testing.T) {
	has := map[string]bool{}
	for file := range programs {
		has[filepath.Base(file)] = true
	}
	named := regexp.MustCompile(`"(mkfs\.\w+|mke2fs|e2fsck|fsck\.\w+|resize2fs|tune2fs|dumpe2fs|xfs_\w+|blkid|modprobe)"`)
	found := map[string]bool{}
	for _, pattern := range []string{"../../csi/*.go", "../../csi/mount/*.go", "../../cmd/internal/kmod/*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range named.FindAllStringSubmatch(string(text), -1) {
				found[m[1]] = true
				if !has[m[1]] {
					t.Errorf("%s runs %s, which the image does not have", file, m[1])
				}
			}
		}
	}
	for _, program := range []string{"blkid", "e2fsck", "mkfs.ext4", "mkfs.xfs", "modprobe", "resize2fs", "xfs_growfs"} {
		if !found[program] {
			t.Errorf("no code runs %s any more: does the image need it?", program)
		}
	}
}

func TestPathsOfMergedDirectoriesAreOne(t *testing.T) {
	for name, want := range map[string]string{
		"./sbin/mkfs": "usr/sbin/mkfs", "/lib64/ld.so": "usr/lib64/ld.so", "./usr/bin/kmod": "usr/bin/kmod",
		"./etc/mke2fs.conf": "etc/mke2fs.conf", "./library/x": "library/x",
	} {
		if got := place(name); got != want {
			t.Errorf("place(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestLinksStayInsideTheImage(t *testing.T) {
	for _, c := range []struct{ from, to, want string }{
		{"usr/sbin/mkfs.ext4", "usr/sbin/mke2fs", "mke2fs"},
		{"usr/sbin/modprobe", "usr/bin/kmod", "../bin/kmod"},
		{"usr/lib64/ld.so", "usr/lib/x86/ld.so", "../lib/x86/ld.so"},
		{"etc/os-release", "usr/lib/os-release", "../usr/lib/os-release"},
		{"usr/lib/a", "usr/lib/b/c", "b/c"},
	} {
		got := relative(c.from, c.to)
		if got != c.want {
			t.Errorf("relative(%q, %q) = %q, want %q", c.from, c.to, got, c.want)
		}
		if back := target(c.from, got); back != c.to {
			t.Errorf("target(%q, %q) = %q, want %q", c.from, got, back, c.to)
		}
	}
}

func TestDependenciesAreNames(t *testing.T) {
	got := parseDepends("libblkid1 (>= 2.36), libc6 (>= 2.34), python3:any | python, logsave, ")
	if want := []string{"libblkid1", "libc6", "python3", "logsave"}; !slices.Equal(got, want) {
		t.Errorf("parseDepends = %v, want %v", got, want)
	}
}

func TestOfTheIndexNameAndSumAreTaken(t *testing.T) {
	got, err := parseURI("'http://mirror.example/pool/k/kmod_30+1_amd64.deb' kmod_30+1_amd64.deb 95332 SHA256:ab12\n")
	if want := (indexed{"kmod_30+1_amd64.deb", "ab12"}); err != nil || got != want {
		t.Errorf("parseURI = %v, %v, want %v", got, err, want)
	}
	for _, bad := range []string{"", "'u' f 1 MD5Sum:1", "E: Unable to locate package"} {
		if got, err := parseURI(bad); err == nil {
			t.Errorf("parseURI(%q) = %v, want an error", bad, got)
		}
	}
}

func TestALayerIsTheSameEachTime(t *testing.T) {
	a, b := tree{}, tree{}
	names := []string{"usr/sbin/x", "etc/y", "usr/lib/z"}
	for _, n := range names {
		a[n] = text(n)
	}
	for _, n := range slices.Backward(names) {
		b[n] = text(n)
	}
	one, err := pack(a)
	if err != nil {
		t.Fatal(err)
	}
	two, err := pack(b)
	if err != nil {
		t.Fatal(err)
	}
	if one.diff != two.diff || !bytes.Equal(one.compressed, two.compressed) {
		t.Error("the same tree gave two layers")
	}
	z, err := gzip.NewReader(bytes.NewReader(one.compressed))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for in := tar.NewReader(z); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s is of %d:%d and %v, want owner root and no time", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		got = append(got, h.Name)
	}
	want := []string{"etc/", "etc/y", "lib", "sbin", "usr/", "usr/lib/", "usr/lib/z", "usr/sbin/", "usr/sbin/x"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the layer's files (-want +got):\n%s", diff)
	}
}

// TestImage builds the real image twice and runs the programs in it.
func TestImage(t *testing.T) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		t.Skip("the image is made of Debian packages, and this machine has no apt-get")
	}
	if os.Geteuid() != 0 {
		t.Skip("running the image's programs needs root, for chroot")
	}
	o := options{name: "weft.dev/weft", version: "test"}
	digests := map[string]bool{}
	for range 2 {
		o.out = t.TempDir()
		digest, err := build(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		digests[digest] = true
	}
	if len(digests) != 1 {
		t.Errorf("two builds gave %v, want the same", slices.Collect(maps.Keys(digests)))
	}
	root := t.TempDir()
	names, size := unpack(t, filepath.Join(o.out, "weft-image.tar"), root)
	if want := []string{"weft.dev/weft:test"}; !slices.Equal(names, want) {
		t.Errorf("the archive's names are %v, want %v", names, want)
	}
	if size > 20<<20 {
		t.Errorf("the image's layers have %d MiB compressed, want at most 20", size>>20)
	}
	t.Logf("layers: %.1f MiB compressed", float64(size)/(1<<20))
	// resize2fs reads the mounts; a container has them in /proc.
	if err := errors.Join(os.Mkdir(filepath.Join(root, "proc/self"), 0o755), os.WriteFile(filepath.Join(root, "proc/self/mounts"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"tmp/a", "tmp/b"} {
		if err := os.WriteFile(filepath.Join(root, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(root, f), 512<<20); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct{ command, want string }{
		{"weft version", "weft "},
		{"mkfs.ext4 -q -F /tmp/a 256M", ""},
		{"e2fsck -f -y /tmp/a", "Pass 5"},
		{"resize2fs /tmp/a", "is now 524288"},
		{"blkid -p -o export /tmp/a", "TYPE=ext4"},
		{"mkfs.xfs -q /tmp/b", ""},
		{"blkid -p -o export /tmp/b", "TYPE=xfs"},
		{"xfs_repair -n /tmp/b", "Phase 7"},
		{"xfs_growfs -V", "xfs_growfs version"},
		{"modprobe --version", "kmod version"},
	} {
		args := strings.Fields(step.command)
		cmd := exec.CommandContext(t.Context(), program(t, root, args[0]), args[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/bin:/usr/sbin"}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), step.want) {
			t.Errorf("%s in the image: %v, want %q in:\n%s", step.command, err, step.want, out)
		}
	}
}

// program is a program's path in the image.
func program(t *testing.T, root, name string) string {
	t.Helper()
	for _, dir := range []string{"/usr/bin/", "/usr/sbin/"} {
		if _, err := os.Stat(filepath.Join(root, dir, name)); err == nil {
			return dir + name
		}
	}
	t.Fatalf("the image has no %s", name)
	return ""
}

// unpack reads an archive as docker load does, and returns the image's names and the size
// of its layers.
func unpack(t *testing.T, archive, root string) (names []string, size int) {
	t.Helper()
	content, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	files, err := readTree(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	var list []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal(files["manifest.json"].content, &list); err != nil || len(list) != 1 {
		t.Fatalf("manifest.json: %v, %d images, want 1", err, len(list))
	}
	var c config
	if err := json.Unmarshal(files[list[0].Config].content, &c); err != nil {
		t.Fatal(err)
	}
	for i, name := range list[0].Layers {
		size += len(files[name].content)
		z, err := gzip.NewReader(bytes.NewReader(files[name].content))
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		if got := digestOf(raw); got != c.RootFS.DiffIDs[i] {
			t.Errorf("layer %d is %s, and the config has %s", i, got, c.RootFS.DiffIDs[i])
		}
		extract := exec.CommandContext(t.Context(), "tar", "-x", "-C", root)
		extract.Stdin = bytes.NewReader(raw)
		if out, err := extract.CombinedOutput(); err != nil {
			t.Fatalf("unpack layer %d: %v\n%s", i, err, out)
		}
	}
	checkLayout(t, files)
	return list[0].RepoTags, size
}

// checkLayout follows index, manifest and config, as a registry's client does.
func checkLayout(t *testing.T, files tree) {
	t.Helper()
	read := func(d descriptor, v any) {
		t.Helper()
		content := files[blobPath(d.Digest)].content
		if len(content) != d.Size || digestOf(content) != d.Digest {
			t.Errorf("blob %s has %d bytes and digest %s, want %d", d.Digest, len(content), digestOf(content), d.Size)
		}
		if v != nil {
			if err := json.Unmarshal(content, v); err != nil {
				t.Fatal(err)
			}
		}
	}
	var top index
	if err := json.Unmarshal(files["index.json"].content, &top); err != nil || len(top.Manifests) != 1 {
		t.Fatalf("index.json: %v, %d manifests, want 1", err, len(top.Manifests))
	}
	var m manifest
	read(top.Manifests[0], &m)
	for _, l := range m.Layers {
		read(l, nil)
	}
	var c config
	read(m.Config, &c)
	if len(c.RootFS.DiffIDs) != len(m.Layers) || !slices.Equal(c.Config.Entrypoint, []string{"/usr/bin/weft"}) {
		t.Errorf("config %+v does not fit the manifest's %d layers", c, len(m.Layers))
	}
	for _, label := range []string{"title", "version", "licenses", "created"} {
		if c.Config.Labels["org.opencontainers.image."+label] == "" {
			t.Errorf("the image has no label %s", label)
		}
	}
}

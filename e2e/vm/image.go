// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/u-root/u-root/pkg/cpio"
)

// Image is what a machine boots from: a kernel, a small initramfs (init, busybox, modules)
// and a read-only disk of programs. All machines share them.
//
// The programs are on a disk, not in the initramfs. So they use the host's page cache once,
// not memory in each guest.
type Image struct {
	Kernel Kernel
	Initrd string
	Tools  string
	Init   string // the program of process 1, which also serves a userland's control port
}

// tool is a program of the distribution that the guests need.
type tool struct {
	name     string
	pkg      string // Debian package to get it from where it is not installed
	optional bool
}

func guestTools() []tool {
	return []tool{
		{name: "fio", pkg: "fio"},
		{name: "mke2fs", pkg: "e2fsprogs"},
		{name: "mkfs.ext4", pkg: "e2fsprogs"},
		{name: "e2fsck", pkg: "e2fsprogs"},
		{name: "resize2fs", pkg: "e2fsprogs"},
		{name: "mkfs.xfs", pkg: "xfsprogs"},
		{name: "xfs_repair", pkg: "xfsprogs"},
		{name: "xfs_growfs", pkg: "xfsprogs"},
		{name: "nvme", pkg: "nvme-cli"},
		{name: "dmsetup", pkg: "dmsetup"},
		{name: "blkid", pkg: "util-linux"},
		{name: "wipefs", pkg: "util-linux"},
		{name: "ss", optional: true},
		{name: "tc", optional: true},
		{name: "ip", optional: true},
		{name: "strace", optional: true},
		{name: "lsblk", optional: true},
		{name: "losetup", optional: true},
		{name: "sfdisk", optional: true},
		{name: "blkdiscard", optional: true},
		{name: "bash", optional: true},
		{name: "pvcreate", optional: true},
		{name: "mdadm", optional: true},
		{name: "mkswap", optional: true},
		{name: "mkfs.ext2", optional: true},
		{name: "mkfs.ext3", optional: true},
		{name: "mkfs.btrfs", optional: true},
		{name: "mkfs.vfat", optional: true},
		{name: "sgdisk", optional: true},
	}
}

// goPrograms are this module's programs for the guests.
func goPrograms() map[string]string {
	return map[string]string{"weft": "./cmd/weft", "workload": "./e2e/workload"}
}

// BuildImage builds the image for a kernel version. Unchanged parts come from the cache.
func BuildImage(ctx context.Context, version string) (Image, error) {
	k, err := FindKernel(ctx, version)
	if err != nil {
		return Image{}, err
	}
	dir, err := cacheDir("image")
	if err != nil {
		return Image{}, err
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return Image{}, err
	}
	defer unlock()
	bin, err := buildPrograms(ctx, dir)
	if err != nil {
		return Image{}, err
	}
	initrd, err := buildInitrd(k, dir, bin["init"])
	if err != nil {
		return Image{}, fmt.Errorf("build the initramfs of kernel %s: %w", k.Release, err)
	}
	delete(bin, "init")
	tools, err := buildTools(ctx, dir, bin)
	if err != nil {
		return Image{}, fmt.Errorf("build the disk of programs: %w", err)
	}
	k.Image = k.uncompressed(dir)
	return Image{Kernel: k, Initrd: initrd, Tools: tools, Init: filepath.Join(dir, "bin", "init")}, prune(dir)
}

// buildPrograms builds the guest's init and our own programs, and returns their paths.
func buildPrograms(ctx context.Context, dir string) (map[string]string, error) {
	root, err := ModuleRoot(ctx)
	if err != nil {
		return nil, err
	}
	bin := make(map[string]string)
	packages := goPrograms()
	packages["init"] = "./e2e/guest/init"
	for name, pkg := range packages {
		bin[name] = filepath.Join(dir, "bin", name)
		err := goTool(ctx, root, "build", "-trimpath", "-ldflags=-s -w", "-o", bin[name], pkg)
		if err != nil {
			return nil, err
		}
	}
	return bin, nil
}

// ModuleRoot returns the directory of the module in which the program runs.
func ModuleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	mod := strings.TrimSpace(string(out))
	if filepath.Base(mod) != "go.mod" {
		return "", errors.New("find the module: run inside the repository")
	}
	return filepath.Dir(mod), nil
}

// goTool runs the go command to build a static program for a guest.
func goTool(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// buildInitrd writes the initramfs uncompressed: unpacking would take longer than reading,
// above all without hardware virtualization.
func buildInitrd(k Kernel, dir, init string) (string, error) {
	busybox, err := staticBusybox()
	if err != nil {
		return "", err
	}
	key, err := hashOf([]string{"2", k.Release, strings.Join(guestModules(), " ")}, k.Image, init, busybox)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "initrd-"+key+".cpio")
	if touch(path) {
		return path, nil
	}
	records, err := initrdRecords(k, init, busybox)
	if err != nil {
		return "", err
	}
	return path, writeWhole(path, func(f *os.File) error {
		w := cpio.Newc.Writer(f)
		if err := cpio.WriteRecordsAndDirs(w, records); err != nil {
			return err
		}
		return cpio.WriteTrailer(w)
	})
}

func initrdRecords(k Kernel, init, busybox string) ([]cpio.Record, error) {
	records := []cpio.Record{
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.CharDev("dev/null", 0o666, 1, 3),
		cpio.Directory("root", 0o700),
		cpio.Directory("mnt", 0o755),
		cpio.Directory("tools", 0o755),
		cpio.Directory("var/lib/weft", 0o755),
		cpio.Symlink("lib64/ld-linux-x86-64.so.2", "/tools/lib/ld-linux-x86-64.so.2"),
		cpio.Symlink("usr/lib", "/tools/lib"), // the loader looks here too when a program's environment is empty
		cpio.Symlink("sbin/modprobe", "/bin/busybox"),
		cpio.Symlink("etc/mke2fs.conf", "/tools/etc/mke2fs.conf"),
		cpio.StaticFile("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n", 0o644),
		cpio.StaticFile("etc/group", "root:x:0:\n", 0o644),
		cpio.StaticFile("etc/hosts", "127.0.0.1 localhost\n", 0o644),
	}
	for dst, src := range map[string]string{"init": init, "bin/busybox": busybox} {
		image, err := os.ReadFile(src)
		if err != nil {
			return nil, err
		}
		records = append(records, cpio.StaticFile(dst, string(image), 0o755))
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of %s: %w", busybox, err)
	}
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" && name != "modprobe" {
			records = append(records, cpio.Symlink("bin/"+name, "/bin/busybox"))
		}
	}
	modules, err := moduleRecords(k)
	return append(records, modules...), err
}

func moduleRecords(k Kernel) ([]cpio.Record, error) {
	all, err := selectModules(k, guestModules())
	if err != nil {
		return nil, err
	}
	dir := "lib/modules/" + k.Release + "/"
	records := []cpio.Record{
		cpio.StaticFile(dir+"modules.dep", modulesDep(all), 0o644),
		cpio.StaticFile(dir+"modules.alias", modulesAlias(all), 0o644),
	}
	builtin, err := os.ReadFile(filepath.Join(k.Modules, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	records = append(records, cpio.StaticFile(dir+"modules.builtin", string(builtin), 0o644))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		records = append(records, cpio.StaticFile(dir+all[name].path, string(all[name].image), 0o644))
	}
	return records, nil
}

func staticBusybox() (string, error) {
	path, err := lookProgram("busybox")
	if err != nil {
		return "", fmt.Errorf("%w; install busybox-static", err)
	}
	f, err := elf.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if libs, err := f.ImportedLibraries(); err != nil || len(libs) > 0 {
		return "", fmt.Errorf("%s is not static; install busybox-static", path)
	}
	return path, nil
}

// buildTools writes the disk of programs: bin holds the programs, and lib their libraries;
// /usr/lib links to it.
func buildTools(ctx context.Context, dir string, own map[string]string) (string, error) {
	files, err := collectTools(ctx)
	if err != nil {
		return "", err
	}
	for name, path := range own {
		files["bin/"+name] = path
	}
	if _, err := os.Stat("/etc/mke2fs.conf"); err == nil {
		files["etc/mke2fs.conf"] = "/etc/mke2fs.conf"
	}
	names := slices.Sorted(maps.Keys(files))
	paths := make([]string, len(names))
	for i, n := range names {
		paths[i] = files[n]
	}
	key, err := hashOf(names, paths...)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "tools-"+key+".ext4")
	if touch(path) {
		return path, nil
	}
	staging, err := os.MkdirTemp(dir, "staging-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(staging)
	size, err := stage(staging, files)
	if err != nil {
		return "", err
	}
	return path, makeExt4(ctx, path, size+size/10+(16<<20), "-d", staging)
}

// stage copies the files to dir and returns their total size.
func stage(dir string, files map[string]string) (int64, error) {
	var total int64
	for name, src := range files {
		dst := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
			return 0, err
		}
		n, err := copyFile(dst, src)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

func copyFile(dst, src string) (int64, error) {
	in, err := os.Open(src)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return 0, err
	}
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_WRONLY|os.O_EXCL, info.Mode().Perm())
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(out, in)
	return n, errors.Join(err, out.Close())
}

// collectTools maps places on the disk of programs to files of this machine.
func collectTools(ctx context.Context) (map[string]string, error) {
	extra, err := missingTools(ctx)
	if err != nil {
		return nil, err
	}
	files := make(map[string]string)
	for _, t := range guestTools() {
		path, err := extra.look(t.name)
		if err != nil && t.optional {
			continue
		}
		if err != nil {
			return nil, err
		}
		files["bin/"+t.name] = path
		libs, err := extra.libraries(ctx, path)
		if err != nil {
			return nil, err
		}
		for _, lib := range libs {
			files["lib/"+filepath.Base(lib)] = lib
		}
	}
	return files, nil
}

// unpacked is the root directory of unpacked packages, used beside the installed programs;
// "" means none.
type unpacked string

// missingTools unpacks the packages of the programs that are not installed.
func missingTools(ctx context.Context) (unpacked, error) {
	var packages []string
	for _, t := range guestTools() {
		if _, err := lookProgram(t.name); err != nil && !t.optional {
			packages = append(packages, t.pkg)
		}
	}
	slices.Sort(packages)
	packages = slices.Compact(packages)
	if len(packages) == 0 {
		return "", nil
	}
	dir, err := cacheDir("tools", strings.Join(packages, "+"))
	if err != nil {
		return "", err
	}
	root := filepath.Join(dir, "root")
	if _, err := os.Stat(root); err == nil {
		return unpacked(root), nil
	}
	a, err := newApt(ctx, "", filepath.Join(dir, "apt"))
	if err != nil {
		return "", err
	}
	all, err := a.closure(ctx, packages)
	if err != nil {
		return "", fmt.Errorf("find packages %s: %w; install them by hand", strings.Join(packages, " "), err)
	}
	notice("not installed here, so unpacked into the cache: %s", strings.Join(packages, " "))
	return unpacked(root), a.unpack(ctx, all, root)
}

func (u unpacked) look(name string) (string, error) {
	if p, err := lookProgram(name); err == nil || u == "" {
		return p, err
	}
	for _, dir := range []string{"usr/bin", "usr/sbin", "bin", "sbin"} {
		if p := filepath.Join(string(u), dir, name); isFile(p) {
			return p, nil
		}
	}
	return "", fmt.Errorf("program %s: %w", name, fs.ErrNotExist)
}

// libraries lists the shared libraries that a program loads, as its loader reports them.
func (u unpacked) libraries(ctx context.Context, program string) ([]string, error) {
	f, err := elf.Open(program)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", program, err)
	}
	defer f.Close()
	if f.Section(".interp") == nil {
		return nil, nil
	}
	cmd := exec.CommandContext(ctx, "ldd", program)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if u != "" {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Join(string(u), "usr/lib/x86_64-linux-gnu")+":"+filepath.Join(string(u), "lib/x86_64-linux-gnu"))
	}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	var libs []string
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "not found") {
			return nil, fmt.Errorf("ldd %s: %s", program, strings.TrimSpace(line))
		}
		for f := range strings.FieldsSeq(line) {
			if filepath.IsAbs(f) {
				libs = append(libs, f)
			}
		}
	}
	return libs, nil
}

func isFile(path string) bool {
	s, err := os.Stat(path)
	return err == nil && s.Mode().IsRegular()
}

// makeExt4 makes a file with an ext4 file system. The file appears only when it is
// complete.
func makeExt4(ctx context.Context, path string, size int64, args ...string) error {
	mke2fs, err := lookProgram("mke2fs")
	if err != nil {
		return fmt.Errorf("%w; install e2fsprogs", err)
	}
	return writeWhole(path, func(f *os.File) error {
		if err := f.Truncate(size); err != nil {
			return err
		}
		args := append([]string{"-q", "-F", "-t", "ext4", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"}, args...)
		out, err := exec.CommandContext(ctx, mke2fs, append(args, f.Name())...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("mke2fs: %w: %s", err, out)
		}
		return nil
	})
}

// writeWhole writes a file that appears under its name only when it is complete.
func writeWhole(path string, write func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if err := errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// hashOf hashes the texts and the contents of the files.
func hashOf(texts []string, files ...string) (string, error) {
	h := sha256.New()
	for _, t := range texts {
		fmt.Fprintf(h, "%d:%s\n", len(t), t)
	}
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		n, err := io.Copy(h, f)
		f.Close()
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "\n%d\n", n)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// touch reports whether a file of the cache exists, and marks it as used now.
func touch(path string) bool {
	now := time.Now()
	return os.Chtimes(path, now, now) == nil
}

// prune removes images that no test has used in six hours. A running machine keeps its
// image open.
func prune(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || info.IsDir() || e.Name() == ".lock" || time.Since(info.ModTime()) < 6*time.Hour {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	modver "golang.org/x/mod/module"
	"golang.org/x/sys/unix"
)

// Options say how the parts are built.
type Options struct {
	Jobs int                              // packages compiled in parallel; 0: as many as there are processors
	Say  func(format string, args ...any) // reports progress to the user; nil: not at all
}

// builder builds the parts in one directory.
type builder struct {
	Options
	dir string
}

// Build builds what is missing. When the context ends, complete parts stay, and Go's build
// cache keeps what was compiled of the others.
func Build(ctx context.Context, o Options) error {
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	if _, err := Find(); err == nil {
		o.Say("Kubernetes %s and its sidecars are built already", Kubernetes)
		return nil
	}
	dir, err := directory()
	if err != nil {
		return err
	}
	b := builder{o, dir}
	for _, d := range []string{"src", "bin", "images"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	unlock, err := b.lock()
	if err != nil {
		return err
	}
	defer unlock()
	o.Say("building Kubernetes %s in %s; about 8 minutes on two idle cores the first time; can be interrupted and continued", Kubernetes, dir)
	if err := b.build(ctx); err != nil {
		return err
	}
	_, err = Find()
	return err
}

func (b builder) build(ctx context.Context) error {
	if err := unpackDebian(ctx, filepath.Join(b.dir, "debian")); err != nil {
		return err
	}
	if err := b.crds(ctx); err != nil {
		return fmt.Errorf("copy the CRDs of snapshots: %w", err)
	}
	for _, m := range modules() {
		missing := slices.DeleteFunc(slices.Clone(m.programs), b.isThere)
		if len(missing) == 0 {
			continue
		}
		src, err := b.module(ctx, m)
		if err != nil {
			return fmt.Errorf("make the module of %s: %w", m.name, err)
		}
		if err := b.programs(ctx, src, m.ldflags(), missing); err != nil {
			return fmt.Errorf("build the programs of %s: %w", m.name, err)
		}
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	if pause := (program{name: "pause", pkg: "./e2e/kube/pause"}); !b.isThere(pause) {
		if err := b.programs(ctx, root, module{}.ldflags(), []program{pause}); err != nil {
			return fmt.Errorf("build pause: %w", err)
		}
	}
	for _, i := range images {
		if err := buildImage(ctx, i, b.dir); err != nil {
			return err
		}
	}
	return nil
}

// lock keeps other processes from building the same parts.
func (b builder) lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(b.dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		return func() { f.Close() }, nil
	}
	b.Say("waiting for another build")
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

func (b builder) binary(p program) string { return filepath.Join(b.dir, "bin", p.name) }

func (b builder) isThere(p program) bool {
	_, err := os.Stat(b.binary(p))
	return err == nil
}

// module creates the directory in which m's programs are built.
func (b builder) module(ctx context.Context, m module) (string, error) {
	src := filepath.Join(b.dir, "src", m.name)
	if _, err := os.Stat(src); err == nil {
		return src, nil
	}
	b.Say("%s: downloading its modules", m.name)
	theirs, err := b.theirGoMod(ctx, m.requires[0])
	if err != nil {
		return "", err
	}
	replacements := ownReplacements(theirs)
	if m.of != nil {
		if replacements, err = b.libraries(ctx, *m.of); err != nil {
			return "", err
		}
	}
	goMod, err := m.goMod(theirs, replacements)
	if err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(filepath.Join(b.dir, "src"), ".new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	err = errors.Join(
		os.WriteFile(filepath.Join(work, "go.mod"), goMod, 0o644),
		os.WriteFile(filepath.Join(work, "tools.go"), m.toolsGo(), 0o644),
	)
	if m.suite {
		err = errors.Join(err, os.Mkdir(filepath.Join(work, suiteDir), 0o755),
			os.WriteFile(filepath.Join(work, suiteDir, "suite_test.go"), []byte(suiteTest), 0o644))
	}
	for _, p := range m.programs {
		if dir := filepath.Join(work, p.pkg); p.main != "" {
			err = errors.Join(err, os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "main.go"), []byte(p.main), 0o644))
		}
	}
	if err != nil {
		return "", err
	}
	if out, err := b.command(ctx, work, "go", "mod", "tidy").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go mod tidy: %w: %s", err, lastLines(string(out)))
	}
	return src, os.Rename(work, src)
}

// downloaded says where Go keeps a module.
type downloaded struct{ GoMod, Dir, Error string }

func (b builder) download(ctx context.Context, v modver.Version) (info downloaded, err error) {
	out, err := b.command(ctx, b.dir, "go", "mod", "download", "-json", v.String()).Output()
	if jsonErr := json.Unmarshal(out, &info); info.Error != "" || err != nil || jsonErr != nil {
		return info, fmt.Errorf("download %v: %w", v, errors.Join(err, jsonErr, errors.New(info.Error)))
	}
	return info, nil
}

func (b builder) theirGoMod(ctx context.Context, v modver.Version) (*modfile.File, error) {
	info, err := b.download(ctx, v)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(info.GoMod)
	if err != nil {
		return nil, err
	}
	return modfile.Parse(info.GoMod, text, nil)
}

// crds copies the CustomResourceDefinitions of snapshots out of the modules of their clients.
func (b builder) crds(ctx context.Context) error {
	to := Parts{b.dir}.CRDs()
	if _, err := os.Stat(to); err == nil {
		return nil
	}
	work, err := os.MkdirTemp(b.dir, ".crds-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	var all []string
	for _, c := range crds {
		info, err := b.download(ctx, c)
		if err != nil {
			return err
		}
		from := os.DirFS(filepath.Join(info.Dir, "config/crd"))
		files, err := fs.Glob(from, "*.k8s.io_*.yaml")
		if err != nil || len(files) == 0 {
			return fmt.Errorf("find the CRDs of %v: %w", c, cmp.Or(err, fs.ErrNotExist))
		}
		if err := os.CopyFS(work, from); err != nil {
			return err
		}
		all = append(all, files...)
	}
	list := "resources:\n- " + strings.Join(all, "\n- ") + "\n"
	if err := os.WriteFile(filepath.Join(work, "kustomization.yaml"), []byte(list), 0o644); err != nil {
		return err
	}
	return os.Rename(work, to)
}

// libraries makes another module use the versions that m uses.
func (b builder) libraries(ctx context.Context, m module) ([]modfile.Replace, error) {
	src, err := b.module(ctx, m)
	if err != nil {
		return nil, err
	}
	list, err := b.command(ctx, src, "go", "list", "-m", "all").Output()
	if err != nil {
		return nil, fmt.Errorf("list the modules of %s: %w", m.name, err)
	}
	return sameLibraries(string(list)), nil
}

// programs builds programs of one module. One command builds all main packages, so that
// packages are compiled while another program is linked.
func (b builder) programs(ctx context.Context, src, ldflags string, all []program) error {
	work := filepath.Join(b.dir, "new")
	if err := os.MkdirAll(work, 0o755); err != nil {
		return err
	}
	// -s -w and no DWARF: debug information takes an eighth of the time. No -trimpath: with
	// it, a library's objects differ by the requested version, even if that version is
	// replaced, and the sidecars could not share them. Without inlining the compiler takes
	// half of the time; the programs are a little slower, which no test measures.
	flags := []string{"-v", "-gcflags=all=-dwarf=false -l", "-ldflags", ldflags}
	if b.Jobs > 0 {
		flags = append(flags, "-p", fmt.Sprint(b.Jobs))
	}
	var names []string
	mains := append([]string{"build", "-o", work + "/"}, flags...)
	for _, p := range all {
		if !p.test {
			names, mains = append(names, p.name), append(mains, p.pkg)
		}
	}
	if len(names) > 0 {
		if err := b.goCommand(ctx, src, mains, names...); err != nil {
			return err
		}
	}
	for _, p := range all {
		made := filepath.Join(work, p.output())
		if p.test {
			test := append(append([]string{"test", "-c", "-o", made}, flags...), p.pkg)
			if err := b.goCommand(ctx, src, test, p.name); err != nil {
				return err
			}
		}
		if err := os.Rename(made, b.binary(p)); err != nil {
			return err
		}
	}
	return nil
}

// goCommand builds, and reports its progress from time to time.
func (b builder) goCommand(ctx context.Context, src string, args []string, names ...string) error {
	what, start := strings.Join(names, ", "), time.Now()
	b.Say("building %s", what)
	if err := b.follow(b.command(ctx, src, "go", args...)); err != nil {
		return err
	}
	b.Say("built %s in %s", what, time.Since(start).Round(time.Second))
	return nil
}

// follow runs a build. The build prints packages as it starts them, and errors, on stderr.
func (b builder) follow(cmd *exec.Cmd) error {
	pipe, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(pipe); s.Scan(); {
			lines <- s.Text()
		}
	}()
	var text strings.Builder
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	packages, last := 0, ""
	for open := true; open; {
		select {
		case line, more := <-lines:
			if open = more; more {
				packages, last = packages+1, line
				fmt.Fprintln(&text, line)
			}
		case <-tick.C:
			b.Say("%d packages compiled, now near %s", packages, last)
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLines(text.String()))
	}
	return nil
}

// command is the go command for a static program, with the present toolchain and outside of
// any workspace.
func (b builder) command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOGC=400", "GOWORK=off", "GOTOOLCHAIN=local", "GOFLAGS=-mod=mod -buildvcs=false")
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// moduleRoot is the root of Weft's module.
func moduleRoot(ctx context.Context) (string, error) {
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

// lastLines is the end of a program's output, enough to see the error.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

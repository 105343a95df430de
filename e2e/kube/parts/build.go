// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Options say how the parts are built.
type Options struct {
	Jobs int                              // packages compiled at a time; 0: as many as there are processors
	Say  func(format string, args ...any) // tells the person who waits; nil: nobody
}

// builder makes the parts in one directory.
type builder struct {
	Options
	dir string
}

// Build makes what is missing. What is complete when the context ends stays, as
// does what the Go build cache has of the rest.
func Build(ctx context.Context, o Options) error {
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	if _, err := Find(); err == nil {
		o.Say("Kubernetes %s and its sidecars are built", Kubernetes)
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
	o.Say("building Kubernetes %s in %s; some 15 minutes on two quiet cores the first time, can be stopped and goes on", Kubernetes, dir)
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
	for _, m := range modules() {
		if b.complete(m) {
			continue
		}
		src, err := b.module(ctx, m)
		if err != nil {
			return fmt.Errorf("make a module of %s %s: %w", m.path, m.version, err)
		}
		for _, p := range m.programs {
			if err := b.program(ctx, src, m, p); err != nil {
				return fmt.Errorf("build %s of %s %s: %w", p.name, m.path, m.version, err)
			}
		}
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	pause := program{name: "pause", pkg: "./e2e/kube/pause"}
	if err := b.program(ctx, root, module{}, pause); err != nil {
		return fmt.Errorf("build pause: %w", err)
	}
	for _, i := range images {
		if err := buildImage(ctx, i, b.dir); err != nil {
			return err
		}
	}
	return nil
}

// lock keeps other processes from building the same.
func (b builder) lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(b.dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		return func() { f.Close() }, nil
	}
	b.Say("waiting for another process that builds")
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

func (b builder) binary(p program) string { return filepath.Join(b.dir, "bin", p.name) }

func (b builder) complete(m module) bool {
	for _, p := range m.programs {
		if _, err := os.Stat(b.binary(p)); err != nil {
			return false
		}
	}
	return true
}

// module makes the folder that m's programs are built in.
func (b builder) module(ctx context.Context, m module) (string, error) {
	src := filepath.Join(b.dir, "src", m.name())
	if _, err := os.Stat(src); err == nil {
		return src, nil
	}
	b.Say("%s %s: downloading its modules", m.path, m.version)
	out, err := b.command(ctx, b.dir, "go", "mod", "download", "-json", m.path+"@"+m.version).Output()
	var info struct{ GoMod, Error string }
	if jsonErr := json.Unmarshal(out, &info); info.Error != "" || err != nil || jsonErr != nil {
		return "", fmt.Errorf("download it: %w", errors.Join(err, jsonErr, errors.New(info.Error)))
	}
	own, err := os.ReadFile(info.GoMod)
	if err != nil {
		return "", err
	}
	goMod, err := m.goMod(own)
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
	if err != nil {
		return "", err
	}
	if out, err := b.command(ctx, work, "go", "mod", "tidy").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go mod tidy: %w: %s", err, lastLines(string(out)))
	}
	return src, os.Rename(work, src)
}

// program builds one program, and tells from time to time how far it is.
func (b builder) program(ctx context.Context, src string, m module, p program) error {
	file := b.binary(p)
	if _, err := os.Stat(file); err == nil {
		return nil
	}
	args := []string{"build"}
	if p.test {
		args = []string{"test", "-c"}
	}
	// -s -w throws away what debuggers want: not to make it takes an eighth off.
	args = append(args, "-v", "-trimpath", "-gcflags=all=-dwarf=false", "-ldflags", m.ldflags(), "-o", file+".new")
	if b.Jobs > 0 {
		args = append(args, "-p", fmt.Sprint(b.Jobs))
	}
	start := time.Now()
	b.Say("%s: building", p.name)
	cmd := b.command(ctx, src, "go", append(args, p.pkg)...)
	if err := b.follow(cmd, p.name); err != nil {
		return err
	}
	b.Say("%s: built in %s", p.name, time.Since(start).Round(time.Second))
	return os.Rename(file+".new", file)
}

// follow runs a build. Its lines on stderr are the packages, as they are begun,
// and what is wrong.
func (b builder) follow(cmd *exec.Cmd, name string) error {
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
			b.Say("%s: %d packages compiled, now near %s", name, packages, last)
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLines(text.String()))
	}
	return nil
}

// command is the go command for a static program, by the present tool chain and
// outside of any workspace.
func (b builder) command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOTOOLCHAIN=local", "GOFLAGS=-mod=mod -buildvcs=false")
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// moduleRoot is the folder of Weft's own module.
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

// lastLines are enough of a program's output to see what is wrong.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

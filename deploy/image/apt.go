// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// errNoPackage means that no package has the name.
var errNoPackage = errors.New("no such package")

// apt is the distribution's packages, with those that were downloaded.
type apt struct {
	dir     string
	updated bool
	index   map[string]indexed // the index entries of the packages asked for so far
}

// get downloads a package if it is not cached, and reads it.
func (a *apt) get(ctx context.Context, name string) (*debian, error) {
	path, err := a.download(ctx, name)
	if err != nil {
		return nil, err
	}
	archive, err := output(ctx, "", "dpkg-deb", "--fsys-tarfile", path)
	if err != nil {
		return nil, err
	}
	files, err := readTree(bytes.NewReader(archive))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	control, err := output(ctx, "", "dpkg-deb", "--field", path)
	if err != nil {
		return nil, err
	}
	depends, err := output(ctx, "", "dpkg-deb", "--showformat=${Pre-Depends}, ${Depends}", "--show", path)
	if err != nil {
		return nil, err
	}
	p := &debian{name: name, depends: parseDepends(string(depends)), control: control, files: files}
	a.learn(ctx, slices.DeleteFunc(slices.Clone(p.depends), func(name string) bool { return !strings.HasPrefix(name, "lib") }))
	return p, nil
}

// download returns the path of a package's file, after checking it against the
// distribution's signed index.
func (a *apt) download(ctx context.Context, name string) (string, error) {
	want, err := a.look(ctx, name)
	if err != nil && !a.updated && os.Geteuid() == 0 {
		// A new machine has no index.
		a.updated = true
		if _, err := output(ctx, "", "apt-get", "update", "-qq"); err != nil {
			return "", err
		}
		want, err = a.look(ctx, name)
	}
	if err != nil {
		return "", err
	}
	path := filepath.Join(a.dir, want.file)
	if content, err := os.ReadFile(path); err == nil && want.is(content) {
		return path, nil
	}
	if err := os.MkdirAll(a.dir, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(a.dir, ".download-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	// apt's sandbox user may not write here.
	if _, err := output(ctx, work, "apt-get", "download", "-qq", "-oAPT::Sandbox::User=", name); err != nil {
		return "", err
	}
	content, err := os.ReadFile(filepath.Join(work, want.file))
	if err != nil {
		return "", err
	}
	if !want.is(content) {
		return "", fmt.Errorf("download %s: not the file that the index names", want.file)
	}
	return path, os.Rename(filepath.Join(work, want.file), path)
}

// indexed is a package's file as the index has it.
type indexed struct{ file, sha256 string }

func (i indexed) is(content []byte) bool {
	return fmt.Sprintf("%x", sha256.Sum256(content)) == i.sha256
}

func (a *apt) look(ctx context.Context, name string) (indexed, error) {
	if i, ok := a.index[name]; ok {
		return i, nil
	}
	out, err := a.ask(ctx, name)
	if err != nil {
		return indexed{}, errors.Join(errNoPackage, err)
	}
	return parseURI(string(out))
}

// learn asks for several packages in one call, since apt is slow to start. If apt does not
// know one of them it returns nothing; learn then asks for each on its own.
func (a *apt) learn(ctx context.Context, names []string) {
	names = slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		_, known := a.index[name]
		return known
	})
	if len(names) == 0 {
		return
	}
	out, err := a.ask(ctx, names...)
	if err != nil {
		return
	}
	for line := range strings.Lines(string(out)) {
		if i, err := parseURI(line); err == nil {
			name, _, _ := strings.Cut(i.file, "_")
			a.index[name] = i
		}
	}
}

// ask asks for the addresses of packages. Debian's containers keep no cache of the index,
// and reading it then takes a second each time; here it has a cache.
func (a *apt) ask(ctx context.Context, names ...string) ([]byte, error) {
	if err := os.MkdirAll(a.dir, 0o755); err != nil {
		return nil, err
	}
	return output(ctx, "", "apt-get", append([]string{
		"download", "--print-uris", "-qq",
		"-oDir::Cache::pkgcache=" + filepath.Join(a.dir, "pkgcache.bin"),
		"-oDir::Cache::srcpkgcache=" + filepath.Join(a.dir, "srcpkgcache.bin"),
	}, names...)...)
}

// parseURI parses a line of apt-get --print-uris: 'URI' FILE SIZE SHA256:SUM.
func parseURI(line string) (indexed, error) {
	fields := strings.Fields(line)
	if len(fields) == 4 {
		if sum, ok := strings.CutPrefix(fields[3], "SHA256:"); ok {
			return indexed{file: filepath.Base(fields[1]), sha256: sum}, nil
		}
	}
	return indexed{}, fmt.Errorf("ask apt for a package's address: %q", strings.TrimSpace(line))
}

// parseDepends returns the names in a list such as "libc6 (>= 2.36), a | b". Of
// alternatives it takes the first.
func parseDepends(text string) (names []string) {
	for entry := range strings.SplitSeq(text, ",") {
		if fields := strings.Fields(strings.SplitN(entry, "|", 2)[0]); len(fields) > 0 {
			name, _, _ := strings.Cut(fields[0], ":")
			names = append(names, name)
		}
	}
	return names
}

func output(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.Bytes(), nil
}

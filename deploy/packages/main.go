// SPDX-License-Identifier: Apache-2.0

// Command packages builds Weft's packages for Debian (.deb) and Red Hat (.rpm) and their
// relatives, with nfpm. The tool is in a module of its own (nfpm.mod), so that the product
// does not depend on it. nfpm.yaml says what the packages contain.
//
// The same sources and Go release give the same bytes.
package main

import (
	"compress/gzip"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"weft.dev/weft/deploy/binary"
)

type options struct {
	out, release, arch string
}

func main() {
	var o options
	flag.StringVar(&o.out, "out", "bin/packages", "directory for the packages")
	flag.StringVar(&o.release, "release", "", "what `weft version` prints, such as v0.1.0; if not given, what Go knows of the commit")
	flag.StringVar(&o.arch, "arch", runtime.GOARCH, "architecture, as Go names it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	files, err := build(ctx, ".", o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "packages:", err)
		os.Exit(1)
	}
	for _, f := range files {
		fmt.Println(f)
	}
}

// build makes the packages of the sources in root, and returns their paths.
func build(ctx context.Context, root string, o options) ([]string, error) {
	stage, err := os.MkdirTemp("", "weft-packages-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(stage)
	if err := fill(ctx, stage, o); err != nil {
		return nil, err
	}
	out, err := emptied(o.out)
	if err != nil {
		return nil, err
	}
	source := binary.Describe(ctx)
	for _, kind := range []string{"deb", "rpm"} {
		cmd := exec.CommandContext(ctx, "go", "tool", "-modfile=deploy/packages/nfpm.mod", "nfpm", "package", "--packager", kind, "--config", "deploy/packages/nfpm.yaml", "--target", out)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "STAGE="+stage, "ARCH="+o.arch,
			"PACKAGE_VERSION="+packageVersion(o.release, source),
			fmt.Sprintf("SOURCE_DATE_EPOCH=%d", source.Created.Unix()))
		if text, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("nfpm: %w: %s", err, text)
		}
	}
	return built(out)
}

// emptied is the directory's absolute path, without the packages of earlier builds.
func emptied(dir string) (string, error) {
	out, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", err
	}
	old, err := built(out)
	for _, f := range old {
		err = errors.Join(err, os.Remove(f))
	}
	return out, err
}

// built lists the packages in a directory.
func built(dir string) ([]string, error) {
	debs, err := filepath.Glob(filepath.Join(dir, "weft_*.deb"))
	rpms, err2 := filepath.Glob(filepath.Join(dir, "weft-*.rpm"))
	return append(debs, rpms...), errors.Join(err, err2)
}

// fill writes what is built and generated to stage: the program, the licenses of what is in
// it, and what the program says of itself.
func fill(ctx context.Context, stage string, o options) error {
	program := filepath.Join(stage, "weft")
	if err := binary.Build(ctx, program, o.release, o.arch); err != nil {
		return err
	}
	if err := binary.Static(program); err != nil {
		return err
	}
	licences, err := binary.Licences(ctx)
	if err != nil {
		return err
	}
	for name, text := range licences {
		if err := write(filepath.Join(stage, "licences", name), text); err != nil {
			return err
		}
	}
	if o.arch != runtime.GOARCH { // this machine can not run the one that was built
		program = filepath.Join(stage, "weft-here")
		if err := binary.Build(ctx, program, o.release, ""); err != nil {
			return err
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, err := say(ctx, program, "completion", shell)
		if err != nil {
			return err
		}
		if err := write(filepath.Join(stage, "weft."+shell), script); err != nil {
			return err
		}
	}
	return manuals(ctx, program, filepath.Join(stage, "man"))
}

// say runs the program and returns what it prints. It gets no environment, which would
// change the defaults that the help shows.
func say(ctx context.Context, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = []string{"HOME=/root"}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("weft %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}

func write(file string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o644)
}

// manuals writes the manual pages, each compressed, as both distributions want them.
func manuals(ctx context.Context, program, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if _, err := say(ctx, program, "manual", dir); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return errors.Join(compress(file), os.Remove(file))
	})
}

// compress writes file.gz, without a name or time in it.
func compress(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	f, err := os.Create(file + ".gz")
	if err != nil {
		return err
	}
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err == nil {
		_, err = z.Write(text)
		err = errors.Join(err, z.Close())
	}
	return errors.Join(err, f.Close())
}

// described is what git says of a commit after a tag: v0.1.0-12-gabcdef0.
var described = regexp.MustCompile(`^(.+)-(\d+)-g([0-9a-f]+)$`)

// packageVersion is the version of the packages. It sorts as the commits do: what comes before
// a release ends in "~", which is lower than nothing, and what comes after a tag in "+".
func packageVersion(release string, source binary.Source) string {
	tag, changed := strings.CutSuffix(strings.TrimPrefix(release, "v"), "+changes")
	after := ""
	if m := described.FindStringSubmatch(tag); m != nil {
		tag, after = m[1], "+"+m[2]+".g"+m[3]
	}
	if tag == "" {
		tag, after = "0.0.0", "~"+source.Created.UTC().Format("20060102150405")
		if source.Revision != "" {
			after += ".g" + source.Revision[:min(12, len(source.Revision))]
		}
	}
	if changed {
		after += ".changes"
	}
	return strings.ReplaceAll(tag, "-", "~") + after
}

// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	modver "golang.org/x/mod/module"
)

// rclone serves the examples' files over NFS and S3. It is under the MIT licence.
var rclone = modver.Version{Path: "github.com/rclone/rclone", Version: "v1.76.0"}

// NFSClient is the name of the image with a client of NFS. Kubernetes would mount NFS with the node's
// kernel, which may have no such client.
const NFSClient = "weft.test/nfsclient:1"

// exampleImages are what the pods of deploy/kubernetes/examples run, under the names in the manifests.
var exampleImages = []image{
	{file: "rclone", names: []string{"docker.io/rclone/rclone:1.76.0"}, busybox: true, program: "rclone", entrypoint: []string{"/bin/rclone"}},
	{file: "nfsclient", names: []string{NFSClient}, busybox: true, program: "nfsclient"},
}

// exampleMains are main packages that are added to rclone's module, so that its go.sum is the one that
// counts. Rclone's own has a hundred backends more, and takes many times as long.
var exampleMains = map[string]string{
	"rclone": `package main

import (
	_ "github.com/rclone/rclone/backend/local"
	_ "github.com/rclone/rclone/backend/s3"
	"github.com/rclone/rclone/cmd"
	_ "github.com/rclone/rclone/cmd/cat"
	_ "github.com/rclone/rclone/cmd/mkdir"
	_ "github.com/rclone/rclone/cmd/rcat"
	_ "github.com/rclone/rclone/cmd/serve/nfs"
	_ "github.com/rclone/rclone/cmd/serve/s3"
)

func main() { cmd.Main() }
`,
	"nfsclient": `// nfsclient ADDRESS write|read FILE: from standard input, to standard output.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/willscott/go-nfs-client/nfs"
	"github.com/willscott/go-nfs-client/nfs/rpc"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(address, what, file string) error {
	c, err := rpc.DialTCP("tcp", address, false)
	if err != nil {
		return err
	}
	defer c.Close()
	m := nfs.Mount{Client: c}
	target, err := m.Mount("/", rpc.AuthNull)
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if what == "read" {
		f, err := target.Open(file)
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		_, err = io.Copy(os.Stdout, f)
		return err
	}
	f, err := target.OpenFile(file, 0o644)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if _, err := io.Copy(f, os.Stdin); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return f.Close()
}
`,
}

// FindExamples returns the archives of the images that the examples need. The error names what is
// missing and how to build it.
func FindExamples() ([]string, error) {
	dir, err := examplesDirectory()
	if err != nil {
		return nil, err
	}
	var all []string
	for _, i := range exampleImages {
		file := filepath.Join(dir, "images", i.file+".tar")
		if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("the image %s is not built: make kube-test RUN=Examples does it", i.file)
		} else if err != nil {
			return nil, err
		}
		all = append(all, file)
	}
	return all, nil
}

// BuildExamples builds them, if they are not there.
func BuildExamples(ctx context.Context, o Options) error {
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	if _, err := FindExamples(); err == nil {
		return nil
	}
	dir, err := examplesDirectory()
	if err != nil {
		return err
	}
	for _, d := range []string{"src", "bin", "images"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	b := builder{o, dir}
	unlock, err := b.lock()
	if err != nil {
		return err
	}
	defer unlock()
	src, err := b.examplesModule(ctx)
	if err != nil {
		return fmt.Errorf("make the module of the examples' programs: %w", err)
	}
	var programs []program
	for _, i := range exampleImages {
		programs = append(programs, program{name: i.program, pkg: "./weft/" + i.program})
	}
	if err := b.programs(ctx, src, "-s -w", programs); err != nil {
		return fmt.Errorf("build the examples' programs: %w", err)
	}
	for _, i := range exampleImages {
		if err := buildImage(ctx, i, dir); err != nil {
			return err
		}
	}
	_, err = FindExamples()
	return err
}

// examplesModule is a copy of rclone's module with the main packages.
func (b builder) examplesModule(ctx context.Context) (string, error) {
	src := filepath.Join(b.dir, "src", "rclone")
	if _, err := os.Stat(src); err == nil {
		return src, nil
	}
	info, err := b.download(ctx, rclone)
	if err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(filepath.Join(b.dir, "src"), ".new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	if err := os.CopyFS(work, os.DirFS(info.Dir)); err != nil {
		return "", err
	}
	for name, text := range exampleMains {
		dir := filepath.Join(work, "weft", name)
		err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "main.go"), []byte(text), 0o644))
		if err != nil {
			return "", err
		}
	}
	return src, os.Rename(work, src)
}

// examplesDirectory is beside the directory of the other parts: neither is built again because of the
// other.
func examplesDirectory() (string, error) {
	dir, err := directory()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintln(h, format, runtime.Version(), runtime.GOARCH, rclone, exampleMains) // fmt sorts maps
	for _, i := range exampleImages {
		fmt.Fprintln(h, i.file, i.names, i.entrypoint)
	}
	return filepath.Join(filepath.Dir(dir), fmt.Sprintf("examples-%x", h.Sum(nil)[:4])), nil
}

// SPDX-License-Identifier: Apache-2.0

// Command image builds Weft's container image without a container engine. The image holds
// the weft program, static, and the programs that the node plugin and the agents run (mkfs,
// resize, blkid, modprobe), with only the libraries that these need. They come from the
// packages of the Debian or Ubuntu that the command runs on.
//
// It writes an OCI image layout, a directory that skopeo, crane and oras can push. It also
// writes the same as one archive, which ctr, docker and podman can import. The same
// sources, packages and Go release give the same bytes.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/deploy/binary"
)

// programs are the distribution's programs in the image, by path, with the package that
// provides each.
var programs = map[string]string{
	"usr/sbin/mkfs.ext4":  "e2fsprogs",
	"usr/sbin/e2fsck":     "e2fsprogs",
	"usr/sbin/resize2fs":  "e2fsprogs",
	"etc/mke2fs.conf":     "e2fsprogs",
	"usr/sbin/mkfs.xfs":   "xfsprogs",
	"usr/sbin/xfs_growfs": "xfsprogs",
	"usr/sbin/xfs_repair": "xfsprogs",
	"usr/sbin/blkid":      "util-linux",
	"usr/sbin/modprobe":   "kmod",
	"etc/os-release":      "base-files", // tells scanners which distribution's packages these are
}

type options struct {
	out, name, version, release, program string
}

func main() {
	var o options
	flag.StringVar(&o.out, "out", "bin", "directory for the layout image/ and the archive weft-image.tar")
	flag.StringVar(&o.name, "name", "weft.dev/weft", "name of the image, without its tag")
	flag.StringVar(&o.version, "version", "0.1.0", "version of the image, which is its tag")
	flag.StringVar(&o.release, "release", "", "what `weft version` prints; if not given, what Go knows of the commit")
	flag.StringVar(&o.program, "program", "", "weft program to take, static; built if not given")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	digest, err := build(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
	fmt.Printf("%s:%s@%s\n", o.name, o.version, digest)
}

// build builds the image and returns its digest.
func build(ctx context.Context, o options) (digest string, err error) {
	work, err := os.MkdirTemp("", "weft-image-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	var base, ours tree
	both, running := errgroup.WithContext(ctx)
	both.Go(func() (err error) {
		base, err = distribution(running)
		return err
	})
	both.Go(func() (err error) {
		if o.program == "" {
			o.program = filepath.Join(work, "weft")
			if err := binary.Build(running, o.program, o.release, ""); err != nil {
				return err
			}
		}
		ours, err = weftFiles(running, o.program)
		return err
	})
	if err := both.Wait(); err != nil {
		return "", err
	}
	i, err := newImage(o, binary.Describe(ctx), base, ours)
	if err != nil {
		return "", err
	}
	layout := filepath.Join(o.out, "image")
	archive := filepath.Join(o.out, "weft-image.tar")
	if err := errors.Join(i.writeLayout(layout), i.writeArchive(archive)); err != nil {
		return "", err
	}
	return i.manifest.Digest, nil
}

// distribution is the layer with the distribution's files.
func distribution(ctx context.Context) (tree, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	shelf := &apt{dir: filepath.Join(cmp.Or(os.Getenv("WEFT_CACHE"), filepath.Join(cache, "weft")), "image", "packages"), index: map[string]indexed{}}
	shelf.learn(ctx, slices.Compact(slices.Sorted(maps.Values(programs))))
	base, err := collect(ctx, shelf, programs)
	if err != nil {
		return nil, err
	}
	base["etc/passwd"] = file{mode: 0o644, content: []byte("root:x:0:0:root:/root:/sbin/nologin\nweft:x:65532:65532:weft:/var/lib/weft:/sbin/nologin\n")}
	base["etc/group"] = file{mode: 0o644, content: []byte("root:x:0:\nweft:x:65532:\n")}
	base["etc/mtab"] = file{link: "../proc/self/mounts"} // xfs_growfs and resize2fs read the mounts there
	base["tmp/"] = file{mode: 0o1777}
	for _, dir := range []string{"dev/", "etc/weft/", "proc/", "run/", "sys/", "var/lib/weft/"} {
		base[dir] = file{mode: 0o755}
	}
	return base, nil
}

// architecture is the architecture of the image, the same as this machine's.
const architecture = runtime.GOARCH

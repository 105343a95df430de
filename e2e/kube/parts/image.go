// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// image is a container image of one layer: one program of ours or of Kubernetes, with or
// without busybox.
type image struct {
	file       string
	names      []string
	busybox    bool
	program    string // in bin/
	entrypoint []string
}

var images = []image{
	{file: "pause", names: []string{Pause}, program: "pause", entrypoint: []string{"/bin/pause"}},
	{file: "busybox", names: []string{Busybox, Nginx}, busybox: true},
	{file: "agnhost", names: []string{Agnhost}, busybox: true, program: "agnhost", entrypoint: []string{"/bin/agnhost"}},
}

// entry is one file of a layer: a link if link is not empty, a directory if name ends in /.
type entry struct {
	name, link string
	mode       int64
	content    []byte
}

// layer lists an image's files. bin has the programs; busybox is the machine's.
func (i image) layer(ctx context.Context, bin, busybox string) ([]entry, error) {
	all := []entry{{name: "bin/", mode: 0o755}, {name: "tmp/", mode: 0o1777}, {name: "root/", mode: 0o700}}
	if i.busybox {
		content, err := os.ReadFile(busybox)
		if err != nil {
			return nil, err
		}
		applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
		if err != nil {
			return nil, fmt.Errorf("list the applets of %s: %w", busybox, err)
		}
		all = append(all, entry{name: "bin/busybox", mode: 0o755, content: content})
		for name := range strings.FieldsSeq(string(applets)) {
			if name != "busybox" {
				all = append(all, entry{name: "bin/" + name, link: "busybox"})
			}
		}
		all = append(all, entry{name: "etc/", mode: 0o755},
			entry{name: "etc/passwd", mode: 0o644, content: []byte("root:x:0:0:root:/root:/bin/sh\n")},
			entry{name: "etc/group", mode: 0o644, content: []byte("root:x:0:\n")})
	}
	if i.program != "" {
		content, err := os.ReadFile(filepath.Join(bin, i.program))
		if err != nil {
			return nil, err
		}
		all = append(all, entry{name: "bin/" + i.program, mode: 0o755, content: content})
	}
	if i.program == "agnhost" {
		all = append(all, entry{name: "agnhost", link: "bin/agnhost"}) // where the suite expects it
	}
	return all, nil
}

// writeImage writes a docker archive: manifest.json, the image's config, one layer.
func writeImage(w io.Writer, names, entrypoint []string, files []entry) error {
	var layer bytes.Buffer
	if err := writeTar(&layer, files); err != nil {
		return err
	}
	diff := fmt.Sprintf("%x", sha256.Sum256(layer.Bytes()))
	settings := map[string]any{"Env": []string{"PATH=/bin:/sbin:/usr/bin:/usr/sbin"}, "WorkingDir": "/"}
	if len(entrypoint) > 0 {
		settings["Entrypoint"] = entrypoint
	} else {
		settings["Cmd"] = []string{"sh"}
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux", "created": "2026-01-01T00:00:00Z", "config": settings,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + diff}},
	})
	if err != nil {
		return err
	}
	id := fmt.Sprintf("%x", sha256.Sum256(config))
	manifest, err := json.Marshal([]map[string]any{{"Config": id + ".json", "RepoTags": names, "Layers": []string{diff + ".tar"}}})
	if err != nil {
		return err
	}
	return writeTar(w, []entry{
		{name: id + ".json", mode: 0o644, content: config},
		{name: diff + ".tar", mode: 0o644, content: layer.Bytes()},
		{name: "manifest.json", mode: 0o644, content: manifest},
	})
}

func writeTar(w io.Writer, files []entry) error {
	t := tar.NewWriter(w)
	for _, e := range files {
		h := &tar.Header{Name: e.name, Mode: e.mode, Size: int64(len(e.content)), Typeflag: tar.TypeReg, ModTime: time.Unix(0, 0)}
		switch {
		case e.link != "":
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.link, 0o777
		case strings.HasSuffix(e.name, "/"):
			h.Typeflag = tar.TypeDir
		}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := t.Write(e.content); err != nil {
			return err
		}
	}
	return t.Close()
}

// buildImage builds an image's archive if it does not exist.
func buildImage(ctx context.Context, i image, dir string) error {
	file := filepath.Join(dir, "images", i.file+".tar")
	if _, err := os.Stat(file); err == nil {
		return nil
	}
	busybox, err := staticBusybox(ctx)
	if err != nil {
		return err
	}
	files, err := i.layer(ctx, filepath.Join(dir, "bin"), busybox)
	if err != nil {
		return fmt.Errorf("image %s: %w", i.file, err)
	}
	out, err := os.Create(file + ".new")
	if err != nil {
		return err
	}
	defer os.Remove(file + ".new")
	if err := errors.Join(writeImage(out, i.names, i.entrypoint, files), out.Close()); err != nil {
		return fmt.Errorf("image %s: %w", i.file, err)
	}
	return os.Rename(file+".new", file)
}

func staticBusybox(ctx context.Context) (string, error) {
	file, err := exec.LookPath("busybox")
	if err != nil {
		return "", fmt.Errorf("%w; install busybox-static", err)
	}
	out, _ := exec.CommandContext(ctx, "ldd", file).CombinedOutput()
	if !slices.ContainsFunc([]string{"not a dynamic executable", "statically linked"}, func(s string) bool { return strings.Contains(string(out), s) }) {
		return "", fmt.Errorf("%s is not static; install busybox-static", path.Clean(file))
	}
	return file, nil
}

// WriteProgram writes the archive of an image with one static program.
func WriteProgram(w io.Writer, name, program string) error {
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	at := "bin/" + filepath.Base(program)
	return writeImage(w, []string{name}, []string{"/" + at}, []entry{
		{name: "bin/", mode: 0o755}, {name: "tmp/", mode: 0o1777}, {name: at, mode: 0o755, content: content},
	})
}

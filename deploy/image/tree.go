// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// file is one file of a tree: a link if link is not empty.
type file struct {
	mode    int64 // permission bits, sticky bit
	link    string
	content []byte
}

// tree is the content of a layer, by path without a leading slash. Directories end in a
// slash; those that are not listed have mode 0755.
type tree map[string]file

// merged are the directories that have become links into usr. Packages may still name files
// by either path.
var merged = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"}

// place is the canonical path of a file: without "./", and below usr.
func place(name string) string {
	name = path.Clean("/" + name)[1:]
	if top, _, _ := strings.Cut(name, "/"); slices.Contains(merged, top) {
		return "usr/" + name
	}
	return name
}

// readTree reads a package's files.
func readTree(r io.Reader) (tree, error) {
	t := tree{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		switch h.Typeflag {
		case tar.TypeReg:
			content, err := io.ReadAll(in)
			if err != nil {
				return nil, err
			}
			t[place(h.Name)] = file{mode: h.Mode & 0o777, content: content}
		case tar.TypeSymlink:
			t[place(h.Name)] = file{link: h.Linkname}
		case tar.TypeLink:
			t[place(h.Name)] = t[place(h.Linkname)]
		}
	}
}

// target is the path that a link at a path leads to.
func target(at, link string) string {
	if strings.HasPrefix(link, "/") {
		return place(link)
	}
	return place(path.Join(path.Dir(at), link))
}

// links are the links for the merged directories that contain files of the tree.
func (t tree) links() tree {
	links := tree{}
	for name := range t {
		for _, dir := range merged {
			if strings.HasPrefix(name, "usr/"+dir+"/") {
				links[dir] = file{link: "usr/" + dir}
			}
		}
	}
	return links
}

// layer is a tree, packed for the image.
type layer struct {
	compressed []byte
	diff       string // digest of the archive before it is compressed
}

// pack makes a layer. Files are in order, belong to root and have no time, so that the same
// tree gives the same bytes.
func pack(t tree) (layer, error) {
	all := maps.Clone(t)
	maps.Copy(all, t.links())
	for name := range all {
		for dir := path.Dir(strings.TrimSuffix(name, "/")); dir != "."; dir = path.Dir(dir) {
			if _, ok := all[dir+"/"]; !ok {
				all[dir+"/"] = file{mode: 0o755}
			}
		}
	}
	var raw bytes.Buffer
	out := tar.NewWriter(&raw)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := add(out, name, all[name]); err != nil {
			return layer{}, fmt.Errorf("pack %s: %w", name, err)
		}
	}
	if err := out.Close(); err != nil {
		return layer{}, err
	}
	var compressed bytes.Buffer
	z := gzip.NewWriter(&compressed)
	if _, err := z.Write(raw.Bytes()); err != nil {
		return layer{}, err
	}
	if err := z.Close(); err != nil {
		return layer{}, err
	}
	return layer{compressed: compressed.Bytes(), diff: digestOf(raw.Bytes())}, nil
}

func add(out *tar.Writer, name string, f file) error {
	h := &tar.Header{
		Name: name, Mode: f.mode, Size: int64(len(f.content)), Typeflag: tar.TypeReg,
		ModTime: time.Unix(0, 0), Format: tar.FormatPAX,
	}
	switch {
	case f.link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.link, 0o777
	case strings.HasSuffix(name, "/"):
		h.Typeflag = tar.TypeDir
	}
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	_, err := out.Write(f.content)
	return err
}

// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"bufio"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing/fstest"

	"github.com/rogpeppe/go-internal/txtar"
)

// reader reads below a root. Names are relative to it. It remembers what it read if kept is not
// nil.
type reader struct {
	root fs.FS
	kept map[string]*file
}

// file holds the recorded part of a file: all of it, or lines by their number.
type file struct {
	text  string
	lines map[int]string
}

func (r *reader) keep(name, text string) {
	if r.kept != nil {
		r.kept[name] = &file{text: text}
	}
}

func (r *reader) bytes(name string) []byte {
	b, err := fs.ReadFile(r.root, name)
	if err != nil {
		return nil
	}
	if strings.ContainsRune(string(b), 0) {
		r.keep(name, dump(b))
	} else {
		r.keep(name, string(b))
	}
	return b
}

func (r *reader) text(name string) string { return strings.TrimSpace(string(r.bytes(name))) }

// lines are those lines of a file that are wanted. ok is false if it cannot be read.
func (r *reader) lines(name string, want func(line string) bool) (all []string, ok bool) {
	f, err := r.root.Open(name)
	if err != nil {
		return nil, false
	}
	defer f.Close()
	kept := &file{lines: map[int]string{}}
	if r.kept != nil {
		if r.kept[name] == nil {
			r.kept[name] = kept
		}
		kept = r.kept[name]
	}
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for n := 0; s.Scan(); n++ {
		if line := s.Text(); want(line) {
			all = append(all, line)
			kept.lines[n] = line
		}
	}
	return all, s.Err() == nil
}

func (r *reader) link(name string) string {
	to, err := fs.ReadLink(r.root, name)
	if err != nil {
		return ""
	}
	r.keep(name, "-> "+to)
	return to
}

// follow is where a link leads, or the name itself if it is none.
func (r *reader) follow(name string) string {
	for range maxLayers {
		to := r.link(name)
		switch {
		case to == "":
			return name
		case path.IsAbs(to):
			name = strings.TrimPrefix(path.Clean(to), "/")
		default:
			name = path.Join(path.Dir(name), to)
		}
	}
	return name
}

// names lists a directory. Recorded are only those of its files that are read.
func (r *reader) names(dir string) (all []string) {
	entries, _ := fs.ReadDir(r.root, dir)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// Record reads a machine as Read does and returns the files that were read, as a txtar archive. Of
// large files it has only the lines that matter.
func Record(root fs.FS, at string) ([]byte, error) {
	r := &reader{root: root, kept: map[string]*file{}}
	if _, err := r.machine(at); err != nil {
		return nil, err
	}
	a := &txtar.Archive{Comment: []byte("Files that weft doctor --gpu read. A line \"-> TARGET\" is a symbolic link; a file that begins with\n\"hex SIZE\" is binary, written as lines \"offset: bytes\" without its zeros.\n")}
	for _, name := range slices.Sorted(maps.Keys(r.kept)) {
		text := r.kept[name].text
		for _, n := range slices.Sorted(maps.Keys(r.kept[name].lines)) {
			text += r.kept[name].lines[n] + "\n"
		}
		a.Files = append(a.Files, txtar.File{Name: name, Data: []byte(text)})
	}
	return txtar.Format(a), nil
}

// Tree is the file system that an archive of [Record] describes.
func Tree(archive []byte) (fs.FS, error) {
	tree := fstest.MapFS{}
	for _, f := range txtar.Parse(archive).Files {
		if !fs.ValidPath(f.Name) {
			return nil, fmt.Errorf("%q: no path of a file", f.Name)
		}
		text := string(f.Data)
		if to, ok := strings.CutPrefix(text, "-> "); ok {
			tree[f.Name] = &fstest.MapFile{Data: []byte(strings.TrimSpace(to)), Mode: fs.ModeSymlink}
			continue
		}
		if strings.HasPrefix(text, dumpHead) {
			b, err := undump(text)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", f.Name, err)
			}
			tree[f.Name] = &fstest.MapFile{Data: b}
			continue
		}
		tree[f.Name] = &fstest.MapFile{Data: f.Data}
	}
	return tree, nil
}

const (
	dumpHead  = "hex "
	dumpWidth = 16
	dumpMost  = 1 << 16
)

// dump writes a binary file as "hex SIZE" and lines "offset: bytes", without those that are zero.
func dump(b []byte) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s%d\n", dumpHead, len(b))
	for at := 0; at < len(b); at += dumpWidth {
		row := b[at:min(at+dumpWidth, len(b))]
		if slices.ContainsFunc(row, func(x byte) bool { return x != 0 }) {
			fmt.Fprintf(&s, "%03x: % x\n", at, row)
		}
	}
	return s.String()
}

func undump(text string) ([]byte, error) {
	head, rows, _ := strings.Cut(text, "\n")
	size, err := strconv.Atoi(strings.TrimPrefix(head, dumpHead))
	if err != nil || size < 0 || size > dumpMost {
		return nil, fmt.Errorf("%q: want the size of a small file", head)
	}
	b := make([]byte, size)
	for row := range strings.Lines(rows) {
		offset, bytes, _ := strings.Cut(row, ":")
		at, err := strconv.ParseUint(offset, 16, 16)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", row, err)
		}
		for i, digits := range strings.Fields(bytes) {
			x, err := strconv.ParseUint(digits, 16, 8)
			if err != nil || int(at)+i >= size {
				return nil, fmt.Errorf("%q: no bytes of a file of %d", row, size)
			}
			b[int(at)+i] = byte(x)
		}
	}
	return b, nil
}

// SPDX-License-Identifier: Apache-2.0

// Package bundle is the format of a support bundle: one file with what is known of a cluster, to
// look at elsewhere. It is a gzip-compressed tar archive:
//
//	state/records.jsonl    the manager's records, a line each: {"key": …, "value": …}
//	state/observed.json    what agents reported, as readers of the state see it
//	state/manager.json     what the manager alone knows: the other managers, their levels
//	nodes/NODE/AGENT/…     what the node's agent is wanted to do, and what it told of its machine
//	manager/…              the manager's log
//	figures/…              the I/O of the last seconds
//	manifest.json          the last one: versions, times, every file with its hash, what is missing
//
// A file without its manifest, or with other bytes than that lists, was cut or changed, and is
// refused. A bundle comes from elsewhere, so [Read] trusts nothing: names, sizes and numbers are
// bounded, and only plain files are taken.
package bundle

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Format is the version of the format.
const Format = 1

// Bounds of a bundle.
const (
	FileMost  = 128 << 20 // bytes of one file
	TotalMost = 512 << 20 // bytes of all files, when unpacked
	FilesMost = 20_000
	nameMost  = 100 // what a plain tar header holds

	manifestName = "manifest.json"
	manifestMost = 16 << 20
	stateDir     = "state/"
)

// The files that a state is made of.
const (
	Records  = stateDir + "records.jsonl"
	Observed = stateDir + "observed.json"
	Manager  = stateDir + "manager.json"
)

// Manifest says what is in a bundle.
type Manifest struct {
	Format     int       `json:"format"`
	Made       time.Time `json:"made"`
	Version    string    `json:"version"` // of the manager that made it
	Cluster    string    `json:"cluster"`
	Level      uint32    `json:"level"`
	Term       uint64    `json:"term"`
	Generation uint64    `json:"generation"`
	LeftOut    []string  `json:"left_out"` // what is in no bundle
	Missing    []Missing `json:"missing"`  // what could have been in this one
	Files      []File    `json:"files"`
}

// Missing is something that is not in a bundle.
type Missing struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// File is a file of a bundle.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Writer writes a bundle. What does not fit is listed as missing.
type Writer struct {
	packed   *gzip.Writer
	tar      *tar.Writer
	manifest Manifest
	total    int64
}

// NewWriter begins a bundle. Manifest says what is known before: not the files.
func NewWriter(w io.Writer, m Manifest) *Writer {
	packed := gzip.NewWriter(w)
	m.Format, m.Files, m.Missing = Format, []File{}, []Missing{}
	return &Writer{packed: packed, tar: tar.NewWriter(packed), manifest: m}
}

// validName matches the names of files: no name leads out of the directory in which it is unpacked.
var validName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$`)

// ValidName reports whether a bundle can have a file of a name.
func ValidName(name string) bool { return len(name) <= nameMost && validName.MatchString(name) }

// Add adds a file. The error is that of the writer below.
func (w *Writer) Add(name string, data []byte) error {
	switch {
	case !ValidName(name) || name == manifestName || slices.ContainsFunc(w.manifest.Files, func(f File) bool { return f.Name == name }):
		w.Miss(name, "a bundle cannot have a file of that name")
		return nil
	case len(data) > FileMost:
		w.Miss(name, fmt.Sprintf("it has %d bytes, and a file has %d at most", len(data), FileMost))
		return nil
	case w.total+int64(len(data)) > TotalMost-manifestMost || len(w.manifest.Files) >= FilesMost-1:
		w.Miss(name, "the bundle is full")
		return nil
	}
	sum := sha256.Sum256(data)
	w.manifest.Files = append(w.manifest.Files, File{name, int64(len(data)), hex.EncodeToString(sum[:])})
	return w.write(name, data)
}

func (w *Writer) write(name string, data []byte) error {
	w.total += int64(len(data))
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(data)), Mode: 0o600, ModTime: w.manifest.Made.Truncate(time.Second), Format: tar.FormatUSTAR}
	if err := w.tar.WriteHeader(header); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if _, err := w.tar.Write(data); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// Miss lists something as missing.
func (w *Writer) Miss(what, why string) {
	w.manifest.Missing = append(w.manifest.Missing, Missing{what, why})
}

// Close writes the manifest. Without it there is no bundle.
func (w *Writer) Close() error {
	text, err := json.MarshalIndent(w.manifest, "", "  ")
	if err != nil {
		return fmt.Errorf("write the manifest: %w", err)
	}
	return errors.Join(w.write(manifestName, text), w.tar.Close(), w.packed.Close())
}

// Bundle is what was read of one.
type Bundle struct {
	Manifest
	state map[string][]byte
}

// State returns a file of the state; nil if there is none.
func (b *Bundle) State(name string) []byte { return b.state[name] }

// ErrDamaged is the error for what is no whole bundle.
var ErrDamaged = errors.New("not a whole support bundle")

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrDamaged, fmt.Errorf(format, args...))
}

// Read reads a bundle, and checks all of it. It keeps the manifest and the state.
func Read(r io.Reader) (*Bundle, error) {
	file := bufio.NewReader(r)
	packed, err := gzip.NewReader(file)
	if err != nil {
		return nil, damaged("it is not compressed with gzip: %w", err)
	}
	packed.Multistream(false)
	in := &reader{archive: tar.NewReader(&limited{packed, TotalMost + FilesMost*1024}), b: &Bundle{state: map[string][]byte{}}, found: map[string]File{}}
	for in.manifest == nil {
		if err := in.next(); err != nil {
			return nil, err
		}
	}
	if _, err := in.archive.Next(); !errors.Is(err, io.EOF) {
		return nil, damaged("something follows the manifest")
	}
	if n, err := io.Copy(io.Discard, &limited{packed, 1 << 20}); err != nil {
		return nil, damaged("after %d bytes behind the archive: %w", n, err)
	}
	if _, err := file.ReadByte(); !errors.Is(err, io.EOF) {
		return nil, damaged("something follows the compressed archive")
	}
	if err := in.check(); err != nil {
		return nil, err
	}
	return in.b, nil
}

// reader reads the files of an archive.
type reader struct {
	archive  *tar.Reader
	b        *Bundle
	found    map[string]File
	total    int64
	manifest []byte
}

// next reads one file.
func (in *reader) next() error {
	header, err := in.archive.Next()
	if errors.Is(err, io.EOF) {
		return damaged("it has no %s: it was cut, or is another archive", manifestName)
	}
	if err != nil {
		return damaged("%w", err)
	}
	if err := in.allow(header); err != nil {
		return err
	}
	name := header.Name
	in.total += header.Size
	keep := name == manifestName || strings.HasPrefix(name, stateDir)
	sum := sha256.New()
	var content bytes.Buffer
	to := io.Writer(sum)
	if keep {
		to = io.MultiWriter(sum, &content)
	}
	if _, err := io.Copy(to, in.archive); err != nil {
		return damaged("%s: %w", name, err)
	}
	if name == manifestName {
		in.manifest = content.Bytes()
		return nil
	}
	if keep {
		in.b.state[name] = content.Bytes()
	}
	in.found[name] = File{name, header.Size, hex.EncodeToString(sum.Sum(nil))}
	return nil
}

// allow refuses files that no bundle has.
func (in *reader) allow(header *tar.Header) error {
	name := header.Name
	_, again := in.found[name]
	switch {
	case !ValidName(name):
		return damaged("name %.200q is not allowed", name)
	case header.Typeflag != tar.TypeReg || header.Format != tar.FormatUSTAR:
		return damaged("%s is not a plain file", name)
	case header.Size < 0 || header.Size > FileMost || in.total+header.Size > TotalMost || len(in.found) >= FilesMost:
		return damaged("%s: %d bytes are too many", name, header.Size)
	case again:
		return damaged("%s is there twice", name)
	}
	return nil
}

// check compares the manifest with the files.
func (in *reader) check() error {
	if len(in.manifest) > manifestMost {
		return damaged("%s is too large", manifestName)
	}
	var head struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(in.manifest, &head); err != nil {
		return damaged("%s: %w", manifestName, err)
	}
	if head.Format != Format {
		return fmt.Errorf("support bundle of format %d: this program reads format %d; use the version of weft that made it, or a later one", head.Format, Format)
	}
	if err := json.Unmarshal(in.manifest, &in.b.Manifest); err != nil {
		return damaged("%s: %w", manifestName, err)
	}
	for _, f := range in.b.Files {
		if in.found[f.Name] != f {
			return damaged("%.200q is not there as %s lists it", f.Name, manifestName)
		}
		delete(in.found, f.Name)
	}
	for name := range in.found {
		return damaged("%s is not listed in %s", name, manifestName)
	}
	return nil
}

// limited returns an error after so many bytes.
type limited struct {
	r    io.Reader
	left int64
}

// Read implements [io.Reader].
func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errors.New("it unpacks to more than a bundle may have")
	}
	n, err := l.r.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	return n, err
}

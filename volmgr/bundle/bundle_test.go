// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// small is a bundle with two files.
func small(t testing.TB) []byte {
	t.Helper()
	var out bytes.Buffer
	w := NewWriter(&out, Manifest{Made: noon, Version: "v1", Cluster: "c", Generation: 7, LeftOut: []string{"keys"}})
	for name, data := range map[string]string{Records: "{}\n", "nodes/t1/target/log.txt": strings.Repeat("a line\n", 1000)} {
		if err := w.Add(name, []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	w.Miss("nodes/t2/target/", "the agent is away")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestABundleIsReadAsItWasWritten(t *testing.T) {
	b, err := Read(bytes.NewReader(small(t)))
	if err != nil {
		t.Fatal(err)
	}
	if !b.Made.Equal(noon) || b.Version != "v1" || b.Generation != 7 || len(b.Files) != 2 || len(b.Missing) != 1 || !slices.Equal(b.LeftOut, []string{"keys"}) {
		t.Errorf("the manifest is %+v", b.Manifest)
	}
	if got := string(b.State(Records)); got != "{}\n" {
		t.Errorf("the records are %q", got)
	}
	if b.State("nodes/t1/target/log.txt") != nil {
		t.Error("a log is kept, and is no state")
	}
}

// Whatever is cut off at the end, the rest is refused.
func TestATruncatedBundleIsRefused(t *testing.T) {
	whole := small(t)
	for n := range len(whole) {
		if _, err := Read(bytes.NewReader(whole[:n])); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d of %d bytes: %v", n, len(whole), err)
		}
	}
}

// Whatever bit changes, either nothing of the content has, or it is refused.
func TestADamagedBundleIsRefused(t *testing.T) {
	whole := small(t)
	want, _ := Read(bytes.NewReader(whole))
	for i := range whole {
		bad := bytes.Clone(whole)
		bad[i] ^= 1 << (i % 8)
		b, err := Read(bytes.NewReader(bad))
		if err == nil && fmt.Sprint(b) != fmt.Sprint(want) {
			t.Fatalf("byte %d: it was read as something else", i)
		}
		if err != nil && !errors.Is(err, ErrDamaged) {
			t.Fatalf("byte %d: %v", i, err)
		}
	}
}

// archive packs headers, each with its content, and a manifest that lists them.
func archive(t *testing.T, manifest string, files ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	w := tar.NewWriter(packed)
	add := func(h tar.Header, content []byte) {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	list := Manifest{Format: Format}
	for _, h := range files {
		content := make([]byte, h.Size)
		sum := sha256.Sum256(content)
		add(h, content)
		list.Files = append(list.Files, File{h.Name, h.Size, hex.EncodeToString(sum[:])})
	}
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	if manifest != "" {
		text = []byte(manifest)
	}
	add(plain(manifestName, int64(len(text))), text)
	if err := errors.Join(w.Close(), packed.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func plain(name string, size int64) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600, Format: tar.FormatUSTAR}
}

func TestHostileBundlesAreRefused(t *testing.T) {
	if _, err := Read(bytes.NewReader(archive(t, "", plain("state/x", 10)))); err != nil {
		t.Fatalf("a plain one: %v", err)
	}
	bomb := func(size int64, n int) []byte {
		var files []tar.Header
		for i := range n {
			files = append(files, plain(fmt.Sprintf("state/%d", i), size))
		}
		return archive(t, "", files...)
	}
	for name, x := range map[string]struct {
		bundle []byte
		want   string
	}{
		"parent directory":  {archive(t, "", plain("../etc/passwd", 1)), `name "../etc/passwd" is not allowed`},
		"inside a name":     {archive(t, "", plain("state/../../x", 1)), "is not allowed"},
		"absolute":          {archive(t, "", plain("/etc/passwd", 1)), "is not allowed"},
		"backslash":         {archive(t, "", plain(`state\x`, 1)), "is not allowed"},
		"empty name":        {archive(t, "", plain(".", 0)), "is not allowed"},
		"symlink":           {archive(t, "", tar.Header{Typeflag: tar.TypeSymlink, Name: "state/x", Linkname: "/etc/shadow", Format: tar.FormatUSTAR}), "not a plain file"},
		"hard link":         {archive(t, "", tar.Header{Typeflag: tar.TypeLink, Name: "state/x", Linkname: "/etc/shadow", Format: tar.FormatUSTAR}), "not a plain file"},
		"device":            {archive(t, "", tar.Header{Typeflag: tar.TypeBlock, Name: "state/x", Format: tar.FormatUSTAR}), "not a plain file"},
		"other tar format":  {archive(t, "", tar.Header{Typeflag: tar.TypeReg, Name: "state/x", Format: tar.FormatPAX, PAXRecords: map[string]string{"WEFT.x": "y"}}), "not a plain file"},
		"twice":             {archive(t, "", plain("state/x", 1), plain("state/x", 1)), "is there twice"},
		"a large file":      {bomb(FileMost+1, 1), "too many"},
		"large files":       {bomb(FileMost, 5), "too many"},
		"not listed":        {archive(t, `{"format":1}`, plain("state/x", 1)), "state/x is not listed"},
		"not there":         {archive(t, `{"format":1,"files":[{"name":"state/x","size":1,"sha256":""}]}`), `"state/x" is not there as`},
		"no JSON":           {archive(t, `{`), "unexpected end"},
		"another format":    {archive(t, `{"format":2}`), "format 2: this program reads format 1"},
		"nothing":           {nil, "not compressed"},
		"two of them":       {append(small(t), small(t)...), "something follows"},
		"no manifest":       {cut(t, small(t)), "it was cut"},
		"something behind":  {append(small(t), "more"...), "something follows"},
		"zeroes of a bomb":  {zeroes(t, TotalMost+FilesMost*1024+1<<20), "it was cut"},
		"zeroes at the end": {archiveThen(t, 2<<20), "behind the archive"},
	} {
		_, err := Read(bytes.NewReader(x.bundle))
		if err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", name, err, x.want)
		}
	}
}

// cut is a bundle without its manifest.
func cut(t *testing.T, whole []byte) []byte {
	t.Helper()
	return repack(t, whole, func(in *tar.Reader, out *tar.Writer) {
		for h, err := in.Next(); err == nil && h.Name != manifestName; h, err = in.Next() {
			if err := out.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(out, in); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func repack(t *testing.T, whole []byte, do func(*tar.Reader, *tar.Writer)) []byte {
	t.Helper()
	packed, err := gzip.NewReader(bytes.NewReader(whole))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	again := gzip.NewWriter(&out)
	w := tar.NewWriter(again)
	do(tar.NewReader(packed), w)
	if err := errors.Join(w.Close(), again.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// zeroes is a compressed file of zeroes.
func zeroes(t *testing.T, n int64) []byte {
	t.Helper()
	var out bytes.Buffer
	packed, _ := gzip.NewWriterLevel(&out, gzip.BestSpeed)
	if _, err := io.CopyN(packed, zeroReader{}, n); err != nil {
		t.Fatal(err)
	}
	if err := packed.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// archiveThen is a bundle in whose compressed stream zeroes follow the archive.
func archiveThen(t *testing.T, n int64) []byte {
	t.Helper()
	packed, err := gzip.NewReader(bytes.NewReader(small(t)))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	again := gzip.NewWriter(&out)
	if _, err := io.Copy(again, packed); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(again, zeroReader{}, n); err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// What does not fit is listed, and the bundle is whole all the same.
func TestWhatDoesNotFitIsMissing(t *testing.T) {
	var out bytes.Buffer
	w := NewWriter(&out, Manifest{Made: noon})
	for _, name := range []string{"../x", "manifest.json", "A", "a", "a", strings.Repeat("a", 101)} {
		if err := w.Add(name, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	big := make([]byte, FileMost)
	for i := range 5 {
		if err := w.Add(fmt.Sprintf("big-%d", i), big); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := Read(&out)
	if err != nil {
		t.Fatal(err)
	}
	var names, missing []string
	for _, f := range b.Files {
		names = append(names, f.Name)
	}
	for _, m := range b.Missing {
		missing = append(missing, m.What)
	}
	if want := []string{"a", "big-0", "big-1", "big-2"}; !slices.Equal(names, want) {
		t.Errorf("it has %q, want %q", names, want)
	}
	if want := []string{"../x", "manifest.json", "A", "a", strings.Repeat("a", 101), "big-3", "big-4"}; !slices.Equal(missing, want) {
		t.Errorf("missing are %q, want %q", missing, want)
	}
}

// FuzzRead reads anything: as a file, and as what a file unpacks to, since no fuzzer finds gzip's
// checksum.
func FuzzRead(f *testing.F) {
	whole := small(f)
	f.Add(whole)
	if packed, err := gzip.NewReader(bytes.NewReader(whole)); err == nil {
		text, _ := io.ReadAll(packed)
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var out bytes.Buffer
		packed := gzip.NewWriter(&out)
		_, _ = packed.Write(data)
		_ = packed.Close()
		for _, text := range [][]byte{data, out.Bytes()} {
			b, err := Read(bytes.NewReader(text))
			if (b == nil) == (err == nil) && err == nil {
				t.Error("neither a bundle nor an error")
			}
			if err == nil {
				for _, x := range b.Files {
					if !ValidName(x.Name) {
						t.Errorf("it has a file %q", x.Name)
					}
				}
			}
		}
	})
}

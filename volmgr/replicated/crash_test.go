// SPDX-License-Identifier: Apache-2.0

package replicated

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/volmgr/cluster"
)

// A power cut leaves any part of what Badger had not synced. The log makes the store whole
// again.
func TestAPowerCutLosesNothingCommitted(t *testing.T) {
	ms, all := quorumOf(t, 1, record("a", "1"))
	m := all[0]
	before := t.TempDir() // as if it had been synced just now
	copyTree(t, before, m.dir, nil)
	var want []cluster.Record
	for i := range 300 {
		r := record(fmt.Sprintf("k%04d", i), strings.Repeat("x", 100))
		want = append(want, r)
		if err := m.commit([]cluster.Record{r}); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.commit([]cluster.Record{{Key: "a"}}); err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for name, lost := range map[string]func(page int) bool{
		"all":                func(int) bool { return true },
		"all but one page":   func(page int) bool { return page != 1 },
		"the first page":     func(page int) bool { return page == 0 },
		"some pages":         func(int) bool { return random.IntN(2) == 0 },
		"nothing, a SIGKILL": func(int) bool { return false },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			copyTree(t, dir, m.dir, func(path string, page int, text []byte) {
				if filepath.Ext(path) == ".mem" && lost(page) {
					clear(text)
					readPage(t, filepath.Join(before, path), page, text)
				}
			})
			ms := &managers{t: t, all: ms.all}
			again := ms.start(dir)
			ms.eventually("it leads", func() error { return again.Confirm(t.Context(), again.Status().Term) })
			ms.holdsSoon(again, want...)
			if err := again.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

const pageSize = 4096

// copyTree copies a directory, with holes where the files have zeroes, and with a change to
// each page.
func copyTree(t *testing.T, to, from string, change func(path string, page int, text []byte)) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(from), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(filepath.Join(to, path), 0o700)
		}
		text, err := os.ReadFile(filepath.Join(from, path))
		if err != nil {
			return err
		}
		f, err := os.Create(filepath.Join(to, path))
		if err != nil {
			return err
		}
		defer f.Close()
		for at := 0; at < len(text); at += pageSize {
			page := text[at:min(at+pageSize, len(text))]
			if bytes.Count(page, []byte{0}) == len(page) {
				continue
			}
			if change != nil {
				change(path, at/pageSize, page)
			}
			if _, err := f.WriteAt(page, int64(at)); err != nil {
				return err
			}
		}
		return f.Truncate(int64(len(text)))
	})
	if err != nil {
		t.Fatal(err)
	}
}

func readPage(t *testing.T, path string, page int, text []byte) {
	t.Helper()
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(text, int64(page)*pageSize); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

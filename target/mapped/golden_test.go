// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"flag"
	"hash"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

func newCRC() hash.Hash32 { return crc32.New(castagnoli) }

// TestTheFormatStays compares the superblock and the first records of a tree with those that the
// first version wrote: what is on drives must be read for ever.
func TestTheFormatStays(t *testing.T) {
	img, p := sample(t)
	for name, at := range map[string]struct{ off, n int64 }{
		"super-1":  {p.offset(p.home()) + superAt[0], unit},
		"head-1":   {p.offset(p.home()), headSize},
		"record-1": {p.offset(0) + tableAt[0], 8 * recordSize},
	} {
		got := make([]byte, at.n)
		img.read(got, at.off)
		path := filepath.Join("testdata", name)
		if *update {
			must(t, os.MkdirAll("testdata", 0o755))
			must(t, os.WriteFile(path, got, 0o644))
		}
		want, err := os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what version 1 writes", name)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package trees

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
	"weft.dev/weft/target/mapped"
	"weft.dev/weft/target/treecheck"
)

// treeFile is a drive in a file with a tree: a leg of 64 MiB with 3 MiB, and its snapshot.
func treeFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "drive")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 300<<20); err != nil {
		t.Fatal(err)
	}
	d, err := backend.Open(path, backend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	leg := block.UUID{1}
	tree, err := mapped.Format(mapped.Place{Device: d, First: treecheck.FirstExtent, Tree: block.UUID{7}, Drive: block.UUID{8}, Extents: []uint32{0}}, leg, 64<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tree.Leg(leg)
	if err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(l, bytes.Repeat([]byte{1}, 3<<20), 0); err != nil {
		t.Fatal(err)
	}
	if err := tree.Freeze(leg, block.UUID{2}, nil); err != nil {
		t.Fatal(err)
	}
	tree.Close()
	return path
}

func TestDoctorChecksTrees(t *testing.T) {
	path := treeFile(t)
	text, err := doctorTree(cli.FormatTable, path)
	if err != nil || !strings.Contains(text, ": whole\n") || !strings.Contains(text, "3MiB of 253MiB used") {
		t.Errorf("doctor --tree printed %s, %v", text, err)
	}
	asJSON, err := doctorTree(cli.FormatJSON, path)
	var all []At
	if jsonErr := json.Unmarshal([]byte(asJSON), &all); err != nil || jsonErr != nil || len(all) != 1 || len(all[0].Trees) != 1 || len(all[0].Trees[0].Layers) != 2 {
		t.Errorf("doctor --tree -o json printed %s, %v, %v", asJSON, err, jsonErr)
	}

	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, copy := range []int64{64 << 10, 512 << 10} { // the record of chunk 3, both copies
		if _, err := f.WriteAt([]byte{0x0f}, treecheck.FirstExtent+copy+3*64+20); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, err = doctorTree(cli.FormatTable, path)
	if err == nil || !strings.Contains(text, "DAMAGED") || !strings.Contains(text, "slot 3: both copies") ||
		!strings.Contains(text, "layer 1 (frozen, ") || !strings.Contains(text, "up to 63488 KiB may have been in these records and cannot be read, in chunk") {
		t.Errorf("doctor --tree of a damaged tree printed %s, %v", text, err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("doctor --tree changed the drive, %v", err)
	}
	if _, err := doctorTree(cli.FormatTable, path+"-is-not-there"); err == nil {
		t.Error("doctor --tree of nothing succeeds")
	}
}

func doctorTree(format cli.Format, path string) (string, error) {
	var text bytes.Buffer
	err := Check([]string{path}, &cli.Output{Format: format, Stdout: &text})
	return text.String(), err
}

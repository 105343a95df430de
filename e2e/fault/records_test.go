// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
)

// The places of both copies of an extent's table, as docs/tree-format.md has them.
const (
	treeExtent   = "weft tree extent"
	tableA       = 64 << 10
	tableB       = 512 << 10
	tableRecords = 1024
	recordBytes  = 64
)

// loseRecords spoils both copies of the records of trees on a drive whose agent is dead, all but each keep-th of them,
// and returns how many.
func (h *targetHost) loseRecords(t *testing.T, keep int) (lost int) {
	t.Helper()
	file := h.platter.file
	end, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	magic, table := make([]byte, len(treeExtent)), make([]byte, tableRecords*recordBytes)
	for at := int64(drive.FirstExtent); at+int64(block.ExtentSize) <= end.Size(); at += int64(block.ExtentSize) {
		if _, err := file.ReadAt(magic, at); err != nil || string(magic) != treeExtent {
			continue
		}
		if _, err := file.ReadAt(table, at+tableA); err != nil {
			t.Fatal(err)
		}
		for slot := range tableRecords {
			record := table[slot*recordBytes:][:recordBytes]
			if len(bytes.Trim(record, "\x00")) == 0 || slot%keep == 0 {
				continue
			}
			for _, copy := range []int64{tableA, tableB} {
				if _, err := file.WriteAt([]byte("spoiled"), at+copy+int64(slot*recordBytes)+8); err != nil {
					t.Fatal(err)
				}
			}
			lost++
		}
	}
	if lost == 0 {
		t.Fatal("there are no records to lose")
	}
	return lost
}

// A drive loses records of a tree in both copies while its target is down. What the other copy holds is never in doubt:
// the copy in the damaged tree is made again on a third target, whether the volume was written meanwhile or not, and
// then the other one is not needed any more.
func TestACopyThatHasLostRecordsIsMadeAgainElsewhere(t *testing.T) {
	for _, written := range []bool{false, true} {
		name := map[bool]string{false: "nothing was written meanwhile", true: "it is stale"}[written]
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			sparedAs(t, func(c *cluster) { withoutCaches(c); c.thin = true }, func(m *mirror, spare *targetHost) {
				m.put("c1", 1, everyUnit...)
				m.first.kill()
				if written {
					m.put("c1", 2, 0, 7)
				}
				m.did("%s has lost %d records", m.first.name, m.first.loseRecords(t, 2))
				m.first.start()
				began := time.Now()
				m.copiesOn(m.second, spare)
				if took := time.Since(began); took > 5*time.Minute {
					t.Errorf("that took %v", took)
				}
				m.sameCopies()
				m.second.kill()
				m.holds("c1", 1, 1, 2, 3)
				m.holds("c1", map[bool]uint64{false: 1, true: 2}[written], 0, 7)
			})
		})
	}
}

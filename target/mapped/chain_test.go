// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"testing"

	"weft.dev/weft/proto/block"
)

// What decides a grain below many records is remembered, so each change of the chunk has to be seen after a
// read. (In tests two records are many.)
func TestReadsBelowManyRecordsFollowEachChange(t *testing.T) {
	const grain, other = ChunkSize - GrainSize, 9 * GrainSize // the last one, and any
	tree, leg, _ := memory(t, 1<<30)
	reads := func(l *Leg, want uint64, after string) {
		t.Helper()
		for _, n := range []int{GrainSize, GrainSize, GrainSize + unit} { // the last goes on in the next chunk
			b := make([]byte, n)
			must(t, block.ReadAt(l, b, grain))
			if b = b[:unit]; want == 0 && !block.AllZero(b) || want != 0 && !bytes.Equal(b, tagged(want, unit/512)) {
				t.Fatalf("after %s a read of %d bytes finds %v, want %v", after, n, tags(b), want)
			}
		}
	}
	write := func(l *Leg, tag uint64, at int64) { must(t, block.WriteAt(l, tagged(tag, unit/512), at)) }

	must(t, tree.Create(id(3), 1<<30, nil))
	alone, err := tree.Leg(id(3))
	must(t, err)
	write(alone, 7, grain)
	write(leg, 1, grain)
	for n := range uint64(3) {
		must(t, tree.Freeze(id(1), id(10+n), nil))
		write(leg, 100+n, other)
	}
	reads(leg, 1, "three snapshots")
	write(leg, 2, grain)
	reads(leg, 2, "a write to a grain that the record lacked")

	must(t, tree.Freeze(id(1), id(20), nil))
	write(leg, 103, other)
	must(t, tree.Freeze(id(1), id(21), nil))
	reads(leg, 2, "two snapshots")
	write(leg, 3, grain)
	reads(leg, 3, "a write that made a record")

	must(t, tree.Clone(id(10), id(2), 1<<30, nil))
	clone, err := tree.Leg(id(2))
	must(t, err)
	must(t, tree.Freeze(id(2), id(22), nil))
	write(clone, 4, other) // its record comes before all others
	reads(leg, 3, "a write to a clone")
	reads(clone, 1, "a write to another grain")
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: grain, Len: GrainSize}))
	reads(leg, 0, "a discard")
	reads(clone, 1, "a discard elsewhere")
	write(clone, 6, grain)
	reads(clone, 6, "a write over what a snapshot has")
	reads(alone, 7, "all that to others")
	must(t, block.Do(alone, &block.IO{Op: block.OpDiscard, Off: grain, Len: GrainSize}))
	must(t, block.Flush(alone))
	for n := range int64(230) { // one of these takes the space that came free
		write(alone, 8, (n+2)*ChunkSize+grain)
	}
	reads(alone, 0, "a discard of all that the leg has")
	agree(t, tree)
}

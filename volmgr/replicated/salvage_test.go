// SPDX-License-Identifier: Apache-2.0

package replicated

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum/wal"
	"weft.dev/weft/volmgr/store"
)

// What is in a survivor's log alone is salvaged too: it may have been answered.
func TestASurvivorsLogIsSalvaged(t *testing.T) {
	ms, all := quorumOf(t, 1, record("a", "1"), record("b", "2"))
	m := all[0]
	if err := m.commit([]cluster.Record{record("c", "3")}); err != nil {
		t.Fatal(err)
	}
	ms.holdsSoon(m, record("a", "1"), record("b", "2"), record("c", "3"))
	if err := m.stop(); err != nil {
		t.Fatal(err)
	}
	log, state, err := wal.Open(wal.InDirectory(store.QuorumDir(m.dir)))
	if err != nil {
		t.Fatal(err)
	}
	last := state.Entries[len(state.Entries)-1]
	data := append(make([]byte, 16), store.EncodeRecords([]cluster.Record{record("d", "4"), {Key: "a"}})...) // after a proposal's tag
	if err := log.Save(nil, []wal.Entry{{Index: last.Index + 1, Term: last.Term, Data: data}}); err != nil {
		t.Fatal(err)
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it changes nothing
		got, err := Salvage(m.dir, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]cluster.Record{record("b", "2"), record("c", "3"), record("d", "4")}, got.Records); diff != "" {
			t.Errorf("salvaged records (-want +got):\n%s", diff)
		}
		if got.ID != m.id || got.Cluster != (block.ClusterID{UUID: block.UUID{1}}) || len(got.Members) != 1 {
			t.Errorf("salvaged is %v of %v, with %v", got.ID, got.Cluster, got.Members)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// kept is a volume's notes in the form of agents before package volume existed.
const kept = `{
	"epoch": 3,
	"grant": 5,
	"slots": {
		"0.1": {
			"leg": "01000100-0000-4000-8000-000000000000",
			"device": "259:7",
			"nqn": "nqn.2026-01.dev.weft:a",
			"nsid": 2,
			"uuid": "02000000-0000-4000-8000-000000000000",
			"dirty": 262144
		}
	},
	"clean": true,
	"gone": true,
	"over": {
		"why": "it was removed by force",
		"writes_lost": true
	}
}
`

// An agent that takes over a machine with attached volumes reads its predecessor's notes, and
// an agent after a downgrade reads its own.
func TestNotesOfAnEarlierAgentAreRead(t *testing.T) {
	m := kernel{runDir: t.TempDir()}
	id := block.VolumeID{UUID: block.UUIDFromRandom([16]byte{9})}
	if err := os.WriteFile(m.notesFile(id), []byte(kept), 0o600); err != nil {
		t.Fatal(err)
	}
	got, ok, err := m.notes(id)
	want := memory{
		Memory: volume.Memory{Epoch: 3, Grant: 5, Clean: true, Gone: true, Over: &volume.Over{Why: "it was removed by force", WritesLost: true}},
		Slots: map[string]slot{"0.1": {
			Leg: legID(0, 1), Device: "259:7", NQN: "nqn.2026-01.dev.weft:a", NSID: 2,
			UUID: block.UUIDFromRandom([16]byte{2}), Dirty: 256 * block.KiB,
		}},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(volume.Memory{}, "Records")); diff != "" || !ok || err != nil {
		t.Errorf("read: %v, %v (-want +got):\n%s", ok, err, diff)
	}
	got.Begin(time.Now()) // none of that is kept
	if err := m.note(id, &got); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(m.runDir, id.String()+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var before, after any
	if err := json.Unmarshal([]byte(kept), &before); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &after); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("written otherwise than before (-before +after):\n%s", diff)
	}
}

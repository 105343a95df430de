// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The records of shared volumes outlive this version, as all records do.
func TestRecordsOfSharedVolumesKeepTheirForm(t *testing.T) {
	s, _ := labelled(t, "detach db1 force", "comply", "create db2 size=1GiB stripes=1 copies=2", "comply", "host c2",
		"attach db2 c1 mode=SHARED_READ_ONLY", "attach db2 c2 mode=SHARED_READ_ONLY", "comply", "detach db2 force",
		"attach db2 c1 mode=SHARED_READ_ONLY")
	v := s.state.volumes.Get(s.state.idOf("db2"))
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(s.store[volumeKey(v.ID)], &fields); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{"attachment": string(fields["attachment"]), "shared": string(fields["shared"]), "lingering": string(fields["lingering"])}
	host := `{"NQN":"nqn.2014-08.org.nvmexpress:uuid:15aac89c-083d-472e-a4c2-d617e96900b5","ID":"15aac89c-083d-472e-a4c2-d617e96900b5"}`
	want := map[string]string{
		"attachment": "",
		"shared": `[{"node":"c1","host":` + host + `,"mode":"SHARED_READ_ONLY","epoch":3,"state":"GRANTING","boot_id":"c1-boot-1",` +
			`"joined_at":JOINED,"since":"2026-11-21T12:00:00Z"}]`,
		"lingering": `[{"node":"c1","boot_id":"c1-boot-1","epoch":1,"mode":"SHARED_READ_ONLY"},{"node":"c2","boot_id":"c2-boot-1","epoch":1,"mode":"SHARED_READ_ONLY"}]`,
	}
	generation, _ := json.Marshal(v.Shared[0].JoinedAt)
	want["shared"] = strings.Replace(want["shared"], "JOINED", string(generation), 1)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("record of a shared volume (-want +got):\n%s", diff)
	}
	loadStore(t, s.store)
}

// Load checks the record of a shared volume.
func TestASharedVolumeThatCanNotBeIsNotLoaded(t *testing.T) {
	s, _ := labelled(t, "detach db1 force", "comply", "create db2 size=1GiB stripes=1 copies=2", "comply",
		"attach db2 c1 mode=SHARED_READ_ONLY", "comply")
	good := *s.state.volumes.Get(s.state.idOf("db2"))
	for name, spoil := range map[string]func(*Volume){
		"a mirrored volume shared for writing": func(v *Volume) { v.Shared[0].Mode = AttachSharedBlock },
		"one of another epoch":                 func(v *Volume) { v.Shared[0].Epoch-- },
		"one that is exclusive":                func(v *Volume) { v.Shared[0].Mode = AttachExclusive },
		"shared, and given to one alone":       func(v *Volume) { a := v.Shared[0]; v.Attachment = &a },
	} {
		v := good.clone()
		spoil(v)
		if err := v.check(); err == nil {
			t.Errorf("%s: check says nothing", name)
		}
	}
	if err := good.check(); err != nil {
		t.Errorf("check of what is right: %v", err)
	}
}

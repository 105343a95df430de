// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

func TestADeviceKeepsItsOtherNameUntilItsVolumeIsDetached(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "names")
	v, beside := block.VolumeID{UUID: block.UUID{0x0b, 0x5f, 0x0a, 0x3e, 1}}, block.VolumeID{UUID: block.UUID{2}}
	either, other := []block.VolumeName{"db1", "db1+0b5f0a3e"}, []block.VolumeName{"db1+0b5f0a3e"}
	of := func(when string, want []block.VolumeName) {
		t.Helper()
		if got := NewNames(dir).Of(v, "db1"); !slices.Equal(got, want) { // as an agent that has just started
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	names := NewNames(dir)
	chosen := func(name block.VolumeName) {
		t.Helper()
		if err := names.Chosen(v, "db1", name); err != nil {
			t.Fatal(err)
		}
	}
	of("before it has one", either)
	chosen("db1")
	of("once it has the volume's", either)
	chosen("db1+0b5f0a3e")
	of("once it has another", other)
	chosen("db1+0b5f0a3e")
	if err := names.Drop(beside); err != nil {
		t.Fatal(err)
	}
	of("once another volume was detached", other)
	if err := names.Drop(v); err != nil {
		t.Fatal(err)
	}
	of("once the volume was detached", either)
}

func TestANameThatCannotBeNotedIsAnError(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "names")
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	names, v := NewNames(dir), block.VolumeID{UUID: block.UUID{1}}
	if names.Chosen(v, "db1", "db1+01000000") == nil {
		t.Error("Chosen of a name that cannot be noted = nil, want an error")
	}
	if got, want := names.Of(v, "db1"), []block.VolumeName{"db1+01000000"}; !slices.Equal(got, want) {
		t.Errorf("of a directory that cannot be read: %v, want %v: it may have had that name", got, want)
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestUdevLearnsTheNameOfAVolume(t *testing.T) {
	s := system{dev: t.TempDir(), sys: t.TempDir()}
	uevent := filepath.Join(s.sys, "block/loop3/uevent")
	if err := errors.Join(os.MkdirAll(filepath.Dir(uevent), 0o755), os.WriteFile(uevent, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := s.expose("db1", "loop3"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(s.dev, ".weft/loop3")
	for file, want := range map[string]string{file: "WEFT_VOLUME=db1\n", uevent: "change"} {
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s holds %q, %v; want %q", file, got, err, want)
		}
	}
	if err := errors.Join(os.WriteFile(uevent, nil, 0o644), s.hide("db1", "loop3")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("once the name is hidden, %s: %v, want that it is gone", file, err)
	}
	if got, err := os.ReadFile(uevent); err != nil || string(got) != "change" {
		t.Errorf("udev was told %q, %v; want change", got, err)
	}
}

func TestAVolumeIsExposedWithoutUdev(t *testing.T) {
	s := system{dev: t.TempDir(), sys: t.TempDir()}
	if err := errors.Join(s.expose("db1", "loop3"), s.hide("db1", "loop3")); err != nil {
		t.Error(err)
	}
}

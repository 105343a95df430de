// SPDX-License-Identifier: Apache-2.0

package kmod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestOnlyMissingModulesAreLoaded(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, NvmeTCP.Sign), 0o755); err != nil {
		t.Fatal(err)
	}
	var loaded []string
	l := Loader{Root: root, Modprobe: func(_ context.Context, name string) error {
		loaded = append(loaded, name)
		return nil
	}}
	if err := l.Need(t.Context(), NvmeTCP, Loop, DMMirror); err != nil {
		t.Errorf("Need = %v, want nil", err)
	}
	if want := []string{"loop", "dm-mirror"}; !slices.Equal(loaded, want) {
		t.Errorf("Need loaded %v, want %v", loaded, want)
	}
}

func TestEveryModuleThatCanNotBeHadIsNamed(t *testing.T) {
	absent := errors.New("not in the kernel's tree")
	l := Loader{Root: t.TempDir(), Modprobe: func(context.Context, string) error { return absent }}
	err := l.Need(t.Context(), NvmetTCP, Loop)
	if !errors.Is(err, absent) || !strings.Contains(err.Error(), "nvmet-tcp") || !strings.Contains(err.Error(), "loop") {
		t.Errorf("Need = %v, want it to name both modules and the cause", err)
	}
}

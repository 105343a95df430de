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

func TestLookTellsWhatCouldBeLoaded(t *testing.T) {
	root := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	l := Loader{Root: root}
	if got := l.StateOf(NBD); got != NoModules {
		t.Errorf("StateOf(nbd) = %v in an empty tree, want NoModules", got)
	}
	put("proc/sys/kernel/osrelease", "6.1.0-test\n")
	put("lib/modules/6.1.0-test/modules.dep", "kernel/drivers/block/nbd.ko.xz:\nkernel/drivers/nvme/host/nvme-tcp.ko: kernel/x.ko\n")
	put("lib/modules/6.1.0-test/modules.builtin", "kernel/drivers/md/dm-mod.ko\n")
	put("dev/fuse", "")
	for m, want := range map[Module]State{NBD: Loadable, NvmeTCP: Loadable, DM: Present, FUSE: Present, UBLK: NotBuilt} {
		if got := l.StateOf(m); got != want {
			t.Errorf("StateOf(%s) = %v, want %v", m.Name, got, want)
		}
	}
}

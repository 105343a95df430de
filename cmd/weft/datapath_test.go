// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/initiator/blockdev"
)

func TestTheKernelServesWhereItCan(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, kmod.Nvmet.Sign), 0o755); err != nil {
		t.Fatal(err)
	}
	can := kmod.Loader{Root: root}
	hidden := kmod.Loader{Root: t.TempDir(), Modprobe: func(context.Context, string) error { return nil }}
	cannot := kmod.Loader{Root: t.TempDir(), Modprobe: func(context.Context, string) error { return errors.New("no such module") }}
	for _, c := range []struct {
		wish, user string
		loader     kmod.Loader
		choice     string // empty: an error
		said       string
	}{
		{"auto", "", can, "kernel", "the kernel supports it"},
		{"auto", "", cannot, "user", "nvmet: no such module"},
		{"auto", "", hidden, "user", "nvmet is not there"},
		{"auto", "files", can, "user", "files"},
		{"user", "", can, "user", "--datapath"},
		{"kernel", "", can, "kernel", "--datapath"},
		{"kernel", "", cannot, "", "nvmet: no such module"},
		{"kernel", "files", can, "", "files"},
		{"spdk", "", can, "", "must be auto, kernel or user"},
	} {
		var said bytes.Buffer
		log := slog.New(slog.NewTextHandler(&said, nil))
		choice, err := chooseDatapath(t.Context(), c.wish, c.user, log, c.loader, kmod.Nvmet)
		if err != nil {
			said.WriteString(err.Error())
		}
		if choice != c.choice || (err == nil) != (c.choice != "") || !strings.Contains(said.String(), c.said) {
			t.Errorf("chooseDatapath(%q, %q) = %q, %v, and said %q; want %q, and %q said", c.wish, c.user, choice, err, said.String(), c.choice, c.said)
		}
	}
}

func TestUserSpaceLoadsWhatItsDevicesNeed(t *testing.T) {
	loaded := map[string]bool{}
	l := kmod.Loader{Root: t.TempDir(), Modprobe: func(_ context.Context, name string) error {
		loaded[name] = true
		return nil
	}}
	probe := func() []blockdev.Ability {
		a := blockdev.Ability{Kind: blockdev.FUSE, Reason: "not loaded"}
		switch {
		case !loaded["fuse"]:
			a.Modules = []string{"fuse"}
		case !loaded["loop"]:
			a.Modules = []string{"loop"}
		default:
			a.Usable = true
		}
		return []blockdev.Ability{{Kind: blockdev.UBLK, Reason: "not built", Fix: "another kernel"}, a}
	}
	if err := needDevice(t.Context(), blockdev.UBLK, l, probe); err == nil || !strings.Contains(err.Error(), "ublk: not built (another kernel)") || strings.Contains(err.Error(), "fuse") {
		t.Errorf("needDevice(ublk) = %v, want what is missing for ublk, and nothing else", err)
	}
	if err := needDevice(t.Context(), blockdev.Auto, l, probe); err != nil {
		t.Errorf("needDevice(auto) = %v after loading %v", err, loaded)
	}
}

func TestUserSpaceWithoutAWayToMakeDevicesSaysWhatToDo(t *testing.T) {
	l := kmod.Loader{Root: t.TempDir(), Modprobe: func(context.Context, string) error { return errors.New("not permitted") }}
	probe := func() []blockdev.Ability {
		return []blockdev.Ability{
			{Kind: blockdev.NBD, Reason: "not loaded", Fix: "modprobe nbd", Modules: []string{"nbd"}},
			{Kind: blockdev.FUSE, Reason: "for root only", Fix: "run as root"},
		}
	}
	err := needDevice(t.Context(), blockdev.Auto, l, probe)
	for _, want := range []string{"nbd: not loaded (modprobe nbd)", "fuse: for root only (run as root)", "weft doctor"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("needDevice = %v, want %q in it", err, want)
		}
	}
}

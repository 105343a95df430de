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
		{"auto", "", can, "kernel", "has what it takes"},
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

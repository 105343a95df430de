// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{"512": 512, "4KiB": 4096, "2GiB": 2 << 30, "1TiB": 1 << 40} {
		if got, err := parseSize(s); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v, want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "0", "-1GiB", "1GB", "9999999TiB", "GiB"} {
		if got, err := parseSize(s); err == nil {
			t.Errorf("parseSize(%q) = %d, want an error", s, got)
		}
	}
}

func TestModulesDepListsWhatAModuleNeedsBeforeIt(t *testing.T) {
	all := map[string]module{
		"a": {path: "k/a.ko", depends: []string{"b", "c"}, aliases: []string{"fs-a"}},
		"b": {path: "k/b.ko", depends: []string{"c"}},
		"c": {path: "k/c.ko", depends: []string{"built_in"}},
	}
	want := "k/a.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko:\n"
	if diff := cmp.Diff(want, modulesDep(all)); diff != "" {
		t.Errorf("modulesDep (-want +got):\n%s", diff)
	}
	if got, want := modulesAlias(all), "alias fs-a a\n"; got != want {
		t.Errorf("modulesAlias = %q, want %q", got, want)
	}
}

func TestKernelPayloadIsCheckedBeforeItIsRead(t *testing.T) {
	image := make([]byte, 4096)
	image[0x1f1] = 1
	copy(image[0x202:], "HdrS\x0f\x02")
	binary.LittleEndian.PutUint32(image[0x248:], 16)
	binary.LittleEndian.PutUint32(image[0x24c:], 32)
	copy(image[1024+16:], "payload")
	got, err := kernelPayload(image)
	if err != nil || len(got) != 32 || !strings.HasPrefix(string(got), "payload") {
		t.Errorf("kernelPayload = %q, %v", got, err)
	}
	binary.LittleEndian.PutUint32(image[0x24c:], 1<<30)
	for name, b := range map[string][]byte{"short": image[:100], "beyond the end": image, "no kernel": make([]byte, 4096)} {
		if _, err := kernelPayload(b); err == nil {
			t.Errorf("kernelPayload(%s) = nil error", name)
		}
	}
}

func TestWriteWholeLeavesNothingHalfWritten(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "image")
	broken := errors.New("broken")
	err := writeWhole(path, func(f *os.File) error {
		_, _ = f.WriteString("half")
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("writeWhole = %v, want %v", err, broken)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("writeWhole left %v, %v", left, err)
	}
}

func TestConsoleTellsTroubleFromTalk(t *testing.T) {
	lines := map[string]bool{
		"[    1.0] EXT4-fs (vda): mounted filesystem":                    false,
		"[    1.0] INFO: task dd:12 blocked for more than 120 seconds.":  false,
		"[    1.0] kernel BUG at mm/usercopy.c:101!":                     true,
		"[    1.0] BUG: kernel NULL pointer dereference, address: 0":     true,
		"[    1.0] Oops: 0000 [#1] PREEMPT SMP":                          true,
		"[    1.0] WARNING: CPU: 0 PID: 1 at block/genhd.c:1 x+0x0/0x10": true,
		"[    1.0] Kernel panic - not syncing: Fatal exception":          true,
		"weft-init: the server has ended":                                true,
	}
	for line, want := range lines {
		got := false
		c := &console{trouble: func(string) { got = true }}
		c.add(line)
		if got != want {
			t.Errorf("trouble(%q) = %v, want %v", line, got, want)
		}
	}
}

func TestTestEventsBecomeResults(t *testing.T) {
	events := `{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"hello\n"}
{"Action":"skip","Test":"TestA/sub"}
{"Action":"pass","Test":"TestA"}
{"Action":"run","Test":"TestB"}
{"Action":"fail","Test":"TestB"}
{"Action":"run","Test":"TestC"}
{"Action":"fail"}
`
	results, err := readEvents(strings.NewReader(events))
	if err != nil {
		t.Fatal(err)
	}
	type seen struct {
		Test, Action string
		Skips        []string
	}
	var got []seen
	for _, r := range results {
		got = append(got, seen{r.test, r.action, r.skips})
	}
	want := []seen{{"TestA", "pass", []string{"TestA/sub"}}, {"TestB", "fail", nil}, {"TestC", "", nil}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("readEvents (-want +got):\n%s", diff)
	}
	if _, err := readEvents(strings.NewReader("{")); err == nil {
		t.Error("readEvents of a broken line = nil error")
	}
	s := Suite{MaySkip: map[string]string{"TestA/.*": "no such device"}}
	if _, ok := s.maySkip("TestA/sub"); !ok {
		t.Error("maySkip(TestA/sub) = false")
	}
	if _, ok := s.maySkip("XTestA/sub"); ok {
		t.Error("maySkip(XTestA/sub) = true")
	}
}

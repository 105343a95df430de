// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// device creates a file on a file system that supports O_DIRECT.
func device(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "device")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

// writeSome runs the writer and returns the acknowledged writes in verify's input format.
func writeSome(t *testing.T, path string) (acks string) {
	t.Helper()
	var out strings.Builder
	if err := run(t.Context(), []string{"write", "-device", path, "-span", "1MiB", "-for", "100ms", "-rate", "2000"}, nil, &out); err != nil {
		t.Skipf("no O_DIRECT on the file system of the test's directory: %v", err)
	}
	for line := range strings.Lines(out.String()) {
		var kind string
		var block, seq uint64
		fmt.Sscan(line, &kind, &block, &seq)
		if kind != "A" {
			t.Fatalf("writer printed %q", line)
		}
		acks += fmt.Sprintln(block, seq)
	}
	if acks == "" {
		t.Fatal("no write was acknowledged")
	}
	return acks
}

func verifyAll(t *testing.T, path, acks string) (string, error) {
	t.Helper()
	var out strings.Builder
	err := run(t.Context(), []string{"verify", "-device", path, "-span", "1MiB"}, strings.NewReader(acks), &out)
	return out.String(), err
}

func TestVerifyFindsWhatWasWritten(t *testing.T) {
	path := device(t, 1<<20)
	acks := writeSome(t, path)
	if out, err := verifyAll(t, path, acks); err != nil {
		t.Errorf("verify = %v\n%s", err, out)
	}
}

func TestVerifyNoticesALostWrite(t *testing.T) {
	path := device(t, 1<<20)
	acks := writeSome(t, path)
	acks += fmt.Sprintln(3, 1<<40)
	if out, err := verifyAll(t, path, acks); err == nil {
		t.Errorf("verify of a write that never was = ok\n%s", out)
	}
}

func TestVerifyNoticesAWriteThatCameLater(t *testing.T) {
	path := device(t, 1<<20)
	acks := writeSome(t, path)
	for newest, want := range map[string]bool{"1": false, "1000000": true} {
		var out strings.Builder
		if err := run(t.Context(), []string{"verify", "-device", path, "-span", "1MiB", "-newest", newest}, strings.NewReader(acks), &out); (err == nil) != want {
			t.Errorf("verify up to write %s = %v\n%s", newest, err, out.String())
		}
	}
}

func TestVerifyNoticesATornOrForeignBlock(t *testing.T) {
	for name, damage := range map[string]func([]byte){
		"torn":       func(b []byte) { clear(b[512:1024]) },
		"foreign":    func(b []byte) { copy(b, "not ours at all") },
		"misplaced":  func(b []byte) { fill(b, 99, 1) },
		"blanked":    func(b []byte) { clear(b) },
		"older":      func(b []byte) { fill(b, 7, 1) },
		"whole, new": func(b []byte) { fill(b, 7, 6) },
	} {
		path := device(t, 1<<20)
		b := make([]byte, blockSize)
		fill(b, 7, 5)
		damage(b)
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(b, 7*blockSize); err != nil {
			t.Fatal(err)
		}
		f.Close()
		out, err := verifyAll(t, path, "7 5\n")
		if strings.Contains(out+fmt.Sprint(err), "invalid argument") {
			t.Skip("no O_DIRECT on the file system of the test's directory")
		}
		if good := name == "whole, new"; good != (err == nil) {
			t.Errorf("verify of a %s block = %v\n%s", name, err, out)
		}
	}
}

func TestRateIsKept(t *testing.T) {
	path := device(t, 1<<20)
	start := time.Now()
	acks := writeSome(t, path)
	if n := strings.Count(acks, "\n"); n > int(2*2000*time.Since(start).Seconds())+16 {
		t.Errorf("%d writes in %v at a rate of 2000 per second", n, time.Since(start))
	}
}

func TestReadsBesideWritesFindWhatTheyMay(t *testing.T) {
	path := device(t, 1<<20)
	var out strings.Builder
	if err := run(t.Context(), []string{"write", "-device", path, "-span", "1MiB", "-for", "300ms", "-rate", "2000", "-reads", "2000"}, nil, &out); err != nil {
		t.Skipf("no O_DIRECT on the file system of the test's directory: %v", err)
	}
	found := map[string]int{}
	for line := range strings.Lines(out.String()) {
		found[line[:1]]++
		if line[0] == 'E' {
			t.Error(line)
		}
	}
	if found["R"] == 0 || found["A"] == 0 {
		t.Errorf("%d reads and %d writes, want some of both", found["R"], found["A"])
	}
}

// Write 10 of block 7 is acknowledged, 12 has begun, and earlier writers ended before 5.
func TestAReadIsJudged(t *testing.T) {
	for _, c := range []struct {
		name  string
		block func([]byte)
		begun uint64 // when the read began
		want  string
	}{
		{"of the acknowledged write", func(b []byte) { fill(b, 7, 10) }, 12, "R 7 10 "},
		{"of a write under way", func(b []byte) { fill(b, 7, 12) }, 12, "R 7 12 "},
		{"of an older write", func(b []byte) { fill(b, 7, 9) }, 12, "E 7 9 0 0 read: stale: "},
		{"of an earlier writer's block", func(b []byte) { fill(b, 7, 4) }, 12, "E 7 4 0 0 read: stale: "},
		{"of a blank block", func(b []byte) { clear(b) }, 12, "E 7 0 0 0 read: stale: "},
		{"of a write that has not begun", func(b []byte) { fill(b, 7, 13) }, 12, "E 7 13 0 0 read: holds write 13, and none after 12 "},
		{"of a torn block", func(b []byte) { fill(b, 7, 10); clear(b[512:1024]) }, 12, "E 7 0 0 0 read: crc "},
		{"of a block that is torn by a write", func(b []byte) { fill(b, 7, 10); clear(b[512:1024]) }, 10, ""},
	} {
		var out strings.Builder
		w := &writer{out: bufio.NewWriter(&out), history: newHistory(5)}
		w.begun[7] = 12
		w.learn(7, 10)
		b := make([]byte, blockSize)
		c.block(b)
		w.judge(reading{block: 7, oldest: 10, begun: c.begun}, b, time.Unix(0, 0), time.Unix(0, 0), nil)
		w.out.Flush()
		if got := out.String(); !strings.HasPrefix(got, c.want) || c.want == "" && got != "" {
			t.Errorf("a read %s says %q, want %q", c.name, got, c.want)
		}
	}
}

// What a read has found, later ones must find, too. Of a block that this writer has not written, it knows that an
// earlier writer's data is older.
func TestReadsDoNotGoBack(t *testing.T) {
	var out strings.Builder
	w := &writer{rand: rand.New(rand.NewPCG(1, 0)), out: bufio.NewWriter(&out), history: newHistory(5)}
	b := make([]byte, blockSize)
	for _, seq := range []uint64{4, 3, 5} {
		fill(b, 0, seq)
		w.judge(w.look(1), b, time.Unix(0, 0), time.Unix(0, 0), nil)
	}
	w.out.Flush()
	want := []string{"R 0 4 ", "E 0 3 ", "E 0 5 "}
	for i, line := range strings.SplitN(strings.TrimSpace(out.String()), "\n", len(want)) {
		if !strings.HasPrefix(line, want[i]) {
			t.Errorf("read %d says %q, want %q", i, line, want[i])
		}
	}
}

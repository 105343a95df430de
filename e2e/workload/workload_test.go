// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
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

// What was discarded may be blank until it is written again, for reads beside the writes and afterwards.
func TestDiscardedBlocksMayBeBlank(t *testing.T) {
	path := device(t, 1<<20)
	var out strings.Builder
	if err := run(t.Context(), []string{"write", "-device", path, "-span", "1MiB", "-for", "500ms", "-rate", "2000", "-reads", "2000", "-discards", "400"}, nil, &out); err != nil {
		t.Skipf("no O_DIRECT on the file system of the test's directory: %v", err)
	}
	acks, blank, found := map[uint64]uint64{}, map[uint64]bool{}, map[string]int{}
	for line := range strings.Lines(out.String()) {
		found[line[:1]]++
		var block, seq uint64
		switch n, _ := fmt.Sscanf(line[1:], "%d %d", &block, &seq); {
		case line[0] == 'E':
			t.Error(line)
		case line[0] == 'A' && n == 2:
			acks[block], blank[block] = max(acks[block], seq), false
		case line[0] == 'd':
			if blank[block] = true; block < 192 {
				t.Errorf("block %d is discarded, which is not in the last quarter", block)
			}
		}
	}
	if found["D"] == 0 || found["R"] == 0 || found["d"] != grain*found["D"] {
		t.Fatalf("lines by kind: %v", found)
	}
	said := func(mayBe bool) (in string) {
		for block, seq := range acks {
			in += fmt.Sprint(block, " ", seq)
			if mayBe && blank[block] {
				in += " blank"
			}
			in += "\n"
		}
		return in
	}
	if out, err := verifyAll(t, path, said(true)); err != nil {
		t.Errorf("verify with what was discarded = %v\n%s", err, out)
	}
	if out, err := verifyAll(t, path, said(false)); err == nil {
		t.Errorf("verify as if nothing was discarded = ok\n%s", out)
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

// Write 10 is acknowledged when the read begins. Write 11 begins before the read does, while it lasts, or not until
// it has ended. Earlier writers ended before 5.
func TestAReadIsJudged(t *testing.T) {
	holds := func(seq uint64) func([]byte) { return func(b []byte) { fill(b, 0, seq) } }
	torn := func(b []byte) { fill(b, 0, 10); clear(b[512:1024]) }
	for _, c := range []struct {
		name  string
		block func([]byte)
		next  string // when write 11 begins
		want  string
	}{
		{"of the acknowledged write", holds(10), "after", "R 0 10 "},
		{"of a write under way", holds(11), "before", "R 0 11 "},
		{"of a write that began meanwhile", holds(11), "during", "R 0 11 "},
		{"of a write that has not begun", holds(11), "after", "E 0 11 0 0 read: holds write 11, and none after 10 "},
		{"of an older write", holds(9), "during", "E 0 9 0 0 read: stale: "},
		{"of an earlier writer's block", holds(4), "after", "E 0 4 0 0 read: stale: "},
		{"of a blank block", func(b []byte) { clear(b) }, "before", "E 0 0 0 0 read: stale: "},
		{"of a torn block", torn, "after", "E 0 0 0 0 read: crc "},
		{"of a block that a write under way tears", torn, "before", ""},
		{"of a block that a write tears meanwhile", torn, "during", ""},
	} {
		var out strings.Builder
		w := &writer{rand: rand.New(rand.NewPCG(1, 0)), next: 10, busy: map[uint64]bool{}, out: bufio.NewWriter(io.Discard), history: newHistory(5)}
		block, seq := w.take(1)
		w.done(block, seq, time.Time{}, time.Time{}, nil)
		if c.next == "before" {
			w.take(1)
		}
		r := w.look(1)
		if c.next == "during" {
			w.take(1)
		}
		b := make([]byte, blockSize)
		c.block(b)
		w.out = bufio.NewWriter(&out)
		w.judge(r, b, time.Unix(0, 0), time.Unix(0, 0), nil)
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
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

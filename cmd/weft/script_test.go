// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"weft.dev/weft/e2e/promtool"
	"weft.dev/weft/proto/nvmetcp/namespace"
)

// The scripts in testdata are the promise that the program makes. They run the program itself.
// weft-next is a weft of another version, to which tests upgrade.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"weft": main, "weft-next": func() { release = "test"; main() }})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			// No process listens at port 1.
			env.Setenv("WEFT_MANAGER", "127.0.0.1:1")
			env.Setenv("WEFT_INSECURE_PLAIN_TCP", "1") // closed.txt is about the rest
			return errors.Join(freePort(env, "PORT"), freePort(env, "METRICS"), freePort(env, "THIRD"), freePort(env, "FOURTH"))
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"cluster": startCluster, "eventually": eventually, "exits": exits, "keep": keep, "scrape": scrape, "awaits": awaits, "write": write, "discard": discard, "same": same,
			"unpack": unpackKept, "includes": includes, "conventional": conventional, "label-version": labelVersion,
		},
	})
}

// exits runs weft and checks its exit code: "exits 3 volume describe db1".
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE ARGUMENTS-OF-WEFT...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec("weft", args[1:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("weft exits with %d, want %d", got, want)
	}
}

// eventually runs weft until its output on stdout matches: "eventually ready drive list".
func eventually(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: eventually PATTERN ARGUMENTS-OF-WEFT...")
	}
	pattern := regexp.MustCompile("(?m)" + args[0])
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := ts.Exec("weft", args[1:]...)
		if err == nil && pattern.MatchString(ts.ReadFile("stdout")) {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("stdout did not come to match %q (%v)", args[0], err)
		}
	}
}

// write writes 4 KiB of a letter, or of zeroes, to a volume of weft dev: "write DEVICE LETTER|0 OFFSET...".
func write(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: write DEVICE LETTER OFFSET...")
	}
	n, err := namespace.Open(context.Background(), args[0])
	ts.Check(err)
	defer n.Close()
	content := bytes.Repeat([]byte(args[1]), 4096)
	if args[1] == "0" {
		clear(content)
	}
	for _, at := range args[2:] {
		off, err := strconv.ParseInt(at, 10, 64)
		ts.Check(err)
		_, err = n.WriteAt(content, off)
		ts.Check(err)
	}
	ts.Check(n.Sync())
}

// discard discards a range of a volume of weft dev: "discard DEVICE OFFSET BYTES".
func discard(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: discard DEVICE OFFSET BYTES")
	}
	n, err := namespace.Open(context.Background(), args[0])
	ts.Check(err)
	defer n.Close()
	off, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	length, err := strconv.ParseInt(args[2], 10, 64)
	ts.Check(err)
	ts.Check(n.Zero(off, length))
	ts.Check(n.Sync())
}

// same checks that the first bytes of two devices of weft dev are the same, or are not: "[!] same DEVICE DEVICE BYTES".
func same(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: same DEVICE DEVICE BYTES")
	}
	size, err := strconv.Atoi(args[2])
	ts.Check(err)
	one, other := contentOf(ts, args[0], size), contentOf(ts, args[1], size)
	for at := range one {
		if !neg && one[at] != other[at] {
			ts.Fatalf("at %d one holds %q, and the other %q", at, one[at], other[at])
		}
	}
	if neg && bytes.Equal(one, other) {
		ts.Fatalf("they hold the same")
	}
}

// contentOf is what a device of weft dev holds.
func contentOf(ts *testscript.TestScript, device string, size int) []byte {
	n, err := namespace.Open(context.Background(), device)
	ts.Check(err)
	defer n.Close()
	all := make([]byte, size)
	for at := 0; at < size; at += 1 << 20 {
		_, err := n.ReadAt(all[at:min(at+1<<20, size)], int64(at))
		ts.Check(err)
	}
	return all
}

// awaits waits for a file, or until it has a line that matches: "awaits FILE [PATTERN]".
func awaits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 || len(args) > 2 {
		ts.Fatalf("usage: awaits FILE [PATTERN]")
	}
	pattern := regexp.MustCompile("(?m)" + strings.Join(args[1:], ""))
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		text, err := os.ReadFile(ts.MkAbs(args[0]))
		if err == nil && pattern.Match(text) {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%s did not come to match %q (%v):\n%s", args[0], pattern, err, text)
		}
	}
}

// conventional checks that promtool finds no fault with the metrics that were scraped last.
func conventional(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) > 0 {
		ts.Fatalf("usage: conventional")
	}
	tool, err := promtool.Path()
	if err != nil && os.Getenv("CI") != "true" {
		ts.Logf("not checked: %v", err)
		return
	}
	ts.Check(err)
	ts.Check(promtool.Lint(tool, ts.ReadFile("stdout")))
}

// keep stores the last output in a variable: "keep DRIVE".
func keep(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: keep VARIABLE")
	}
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
}

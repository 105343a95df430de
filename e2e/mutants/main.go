// SPDX-License-Identifier: Apache-2.0

// Mutants removes guards from the code, one at a time, and requires that a test fails each
// time:
//
//	list/*.txtar ──► the file without the guard ──► go test -overlay ──► a test must fail
//
// The tree itself is not changed. It is an error if no test notices a mutation, if the lines
// of a mutation are no longer in the code, or if it does not compile. Whoever writes a guard
// adds the mutation that removes it.
//
//	go run ./e2e/mutants -quick          what CI runs
//	go run ./e2e/mutants                 all of them
//	go run ./e2e/mutants -run flush      those whose name matches
//	go run ./e2e/mutants -faults 1200    those marked "whole" against the fault suite of a whole cluster:
//	                                     random faults, or the test that the mark names
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

func main() {
	var o options
	flag.BoolVar(&o.quick, "quick", false, "only those that CI runs")
	flag.StringVar(&o.run, "run", ".", "only those whose name matches this regular expression")
	flag.IntVar(&o.faults, "faults", 0, "try those marked whole on the fault suite with this many faults, instead of on their own tests")
	flag.Float64Var(&o.share, "share", 0.75, "with -faults: the part of them that must be noticed")
	flag.IntVar(&o.jobs, "j", 2, "how many at a time")
	flag.DurationVar(&o.timeout, "timeout", 3*time.Minute, "for one of them; a test that then still runs has noticed")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := runAll(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

type options struct {
	quick   bool
	run     string
	faults  int
	share   float64
	jobs    int
	timeout time.Duration
}

func runAll(ctx context.Context, o options) error {
	all, err := readAll(filepath.Join("e2e", "mutants", "list"))
	if err != nil {
		return err
	}
	byName := map[string]*mutation{}
	for _, m := range all {
		byName[m.name] = m
	}
	name, err := regexp.Compile(o.run)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	all = slices.DeleteFunc(all, func(m *mutation) bool {
		return o.quick && !m.quick || o.faults > 0 && !m.whole || !name.MatchString(m.name)
	})
	if len(all) == 0 {
		return errors.New("no mutation is chosen")
	}
	dir, err := os.MkdirTemp("", "weft-mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	outcomes := make([]outcome, len(all))
	var group errgroup.Group
	group.SetLimit(o.jobs)
	for i, m := range all {
		group.Go(func() error {
			began := time.Now()
			outcomes[i] = m.try(ctx, filepath.Join(dir, m.name), byName, o)
			fmt.Printf("%-10s %6.1fs  %s: %s\n", outcomes[i].verdict, time.Since(began).Seconds(), m.name, outcomes[i].why)
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return judge(outcomes, o)
}

// judge decides whether enough mutations were noticed: all of them, or on the fault suite a
// share.
func judge(outcomes []outcome, o options) error {
	count := map[verdict]int{}
	for _, x := range outcomes {
		count[x.verdict]++
	}
	fmt.Printf("mutants: %d tried, %d noticed, %d survived, %d could not be tried\n",
		len(outcomes), count[noticed], count[survived], count[broken])
	need := len(outcomes)
	if o.faults > 0 {
		need = int(o.share*float64(len(outcomes)) + 0.999)
	}
	switch {
	case count[broken] > 0:
		return fmt.Errorf("%d mutations do not fit the code", count[broken])
	case count[noticed] < need:
		return fmt.Errorf("%d of %d were noticed, want %d", count[noticed], len(outcomes), need)
	}
	return nil
}

type verdict string

const (
	noticed  verdict = "noticed"
	survived verdict = "SURVIVED"
	broken   verdict = "BROKEN" // it does not apply, or does not compile
)

type outcome struct {
	verdict verdict
	why     string
}

// try runs the tests over the mutated files, which it writes to dir.
func (m *mutation) try(ctx context.Context, dir string, byName map[string]*mutation, o options) outcome {
	together := []*mutation{m}
	for _, name := range m.with {
		if o.faults > 0 {
			together = append(together, byName[name])
		}
	}
	overlay, err := overlayOf(together, dir)
	if err != nil {
		return outcome{broken, err.Error()}
	}
	found := runTests(ctx, overlay, o, m.tests(o))
	if found.verdict != noticed || o.faults > 0 || !m.traced() {
		return found
	}
	if again := runTests(ctx, overlay, o, []string{"-run", "^TestKeptTracesBreakNothing$/^" + m.name + `\.txt$`, "./e2e/explore"}); again.verdict != noticed {
		return outcome{again.verdict, "its trace in e2e/explore breaks nothing: " + again.why}
	}
	return found
}

// runTests runs tests over the mutated files.
func runTests(ctx context.Context, overlay string, o options, tests []string) outcome {
	arguments := append([]string{"test", "-count=1", "-failfast", "-overlay", overlay, "-timeout", o.timeout.String()}, tests...)
	const toCompile = 10 * time.Minute // on a machine with much else to do
	ctx, cancel := context.WithTimeout(ctx, o.timeout+toCompile)
	defer cancel()
	command := exec.CommandContext(ctx, "go", arguments...)
	command.WaitDelay = 10 * time.Second
	out, err := command.CombinedOutput()
	return read(string(out), err)
}

// traces is where the traces are kept that show what happens without a guard.
const traces = "e2e/explore/testdata"

// traced reports whether a trace of the mutation is kept: its steps must break a promise, too.
func (m *mutation) traced() bool {
	_, err := os.Stat(filepath.Join(traces, m.name+".txt"))
	return err == nil
}

// tests returns the arguments that select the tests.
func (m *mutation) tests(o options) []string {
	if o.faults > 0 && m.directed != "" {
		return []string{"-run", "^" + m.directed + "$", "./e2e/fault"}
	}
	if o.faults > 0 {
		faults := o.faults
		if m.lives != "plain" {
			faults = (faults + 3) / 4
		}
		return []string{"-run", "TestNothingIsLost", "./e2e/fault", "-" + m.lives, "-faults", fmt.Sprint(faults)}
	}
	arguments := slices.Concat(m.packages, m.flags)
	if m.run != "" {
		return append([]string{"-run", m.run}, arguments...)
	}
	return arguments
}

// overlayOf writes the mutated files, and the overlay list for the go command.
func overlayOf(together []*mutation, dir string) (string, error) {
	texts := map[string][]byte{}
	for _, m := range together {
		text, err := texts[m.file], error(nil)
		if text == nil {
			text, err = os.ReadFile(m.file)
		}
		if err == nil {
			text, err = m.apply(text)
		}
		if err != nil {
			return "", err
		}
		texts[m.file] = text
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	replace := map[string]string{}
	for file, text := range texts {
		original, err := filepath.Abs(file)
		if err != nil {
			return "", err
		}
		replace[original] = filepath.Join(dir, fmt.Sprintf("%d-%s", len(replace), filepath.Base(file)))
		if err := os.WriteFile(replace[original], text, 0o600); err != nil {
			return "", err
		}
	}
	list, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, list, 0o600)
}

var (
	failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+/\S+|\S+)`)
	said   = regexp.MustCompile(`(?m)^\s*\S+_test\.go:\d+: (.{1,160})`)
)

// read derives the outcome of a mutation from the output of go test.
func read(out string, err error) outcome {
	switch {
	case strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]"):
		return outcome{broken, "it does not compile:\n" + out}
	case err == nil && strings.Contains(out, "no tests to run"):
		return outcome{broken, "its tests are not there any more"}
	case err == nil:
		return outcome{survived, "no test failed"}
	case strings.Contains(out, "panic: test timed out"):
		return outcome{noticed, "a test hangs"}
	}
	if test := failed.FindStringSubmatch(out); test != nil {
		why := test[1]
		if text := said.FindStringSubmatch(out); text != nil {
			why += ": " + text[1]
		}
		return outcome{noticed, why}
	}
	if strings.Contains(out, "panic: ") || strings.Contains(out, "fatal error: ") || strings.Contains(out, "\nFAIL") {
		return outcome{noticed, "the tests crash"}
	}
	return outcome{broken, fmt.Sprintf("%v:\n%s", err, out)}
}

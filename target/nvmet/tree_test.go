// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/target/nvmet/nvmettest"
)

// hang makes the drains of one subsystem wait until the test's end, or release.
func hang(t *testing.T, f *nvmettest.FS, s Subsystem) (release func()) {
	gate := make(chan struct{})
	done := false
	release = func() {
		if !done {
			done = true
			close(gate)
		}
	}
	t.Cleanup(release)
	f.Drain = func(name string) {
		if name == string(s.NQN) {
			<-gate
		}
	}
	return release
}

func TestADrainThatHangsIsNeitherWaitedForNorForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := nvmettest.New("/dev/ram0", "/dev/ram1")
		tree, err := OpenOn(nvmettest.Root, f)
		if err != nil {
			t.Fatal(err)
		}
		p := place{tree: tree}
		stuck, other := sub(1, 1, 1, "/dev/ram0"), sub(2, 1, 1, "/dev/ram1")
		p.reach(t, p.config(stuck, other))
		release := hang(t, f, stuck)
		apply := func(want Config) []Failure {
			_, failures := tree.Apply(t.Context(), Diff(p.read(t), want), time.Second)
			return failures
		}

		start := time.Now()
		failures := apply(Config{})
		if len(failures) != 1 || !errors.Is(failures[0].Err, ErrDraining) || failures[0].Step.Object != subsystemPath(stuck.NQN) {
			t.Errorf("Apply = %v, want the one drain that hangs", failures)
		}
		if d := time.Since(start); d != time.Second {
			t.Errorf("Apply took %v, want its patience of 1s", d)
		}
		got := p.read(t)
		if _, there := got.Subsystem(other.NQN); there {
			t.Error("the other subsystem has not been removed")
		}
		if !tree.Busy(stuck.NQN) || tree.Busy(other.NQN) {
			t.Errorf("Busy = %v, %v; want true, false", tree.Busy(stuck.NQN), tree.Busy(other.NQN))
		}

		// The second Do makes no new call and does not wait, though the kernel already shows
		// enable=0.
		start = time.Now()
		for range 10 {
			if failures := apply(Config{}); len(failures) != 1 || !errors.Is(failures[0].Err, ErrDraining) {
				t.Errorf("Apply = %v, want the drain that still hangs", failures)
			}
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("Apply took %v for what it knows to hang, want no time", d)
		}
		if _, there := p.read(t).Subsystem(stuck.NQN); !there {
			t.Error("the subsystem is gone before its drain is over")
		}

		release()
		synctest.Wait()
		p.reach(t, Config{})
	})
}

func TestDoJoinsTheSameCallAndRefusesAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := nvmettest.New("/dev/ram0")
		tree, err := OpenOn(nvmettest.Root, f)
		if err != nil {
			t.Fatal(err)
		}
		p := place{tree: tree}
		s := sub(1, 1, 1, "/dev/ram0")
		p.reach(t, p.config(s))
		release := hang(t, f, s)
		where := namespacePath(s.NQN, s.Namespaces[0]) + "/enable"
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := tree.Do(ctx, Step{Op: Write, Path: where, Arg: "0"}); !errors.Is(err, ErrDraining) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Do = %v, want %v after its deadline", err, ErrDraining)
		}
		if err := tree.Do(t.Context(), Step{Op: Write, Path: where, Arg: "1"}); !errors.Is(err, ErrDraining) {
			t.Errorf("Do of the opposite = %v, want %v", err, ErrDraining)
		}
		joined := make(chan error)
		go func() { joined <- tree.Do(t.Context(), Step{Op: Write, Path: where, Arg: "0"}) }()
		synctest.Wait()
		release()
		if err := <-joined; err != nil {
			t.Errorf("Do that joined = %v, want the call's own result", err)
		}
	})
}

// slowFiles hangs in one read, as attr_model does while a drain holds its lock.
type slowFiles struct {
	*nvmettest.FS
	gate chan struct{}
}

func (f slowFiles) Read(path string) (string, error) {
	if strings.HasSuffix(path, "attr_model") {
		<-f.gate
	}
	return f.FS.Read(path)
}

func TestReadEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := slowFiles{nvmettest.New(), make(chan struct{})}
		if err := f.Mkdir(nvmettest.Root + "/subsystems/nqn.x"); err != nil {
			t.Fatal(err)
		}
		tree, err := OpenOn(nvmettest.Root, f)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := tree.Read(ctx); !errors.Is(err, ErrDraining) {
				t.Errorf("Read = %v, want %v", err, ErrDraining)
			}
			cancel()
		}
		close(f.gate)
		if c, err := tree.Read(t.Context()); err != nil || len(c.Subsystems) != 1 {
			t.Errorf("Read = %+v, %v; want the one subsystem", c, err)
		}
	})
}

func TestOpenSaysWhenThereIsNoTarget(t *testing.T) {
	if _, err := Open(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open(empty) = %v, want %v", err, fs.ErrNotExist)
	}
}

func TestApplyLeavesOutWhatRestsOnAFailure(t *testing.T) {
	f := nvmettest.New() // no device: enable=1 fails
	tree, err := OpenOn(nvmettest.Root, f)
	if err != nil {
		t.Fatal(err)
	}
	p := place{tree: tree}
	want := p.config(sub(1, 1, 1, "/dev/none"), sub(2, 1, 1))
	_, failures := tree.Apply(t.Context(), Diff(Config{}, want), time.Second)
	if len(failures) != 1 || !errors.Is(failures[0].Err, fs.ErrNotExist) {
		t.Errorf("Apply = %v, want that the device is missing", failures)
	}
	got := p.read(t)
	if got.Linked(want.Subsystems[0].NQN) || !got.Linked(want.Subsystems[1].NQN) {
		t.Error("want the complete subsystem linked, and only that")
	}
}

func TestATargetWithoutKeysSaysSo(t *testing.T) {
	fake := nvmettest.New()
	fake.WithoutKeys = true
	tree, err := OpenOn(nvmettest.Root, fake)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if able, err := tree.Authenticates(); able || err != nil {
			t.Errorf("Authenticates = %v, %v; want false", able, err)
		}
	}
}

// Configfs makes all its files readable by everybody.
func TestOnlyRootMayReadAKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dhchap_key")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := (kernelFiles{}).WriteSecret(file, "a key"); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if info.Mode().Perm() != 0o600 || string(text) != "a key" || err != nil {
		t.Errorf("%v with %q, %v; want the key, for its owner alone", info.Mode(), text, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// clusters returns two processes' views of one /dev, in which each has a volume of one name.
func clusters(t *testing.T) (s system, one, two Options) {
	t.Helper()
	s = system{dev: t.TempDir(), sys: t.TempDir(), proc: t.TempDir()}
	cluster := func(other block.VolumeName) Options {
		return Options{
			Name: "db1", Names: []block.VolumeName{"db1", other}, DevDir: s.dev, RunDir: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		}
	}
	return s, cluster("db1+11111111"), cluster("db1+22222222")
}

// claims fails the test unless the name that o gets is want.
func (s system) claims(t *testing.T, o Options, want block.VolumeName) *claim {
	t.Helper()
	c, err := s.claimFor(o)
	if err != nil {
		t.Fatal(err)
	}
	if c.name != want {
		t.Errorf("the device gets the name %q, want %q", c.name, want)
	}
	return c
}

// attach makes a loop device of a volume's file, with its name.
func (s system) attach(t *testing.T, o Options, name block.VolumeName, disk string) {
	t.Helper()
	file := filepath.Join(s.sys, "block", disk, "loop/backing_file")
	err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(fuseFile(o)+"\n"), 0o644))
	if err := errors.Join(err, writeRecord(o, record{Kind: FUSE, Disk: disk, Name: name}), s.expose(name, disk)); err != nil {
		t.Fatal(err)
	}
}

// detach leaves the loop device to whoever wants one.
func (s system) detach(t *testing.T, disk string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(s.sys, "block", disk, "loop")); err != nil {
		t.Fatal(err)
	}
}

func TestTheSecondVolumeOfANameGetsAnother(t *testing.T) {
	s, one, two := clusters(t)
	first := s.claims(t, one, "db1")
	s.attach(t, one, "db1", "loop3")
	second := s.claims(t, two, "db1+22222222")

	// A third one whose id begins like the second's.
	third := two
	third.RunDir = t.TempDir()
	_, err := s.claimFor(third)
	if !errors.Is(err, ErrExported) {
		t.Fatalf("claim of names that are all held = %v, want ErrExported", err)
	}
	for _, want := range []string{s.link("db1"), "../loop3", one.RunDir, s.link("db1+22222222"), two.RunDir, "process "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the refusal %q does not say %q", err, want)
		}
	}

	second.release()
	first.release()
	s.detach(t, "loop3")
	s.claims(t, third, "db1").release()
	for _, name := range two.Names {
		if exists(s.claimFile(name)) {
			t.Errorf("the released claim of %s left its file", name)
		}
	}
}

func TestWithoutOtherNamesAVolumeIsRefused(t *testing.T) {
	s, one, two := clusters(t)
	defer s.claims(t, one, "db1").release()
	two.Names = nil
	if _, err := s.claimFor(two); !errors.Is(err, ErrExported) {
		t.Errorf("claim of a name that is held = %v, want ErrExported", err)
	}
}

// The disk of a dead process may be mounted, and wait for the next process.
func TestADeadProcessesDiskKeepsItsName(t *testing.T) {
	s, one, two := clusters(t)
	c := s.claims(t, one, "db1")
	s.attach(t, one, "db1", "loop3")
	c.unlock() // as the kernel does; file and link stay
	s.claims(t, two, "db1+22222222").release()
	s.claims(t, one, "db1").unlock() // its next process
	s.detach(t, "loop3")             // the disk ends, as when no process has come in time
	s.claims(t, two, "db1").release()
}

// Whoever has mounted the second device must not get the first volume's, or the other way round.
func TestTheSecondKeepsItsNameWhenTheFirstIsGone(t *testing.T) {
	s, one, two := clusters(t)
	first := s.claims(t, one, "db1")
	second := s.claims(t, two, "db1+22222222")
	s.attach(t, two, "db1+22222222", "loop4")
	first.release()
	second.unlock() // its process dies
	s.claims(t, one, "db1").release()
	s.claims(t, two, "db1+22222222").release()
}

func TestAnUnusedDiskOfADeadProcessKeepsNoName(t *testing.T) {
	for _, disk := range []string{"loop3", "nbd0"} { // the kernel keeps them without a use
		s, _, two := clusters(t)
		if err := errors.Join(s.expose("db1", disk), os.MkdirAll(filepath.Join(s.sys, "block", disk), 0o755)); err != nil {
			t.Fatal(err)
		}
		s.claims(t, two, "db1").release()
	}
}

func TestAClaimThatWasRemovedMeanwhileIsNone(t *testing.T) {
	s, one, _ := clusters(t)
	c := s.claims(t, one, "db1")
	late, err := os.OpenFile(c.path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	c.release()
	if (&claim{f: late, path: c.path}).isThere() {
		t.Error("a file that nobody else will lock was taken for the claim")
	}
	late.Close()
}

// In containers, the run directories of two agents may have one path. Then the marks of their devices are equal.
func TestAVolumeIsRefusedBesideOneWithTheSameMarks(t *testing.T) {
	s, one, two := clusters(t)
	two.RunDir = one.RunDir
	first := s.claims(t, one, "db1")
	if _, err := s.claimFor(two); !errors.Is(err, ErrExported) || !strings.Contains(err.Error(), one.RunDir) {
		t.Errorf("claim beside a device with the same marks = %v, want ErrExported that says why", err)
	}
	first.unlock()
	s.claims(t, two, "db1").release()

	one.Names = one.Names[1:]
	defer s.claims(t, one, "db1+11111111").release()
	if _, err := s.claimFor(two); !errors.Is(err, ErrExported) {
		t.Errorf("claim beside a device with the same marks and another name = %v, want ErrExported", err)
	}
}

// mapped makes a device-mapper device.
func (s system) mapped(t *testing.T, disk string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(s.sys, "block", disk), 0o755); err != nil {
		t.Fatal(err)
	}
}

// The kernel data path's devices outlive every process.
func TestADeviceOfTheKernelsDataPathKeepsItsName(t *testing.T) {
	s, one, two := clusters(t)
	s.mapped(t, "dm-4")
	s.mapped(t, "dm-5")
	var chosen []block.VolumeName
	expose := func(disk string, o Options) error {
		return Expose(s.dev, s.sys, disk, o.Names, func(n block.VolumeName) error { chosen = append(chosen, n); return nil })
	}
	leads := func(name block.VolumeName, want string) {
		t.Helper()
		if to, err := os.Readlink(s.link(name)); err != nil || to != "../"+want {
			t.Errorf("%s leads to %q, %v; want %s", name, to, err, want)
		}
	}
	if err := errors.Join(expose("dm-4", one), expose("dm-5", two), expose("dm-4", one)); err != nil { // the last to repeat
		t.Fatal(err)
	}
	if want := []block.VolumeName{"db1", "db1+22222222", "db1"}; fmt.Sprint(chosen) != fmt.Sprint(want) {
		t.Errorf("chosen: %v, want %v", chosen, want)
	}
	leads("db1", "dm-4")
	leads("db1+22222222", "dm-5")

	third := one
	third.Names = []block.VolumeName{"db1", "db1+33333333"}
	third.RunDir = t.TempDir()
	c := s.claims(t, third, "db1+33333333")
	fourth := third
	if err := expose("dm-6", fourth); !errors.Is(err, ErrExported) {
		t.Errorf("of names that a process and a mapped device have: %v, want ErrExported", err)
	}
	leads("db1", "dm-4")
	c.release()
	if err := os.RemoveAll(filepath.Join(s.sys, "block/dm-4")); err != nil {
		t.Fatal(err)
	}
	s.claims(t, third, "db1").release()
}

func TestADeviceWhoseNameCannotBeNotedHasNone(t *testing.T) {
	s, one, _ := clusters(t)
	s.mapped(t, "dm-4")
	err := Expose(s.dev, s.sys, "dm-4", one.Names, func(block.VolumeName) error { return fs.ErrPermission })
	if !errors.Is(err, fs.ErrPermission) || exists(s.link("db1")) || exists(s.claimFile("db1")) {
		t.Errorf("Expose without a note = %v; the name is there: %v", err, exists(s.link("db1")))
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// clusters returns two processes' views of one /dev.
func clusters(t *testing.T) (s system, one, two Options) {
	t.Helper()
	s = system{dev: t.TempDir(), sys: t.TempDir()}
	one = Options{Name: "db1", DevDir: s.dev, RunDir: "/run/one"}
	two = Options{Name: "db1", DevDir: s.dev, RunDir: "/run/two"}
	return s, one, two
}

func TestALiveNameOfAnotherClusterIsRefused(t *testing.T) {
	s, one, two := clusters(t)
	c, err := s.claimName(one)
	if err == nil {
		err = s.expose("db1", "loop3")
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.claimName(two)
	if !errors.Is(err, ErrExported) {
		t.Fatalf("claim of a name that is held = %v, want ErrExported", err)
	}
	if !strings.Contains(err.Error(), "detach one of the two") { // volumes cannot be renamed
		t.Errorf("claim of a name that is held = %v, want what to do", err)
	}
	for _, want := range []string{s.link("db1"), "../loop3", "/run/one", "process "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the refusal %q does not say %q", err, want)
		}
	}
	if err := Held(s.dev, "db1"); !errors.Is(err, ErrExported) {
		t.Errorf("Held = %v, want ErrExported", err)
	}
	c.release()
	if err := Held(s.dev, "db1"); err != nil {
		t.Errorf("Held of a name that was released = %v", err)
	}
	if c, err = s.claimName(two); err != nil {
		t.Fatalf("claim of a name that was released: %v", err)
	}
	c.release()
	if exists(s.claimFile("db1")) {
		t.Error("a released claim left its file")
	}
}

func TestADeadProcessesNameIsTakenOver(t *testing.T) {
	s, one, two := clusters(t)
	c, err := s.claimName(one)
	if err == nil {
		err = s.expose("db1", "loop3")
	}
	if err != nil {
		t.Fatal(err)
	}
	c.unlock() // as the kernel does; file and link stay
	c, err = s.claimName(two)
	if err != nil {
		t.Fatalf("claim of a dead process's name: %v", err)
	}
	c.release()
}

func TestAClaimThatWasRemovedMeanwhileIsNone(t *testing.T) {
	s, one, _ := clusters(t)
	c, err := s.claimName(one)
	if err != nil {
		t.Fatal(err)
	}
	late, err := os.OpenFile(c.path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	c.release()
	if (&claim{late, c.path}).isThere() {
		t.Error("a file that nobody else will lock was taken for the claim")
	}
	late.Close()
}

// The kernel data path's devices outlive every process.
func TestANameOfTheKernelsDataPathIsRefusedWhileItsDeviceIsThere(t *testing.T) {
	s, one, _ := clusters(t)
	if err := errors.Join(s.expose("db1", "dm-4"), os.MkdirAll(filepath.Join(s.sys, "block/dm-4"), 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.claimName(one); !errors.Is(err, ErrExported) || !strings.Contains(err.Error(), "dm-4") {
		t.Fatalf("claim = %v, want ErrExported that names dm-4", err)
	}
	if err := os.Remove(filepath.Join(s.sys, "block/dm-4")); err != nil {
		t.Fatal(err)
	}
	c, err := s.claimName(one)
	if err != nil {
		t.Fatalf("claim of a name that leads nowhere: %v", err)
	}
	c.release()
}

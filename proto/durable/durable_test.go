// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// holds checks that a directory has exactly one file, with this text and mode.
func holds(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != text {
		t.Errorf("%s holds %q, %v; want %q", path, got, err, text)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != mode {
		t.Errorf("%s has mode %v, %v; want %v", path, info.Mode(), err, mode)
	}
	if all, err := os.ReadDir(filepath.Dir(path)); err != nil || len(all) != 1 {
		t.Errorf("the directory holds %v, %v; want the file alone", all, err)
	}
}

func TestAFileIsReplacedWholeOrNotAtAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, text := range []string{"one", "two"} {
		if err := Write(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
		holds(t, path, text, 0o644)
	}
	cut := errors.New("cut")
	half := func(w io.Writer) error {
		if _, err := io.WriteString(w, "thr"); err != nil {
			return err
		}
		return cut
	}
	if err := Fill(path, 0o600, half); err != cut { //nolint:errorlint // as it is: it may be a gRPC status
		t.Errorf("Fill = %v, want %v", err, cut)
	}
	holds(t, path, "two", 0o644)
}

func TestEnsureLeavesWhatIsThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, text := range []string{"first", "second"} {
		if err := Ensure(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		holds(t, path, "first", 0o600)
	}
}

func TestWhatIsInTheWayIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, "text", 0o600); err == nil {
		t.Error("Write over a directory = nil")
	}
	if err := Write(filepath.Join(path, "no", "file"), "text", 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Write where no directory is = %v, want %v", err, fs.ErrNotExist)
	}
	if all, err := os.ReadDir(filepath.Dir(path)); err != nil || len(all) != 1 {
		t.Errorf("left: %v, %v; want the directory alone", all, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

// kept is the folder of data from older versions, relative to the tests' directory.
const kept = "testdata/upgrade"

// unpackKept makes a directory of the data that a commit left: "unpack COMMIT".
func unpackKept(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: unpack COMMIT")
	}
	ts.Check(unpack(filepath.Join(kept, args[0]+".tgz"), filepath.Join(ts.Getenv("WORK"), args[0])))
}

// includes checks that the JSON on stdout contains everything in a kept file; it may contain more:
// "includes FILE".
func includes(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: includes FILE")
	}
	b, err := os.ReadFile(filepath.Join(kept, args[0]))
	ts.Check(err)
	var got, want any
	ts.Check(errors.Join(json.Unmarshal([]byte(ts.ReadFile("stdout")), &got), json.Unmarshal(b, &want)))
	ts.Check(missing("", got, want))
}

// labelVersion checks the version of the newest label at the head of each drive:
// "label-version VERSION DRIVE...".
func labelVersion(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: label-version VERSION DRIVE...")
	}
	for _, path := range args[1:] {
		f, err := os.Open(path)
		ts.Check(err)
		var version uint32
		var newest uint64
		for _, slot := range []int64{0, 4 << 20} {
			header := make([]byte, 32)
			_, err := f.ReadAt(header, slot)
			ts.Check(err)
			if generation := binary.LittleEndian.Uint64(header[24:]); generation > newest {
				newest, version = generation, binary.LittleEndian.Uint32(header[16:])
			}
		}
		ts.Check(f.Close())
		if fmt.Sprint(version) != args[0] {
			ts.Fatalf("the label of %s has version %d", path, version)
		}
	}
}

// unpack makes a directory of an archive. A drive in it is its size, and each block of 4 KiB that
// is not zeroes, after its offset.
func unpack(archive, dir string) (retErr error) {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for files := tar.NewReader(z); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		b, err := io.ReadAll(files)
		if err != nil {
			return err
		}
		path := filepath.Join(dir, h.Name)
		write := os.WriteFile
		if strings.HasSuffix(path, "drive1") {
			write = writeBlocks
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), write(path, b, 0o600)); err != nil {
			return err
		}
	}
}

func writeBlocks(path string, b []byte, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	err = f.Truncate(int64(binary.LittleEndian.Uint64(b)))
	for b = b[8:]; len(b) > 0 && err == nil; b = b[8+4096:] {
		_, err = f.WriteAt(b[8:8+4096], int64(binary.LittleEndian.Uint64(b)))
	}
	return errors.Join(err, f.Close())
}

// missing says what of want differs in got.
func missing(at string, got, want any) error {
	switch want := want.(type) {
	case map[string]any:
		have, _ := got.(map[string]any)
		var errs []error
		for key := range want {
			errs = append(errs, missing(at+"."+key, have[key], want[key]))
		}
		return errors.Join(errs...)
	case []any:
		have, _ := got.([]any)
		if len(have) != len(want) {
			return fmt.Errorf("%s: %d are there, want %d", at, len(have), len(want))
		}
		var errs []error
		for i := range want {
			errs = append(errs, missing(fmt.Sprintf("%s[%d]", at, i), have[i], want[i]))
		}
		return errors.Join(errs...)
	}
	if got != want {
		return fmt.Errorf("%s is %v, want %v", at, got, want)
	}
	return nil
}

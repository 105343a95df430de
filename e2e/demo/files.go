// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// sources lists the files that the story copies to the volume: this source tree and the
// program itself.
func sources(program string) ([]string, error) {
	list, err := exec.Command("git", "ls-files", "-z").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	names := slices.DeleteFunc(strings.Split(string(list), "\x00"), func(name string) bool {
		info, err := os.Lstat(name)
		return err != nil || !info.Mode().IsRegular() // deleted but not committed yet, or the empty name
	})
	return append(names, program), nil
}

// sums maps file names to SHA-256 sums, as sha256sum prints them.
type sums map[string]string

// add hashes a file's content as it reads it.
func (s sums) add(name string, content io.Reader) (size int64, err error) {
	hash := sha256.New()
	size, err = io.Copy(hash, content)
	s[name] = hex.EncodeToString(hash.Sum(nil))
	return size, err
}

func (s sums) save(file string) error {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s)) {
		fmt.Fprintf(&text, "%s  %s\n", s[name], name)
	}
	if err := os.WriteFile(file+".new", []byte(text.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func loadSums(file string) (sums, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	s := sums{}
	for line := range strings.Lines(string(text)) {
		sum, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		s[name] = sum
	}
	return s, nil
}

// differ returns an error for the first difference from want, or nil.
func (s sums) differ(want sums) error {
	for name, sum := range want {
		if s[name] != sum {
			return fmt.Errorf("%s differs from the original", name)
		}
	}
	if len(s) != len(want) {
		return fmt.Errorf("there are %d files, want %d", len(s), len(want))
	}
	return nil
}

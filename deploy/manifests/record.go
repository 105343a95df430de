// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// recordFile is in the form of sha256sum, with paths from the module's root.
const recordFile = "SHA256SUMS"

// write puts the files to outputDir in place of those that are there.
func write(root string, files map[string]string) error {
	dir := filepath.Join(root, outputDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range old {
		if _, stays := files[filepath.Base(file)]; !stays {
			if err := os.Remove(file); err != nil {
				return err
			}
		}
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	sums, err := record(os.DirFS(root))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, recordFile), []byte(sums), 0o644)
}

// record is the content of recordFile as it should be: a line for each file of
// the chart and of the output.
func record(root fs.FS) (string, error) {
	var lines []string
	for _, dir := range []string{chartDir, outputDir} {
		err := fs.WalkDir(root, dir, func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || path.Base(file) == recordFile {
				return err
			}
			text, err := fs.ReadFile(root, file)
			if err != nil {
				return err
			}
			lines = append(lines, fmt.Sprintf("%x  %s\n", sha256.Sum256(text), file))
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	slices.SortFunc(lines, func(a, b string) int { return strings.Compare(a[64:], b[64:]) })
	return strings.Join(lines, ""), nil
}

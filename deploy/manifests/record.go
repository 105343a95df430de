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

// recordFile has the format of sha256sum, with paths from the module's root.
const recordFile = "SHA256SUMS"

// write writes the files, and removes those of templates that no longer exist.
func write(root string, files map[string]string) error {
	for _, dir := range []string{outputDir, path.Join(outputDir, snapshotsDir)} {
		old, err := filepath.Glob(filepath.Join(root, dir, "*.yaml"))
		if err != nil {
			return err
		}
		for _, file := range old {
			if _, stays := files[path.Join(dir, filepath.Base(file))]; !stays {
				if err := os.Remove(file); err != nil {
					return err
				}
			}
		}
	}
	for name, text := range files {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return err
		}
	}
	sums, err := record(os.DirFS(root))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, outputDir, recordFile), []byte(sums), 0o644)
}

// record is the correct content of recordFile: a line for each input and output file.
func record(root fs.FS) (string, error) {
	var lines []string
	for _, dir := range []string{chartDir, outputDir, path.Dir(testValues)} {
		err := fs.WalkDir(root, dir, func(file string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && d.Name() == "examples": // written by hand
				return fs.SkipDir
			case d.IsDir() || d.Name() == recordFile:
				return nil
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

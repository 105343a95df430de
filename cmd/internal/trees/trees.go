// SPDX-License-Identifier: Apache-2.0

// Package trees prints what the checker of trees of layers finds on drives.
package trees

import (
	"fmt"
	"io"
	"os"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/treecheck"
)

// At is what the checker found in one file or device. Its keys are stable.
type At struct {
	Path  string           `json:"path"`
	Trees []treecheck.Tree `json:"trees"`
}

// Check checks the trees on drives, which are files or devices, and prints what it found. It fails
// if a tree is damaged.
func Check(paths []string, out *cli.Output) error {
	var all []At
	damaged := 0
	for _, path := range paths {
		report, err := checkTrees(path)
		if err != nil {
			return err
		}
		for _, t := range report.Trees {
			if t.Damaged() {
				damaged++
			}
		}
		all = append(all, At{path, report.Trees})
	}
	if err := out.PrintValue(all, func(w io.Writer) { printTrees(w, all) }); err != nil {
		return err
	}
	if damaged > 0 {
		return fmt.Errorf("%d trees are damaged", damaged)
	}
	return nil
}

func checkTrees(path string) (*treecheck.Report, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd) // of a block device, too
	if err != nil {
		return nil, err
	}
	report, err := treecheck.Check(f, size, treecheck.FirstExtent)
	if err != nil {
		return nil, fmt.Errorf("check %s: %w", path, err)
	}
	return report, nil
}

func printTrees(w io.Writer, all []At) {
	for _, at := range all {
		if len(at.Trees) == 0 {
			fmt.Fprintf(w, "%s: no tree of layers\n", at.Path)
		}
		for _, t := range at.Trees {
			printTree(w, at.Path, t)
		}
	}
}

func printTree(w io.Writer, path string, t treecheck.Tree) {
	verdict := "whole"
	switch {
	case t.Damaged():
		verdict = "DAMAGED"
	case len(t.Findings) > 0:
		verdict = "whole; what a crash left is repaired when the tree is opened"
	}
	fmt.Fprintf(w, "%s: tree %v: %s\n", path, t.ID, verdict)
	fmt.Fprintf(w, "  drive %v, generation %d, %d extents, %s of %s used\n", t.Drive, t.Generation, len(t.Extents), block.Size(t.UsedBytes).Short(), block.Size(t.TotalBytes).Short())
	var rows [][]string
	for _, l := range t.Layers {
		parent := "-"
		if l.Parent != 0 {
			parent = fmt.Sprint(l.Parent)
		}
		rows = append(rows, []string{fmt.Sprint(l.ID), parent, l.State, l.Object.String(), block.Size(l.SizeBytes).String(),
			block.Size(l.UsedBytes).Short(), block.Size(l.ReferencedBytes).Short(), block.Size(l.FreedBytes).Short()})
	}
	cli.Table(w, "LAYER PARENT STATE OBJECT SIZE USED REFERENCED FREED-IF-DELETED", rows...)
	for _, f := range t.Findings {
		word := "left by a crash"
		if f.Damage {
			word = "damage"
		}
		fmt.Fprintf(w, "  %s: %s\n", word, f.Text)
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"weft.dev/weft/proto/block"
)

// naming is the part of the legs' stable names that the agent uses.
type naming interface {
	// List returns where each name leads.
	List() (map[block.LegID]string, error)
	// Set points a leg's name at node, in one step; an empty node removes the name.
	Set(id block.LegID, node string) error
}

// names are stable names in the kernel's world: symlinks dir/<leg id> to the mapped devices' nodes.
// Node numbers change with every boot, and nvmet is configured with a path.
type names struct{ dir string }

func (n names) List() (map[block.LegID]string, error) {
	entries, err := os.ReadDir(n.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return map[block.LegID]string{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list names of legs: %w", err)
	}
	out := map[block.LegID]string{}
	for _, e := range entries {
		id, err := block.ParseLegID(e.Name())
		if err != nil {
			continue // not ours
		}
		to, err := os.Readlink(filepath.Join(n.dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since the directory was read
		}
		if err != nil {
			return nil, fmt.Errorf("read name of leg: %w", err)
		}
		out[id] = to
	}
	return out, nil
}

func (n names) Set(id block.LegID, node string) error {
	name := filepath.Join(n.dir, id.String())
	if node == "" {
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove name of leg: %w", err)
		}
		return nil
	}
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return fmt.Errorf("name leg: %w", err)
	}
	fresh := name + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("name leg: %w", err)
	}
	if err := os.Symlink(node, fresh); err != nil {
		return fmt.Errorf("name leg: %w", err)
	}
	if err := os.Rename(fresh, name); err != nil {
		return fmt.Errorf("name leg: %w", err)
	}
	return nil
}

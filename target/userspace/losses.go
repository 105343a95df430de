// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
)

// lossNotes are notes of the incarnation that a drive's label should record: one file for each
// drive that has lost writes since the machine booted. If a process dies between a loss and the
// label's update, the next one finds the note. A note older than the label is ignored and stays.
type lossNotes struct{ dir string } // empty: there are none

// read returns the noted incarnation of a drive; 0 if there is none.
func (n lossNotes) read(id block.DriveID) (uint32, error) {
	if n.dir == "" {
		return 0, nil
	}
	text, err := os.ReadFile(n.file(id))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read note of losses: %w", err)
	}
	incarnation, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("read note of losses %s: %w", n.file(id), err)
	}
	return uint32(incarnation), nil
}

// write replaces the note for a drive.
func (n lossNotes) write(id block.DriveID, incarnation uint32) error {
	if n.dir == "" {
		return nil
	}
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return fmt.Errorf("note losses: %w", err)
	}
	if err := durable.Write(n.file(id), fmt.Sprintln(incarnation), 0o644); err != nil {
		return fmt.Errorf("note losses: %w", err)
	}
	return nil
}

func (n lossNotes) file(id block.DriveID) string { return filepath.Join(n.dir, id.String()) }

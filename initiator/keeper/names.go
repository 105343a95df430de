// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
)

// Names chooses the names of devices. Two clusters, or two nodes of one, may have a volume of one name on
// this machine:
//
//	/dev/weft/db1             the device that was there first
//	/dev/weft/db1+0b5f0a3e    the other
//
// The other keeps its name until its volume is detached, also if the first is gone by then, over restarts and
// boots: whoever mounts a device by its name must not get another volume. So it is noted in a directory: a file
// for each volume whose device has the other name. A nil Names notes nothing. It is safe for concurrent use,
// except on one volume.
type Names struct{ dir string }

// NewNames returns the Names of a directory; it touches nothing.
func NewNames(dir string) *Names { return &Names{dir} }

// Of lists the names that a volume's device may have, best first.
func (n *Names) Of(v block.VolumeID, name block.VolumeName) []block.VolumeName {
	other := name.Beside(v)
	if n != nil {
		if _, err := os.Lstat(n.file(v)); !errors.Is(err, fs.ErrNotExist) { // if that cannot be known, it may be there
			return []block.VolumeName{other}
		}
	}
	return []block.VolumeName{name, other}
}

// Chosen notes which of its names a volume's device is about to have. It returns when the note is durable.
func (n *Names) Chosen(v block.VolumeID, name, chosen block.VolumeName) error {
	if n == nil || chosen == name {
		return nil
	}
	err := os.MkdirAll(n.dir, 0o700)
	if err == nil {
		err = durable.SyncDir(filepath.Dir(n.dir))
	}
	if err == nil {
		err = durable.Write(n.file(v), string(chosen)+"\n", 0o600)
	}
	if err != nil {
		return fmt.Errorf("note that the device of volume %s is called %s: %w", name, chosen, err)
	}
	return nil
}

// Drop forgets the name of a volume's device, once the volume is detached.
func (n *Names) Drop(v block.VolumeID) error {
	if n == nil {
		return nil
	}
	err := os.Remove(n.file(v))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = durable.SyncDir(n.dir)
	}
	return err
}

func (n *Names) file(v block.VolumeID) string { return filepath.Join(n.dir, v.String()) }

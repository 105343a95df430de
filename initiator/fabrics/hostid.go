// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"weft.dev/weft/proto/block"
)

// HostIdentity reads the machine's NVMe identity from dir/hostid, which it makes
// of random if there is none. A file with anything else in it is an error and
// stays as it is: a machine that changed its identity would lose its attachments.
func HostIdentity(dir string, random [16]byte) (block.Host, error) {
	path := filepath.Join(dir, "hostid")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createHostID(dir, path, random); err != nil {
			return block.Host{}, fmt.Errorf("create host identity: %w", err)
		}
		b, err = os.ReadFile(path)
	}
	if err != nil {
		return block.Host{}, fmt.Errorf("read host identity: %w", err)
	}
	id, err := block.ParseUUID(strings.TrimSpace(string(b)))
	if err != nil || id.IsZero() {
		return block.Host{}, fmt.Errorf("read host identity: %s holds %.40q, not a uuid: put the machine's host id back, or remove the file to become a new host", path, b)
	}
	return block.HostFromID(id), nil
}

// createHostID writes the id aside and links it into place, so that nobody sees
// half of it and the first of two agents wins.
func createHostID(dir, path string, random [16]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".hostid-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(block.UUIDFromRandom(random).String() + "\n")
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

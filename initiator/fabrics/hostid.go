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
	"weft.dev/weft/proto/durable"
)

// HostIdentity reads the machine's NVMe identity from dir/hostid. If there is no such file, it
// creates one from random. A file with any other content is an error and is left alone: a
// machine that changed its identity would lose its attachments.
func HostIdentity(dir string, random [16]byte) (block.Host, error) {
	path := filepath.Join(dir, "hostid")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createHostID(path, random); err != nil {
			return block.Host{}, fmt.Errorf("create host identity: %w", err)
		}
		b, err = os.ReadFile(path)
	}
	if err != nil {
		return block.Host{}, fmt.Errorf("read host identity: %w", err)
	}
	id, err := block.ParseUUID(strings.TrimSpace(string(b)))
	if err != nil || id.IsZero() {
		return block.Host{}, fmt.Errorf("read host identity: %s holds %.40q, not a uuid: restore the machine's host id, or remove the file to become a new host", path, b)
	}
	return block.HostFromID(id), nil
}

func createHostID(path string, random [16]byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// If two agents race, the first one wins.
	return durable.Ensure(path, block.UUIDFromRandom(random).String()+"\n", 0o644)
}

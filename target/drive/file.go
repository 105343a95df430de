// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// FileModel is the model of a drive that is a regular file.
const FileModel = "file"

// regularFiles describes those of the files that exist. A file is named only by its path. It is
// written through a page cache, or at least through a file system's metadata, so unflushed writes
// do not survive a power loss of the machine.
func (s sysfs) regularFiles(paths []string) []found {
	var all []found
	for _, path := range paths {
		info, err := os.Stat(s.path(path))
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		all = append(all, found{Device: &pb.Device{
			Path: path, Model: FileModel, NumaNode: -1, VolatileCache: true,
			SizeBytes: uint64(block.Size(info.Size()) / copyUnit * copyUnit), BlockSize: uint32(copyUnit),
			ReadOnly: info.Mode().Perm()&0o222 == 0,
		}})
	}
	return all
}

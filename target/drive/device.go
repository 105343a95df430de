// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"io"

	"weft.dev/weft/proto/block"
)

// Medium is the storage under a drive: a block device or a file; in tests, memory.
type Medium interface {
	// ReadAt reads any range.
	io.ReaderAt
	// WriteAt writes whole blocks of BlockSize at a multiple of it. Written data is durable after
	// the next Flush.
	io.WriterAt
	Flush() error
	// Zero fills a range of whole blocks with zeroes and flushes. progress may be nil; ctx is
	// checked between chunks.
	Zero(ctx context.Context, offset, length block.Size, progress func(done block.Size)) error
	Size() block.Size
	BlockSize() block.Size // logical, a power of two from 512 to 4096
	Close() error
}

// SPDX-License-Identifier: Apache-2.0

// Package integrity keeps a checksum of each block of a leg beside the leg's data, so that a read
// never returns what the drive has changed by itself.
//
// A leg with checksums has extents of 256 MiB, like any other. In each of them the first MiB is for
// checksums, and the other 255 MiB are data:
//
//	extent   | 576 KiB | 68 pages of 4 KiB | … | 255 MiB of data          |
//	page     | head | 960 checksums |            each of a block of 4 KiB
//
// So each extent is complete in itself, and a leg grows by extents.
//
// # A write and a power cut
//
// Data and its checksum are two writes, and a power cut can come between them. Before the first
// write to a part of a page, the page is written with a mark: the checksums of this part may be
// older than the data. Only then is the data written. The new checksums stay in memory. Some
// seconds after the last write to it, the page is written once more, with the checksums and without
// the mark. So a part that is written often costs two more writes in many seconds, and a write to a
// part that has its mark costs none.
//
// After a power cut the pages with marks are known. When one is first used, its marked parts are
// read, and what the drive holds there is taken for right: an acknowledged write is there because
// the drive has acknowledged it, and one that was under way may be there in any part, as on a drive
// without checksums. Blocks whose checksums were right all along are not counted; the others are
// (Stats.Adopted). A page that is damaged is treated like one that is marked everywhere.
//
// Promises:
//
//   - A read returns data that matches its checksum, or fails with block.ErrChecksum. Data whose
//     part was marked when the power was cut is not protected across that cut, see above.
//   - No power cut makes a block unreadable, whatever was under way.
//   - A write to a part of a block reads the rest and checks it. If that is wrong, the block stays
//     wrong: it can be read again once all of it was written.
//   - Blocks that were never written read as zeroes, and that is checked, too: a page of zeroes
//     holds the checksums of zeroes.
//
// On a drive with a volatile cache a mark is durable before the data is written, and data is durable
// before its mark goes.
//
// docs/architecture.md has the format.
package integrity

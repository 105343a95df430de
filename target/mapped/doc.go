// SPDX-License-Identifier: Apache-2.0

// Package mapped keeps legs whose bytes are found through a map: legs that take space only where
// they were written, their snapshots and their clones.
//
// What shares space is a tree of layers, on one drive, in extents of 256 MiB:
//
//	base ── mon ── tue ── db1        base, mon, tue: frozen layers (snapshots)
//	          \                      db1, c1: open layers (the heads of volumes)
//	           c1
//
//	extent   | head, table A, table B | chunk | chunk | chunk | …      1 MiB each
//	table    | record | record | …    one of 64 bytes for each chunk
//	record   layer 5 has of chunk 17 the grains 0-3, and 8 as zeroes   64 grains of 16 KiB
//
// A layer holds only the grains that were written during its life. A read takes each grain from the
// nearest layer that has it: the layer itself, its parent, and so on; what none has is zeroes. So a
// snapshot copies nothing, and no reference is counted.
//
// The map is indexed by the chunk on the drive: every fact has one fixed place, and a change is one
// write of the 4 KiB block with its record, to both copies of the table. There is no log and no
// tree of blocks; metadata cannot run out before data does. Changes that share a block share a
// write.
//
// Promises:
//
//   - A write is answered when its data and its record are as durable as the drive's writes are.
//     After a crash at any write every acknowledged one is there, and each layer is as it was.
//   - Grains that were never written read as zeroes. A chunk is given to a new owner only when
//     nothing durable names the old one, and no I/O to it is under way.
//   - A write without space fails with an error that says when there is space again (FullError).
//     Nothing else changes.
//   - If metadata cannot be written the tree stops: every later I/O fails with ErrFailed. So it does if a
//     drive with a volatile cache may have lost writes, since the tree in memory has records that the
//     drive may lack.
//   - Of a tree with records that are bad in both copies, everything that is certain is read, nothing is
//     guessed, and nothing is changed but which layers are deleted (Damage).
//
// What a tree promises on a drive with a volatile cache is what the drive promises: acknowledged
// writes are durable after a flush. Data is durable before the record that names it, unless the grains read as
// zeroes without either, and in their chunk, too (prepare.go).
//
// The package does not know drives' labels: its caller says which extents are the tree's.
// docs/tree-format.md describes the format for other implementations; package treecheck is one.
package mapped

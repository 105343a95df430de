// SPDX-License-Identifier: Apache-2.0

// Package archive writes what a snapshot holds as a stream, and a stream into a volume: for backups, and
// for another cluster.
//
//	magic | length, sum | header (JSON)             who, how large, since which snapshot
//	kind | length | offset | sum | data             a range of the volume, at most 1 MiB
//	…
//	end | … | sum                                   how many ranges, and a SHA-256 of all before
//
// Numbers are little-endian, and sums of records are CRC-32C. A stream is whole or it is refused: a
// reader that has not seen its end knows that it is cut off.
//
// A full stream has the ranges that hold data. One since an earlier snapshot has the ranges that differ
// from it, also those that are zeroes by now, and is only for a volume that holds the earlier one.
package archive

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"time"

	"weft.dev/weft/proto/block"
)

// Header is what a stream says of itself.
type Header struct {
	Version    int        `json:"version"`
	Volume     string     `json:"volume"`   // of which the snapshot is, by name
	Snapshot   string     `json:"snapshot"` // its name, "db1@tue"
	SnapshotID string     `json:"snapshot_id"`
	Since      string     `json:"since,omitempty"` // the name of the earlier snapshot; empty: the stream is full
	SinceID    string     `json:"since_id,omitempty"`
	Size       block.Size `json:"size_bytes"` // of the volume
	Taken      time.Time  `json:"taken"`
}

// version is the newest format that this program knows.
const version = 1

const (
	magic      = "weft snapshot\x00\x00\x00"
	headerMost = 64 << 10
	recordSize = 20
	// PieceMost is the most data of one record.
	PieceMost = 1 << 20
)

var (
	// ErrCut is returned for a stream that ends before its end.
	ErrCut = errors.New("the stream is cut off: its end is missing")
	// ErrCorrupt is returned for a stream in which something has changed.
	ErrCorrupt = errors.New("the stream is damaged")
	// ErrMore is returned for what follows a whole stream.
	ErrMore = errors.New("more follows the end of the stream: import each stream by itself")
	// ErrNotArchive is returned for something else.
	ErrNotArchive = errors.New("not a stream of `weft snapshot export`")
)

type kind uint8

const (
	kindData   kind = 1
	kindZeroes kind = 2 // length is that of the range, and there is no data
	kindEnd    kind = 3 // offset counts the records before, and the data is a SHA-256
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumOf is the sum of a record.
func sumOf(head, data []byte) uint32 {
	return crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, data)
}

// Writer writes a stream.
type Writer struct {
	w       io.Writer
	all     hash.Hash
	records uint64
}

// NewWriter begins a stream.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	h.Version = version
	text, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	out := &Writer{w: w, all: sha256.New()}
	b := binary.LittleEndian.AppendUint32([]byte(magic), uint32(len(text)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(text, castagnoli))
	return out, out.write(append(b, text...))
}

func (w *Writer) write(p []byte) error {
	w.all.Write(p)
	_, err := w.w.Write(p)
	return err
}

func (w *Writer) record(k kind, length uint32, offset uint64, data []byte) error {
	head := make([]byte, recordSize)
	head[0] = byte(k)
	binary.LittleEndian.PutUint32(head[4:], length)
	binary.LittleEndian.PutUint64(head[8:], offset)
	binary.LittleEndian.PutUint32(head[16:], sumOf(head[:16], data))
	w.records++
	if err := w.write(head); err != nil {
		return err
	}
	return w.write(data)
}

// Data writes a range that holds data, of at most PieceMost bytes.
func (w *Writer) Data(offset int64, p []byte) error {
	return w.record(kindData, uint32(len(p)), uint64(offset), p)
}

// Zeroes writes a range of at most PieceMost bytes that reads as zeroes.
func (w *Writer) Zeroes(offset, n int64) error {
	return w.record(kindZeroes, uint32(n), uint64(offset), nil)
}

// Close ends the stream. Without it, readers refuse what was written.
func (w *Writer) Close() error {
	sum := w.all.Sum(nil)
	return w.record(kindEnd, uint32(len(sum)), w.records, sum)
}

// Range is a part of a stream. Data is nil if it is zeroes; it is good until the next call.
type Range struct {
	Offset, Len int64
	Data        []byte
}

// Reader reads a stream.
type Reader struct {
	r       io.Reader
	h       Header
	all     hash.Hash
	records uint64
	last    int64 // where the last range ends
	buf     []byte
}

// NewReader reads the beginning of a stream.
func NewReader(r io.Reader) (*Reader, error) {
	in := &Reader{r: r, all: sha256.New(), buf: make([]byte, PieceMost)}
	head := make([]byte, len(magic)+8)
	if n, err := io.ReadFull(r, head); err != nil {
		if n == 0 {
			return nil, errors.New("the stream is empty")
		}
		return nil, ErrNotArchive
	}
	if string(head[:len(magic)]) != magic {
		return nil, ErrNotArchive
	}
	length, sum := binary.LittleEndian.Uint32(head[len(magic):]), binary.LittleEndian.Uint32(head[len(magic)+4:])
	if length > headerMost {
		return nil, ErrCorrupt
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, cut(err)
	}
	if crc32.Checksum(text, castagnoli) != sum {
		return nil, ErrCorrupt
	}
	in.all.Write(head)
	in.all.Write(text)
	if err := json.Unmarshal(text, &in.h); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	switch {
	case in.h.Version != version:
		return nil, fmt.Errorf("the stream has version %d, and this program knows version %d", in.h.Version, version)
	case in.h.Size == 0 || in.h.Size > block.MaxMapped || in.h.SnapshotID == "":
		return nil, ErrCorrupt
	}
	return in, nil
}

// cut is the error of a read that got less than it needs.
func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrCut
	}
	return err
}

// Header is what the stream says of itself.
func (r *Reader) Header() Header { return r.h }

// Ended says whether nothing follows the stream, after Next has found its end: the input may be two streams, of which
// only the first was read.
func (r *Reader) Ended() error {
	switch _, err := io.ReadFull(r.r, make([]byte, 1)); {
	case err == nil:
		return ErrMore
	case !errors.Is(err, io.EOF):
		return err
	}
	return nil
}

// Next returns the next range; io.EOF at the stream's end, which says that all of it was good.
func (r *Reader) Next() (one Range, err error) {
	before := r.all.Sum(nil)
	head := make([]byte, recordSize)
	if _, err := io.ReadFull(r.r, head); err != nil {
		return one, cut(err)
	}
	k, length, offset := kind(head[0]), binary.LittleEndian.Uint32(head[4:]), binary.LittleEndian.Uint64(head[8:])
	if length > PieceMost || k < kindData || k > kindEnd {
		return one, ErrCorrupt
	}
	var data []byte
	if k != kindZeroes {
		data = r.buf[:length]
		if _, err := io.ReadFull(r.r, data); err != nil {
			return one, cut(err)
		}
	}
	if binary.LittleEndian.Uint32(head[16:]) != sumOf(head[:16], data) {
		return one, ErrCorrupt
	}
	if k == kindEnd {
		if offset != r.records || string(data) != string(before) {
			return one, ErrCorrupt
		}
		return one, io.EOF
	}
	one = Range{Offset: int64(offset), Len: int64(length), Data: data}
	if offset > uint64(r.h.Size) || one.Offset < r.last || length == 0 || uint64(length) > uint64(r.h.Size)-offset {
		return one, ErrCorrupt
	}
	r.all.Write(head)
	r.all.Write(data)
	r.records++
	r.last = one.Offset + one.Len
	return one, nil
}

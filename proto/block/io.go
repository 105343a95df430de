// SPDX-License-Identifier: Apache-2.0

package block

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// Op is the operation of an IO.
type Op uint8

// The operations of a block device (NVM Command Set 1.0, section 3.2).
const (
	OpRead Op = iota + 1
	OpWrite
	OpFlush       // makes every acknowledged write durable
	OpDiscard     // the range's content is no longer needed
	OpWriteZeroes // the range reads as zeroes afterwards
	OpMap         // where the range may hold data: see Geometry.CheckMap
)

func (o Op) String() string {
	switch o {
	case OpRead:
		return "read"
	case OpWrite:
		return "write"
	case OpFlush:
		return "flush"
	case OpDiscard:
		return "discard"
	case OpWriteZeroes:
		return "write zeroes"
	case OpMap:
		return "map"
	}
	return "unknown operation"
}

// IO is one request to a Device. Its owner fills it in and submits it, and must not touch
// it or Data until Done has been called. It may then be reused.
type IO struct {
	Op    Op
	FUA   bool   // OpWrite, OpWriteZeroes: durable before it is done
	Unmap bool   // OpWriteZeroes: the range may be deallocated if it still reads as zeroes
	Off   int64  // bytes from the start of the device, a multiple of its block size
	Len   int64  // bytes, a multiple of the block size: len(Data) for reads and writes; 0 for OpFlush
	Data  []byte // the buffer that reads fill and writes take from, and the bits of OpMap

	// Done is called exactly once for each Submit, from any goroutine, possibly before
	// Submit has returned. It must not block.
	Done func(*IO)
	Err  error // the outcome, set before Done is called

	// Owner belongs to the submitter, to find what the IO is a part of. Devices ignore it.
	Owner any
}

// Complete sets the outcome and calls Done.
func (io *IO) Complete(err error) {
	io.Err = err
	io.Done(io)
}

// Range is the bytes of a device from Off to before End.
type Range struct{ Off, End int64 }

// Geometry describes a Device; all values are in bytes.
type Geometry struct {
	Size          Size
	BlockSize     Size // 512 or 4096: the smallest unit of a write
	DiscardUnit   Size // 0: discards have no effect
	MaxIO         Size // largest IO; 0: no limit
	VolatileCache bool // acknowledged writes need OpFlush to be durable
	ReadOnly      bool // requests that change it fail with ErrReadOnly
}

// Device is anything that takes IOs: a file, a remote namespace, a mirror, a volume. Submit
// may be called by many goroutines and never waits for the medium. Overlapping IOs that are
// in flight together complete in any order. A Device that cannot answer yet keeps the IO
// until it can, or until it is closed.
type Device interface {
	Geometry() Geometry
	Submit(*IO)
}

// Errors of a Device; it may wrap them.
var (
	ErrRange       = errors.New("beyond the end of the device, or not aligned to its blocks")
	ErrMedium      = errors.New("medium error")
	ErrGone        = errors.New("device is gone")
	ErrReadOnly    = errors.New("device is read-only")
	ErrUnsupported = errors.New("operation not supported")
	ErrFull        = errors.New("no space for new data")
	// ErrChecksum is an ErrMedium: the data was read, and is not what was written.
	ErrChecksum = fmt.Errorf("data does not match its checksum: %w", ErrMedium)
)

// FullError is the ErrFull of a device that knows for how long it has had no space, without a break.
type FullError struct {
	For time.Duration
	Err error // an ErrFull
}

func (e *FullError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *FullError) Unwrap() error { return e.Err }

// CheckIO returns an error if an IO is not valid for a device of geometry g.
func (g Geometry) CheckIO(io *IO) error {
	switch {
	case io.Op == OpFlush:
		return nil
	case io.Op < OpRead || io.Op > OpWriteZeroes:
		return ErrUnsupported
	case g.ReadOnly && io.Op != OpRead:
		return ErrReadOnly
	case g.checkRange(io) != nil:
		return ErrRange
	case (io.Op == OpRead || io.Op == OpWrite) && int64(len(io.Data)) != io.Len:
		return ErrRange
	}
	return nil
}

// checkRange returns an error if an IO's range is not one of whole blocks of the device.
func (g Geometry) checkRange(io *IO) error {
	b := int64(g.BlockSize)
	if io.Off < 0 || io.Len <= 0 || io.Off%b != 0 || io.Len%b != 0 || uint64(io.Off) > uint64(g.Size) || uint64(io.Len) > uint64(g.Size)-uint64(io.Off) {
		return ErrRange
	}
	return nil
}

// MapUnit is what a bit of an OpMap's answer stands for.
const MapUnit = 4 * KiB

// MapSize is how many bytes the answer to an OpMap has whose range is of n bytes.
func MapSize(n int64) int { return int((n + 8*int64(MapUnit) - 1) / (8 * int64(MapUnit))) }

// CheckMap is CheckIO for OpMap, which few devices know; CheckIO refuses it as ErrUnsupported. Bit
// i%8 of Data[i/8] stands for the i-th MapUnit of the range. If the device clears it, the unit read as
// zeroes at some moment while the IO was in flight; if it sets it, the unit may hold anything.
func (g Geometry) CheckMap(io *IO) error {
	if g.checkRange(io) != nil || len(io.Data) != MapSize(io.Len) {
		return ErrRange
	}
	return nil
}

// MayHold reports whether an OpMap's answer has a bit set.
func MayHold(answer []byte, unit int64) bool { return answer[unit/8]>>(unit%8)&1 == 1 }

// MarkMap sets the bits of an OpMap's answer for the range [off, end), relative to the range that was
// asked for.
func MarkMap(answer []byte, off, end int64) {
	for unit := off / int64(MapUnit); unit*int64(MapUnit) < end; unit++ {
		answer[unit/8] |= 1 << (unit % 8)
	}
}

// Do submits an IO and waits for it.
func Do(d Device, io *IO) error {
	done := make(chan struct{})
	io.Done = func(*IO) { close(done) }
	d.Submit(io)
	<-done
	return io.Err
}

// ReadAt reads len(p) bytes at off and waits for the result.
func ReadAt(d Device, p []byte, off int64) error {
	return Do(d, &IO{Op: OpRead, Data: p, Off: off, Len: int64(len(p))})
}

// WriteAt writes p at off and waits until it is acknowledged.
func WriteAt(d Device, p []byte, off int64) error {
	return Do(d, &IO{Op: OpWrite, Data: p, Off: off, Len: int64(len(p))})
}

// Flush waits until every acknowledged write is durable.
func Flush(d Device) error { return Do(d, &IO{Op: OpFlush}) }

// AllZero reports whether p has zeroes alone. It ends at the first other byte.
func AllZero(p []byte) bool { return len(p) == 0 || p[0] == 0 && bytes.Equal(p[1:], p[:len(p)-1]) }

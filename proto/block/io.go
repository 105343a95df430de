// SPDX-License-Identifier: Apache-2.0

package block

import "errors"

// Op is what an IO does.
type Op uint8

// The operations of a block device, as NVM Command Set 1.0, section 3.2, has them.
const (
	OpRead Op = iota + 1
	OpWrite
	OpFlush       // what was acknowledged before is durable after
	OpDiscard     // the range's content is of no interest any more
	OpWriteZeroes // the range reads as zeroes after
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
	}
	return "unknown operation"
}

// IO is one request to a Device. Its owner fills it in, submits it, and leaves
// it and Data alone until Done has been called; it may be used again after.
type IO struct {
	Op    Op
	FUA   bool   // OpWrite, OpWriteZeroes: durable before it is done
	Unmap bool   // OpWriteZeroes: the range may be deallocated, if it reads as zeroes then
	Off   int64  // bytes from the start of the device, a multiple of its block size
	Len   int64  // bytes, a multiple of the block size; of reads and writes the length of Data; 0 for OpFlush
	Data  []byte // reads fill it, writes take it

	// Done is called exactly once for each Submit, from any goroutine, perhaps
	// before Submit has returned. It must not block.
	Done func(*IO)
	Err  error // the outcome, set before Done is called

	// Owner is for whoever submits: what the IO is a part of. Devices leave it alone.
	Owner any
}

// Complete sets the outcome and calls Done.
func (io *IO) Complete(err error) {
	io.Err = err
	io.Done(io)
}

// Geometry is what a Device is like; all values are bytes.
type Geometry struct {
	Size          Size
	BlockSize     Size // 512 or 4096: the unit that is written at once
	DiscardUnit   Size // 0: discards do nothing
	MaxIO         Size // of one IO; 0: any
	VolatileCache bool // acknowledged writes need OpFlush to be durable
	ReadOnly      bool // what would change it fails with ErrReadOnly
}

// Device is anything that takes IOs: a file, a namespace on the other side of a
// network, a mirror, a volume. Submit may be called by many goroutines and never
// waits for a medium; IOs that overlap and are under way together happen in any
// order. A Device that cannot answer now keeps the IO until it can or is closed.
type Device interface {
	Geometry() Geometry
	Submit(*IO)
}

// Errors that a Device answers with, to be wrapped.
var (
	ErrRange       = errors.New("beyond the end of the device, or not aligned to its blocks")
	ErrMedium      = errors.New("medium error")
	ErrGone        = errors.New("device is gone")
	ErrReadOnly    = errors.New("device is read-only")
	ErrUnsupported = errors.New("operation not supported")
)

// CheckIO says what is wrong with an IO for a device of geometry g.
func (g Geometry) CheckIO(io *IO) error {
	b := int64(g.BlockSize)
	switch {
	case io.Op == OpFlush:
		return nil
	case io.Op < OpRead || io.Op > OpWriteZeroes:
		return ErrUnsupported
	case g.ReadOnly && io.Op != OpRead:
		return ErrReadOnly
	case io.Off < 0 || io.Len <= 0 || io.Off%b != 0 || io.Len%b != 0 || uint64(io.Off) > uint64(g.Size) || uint64(io.Len) > uint64(g.Size)-uint64(io.Off):
		return ErrRange
	case (io.Op == OpRead || io.Op == OpWrite) && int64(len(io.Data)) != io.Len:
		return ErrRange
	}
	return nil
}

// Do submits an IO and waits for it.
func Do(d Device, io *IO) error {
	done := make(chan struct{})
	io.Done = func(*IO) { close(done) }
	d.Submit(io)
	<-done
	return io.Err
}

// ReadAt reads len(p) bytes at off and waits for them.
func ReadAt(d Device, p []byte, off int64) error {
	return Do(d, &IO{Op: OpRead, Data: p, Off: off, Len: int64(len(p))})
}

// WriteAt writes p at off and waits until it is acknowledged.
func WriteAt(d Device, p []byte, off int64) error {
	return Do(d, &IO{Op: OpWrite, Data: p, Off: off, Len: int64(len(p))})
}

// Flush waits until everything that was acknowledged is durable.
func Flush(d Device) error { return Do(d, &IO{Op: OpFlush}) }

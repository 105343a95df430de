// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// Options say how a File is opened. The zero value opens for reading and writing, bypassing the
// page cache where possible.
type Options struct {
	ReadOnly  bool
	Exclusive bool // block devices: EBUSY if a file system or another exclusive opener holds it
	Buffered  bool // through the page cache even where O_DIRECT would work

	// BlockSize of a regular file, 512 or 4096; 0 means 4096. A block device has its own.
	BlockSize block.Size

	// Workers is how many IOs may wait in the kernel at once; 0 means 32.
	Workers int

	// FlushAgain lets a flush succeed after a failed one. The caller must then use Losses to make
	// sure that no later flush is taken for a flush of the lost writes.
	FlushAgain bool

	// OnLoss is called after Losses has grown, before the failed flush is answered and before Open
	// returns; may be nil.
	OnLoss func()

	// Calls wraps the system calls of the File: a test's drive that forgets undurable writes, or
	// fails. All IOs are then done by workers.
	Calls func(Calls) Calls

	workersOnly bool // in tests: workers do all IOs
}

// Calls are the system calls behind a File's IO, named after them; many goroutines make them.
// Zeroes and discards on a block device use ioctls instead, and IO that the kernel takes without
// waiting goes through aio.
type Calls interface {
	Pread(p []byte, off int64) (int, error)
	Pwrite(p []byte, off int64) (int, error)
	PwriteDurable(p []byte, off int64) (int, error) // pwritev2 with RWF_DSYNC
	Fallocate(mode uint32, off, n int64) error
	Fdatasync() error
	FadviseDontNeed() error // posix_fadvise of the whole file, with POSIX_FADV_DONTNEED
}

// File is a block.Device on a regular file or a block device. When the page cache is bypassed,
// Submit hands reads and writes straight to the kernel (see aio). A bounded number of goroutines,
// which exist only while there is work, does everything else, and the IOs for which the kernel
// would have to wait first.
type File struct {
	path     string
	fd       int
	isBlock  bool
	direct   bool
	memory   int // memory alignment that direct IO requires
	readOnly bool
	again    bool
	max      int
	losses   atomic.Uint64
	onLoss   func()
	aio      *aio // nil: not available
	calls    Calls

	terms atomic.Pointer[terms] // replaced with mu held

	mu       sync.Mutex
	idle     sync.Cond // no worker and no flusher is left
	queue    fifo
	workers  int
	flushes  []*block.IO // wait for the next fdatasync
	spare    []*block.IO // the slice of the last round, for reuse
	flushing bool
	lost     error // the error of the first failed fdatasync

	run, runFlush func() // work and flush, made once so that starting them allocates nothing
}

// terms are what an IO is admitted by.
type terms struct {
	geometry block.Geometry
	closed   bool
	short    error // the file was cut off by another program: see Check
}

// change replaces the terms and returns what they were.
func (f *File) change(change func(*terms)) terms {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := *f.terms.Load()
	now := old
	change(&now)
	f.terms.Store(&now)
	return old
}

// Open opens the regular file or block device at path.
func Open(path string, o Options) (_ *File, retErr error) {
	f := &File{path: path, readOnly: o.ReadOnly, again: o.FlushAgain, onLoss: o.OnLoss, max: o.Workers}
	f.idle.L = &f.mu
	f.run, f.runFlush = f.work, f.flush
	if f.max == 0 {
		f.max = 32
	}
	if err := f.open(o); err != nil {
		return nil, fmt.Errorf("open device: %w", &os.PathError{Op: "open", Path: path, Err: err})
	}
	if !f.readOnly && !f.direct {
		// Data that an earlier process left in the page cache may be lost without anyone having
		// been told; the kernel tells the next opener of the file, once.
		f.sync() //nolint:errcheck // it counts as a loss
		// After a failed flush the cache still shows data that is not on the drive, and that no
		// later flush would write.
		f.calls.FadviseDontNeed() //nolint:errcheck // it is advice
	}
	return f, nil
}

// Losses counts the events after which acknowledged writes may be lost: failed flushes, including
// the one in Open, and the calls of Lose.
func (f *File) Losses() uint64 { return f.losses.Load() }

// Geometry implements block.Device.
func (f *File) Geometry() block.Geometry { return f.terms.Load().geometry }

// Direct reports whether IO goes past the page cache.
func (f *File) Direct() bool { return f.direct }

// Refresh reads the size of the file or device again, after it was changed.
func (f *File) Refresh() error {
	size, err := f.size()
	if err != nil {
		return fmt.Errorf("size of %s: %w", f.path, err)
	}
	f.change(func(t *terms) { t.geometry.Size = size / t.geometry.BlockSize * t.geometry.BlockSize })
	return nil
}

// Check tests that a file is still as long as it was. If not, the File refuses all IO from then on:
// a write beyond the end would extend the file again, with zeroes in place of the lost data.
func (f *File) Check() error {
	if f.isBlock {
		return nil
	}
	size, err := f.size()
	if err != nil {
		return fmt.Errorf("size of %s: %w", f.path, err)
	}
	if size < f.Geometry().Size {
		return f.cutOff(int64(size))
	}
	return f.terms.Load().short
}

// cutOff notes that a file ends where it used to have data.
func (f *File) cutOff(end int64) error {
	err := fmt.Errorf("%s ends at %d, before its end: %w", f.path, end, block.ErrMedium)
	if f.isBlock {
		return err
	}
	f.change(func(t *terms) { t.short = err })
	return err
}

// Submit implements block.Device.
func (f *File) Submit(io *block.IO) {
	err := f.admit(io)
	if err == nil && f.aio.submit(io) {
		return
	}
	if err == nil {
		err = f.toWorkers(io)
	}
	if err != nil {
		io.Complete(err)
	}
}

// toWorkers gives an admitted IO to those who may wait for the kernel, unless f was closed meanwhile.
func (f *File) toWorkers(io *block.IO) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.admit(io); err != nil {
		return err
	}
	if io.Op != block.OpFlush {
		f.queueLocked(io)
		return nil
	}
	f.flushes = append(f.flushes, io)
	if !f.flushing {
		f.flushing = true
		go f.runFlush()
	}
	return nil
}

// queueLocked queues an IO for the workers.
func (f *File) queueLocked(io *block.IO) {
	f.queue.push(io)
	if f.workers < f.max {
		f.workers++
		go f.run()
	}
}

// ended answers an IO from aio, or passes it to a worker if it was not done as a whole: repeating
// it is harmless, as it has not been answered.
func (f *File) ended(io *block.IO, well bool) {
	if well {
		io.Complete(nil)
		return
	}
	f.mu.Lock()
	f.queueLocked(io)
	f.mu.Unlock()
}

func (f *File) admit(io *block.IO) error {
	t := f.terms.Load()
	switch {
	case t.closed:
		return fmt.Errorf("%v, to %s: %w", io.Op, f.path, block.ErrGone)
	case f.readOnly && io.Op != block.OpRead && io.Op != block.OpFlush:
		return fmt.Errorf("%v, to %s: %w", io.Op, f.path, block.ErrReadOnly)
	case t.short != nil:
		return t.short
	}
	return t.geometry.CheckIO(io)
}

// work does IOs until the queue is empty.
func (f *File) work() {
	var scratch []byte
	f.mu.Lock()
	for {
		io := f.queue.pop()
		if io == nil {
			break
		}
		f.mu.Unlock()
		io.Complete(f.do(io, &scratch))
		f.mu.Lock()
	}
	f.workers--
	f.restLocked()
	f.mu.Unlock()
}

// flush serves all waiting flushes with one fdatasync, and repeats while more arrive: a flush
// covers what was acknowledged before it began.
func (f *File) flush() {
	f.mu.Lock()
	for len(f.flushes) > 0 {
		round := f.flushes
		f.flushes = f.spare[:0]
		f.mu.Unlock()
		err := f.sync()
		for _, io := range round {
			io.Complete(err)
		}
		clear(round)
		f.mu.Lock()
		f.spare = round[:0]
	}
	f.flushing = false
	f.restLocked()
	f.mu.Unlock()
}

// sync is fdatasync with a memory: Linux reports a lost write once and then treats the page as
// clean, so the next fdatasync would succeed.
func (f *File) sync() error {
	f.mu.Lock()
	lost := f.lost
	f.mu.Unlock()
	if lost != nil && !f.again {
		return lost
	}
	if err := f.fdatasync(); err != nil {
		return f.Lose(err)
	}
	return nil
}

// Lose remembers that a flush of the same file or device has failed, here or in another opener:
// acknowledged writes may be lost. It returns the error for such a flush.
func (f *File) Lose(cause error) error {
	err := fmt.Errorf("flush %s: %w: %w", f.path, block.ErrMedium, cause)
	f.mu.Lock()
	f.lost = err
	f.losses.Add(1)
	f.mu.Unlock()
	if f.onLoss != nil {
		f.onLoss()
	}
	return err
}

func (f *File) restLocked() {
	if f.workers == 0 && !f.flushing {
		f.idle.Broadcast()
	}
}

// Close accepts no more IO, waits for the IO under way, makes it durable and closes the file.
func (f *File) Close() error {
	if f.change(func(t *terms) { t.closed = true }).closed {
		return nil
	}
	f.aio.close() // before the workers, who get what it cannot do
	f.mu.Lock()
	for f.workers > 0 || f.flushing {
		f.idle.Wait()
	}
	f.mu.Unlock()
	var err error
	if !f.readOnly {
		err = f.sync()
	}
	if closing := f.close(); err == nil && closing != nil {
		err = fmt.Errorf("close %s: %w", f.path, closing)
	}
	return err
}

// fifo is a queue in a ring that grows and is reused.
type fifo struct {
	ring  []*block.IO
	first int
	n     int
}

func (q *fifo) push(io *block.IO) {
	if q.n == len(q.ring) {
		bigger := make([]*block.IO, max(64, 2*q.n))
		for i := range q.n {
			bigger[i] = q.ring[(q.first+i)%len(q.ring)]
		}
		q.ring, q.first = bigger, 0
	}
	q.ring[(q.first+q.n)%len(q.ring)] = io
	q.n++
}

func (q *fifo) pop() *block.IO {
	if q.n == 0 {
		return nil
	}
	io := q.ring[q.first]
	q.ring[q.first] = nil
	q.first = (q.first + 1) % len(q.ring)
	q.n--
	return io
}

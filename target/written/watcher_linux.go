// SPDX-License-Identifier: Apache-2.0

package written

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

// mostDevices is how many devices can be listed at a time.
const mostDevices = 1 << 16

// Watcher runs the program. Its methods may be called concurrently.
type Watcher struct {
	devices, program, link int // file descriptors

	mu     sync.Mutex
	shared map[block.DeviceNumber]*shared
}

// shared is the memory of one device.
type shared struct {
	bytes []byte
	words []atomic.Uint64
}

// Open makes the kernel run the program. Sys is /sys. Kernels without it return an error that says what
// they lack.
func Open(sys string) (w *Watcher, retErr error) {
	l, tracepoint, err := describe(sys)
	if err != nil {
		return nil, fmt.Errorf("list writes: %w", err)
	}
	w = &Watcher{devices: -1, program: -1, link: -1, shared: map[block.DeviceNumber]*shared{}}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(fmt.Errorf("list writes: %w", retErr), w.Close())
		}
	}()
	model, err := createMap(mapArray, 4, 8, wordRegions+1, flagMmap|flagInner, -1)
	if err != nil {
		return w, err
	}
	defer unix.Close(model)
	if w.devices, err = createMap(mapHashOfMaps, 4, 4, mostDevices, 0, model); err != nil {
		return w, err
	}
	if w.program, err = loadProgram(assemble(l, w.devices), tracepoint); err != nil {
		return w, err
	}
	w.link, err = attach(w.program)
	return w, err
}

// describe reads what the program has to know of this kernel.
func describe(sys string) (l layout, tracepoint uint32, err error) {
	b, err := os.ReadFile(filepath.Join(sys, "kernel/btf/vmlinux"))
	if err != nil {
		return l, 0, err
	}
	types, err := parseTypes(b)
	if err != nil {
		return l, 0, err
	}
	for _, f := range []struct {
		to     *int
		of     string
		fields []string
	}{
		{&l.opf, "bio", []string{"bi_opf"}},
		{&l.bdev, "bio", []string{"bi_bdev"}},
		{&l.sector, "bio", []string{"bi_iter", "bi_sector"}},
		{&l.size, "bio", []string{"bi_iter", "bi_size"}},
		{&l.dev, "block_device", []string{"bd_dev"}},
	} {
		if *f.to, err = types.offset(f.of, f.fields...); err != nil {
			return l, 0, err
		}
	}
	tracepoint, err = types.find(kindTypedef, "btf_trace_block_bio_queue")
	return l, tracepoint, err
}

// Close ends the program. Trackers must not be used any more.
func (w *Watcher) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var errs error
	for _, fd := range []*int{&w.link, &w.program, &w.devices} {
		if *fd >= 0 {
			errs = errors.Join(errs, unix.Close(*fd))
		}
		*fd = -1
	}
	for n, s := range w.shared {
		errs = errors.Join(errs, unix.Munmap(s.bytes))
		delete(w.shared, n)
	}
	return errs
}

// number is a device number as struct block_device has it.
func number(n block.DeviceNumber) uint32 { return n.Major<<20 | n.Minor }

// Track begins a new list of a device's writes, about which nothing is known yet. The regions are those
// of a checkpoint.Tracker of this size.
func (w *Watcher) Track(n block.DeviceNumber, size block.Size) (*checkpoint.Tracker, error) {
	fail := func(err error) (*checkpoint.Tracker, error) {
		return nil, fmt.Errorf("list writes to device %v: %w", n, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.forgetLocked(n); err != nil {
		return fail(err)
	}
	words := wordRegions + checkpoint.Words(size)
	fd, err := createMap(mapArray, 4, 8, uint32(words), flagMmap|flagInner, -1)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(fd) // the map of devices keeps it
	b, err := share(fd, words)
	if err != nil {
		return fail(err)
	}
	s := &shared{b, unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&b[0])), words)}
	s.words[wordShift].Store(uint64(bits.TrailingZeros64(uint64(checkpoint.RegionOf(size)))))
	if err := putMap(w.devices, number(n), fd); err != nil {
		return fail(errors.Join(err, unix.Munmap(b)))
	}
	w.shared[n] = s
	return checkpoint.NewTrackerIn(size, s.words[wordRegions:]), nil
}

// Forget ends a device's list, whose Tracker must not be used any more.
func (w *Watcher) Forget(n block.DeviceNumber) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.forgetLocked(n)
}

func (w *Watcher) forgetLocked(n block.DeviceNumber) error {
	s := w.shared[n]
	if s == nil {
		return nil
	}
	if err := deleteKey(w.devices, number(n)); err != nil {
		return err
	}
	delete(w.shared, n)
	return unix.Munmap(s.bytes)
}

// Missed counts what the list of a device may lack. If the count has not changed since before a list
// began, it has every write. An error says the same as a change.
func (w *Watcher) Missed(n block.DeviceNumber) (uint64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.shared[n]
	if s == nil {
		return 0, fmt.Errorf("list writes to device %v: it is not listed", n)
	}
	program, err := infoOf(w.program)
	return program.misses + s.words[wordTooLong].Load(), err
}

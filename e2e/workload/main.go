// SPDX-License-Identifier: Apache-2.0

// Workload writes to a block device, prints each acknowledgement with its time, and can
// later check that all acknowledged data is still there. It runs in the guests of the
// scenarios and in the demo, which read its output. The device can also be a namespace
// served by weft dev.
//
//	workload write  -device /dev/weft/db1 -span 64MiB -depth 8 [-for 20s] [-rate 500] [-reads 100] [-discards 10]
//	workload verify -device /dev/weft/db1 -span 64MiB [-newest 1000] < acknowledged
//	workload relay :9100 /run/csi.sock
//
// write prints a line for each acknowledged write, "A block seq start_ns end_ns" with the
// machine's clock, or "E block seq start_ns end_ns error" for a failed one. It ends after
// -for, or cleanly on SIGTERM. A block has at most one write in flight.
//
// With -reads it also reads random blocks, and prints "R block seq start_ns end_ns" for each
// read, and "E" for one that failed or found what it must not: a write older than the newest
// that was acknowledged, or found by another read, before it began, or one that had not begun
// when it ended. It knows of its own writes only; of earlier ones, that they are older.
//
// With -discards it also discards in the last quarter of the span, 16 KiB at a time. It prints "d block" for each
// block before that, and "D" after it; a discard that the device does not take is none. From then on the block may be
// blank, or hold what it held, until a write of it is acknowledged.
//
// verify reads lines "block seq", or "block seq blank" of a block that may also be blank. It fails unless each such
// block holds that write or a later one, but none after -newest, and every other block is intact or blank.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"weft.dev/weft/proto/nvmetcp/namespace"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "workload:", err)
		os.Exit(1)
	}
}

type options struct {
	device   string
	blocks   uint64
	depth    int
	seed     uint64
	rate     int
	reads    int
	discards int
	during   time.Duration
	first    uint64
	known    bool
	newest   uint64
}

func run(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("no command: use write, verify or relay")
	}
	if args[0] == "relay" {
		return relay(ctx, args[1:])
	}
	var o options
	var span string
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.StringVar(&o.device, "device", "", "block device or file, or nvme-tcp://ADDRESS:PORT/SUBSYSTEM?host=ID")
	flags.StringVar(&span, "span", "64MiB", "the part of the device to use, from its start")
	flags.IntVar(&o.depth, "depth", 8, "writes in flight, and reads")
	flags.Uint64Var(&o.seed, "seed", 1, "seed of the order of blocks")
	flags.IntVar(&o.rate, "rate", 0, "writes per second in total; 0 means as fast as possible")
	flags.IntVar(&o.reads, "reads", 0, "reads per second in total, beside the writes; 0: none")
	flags.IntVar(&o.discards, "discards", 0, "discards per second, beside the writes; 0: none")
	flags.Uint64Var(&o.first, "first", 1, "first sequence number")
	flags.BoolVar(&o.known, "known", false, "verify only the blocks that are known to have been written")
	flags.Uint64Var(&o.newest, "newest", 0, "verify that no block holds a later write than this one; 0: any may be there")
	flags.DurationVar(&o.during, "for", 0, "how long to write; 0 means until SIGTERM")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	var mib uint64
	if _, err := fmt.Sscanf(strings.TrimSuffix(span, "MiB"), "%d", &mib); err != nil || mib == 0 {
		return fmt.Errorf("span %q: must be a number of MiB, such as 64MiB", span)
	}
	o.blocks = mib << 20 / blockSize
	switch args[0] {
	case "write":
		return write(ctx, o, out)
	case "verify":
		return verify(o, in, out)
	}
	return fmt.Errorf("unknown command %q: use write or verify", args[0])
}

// disk is the device that is written to and checked.
type disk interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

func open(name string, mode int) (disk, error) {
	if namespace.Is(name) {
		return namespace.Open(context.Background(), name)
	}
	return os.OpenFile(name, mode|syscall.O_DIRECT, 0)
}

// aligned returns n bytes of memory at a page boundary, as O_DIRECT requires.
func aligned(n int) []byte {
	b := make([]byte, (n+1)*blockSize)
	skip := blockSize - int(uintptr(unsafe.Pointer(&b[0]))%blockSize)
	return b[skip : skip+n*blockSize]
}

// writer assigns blocks and sequence numbers. No block is written twice at the same time.
type writer struct {
	mu   sync.Mutex
	rand *rand.Rand
	next uint64
	busy map[uint64]bool
	out  *bufio.Writer
	history
}

func (w *writer) take(blocks uint64) (block, seq uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		block = w.rand.Uint64N(blocks)
		if !w.busy[block] {
			break
		}
	}
	w.busy[block] = true
	seq = w.next
	w.next++
	w.begun[block] = seq
	return block, seq
}

func (w *writer) done(block, seq uint64, start, end time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.busy, block)
	if err != nil {
		fmt.Fprintf(w.out, "E %d %d %d %d %v\n", block, seq, start.UnixNano(), end.UnixNano(), err)
		return
	}
	delete(w.blank, block)
	w.learn(block, seq)
	fmt.Fprintf(w.out, "A %d %d %d %d\n", block, seq, start.UnixNano(), end.UnixNano())
}

// flushEvery flushes the output soon after each acknowledgement, so that little of it is
// lost when the machine is killed.
func (w *writer) flushEvery(ctx context.Context, period time.Duration) {
	for tick := time.NewTicker(period); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
			w.mu.Lock()
			w.out.Flush()
			w.mu.Unlock()
		}
	}
}

func write(ctx context.Context, o options, out io.Writer) error {
	if o.during > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.during)
		defer cancel()
	}
	mode := os.O_WRONLY
	if o.reads > 0 {
		mode = os.O_RDWR
	}
	f, err := open(o.device, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	w := &writer{rand: rand.New(rand.NewPCG(o.seed, 0)), next: o.first, busy: map[uint64]bool{}, out: bufio.NewWriter(out), history: newHistory(o.first)}
	defer w.out.Flush()
	if o.discards > 0 { // an earlier writer's discards may be done on one copy alone
		from, end := o.discardable()
		for n := from * grain; n < end*grain; n++ {
			w.blank[n] = true
		}
	}
	flushing, stop := context.WithCancel(context.Background())
	defer stop()
	go w.flushEvery(flushing, 20*time.Millisecond)

	var group sync.WaitGroup
	for range min(o.depth, int(o.blocks)) {
		group.Go(func() {
			b := aligned(1)
			for ctx.Err() == nil {
				block, seq := w.take(o.blocks)
				fill(b, block, seq)
				start := time.Now()
				_, err := f.WriteAt(b, int64(block*blockSize))
				w.done(block, seq, start, time.Now(), err)
				if o.rate > 0 {
					pause(ctx, time.Second*time.Duration(o.depth)/time.Duration(o.rate)-time.Since(start))
				}
			}
		})
	}
	if o.reads > 0 {
		for range o.depth {
			group.Go(func() { w.read(ctx, f, o) })
		}
	}
	if o.discards > 0 {
		group.Go(func() { w.discard(ctx, f, o) })
	}
	group.Wait()
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// toVerify are the first blocks of the batches to read: of all blocks, or of those acknowledged.
func (o options) toVerify(acknowledged map[uint64]uint64, batch uint64) iter.Seq[uint64] {
	if o.known {
		return slices.Values(slices.Sorted(maps.Keys(acknowledged)))
	}
	return func(yield func(uint64) bool) {
		for n := uint64(0); n < o.blocks && yield(n); n += batch {
		}
	}
}

// mostBad is the number of wrong blocks that are listed.
const mostBad = 20

// wrong says what is wrong with a block that holds the write want or a later one.
func (o options) wrong(b []byte, n, want uint64) error {
	got, err := parse(b, n)
	if err == nil && (got < want || o.newest > 0 && got > o.newest) {
		err = fmt.Errorf("holds write %d", got)
	}
	return err
}

// parseKnown reads what is known of blocks: the last acknowledged write, and which of them may be blank all the same.
func parseKnown(in io.Reader) (acknowledged map[uint64]uint64, mayBeBlank map[uint64]bool, err error) {
	acknowledged, mayBeBlank = map[uint64]uint64{}, map[uint64]bool{}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var block, seq uint64
		var blank string
		if n, err := fmt.Sscan(lines.Text(), &block, &seq, &blank); n < 2 || n == 3 && blank != "blank" {
			return nil, nil, fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		acknowledged[block] = max(acknowledged[block], seq)
		mayBeBlank[block] = blank != ""
	}
	return acknowledged, mayBeBlank, nil
}

func verify(o options, in io.Reader, out io.Writer) error {
	acknowledged, mayBeBlank, err := parseKnown(in)
	if err != nil {
		return err
	}
	f, err := open(o.device, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	batch := uint64(64)
	if o.known {
		batch = 1
	}
	b := aligned(int(batch))
	bad := 0
	for n := range o.toVerify(acknowledged, batch) {
		count := min(batch, o.blocks-n)
		if _, err := f.ReadAt(b[:count*blockSize], int64(n*blockSize)); err != nil {
			return fmt.Errorf("read blocks %d to %d: %w", n, n+count-1, err)
		}
		for i := range count {
			want, known := acknowledged[n+i]
			err := o.wrong(b[i*blockSize:(i+1)*blockSize], n+i, want)
			if err == nil || err == errBlank && (!known || mayBeBlank[n+i]) {
				continue
			}
			if bad++; bad <= mostBad {
				fmt.Fprintf(out, "block %d: %v; the last acknowledged write is %d\n", n+i, err, want)
			}
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d blocks are wrong; %d were acknowledged", bad, o.blocks, len(acknowledged))
	}
	fmt.Fprintf(out, "ok: %d blocks, %d acknowledged\n", o.blocks, len(acknowledged))
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/e2e/vm"
)

// Ack is one acknowledged write, with times of the client's clock.
type Ack struct {
	Block, Seq uint64
	Start, End time.Time
}

// Acks are the acknowledged writes of a volume: the last sequence number of each block.
type Acks map[uint64]uint64

// Writer is a program on a client that writes to a volume and records the acknowledgements.
type Writer struct {
	bed    *Bed
	client *vm.Machine
	cancel context.CancelFunc
	done   chan error

	mu     sync.Mutex
	rest   []byte // of an incomplete line
	log    []Ack
	reads  int
	blank  map[uint64]bool // by block: true, it was discarded; false, a write of it was acknowledged since
	frees  int             // discards that ended
	errors []string
}

// Write starts writing to a device on a client: to its first span MiB, at rate writes per
// second (0: as fast as possible). next is the first sequence number: 1, or the Next of an
// earlier writer, which wrote the blocks in another order.
func (b *Bed) Write(client *vm.Machine, device string, span, rate int, next uint64) *Writer {
	return b.WriteAndRead(client, device, span, rate, 0, next)
}

// WriteAndRead is Write with so many reads per second beside the writes. One that finds what it must not is an error
// that the application sees.
func (b *Bed) WriteAndRead(client *vm.Machine, device string, span, rate, reads int, next uint64) *Writer {
	return b.WriteReadAndDiscard(client, device, span, rate, reads, 0, next)
}

// WriteReadAndDiscard is WriteAndRead with so many discards per second, in the last quarter of the span.
func (b *Bed) WriteReadAndDiscard(client *vm.Machine, device string, span, rate, reads, discards int, next uint64) *Writer {
	ctx, cancel := context.WithCancel(b.T.Context())
	w := &Writer{bed: b, client: client, cancel: cancel, done: make(chan error, 1), blank: map[uint64]bool{}}
	go func() {
		w.done <- client.Do(ctx, vm.Command{
			Argv: []string{"workload", "write", "-device", device, "-span", fmt.Sprintf("%dMiB", span),
				"-depth", "8", "-rate", fmt.Sprint(rate), "-reads", fmt.Sprint(reads), "-discards", fmt.Sprint(discards), "-first", fmt.Sprint(next), "-seed", fmt.Sprint(next)},
			Stdout: w,
		})
	}()
	w.AwaitProgress(1, 30*time.Second)
	return w
}

// Write takes the program's output.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = append(w.rest, p...)
	for {
		end := bytes.IndexByte(w.rest, '\n')
		if end < 0 {
			return len(p), nil
		}
		w.line(string(w.rest[:end]))
		w.rest = w.rest[end+1:]
	}
}

func (w *Writer) line(line string) {
	var a Ack
	var start, end int64
	if n, _ := fmt.Sscanf(line, "A %d %d %d %d", &a.Block, &a.Seq, &start, &end); n == 4 {
		a.Start, a.End = time.Unix(0, start), time.Unix(0, end)
		w.log = append(w.log, a)
		w.blank[a.Block] = false
		return
	}
	if n, _ := fmt.Sscanf(line, "d %d", &a.Block); n == 1 {
		w.blank[a.Block] = true
		return
	}
	if strings.HasPrefix(line, "D ") {
		w.frees++
		return
	}
	if strings.HasPrefix(line, "R ") {
		w.reads++
		return
	}
	w.errors = append(w.errors, line)
}

// Log returns the writes acknowledged so far, in order of acknowledgement.
func (w *Writer) Log() []Ack {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Ack(nil), w.log...)
}

// Reads is how many reads have found what they may.
func (w *Writer) Reads() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reads
}

// Discards is how many discards have ended.
func (w *Writer) Discards() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.frees
}

// Blank notes in all which blocks this writer has discarded (true), and which it has written since (false).
func (w *Writer) Blank(all map[uint64]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.Copy(all, w.blank)
}

// Discardable are the blocks of a span of so many MiB that a writer may discard.
func Discardable(span int) map[uint64]bool {
	all := map[uint64]bool{}
	blocks := uint64(span) << 20 / 4096
	for n := blocks - blocks/4; n < blocks; n++ {
		all[n] = true
	}
	return all
}

// Next is a sequence number that this writer has not used.
func (w *Writer) Next() uint64 {
	next := uint64(1)
	for _, a := range w.Log() {
		next = max(next, a.Seq+1)
	}
	return next + 64 // some may still be in flight
}

// AwaitProgress waits until n more writes are acknowledged.
func (w *Writer) AwaitProgress(n int, atMost time.Duration) {
	w.bed.T.Helper()
	before := len(w.Log())
	w.bed.Eventually(atMost, fmt.Sprintf("%d more writes are acknowledged on %s", n, w.client.Name()), func(context.Context) error {
		if now := len(w.Log()); now < before+n {
			return fmt.Errorf("%d were, %d errors: %v", now-before, len(w.errors), w.errors)
		}
		return nil
	})
}

// Stop ends the writer. It fails the test if the application saw an error.
func (w *Writer) Stop() {
	w.bed.T.Helper()
	ctx, cancel := context.WithTimeout(w.bed.T.Context(), time.Minute)
	defer cancel()
	// It also stops the other writers of this client, which then find nobody to stop.
	if _, err := w.client.Shell(ctx, "busybox killall -q -TERM workload || true"); err != nil {
		w.bed.T.Fatalf("stop the writer: %v", err)
	}
	select {
	case err := <-w.done:
		if err != nil {
			w.bed.T.Fatalf("the writer on %s: %v", w.client.Name(), err)
		}
	case <-ctx.Done():
		w.bed.T.Fatalf("the writer on %s does not exit: its writes hang\n%s", w.client.Name(), w.bed.State())
	}
	w.NoErrors()
}

// Abandon gives up a writer whose machine is off. Its output until then counts.
func (w *Writer) Abandon() {
	w.cancel()
	<-w.done
}

// NoErrors fails the test if the application saw an error.
func (w *Writer) NoErrors() {
	w.bed.T.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.errors) > 0 {
		w.bed.T.Fatalf("the application on %s saw %d errors, the first: %s", w.client.Name(), len(w.errors), w.errors[0])
	}
}

// Stall is the longest time between two acknowledgements, and its beginning.
func (w *Writer) Stall() (longest time.Duration, began time.Time) { return LongestGap(w.Log()) }

// LongestGap is the longest time between two acknowledgements, and its beginning.
func LongestGap(log []Ack) (longest time.Duration, began time.Time) {
	for i := 1; i < len(log); i++ {
		if gap := log[i].End.Sub(log[i-1].End); gap > longest {
			longest, began = gap, log[i-1].End
		}
	}
	return longest, began
}

// Add merges the acknowledged writes of a writer.
func (a Acks) Add(w *Writer) Acks {
	for _, ack := range w.Log() {
		a[ack.Block] = max(a[ack.Block], ack.Seq)
	}
	return a
}

// Verify fails the test unless every acknowledged write is on the device. Of more than 1 GiB it reads
// only the blocks that were written.
func (b *Bed) Verify(client *vm.Machine, device string, span int, acks Acks) {
	b.T.Helper()
	b.VerifyUpTo(client, device, span, acks, 0)
}

// VerifyUpTo is Verify, and fails the test if the device holds a write after the newest one that may be
// there; 0: any may.
func (b *Bed) VerifyUpTo(client *vm.Machine, device string, span int, acks Acks, newest uint64) {
	b.T.Helper()
	b.VerifyDiscarded(client, device, span, acks, newest, nil)
}

// VerifyDiscarded is VerifyUpTo with blocks that may be blank.
func (b *Bed) VerifyDiscarded(client *vm.Machine, device string, span int, acks Acks, newest uint64, blank map[uint64]bool) {
	b.T.Helper()
	var in strings.Builder
	for block, seq := range acks {
		fmt.Fprint(&in, block, " ", seq)
		if blank[block] {
			fmt.Fprint(&in, " blank")
		}
		fmt.Fprintln(&in)
	}
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(b.T.Context(), 3*time.Minute)
	defer cancel()
	argv := []string{"workload", "verify", "-device", device, "-span", fmt.Sprintf("%dMiB", span), "-newest", fmt.Sprint(newest)}
	if span > 1<<10 {
		argv = append(argv, "-known")
	}
	err := client.Do(ctx, vm.Command{
		Argv:  argv,
		Stdin: []byte(in.String()), Stdout: &out,
	})
	if err != nil {
		b.T.Fatalf("acknowledged writes are lost on %s of %s: %v\n%s\n%s", device, client.Name(), err, out.String(), b.State())
	}
	b.T.Logf("%s on %s: %s", device, client.Name(), strings.TrimSpace(out.String()))
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// writer runs e2e/workload, a separate program that writes and prints what was
// acknowledged.
type writer struct {
	program, file string
	process       *exec.Cmd
	ended         chan error

	mu     sync.Mutex
	last   map[uint64]uint64 // the last sequence number of each block
	n      int
	at     time.Time // of the last acknowledgement
	gap    time.Duration
	errors []string
}

func (d *demo) startWriter(file string) *writer {
	w := &writer{program: filepath.Join(filepath.Dir(d.weft), "workload"), file: file, ended: make(chan error, 1), last: map[uint64]uint64{}}
	w.process = exec.Command(w.program, "write", "-device", file, "-span", fmt.Sprintf("%dMiB", span), "-depth", "8", "-rate", "200")
	w.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	out, err := w.process.StdoutPipe()
	d.must(err)
	d.must(w.process.Start())
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			w.line(lines.Text())
		}
		w.ended <- w.process.Wait()
	}()
	d.undo = append(d.undo, w.end)
	return w
}

func (w *writer) line(line string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var block, seq uint64
	var start, end int64
	if n, _ := fmt.Sscanf(line, "A %d %d %d %d", &block, &seq, &start, &end); n != 4 {
		w.errors = append(w.errors, line)
		return
	}
	w.last[block] = max(w.last[block], seq)
	w.n++
	at := time.Unix(0, end)
	if !w.at.IsZero() {
		w.gap = max(w.gap, at.Sub(w.at))
	}
	w.at = at
}

func (w *writer) acknowledged() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.n
}

// await waits until n more writes are acknowledged.
func (w *writer) await(d *demo, n int) {
	n += w.acknowledged()
	d.eventually("the application's writes continue", func() bool {
		d.must(w.noErrors())
		return w.acknowledged() >= n
	})
}

func (w *writer) noErrors() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.errors) > 0 {
		return fmt.Errorf("the application saw %d errors, the first: %s", len(w.errors), w.errors[0])
	}
	return nil
}

// stall is the longest time between two acknowledgements since the last call.
func (w *writer) stall() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	gap := w.gap
	w.gap = 0
	return gap
}

func (w *writer) end() error {
	if err := w.process.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-w.ended:
		return err
	case <-time.After(patience):
		return errors.Join(errors.New("the application does not exit: its writes hang"), w.process.Process.Kill())
	}
}

// stop ends the program, checks that all acknowledged writes are on the volume, and returns
// their number.
func (w *writer) stop(d *demo) int {
	d.done()
	d.must(w.noErrors())
	var acks strings.Builder
	for block, seq := range w.last {
		fmt.Fprintln(&acks, block, seq)
	}
	cmd := exec.CommandContext(d.ctx, w.program, "verify", "-device", w.file, "-span", fmt.Sprintf("%dMiB", span))
	cmd.Stdin = strings.NewReader(acks.String())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		d.must(fmt.Errorf("acknowledged writes are lost: %w\n%s", err, out.String()))
	}
	return w.n
}

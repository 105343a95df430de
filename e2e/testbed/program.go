// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"

	"weft.dev/weft/e2e/vm"
)

// Main runs a program that uses a cluster as a test does, and returns its exit code. It
// ends everything that the program started, also when interrupted.
func Main(name string, verbose bool, run func(t vm.TB)) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	p := &program{ctx: ctx, name: name, verbose: verbose}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer p.cleanUp()
		run(p)
	}()
	<-done
	if p.Failed() {
		return 1
	}
	return 0
}

// program is a vm.TB for programs that are not tests. Like a test, Fatalf ends the
// goroutine that runs the program.
type program struct {
	ctx     context.Context
	name    string
	verbose bool

	mu       sync.Mutex
	failed   bool
	cleanups []func()
}

func (p *program) Helper()                  {}
func (p *program) Name() string             { return p.name }
func (p *program) Context() context.Context { return p.ctx }

func (p *program) Logf(format string, args ...any) {
	if p.verbose {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}
}

func (p *program) Errorf(format string, args ...any) {
	p.mu.Lock()
	p.failed = true
	p.mu.Unlock()
	fmt.Fprintf(os.Stderr, p.name+": "+format+"\n", args...)
}

func (p *program) Fatalf(format string, args ...any) {
	p.Errorf(format, args...)
	runtime.Goexit()
}

func (p *program) Skipf(format string, args ...any) { p.Fatalf(format, args...) }

func (p *program) Failed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

func (p *program) Cleanup(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cleanups = append(p.cleanups, f)
}

func (p *program) cleanUp() {
	for {
		p.mu.Lock()
		n := len(p.cleanups)
		if n == 0 {
			p.mu.Unlock()
			return
		}
		f := p.cleanups[n-1]
		p.cleanups = p.cleanups[:n-1]
		p.mu.Unlock()
		f()
	}
}

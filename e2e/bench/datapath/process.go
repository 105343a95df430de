// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pinned starts a command on one processor, with first priority there; with a negative cpu
// it starts it normally, on all processors. The command's children inherit this. The
// command ends with this process.
func pinned(cmd *exec.Cmd, cpu int) (wait func() error, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error), make(chan error, 1)
	go func() {
		// The thread is pinned, so it is not reused. It lives until the end, because the
		// command is killed when it ends.
		runtime.LockOSThread()
		if cpu >= 0 {
			var set unix.CPUSet
			set.Set(cpu)
			if err := unix.SchedSetaffinity(0, &set); err != nil {
				started <- fmt.Errorf("pin to processor %d: %w", cpu, err)
				return
			}
			goFirst()
		}
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	return func() error { return <-ended }, <-started
}

// outputOf runs a pinned command to its end and returns what it printed.
func outputOf(cmd *exec.Cmd, cpu int) (string, error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	wait, err := pinned(cmd, cpu)
	if err == nil {
		err = wait()
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Args[0]), err, out.String())
	}
	return out.String(), nil
}

// goFirst gives this thread and its children first priority on the machine, if permitted.
// Without it, a server that sleeps waits for the end of another program's time slice
// (milliseconds), while a server that polls a little longer does not. The comparison would
// not be fair.
func goFirst() {
	a := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}
	_ = unix.SchedSetAttr(0, &a, 0) // without permission we run at normal priority
}

// process is another process of this program. It answers requests line by line, and ends
// when its input ends.
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	wait func() error
}

func start(cpu int, role ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(self, append([]string{Role}, role...)...)}
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	p.wait, err = pinned(p.cmd, cpu)
	return p, err
}

// answerTime is the time limit for an answer, in addition to the load's running time.
const answerTime = time.Minute

// ask sends a question and reads its answer. If the answer does not come within d plus
// answerTime, it kills the process.
func (p *process) ask(d time.Duration, question, answer any) error {
	defer time.AfterFunc(d+answerTime, func() { p.cmd.Process.Kill() }).Stop()
	b, err := json.Marshal(question)
	if err != nil {
		return err
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		return err
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("answer of %v: %w", p.cmd.Args, err)
	}
	return json.Unmarshal(line, answer)
}

// stop closes the process's input and waits until it has ended.
func (p *process) stop() {
	defer time.AfterFunc(answerTime, func() { p.cmd.Process.Kill() }).Stop()
	p.in.Close()
	_ = p.wait() // it has to end, however it does
}

// answer is the other end of ask.
func answer[Q, A any](do func(Q) A) error {
	in, out := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var q Q
		if err := json.Unmarshal(line, &q); err != nil {
			return err
		}
		if err := out.Encode(do(q)); err != nil {
			return err
		}
	}
}

// processorTime is the processor time of all threads of a process.
func processorTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	var ticks uint64
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil // USER_HZ
}

// usage is the resource use of one of our processes.
type usage struct {
	CPU     time.Duration
	Mallocs uint64
}

func ownUsage() usage {
	var r unix.Rusage
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		panic(err) // cannot fail with these arguments
	}
	return usage{time.Duration(r.Utime.Nano() + r.Stime.Nano()), m.Mallocs}
}

// profilesIn is the variable that tells our processes where to write profiles.
const profilesIn = "WEFT_BENCH_PROFILES"

// profileFor writes a profile of this process if the environment asks for one.
func profileFor(role string) (stop func()) {
	dir := os.Getenv(profilesIn)
	if dir == "" {
		return func() {}
	}
	return profile(dir, role)
}

func run(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

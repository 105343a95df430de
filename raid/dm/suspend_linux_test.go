// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"context"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// toSuspend names the device that this program suspends in place of running tests.
const toSuspend = "WEFT_TEST_SUSPEND"

func TestMain(m *testing.M) {
	name := os.Getenv(toSuspend)
	if name == "" {
		os.Exit(m.Run())
	}
	c, err := Open()
	if err == nil {
		err = c.Suspend(name, true, true)
	}
	if err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		os.Exit(1)
	}
}

// A process that is killed, or gets another signal, while it suspends a mirror whose I/O does not end leaves a
// mirror that can be suspended again. Where the wait is interrupted, the kernel never ends the next one.
func TestASuspendOutlivesItsProcess(t *testing.T) {
	requireKernel(t)
	w := kernelWorld(t)
	t.Cleanup(func() {
		if !t.Failed() { // or it would wait for ever
			w.removeAll(t)
		}
	})
	for signal, what := range map[syscall.Signal]string{syscall.SIGURG: "interrupted", syscall.SIGKILL: "killed"} {
		t.Run(what, func(t *testing.T) { suspendsThrough(t, w, what, signal) })
	}
}

func suspendsThrough(t *testing.T, w *world, what string, signal syscall.Signal) {
	below, name := w.name("below-"+what), w.name("mirror-"+what)
	must(t, w.client.Do(Step{OpCreate, Device{Name: below, UUID: below, Table: w.linear(0)}}))
	table := Whole(diskSize/2, Mirror{
		Log: Log{Region: block.MiB, Sync: NoSync}, Legs: []Leg{{w.disks[1], 0}, {Ref(below), 0}}, HandleErrors: true,
	})
	must(t, w.client.Do(Step{OpCreate, Device{Name: name, UUID: name, Table: table}}))
	must(t, w.client.Suspend(below, true, true))

	f, err := os.OpenFile(nodeOf(t, w.client, name), os.O_RDWR|unix.O_DIRECT, 0)
	must(t, err)
	written := make(chan error, 1)
	go func() {
		defer f.Close()
		_, err := f.WriteAt(aligned(4096), 0)
		written <- err
	}()

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	first, ended := suspendElsewhere(t, name)
	time.Sleep(time.Second) // until it waits in the kernel
	for range 10 {
		must(t, first.Signal(signal))
		time.Sleep(20 * time.Millisecond)
		if signal == syscall.SIGKILL {
			break
		}
	}
	if info, err := w.client.Info(name); err != nil || info.Suspended {
		t.Fatalf("Info = %+v, %v; want it not suspended yet, or this test shows nothing", info, err)
	}
	must(t, w.client.Resume(below, UdevInner))
	select {
	case err := <-written:
		must(t, err)
	case <-ctx.Done():
		t.Fatal("the write did not end")
	}
	select {
	case <-ended:
	case <-ctx.Done():
		t.Fatalf("the process that was %s has not ended", what)
	}
	for info, err := w.client.Info(name); !info.Suspended; info, err = w.client.Info(name) {
		must(t, err)
		if ctx.Err() != nil {
			t.Fatal("the mirror was never suspended")
		}
		time.Sleep(20 * time.Millisecond)
	}
	must(t, w.client.Do(Step{OpReload, Device{Name: name, UUID: name, Table: table}}))
	_, again := suspendElsewhere(t, name)
	select {
	case err := <-again:
		must(t, err)
	case <-ctx.Done():
		t.Fatal("the mirror can no more be suspended")
	}
	must(t, w.client.Do(Step{OpReload, Device{Name: name, UUID: name, Table: table}}))
}

// suspendElsewhere suspends a device in another process, because one that waits for ever cannot end.
func suspendElsewhere(t *testing.T, name string) (p *os.Process, ended chan error) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	other := exec.Command(self)
	other.Env, other.Stderr = append(os.Environ(), toSuspend+"="+name), os.Stderr
	must(t, other.Start())
	ended = make(chan error, 1)
	go func() { ended <- other.Wait() }()
	return other.Process, ended
}

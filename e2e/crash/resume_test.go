// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// needResume skips the test where devices of FUSE cannot wait for another process.
func needResume(t *testing.T) {
	t.Helper()
	for _, a := range blockdev.Probe() {
		if a.Kind == blockdev.FUSE && (!a.Usable || !a.Survives) {
			t.Skipf("fuse: %s; waits for another process: %v", a.Reason, a.Survives)
		}
	}
}

// page is what one page of a device holds.
const page = 4096

// checker writes random pages of a device, past the page cache, and knows what was acknowledged.
type checker struct {
	fd    int
	data  []byte // memory for direct I/O
	known map[int64][]byte
	worst time.Duration // the longest write
}

func newChecker(t *testing.T, path string) *checker {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	data, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(data) }) //nolint:errcheck // the test ends
	return &checker{fd: fd, data: data, known: map[int64][]byte{}}
}

// run writes and reads until stop is closed.
func (c *checker) run(stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return c.all()
		default:
		}
		at := mathrand.Int64N(1000)
		rand.Read(c.data)
		began := time.Now()
		if _, err := unix.Pwrite(c.fd, c.data, at*page); err != nil {
			return fmt.Errorf("write page %d after %v: %w", at, time.Since(began), err)
		}
		c.worst = max(c.worst, time.Since(began))
		c.known[at] = bytes.Clone(c.data)
		if err := c.check(mathrand.Int64N(1000)); err != nil {
			return err
		}
	}
}

func (c *checker) check(at int64) error {
	if _, err := unix.Pread(c.fd, c.data, at*page); err != nil {
		return fmt.Errorf("read page %d: %w", at, err)
	}
	if want := c.known[at]; want != nil && !bytes.Equal(c.data, want) {
		return fmt.Errorf("page %d is not what was acknowledged", at)
	}
	return nil
}

func (c *checker) all() error {
	for at := range c.known {
		if err := c.check(at); err != nil {
			return err
		}
	}
	return nil
}

// deviceName is the name of the volume with a block device: another test of this machine may have the same volume.
var deviceName = fmt.Sprintf("crash-%d", os.Getpid())

// createAndServe attaches a volume to a new c1 with a block device.
func (l *lab) createAndServe(wait time.Duration) *host {
	l.t.Helper()
	h := l.startHost("c1", "", 0, clientResume+"="+wait.String())
	l.eventually("the volume", func(ctx context.Context) error {
		_, err := l.manager.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: deviceName, SizeBytes: uint64(block.GiB), Copies: 2})
		return err
	})
	l.serves("c1")
	return h
}

// serves attaches the volume, if it is not, and waits until a host serves it.
func (l *lab) serves(node string) {
	l.t.Helper()
	l.eventually("the device on "+node, func(ctx context.Context) error {
		a, err := l.manager.Attach(ctx, &pb.AttachRequest{Volume: deviceName, Node: node})
		if err == nil && (a.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED || a.GetDevice() == "") {
			err = fmt.Errorf("%v: waits for %s", a.GetState(), a.GetWaitingFor())
		}
		return err
	})
}

func TestADeviceOutlivesItsAgentUnderWrites(t *testing.T) {
	needResume(t)
	l := newLab(t, 4*block.GiB)
	h := l.createAndServe(time.Minute)
	path := "/dev/weft/" + deviceName
	disk, err := filepath.EvalSymlinks(path)
	if err != nil {
		t.Fatal(err)
	}
	c := newChecker(t, path)
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- c.run(stop) }()
	for i := range 4 {
		time.Sleep(500 * time.Millisecond)
		if i%2 == 1 { // I/O is sure to be under way
			h.process.Process.Signal(unix.SIGSTOP) //nolint:errcheck // the next line shows it
			time.Sleep(200 * time.Millisecond)
		}
		h.kill()
		h = l.startHost("c1", "", 0, clientResume+"=1m")
	}
	time.Sleep(2 * time.Second)
	close(stop)
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the device does not go on")
	}
	if now, err := filepath.EvalSymlinks(path); err != nil || now != disk {
		t.Errorf("the device is %s now, %v; want %s", now, err, disk)
	}
	if len(c.known) < 100 {
		t.Errorf("only %d pages were written", len(c.known))
	}
	t.Logf("%d pages written over 4 kills, none lost; the longest write took %v", len(c.known), c.worst.Round(time.Millisecond))
	unix.Close(c.fd)
	l.detach()
}

// detach lets go of the volume in order.
func (l *lab) detach() {
	l.t.Helper()
	l.eventually("the detach", func(ctx context.Context) error {
		_, err := l.manager.Detach(ctx, &pb.DetachRequest{Volume: deviceName})
		if v, now := l.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: deviceName}); err == nil && (now != nil || len(v.GetAttachments()) > 0) {
			err = errors.Join(now, errors.New("it is attached"))
		}
		return err
	})
}

// While no agent of c1 runs, c2 gets the volume and writes to it. What the kernel of c1 still has in memory is
// of another time: the waiting I/O must fail, and no byte of it may reach the volume.
func TestADeviceThatWaitsFailsOnceAnotherHostHasHadItsVolume(t *testing.T) {
	needResume(t)
	l := newLab(t, 4*block.GiB)
	h := l.createAndServe(time.Minute)
	c := newChecker(t, "/dev/weft/"+deviceName)
	rand.Read(c.data)
	if _, err := unix.Pwrite(c.fd, c.data, 0); err != nil {
		t.Fatal(err)
	}
	before := bytes.Clone(c.data)
	h.kill()
	waits := make(chan error, 1)
	go func() {
		copy(c.data, bytes.Repeat([]byte{0xee}, page))
		_, err := unix.Pwrite(c.fd, c.data, 0)
		waits <- err
	}()
	l.eventually("the forced detach", func(ctx context.Context) error {
		_, err := l.manager.Detach(ctx, &pb.DetachRequest{Volume: deviceName, Node: "c1", Force: true})
		return err
	})
	other := l.startHost("c2", "", 0)
	l.eventually("the volume on c2", func(ctx context.Context) error {
		_, err := l.manager.Attach(ctx, &pb.AttachRequest{Volume: deviceName, Node: "c2"})
		other.mu.Lock()
		defer other.mu.Unlock()
		if err == nil && other.served.IsZero() {
			err = errors.New("c2 does not serve it")
		}
		return err
	})
	select {
	case err := <-waits:
		t.Fatalf("a write to the device that waits = %v, before its time", err)
	default:
	}
	other.kill()
	l.eventually("the forced detach", func(ctx context.Context) error {
		_, err := l.manager.Detach(ctx, &pb.DetachRequest{Volume: deviceName, Node: "c2", Force: true})
		return err
	})
	l.startHost("c1", "", 0, clientResume+"=1m")
	l.serves("c1")
	select {
	case err := <-waits:
		if err == nil {
			t.Error("a write of before another host had the volume was acknowledged")
		}
	case <-time.After(10 * time.Second):
		t.Error("a write of before another host had the volume waits on")
	}
	again := newChecker(t, "/dev/weft/"+deviceName)
	if _, err := unix.Pread(again.fd, again.data, 0); err != nil || !bytes.Equal(again.data, before) {
		t.Errorf("page 0 is not what it was before the write that had to fail: %v", err)
	}
	unix.Close(again.fd)
	unix.Close(c.fd)
	l.detach()
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// holding is a device that the holder keeps for this process.
type holding struct {
	o   Options
	fds []int // our copies of what it keeps

	mu    sync.Mutex
	conn  *net.UnixConn
	ended bool
}

// holdDevice has the holder keep a device and copies of descriptors. A holder that ends is
// replaced.
func holdDevice(ctx context.Context, o Options, fds []int) (*holding, error) {
	h := &holding{o: o}
	own, err := serving.open(func() (own []int, err error) {
		for _, fd := range fds {
			fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				closeAll(own)
				return nil, os.NewSyscallError("fcntl", err)
			}
			own = append(own, fd)
		}
		return own, nil
	})
	if err != nil {
		return nil, fmt.Errorf("hold %s: %w", o.Name, err)
	}
	h.fds = own
	if h.conn, err = h.register(ctx); err != nil {
		h.closeFiles()
		return nil, fmt.Errorf("hold %s: %w", o.Name, err)
	}
	go h.watch(h.conn)
	return h, nil
}

// register connects to the holder and gives it what to keep.
func (h *holding) register(ctx context.Context) (*net.UnixConn, error) {
	c, err := dialHolder(ctx, h.o)
	if err != nil {
		return nil, err
	}
	if _, err := callHolder(ctx, c, holdMessage{Do: "keep", Name: h.o.Name, Token: h.o.Resume, Within: h.o.ResumeWithin}, h.fds); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// holderRetry is the pause between attempts to find or start another holder.
const holderRetry = time.Second

// watch registers again when the holder has ended.
func (h *holding) watch(c *net.UnixConn) {
	for {
		_, _ = c.Read(make([]byte, 1)) // the holder says nothing unasked
		c.Close()
		for {
			h.mu.Lock()
			if h.ended || h.conn != c {
				h.mu.Unlock()
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), holderPatience)
			next, err := h.register(ctx)
			cancel()
			if err == nil {
				h.conn, c = next, next
			}
			h.mu.Unlock()
			if err == nil {
				h.o.Log.Warn("the holder of a block device ended; another one holds it")
				break
			}
			h.o.Log.Warn("no holder: if this process dies now, its block device fails", "err", err, "again_in", holderRetry)
			time.Sleep(holderRetry)
		}
	}
}

// drop makes the holder forget the device; h may be nil.
func (h *holding) drop(ctx context.Context) {
	if h == nil || !h.end() {
		return
	}
	defer h.closeFiles()
	if err := dropHeld(ctx, h.o); err != nil {
		h.o.Log.Warn("the holder keeps a device that is gone", "err", err)
	}
}

// leave leaves the device with the holder, as if this process had died.
func (h *holding) leave() {
	if h.end() {
		h.closeFiles()
	}
}

// end ends the connection, once.
func (h *holding) end() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return false
	}
	h.ended = true
	h.conn.Close()
	return true
}

func (h *holding) closeFiles() {
	serving.forget(h.fds...)
	closeAll(h.fds)
}

// dropHeld makes the holder, if there is one, forget a device whose process has died.
func dropHeld(ctx context.Context, o Options) error {
	c, err := connectHolder(o.RunDir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("drop %s at the holder: %w", o.Name, err)
	}
	defer c.Close()
	if _, err := callHolder(ctx, c, holdMessage{Do: "drop", Name: o.Name}, nil); err != nil {
		return fmt.Errorf("drop %s at the holder: %w", o.Name, err)
	}
	return nil
}

// takeHeld returns what the holder keeps of a device whose process has died, registered as
// serving.
func takeHeld(ctx context.Context, o Options) ([]int, error) {
	c, err := connectHolder(o.RunDir)
	if err != nil {
		return nil, fmt.Errorf("take %s from the holder: %w", o.Name, err)
	}
	defer c.Close()
	fds, err := serving.open(func() ([]int, error) {
		return callHolder(ctx, c, holdMessage{Do: "take", Name: o.Name, Token: o.Resume}, nil)
	})
	if err != nil {
		return nil, fmt.Errorf("take %s from the holder: %w", o.Name, err)
	}
	return fds, nil
}

func connectHolder(runDir string) (*net.UnixConn, error) {
	return net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: holderSocket(runDir), Net: "unixpacket"})
}

// holderPatience is how long a holder may take to start, and to answer.
const holderPatience = 5 * time.Second

// callHolder makes one request.
func callHolder(ctx context.Context, c *net.UnixConn, m holdMessage, fds []int) ([]int, error) {
	deadline := time.Now().Add(holderPatience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = c.SetDeadline(deadline)
	defer c.SetDeadline(time.Time{})
	if err := transmit(c, m, fds); err != nil {
		return nil, err
	}
	answer, got, err := receive(c)
	if err == nil && answer.Error != "" {
		err = errors.New(answer.Error)
	}
	if err != nil {
		closeAll(got)
		return nil, err
	}
	return got, nil
}

// dialHolder connects to the holder, and starts one where none runs.
func dialHolder(ctx context.Context, o Options) (*net.UnixConn, error) {
	c, err := connectHolder(o.RunDir)
	if err == nil || len(o.Holder) == 0 {
		return c, err
	}
	// In a session of its own: a signal to this process's group is not for the holder.
	cmd := exec.Command(o.Holder[0], o.Holder[1:]...)
	cmd.Stderr, cmd.SysProcAttr, cmd.Dir = os.Stderr, &syscall.SysProcAttr{Setsid: true}, "/"
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a holder: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	patience := time.NewTimer(holderPatience)
	defer patience.Stop()
	for {
		c, err := connectHolder(o.RunDir)
		if err == nil {
			return c, nil
		}
		select {
		case end := <-ended:
			if end != nil {
				return nil, fmt.Errorf("start a holder: %w", end)
			}
			ended = nil // another one was faster
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the holder: %w", ctx.Err())
		case <-patience.C:
			return nil, fmt.Errorf("wait for the holder: %w", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// A holder is a small process that outlives the one that exports devices. It keeps a second
// descriptor of each FUSE connection, since the kernel ends a connection with its last
// descriptor, and it removes devices of every kind whose process has died and has no successor:
//
//	exporting process                      holder                 the next process
//	  keep(name, token, descriptors)  ->
//	  ... dies ...                         its time begins
//	                                  <-                            take(name, token)
//	                                       descriptors  ->
//	                                  <-                            keep(...): time ends
//
// Each exported device has a connection to the holder's socket (SOCK_SEQPACKET) in the run
// directory. The end of the connection tells the holder that the process has died. Messages
// are JSON; each is answered.

// HoldOptions say for which devices a holder works.
type HoldOptions struct {
	DevDir string // as in Options
	RunDir string
	Log    *slog.Logger // nil: none

	// Linger: it ends once it has had nothing to hold, and nobody connected, for so long; 0:
	// it ends only with its context.
	Linger time.Duration
}

// holdMessage is a request to the holder, or its answer.
type holdMessage struct {
	Do     string           `json:"do,omitempty"` // keep, take, drop
	Name   block.VolumeName `json:"name,omitempty"`
	Token  string           `json:"token,omitempty"`
	Within time.Duration    `json:"within,omitempty"`
	Error  string           `json:"error,omitempty"`
}

const (
	holdMessageMax = 4096
	holdFilesMax   = 4
)

func holderSocket(runDir string) string { return filepath.Join(runDir, ".holder.sock") }
func holderLock(runDir string) string   { return filepath.Join(runDir, ".holder") }

// holder is the state of Hold.
type holder struct {
	o HoldOptions

	mu        sync.Mutex
	held      map[block.VolumeName]*held
	connected int
	idle      time.Time
}

// held is a device that is kept.
type held struct {
	holdMessage
	fds   []int
	by    *net.UnixConn // of the process that serves it; nil: it has died
	timer *time.Timer   // until the device is removed, once the process has died
}

// Hold is a holder's work; it runs until ctx ends or it is idle (see HoldOptions). A second
// holder of a run directory returns nil at once.
func Hold(ctx context.Context, o HoldOptions) error {
	all, err := Options{Name: "any", DevDir: o.DevDir, RunDir: o.RunDir, Log: o.Log}.withDefaults()
	if err != nil {
		return fmt.Errorf("hold devices: %w", err)
	}
	o.DevDir, o.RunDir = all.DevDir, all.RunDir
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	lock, err := os.OpenFile(holderLock(o.RunDir), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("hold devices: %w", err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	} else if err != nil {
		return fmt.Errorf("hold devices: lock %s: %w", lock.Name(), err)
	}
	socket := holderSocket(o.RunDir)
	if err := remove(socket); err != nil {
		return fmt.Errorf("hold devices: %w", err)
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("hold devices: %w", err)
	}
	defer listener.Close()
	if err := os.Chmod(socket, 0o600); err != nil {
		return fmt.Errorf("hold devices: %w", err)
	}
	h := &holder{o: o, held: make(map[block.VolumeName]*held), idle: time.Now()}
	return h.accept(ctx, listener)
}

// accept serves connections until the holder ends.
func (h *holder) accept(ctx context.Context, listener *net.UnixListener) error {
	for ctx.Err() == nil {
		_ = listener.SetDeadline(time.Now().Add(500 * time.Millisecond))
		c, err := listener.AcceptUnix()
		switch {
		case err == nil:
			h.mu.Lock()
			h.connected++
			h.mu.Unlock()
			go h.serve(c)
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("hold devices: %w", err)
		case h.idled():
			return nil
		}
	}
	return nil
}

// idled reports whether the holder may end.
func (h *holder) idled() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.connected > 0 || len(h.held) > 0 {
		h.idle = time.Now()
	}
	return h.o.Linger > 0 && time.Since(h.idle) > h.o.Linger
}

// serve answers one process until it ends the connection.
func (h *holder) serve(c *net.UnixConn) {
	defer c.Close()
	defer h.left(c)
	for {
		m, fds, err := receive(c)
		if err != nil {
			return
		}
		var answer holdMessage
		var send []int
		switch m.Do {
		case "keep":
			h.keep(c, m, fds)
			fds = nil
		case "take":
			if send, err = h.take(m); err != nil {
				answer.Error = err.Error()
			}
		case "drop":
			h.drop(m.Name)
		default:
			answer.Error = fmt.Sprintf("the holder does not know how to %q", m.Do)
		}
		closeAll(fds)
		err = transmit(c, answer, send)
		closeAll(send)
		if err != nil {
			return
		}
	}
}

// keep keeps descriptors of a device for as long as c lasts, and for m.Within after. It
// replaces what was kept under the name.
func (h *holder) keep(c *net.UnixConn, m holdMessage, fds []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dropLocked(m.Name)
	h.held[m.Name] = &held{holdMessage: m, fds: fds, by: c}
}

// take returns copies of what is kept for a token. The time goes on until they are kept again.
func (h *holder) take(m holdMessage) (fds []int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	one := h.held[m.Name]
	if one == nil || one.Token != m.Token {
		return nil, fmt.Errorf("nothing is held of %s for this token", m.Name)
	}
	for _, fd := range one.fds {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeAll(fds)
			return nil, os.NewSyscallError("fcntl", err)
		}
		fds = append(fds, own)
	}
	return fds, nil
}

func (h *holder) drop(name block.VolumeName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dropLocked(name)
}

func (h *holder) dropLocked(name block.VolumeName) {
	one := h.held[name]
	if one == nil {
		return
	}
	delete(h.held, name)
	if one.timer != nil {
		one.timer.Stop()
	}
	closeAll(one.fds)
}

// left begins the time of the devices of a process that has died.
func (h *holder) left(c *net.UnixConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.connected--
	for _, one := range h.held {
		if one.by == c {
			one.by = nil
			h.o.Log.Warn("the process of a block device has ended; its I/O waits for the next one", "volume", string(one.Name), "at_most", one.Within)
			one.timer = time.AfterFunc(one.Within, func() { h.expire(one) })
		}
	}
}

// removeLimit is how long the removal of an abandoned device may take.
const removeLimit = 30 * time.Second

// expire removes a device that no process has taken over.
func (h *holder) expire(one *held) {
	h.mu.Lock()
	if h.held[one.Name] != one {
		h.mu.Unlock()
		return
	}
	h.dropLocked(one.Name)
	h.mu.Unlock()
	h.o.Log.Error("no process has taken over a block device: its I/O fails from now on", "volume", string(one.Name), "waited", one.Within)
	ctx, cancel := context.WithTimeout(context.Background(), removeLimit)
	defer cancel()
	err := Remove(ctx, Options{Name: one.Name, DevDir: h.o.DevDir, RunDir: h.o.RunDir, Log: h.o.Log})
	if err != nil && !errors.Is(err, ErrExported) {
		h.o.Log.Error("could not remove a block device", "volume", string(one.Name), "err", err)
	}
}

// transmit sends a message with descriptors.
func transmit(c *net.UnixConn, m holdMessage, fds []int) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(b, rights, nil)
	return err
}

// receive receives a message with descriptors, which are the caller's.
func receive(c *net.UnixConn) (m holdMessage, fds []int, err error) {
	b, space := make([]byte, holdMessageMax), make([]byte, unix.CmsgSpace(4*holdFilesMax))
	n, oob, flags, _, err := c.ReadMsgUnix(b, space)
	if err != nil {
		return m, nil, err
	}
	controls, err := unix.ParseSocketControlMessage(space[:oob])
	for _, control := range controls {
		if got, err := unix.ParseUnixRights(&control); err == nil {
			fds = append(fds, got...)
		}
	}
	if n == 0 {
		err = errors.Join(err, net.ErrClosed)
	}
	if flags&(syscall.MSG_TRUNC|syscall.MSG_CTRUNC) != 0 {
		err = errors.Join(err, errors.New("a message was too long"))
	}
	if err == nil {
		err = json.Unmarshal(b[:n], &m)
	}
	if err != nil {
		closeAll(fds)
		return m, nil, err
	}
	return m, fds, nil
}

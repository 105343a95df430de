// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// pipe is one end of a TCP connection that adds no delay of its own.
type pipe interface {
	io.ReadWriteCloser
}

// form is the way in which a process waits for its socket.
type form string

const (
	blocking form = "blocking" // the thread sleeps in read, as in C
	poller   form = "poller"   // the goroutine sleeps, the runtime polls
	busy     form = "busy"     // nothing sleeps: the thread asks again until there is something
)

func (f form) wrap(c net.Conn) (pipe, error) {
	if f == poller {
		return c, nil
	}
	file, err := c.(*net.TCPConn).File() // a duplicate, in blocking mode
	if err != nil {
		return nil, err
	}
	c.Close()
	fd := int(file.Fd())
	if err := unix.SetNonblock(fd, f == busy); err != nil {
		return nil, err
	}
	return &rawPipe{fd, file}, nil
}

func dial(f form, address string) (pipe, error) {
	var c net.Conn
	var err error
	for range 100 { // a server that has just started may not listen yet
		if c, err = net.DialTimeout("tcp", address, 2*time.Second); err == nil {
			return f.wrap(c)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, err
}

// rawPipe makes its system calls without telling the Go scheduler: while it waits, or asks
// again, nothing else runs in its process.
type rawPipe struct {
	fd   int
	file *os.File
}

func (p *rawPipe) Read(b []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(p.fd), addressOf(b), uintptr(len(b)))
		switch {
		case errno == unix.EINTR || errno == unix.EAGAIN:
		case errno != 0:
			return 0, fmt.Errorf("read: %w", errno)
		case n == 0:
			return 0, io.EOF
		default:
			return int(n), nil
		}
	}
}

func (p *rawPipe) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(p.fd), addressOf(b[done:]), uintptr(len(b)-done))
		switch {
		case errno == unix.EINTR || errno == unix.EAGAIN:
		case errno != 0:
			return done, fmt.Errorf("write: %w", errno)
		default:
			done += int(n)
		}
	}
	return len(b), nil
}

func (p *rawPipe) Close() error { return p.file.Close() }

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A daemon can start its next process, perhaps of another version, and hand over to it once that is
// ready:
//
//	this process                      the next one
//	---------------------------------------------------------
//	StartSuccessor         ───────▶   FindPredecessor
//	                       ◀───────   Take: ready
//	stops
//	Give                   ───────▶
//	                       ◀───────   Accept
//	tells systemd                     goes on
//	ends
//
// Until the next process has accepted, this one can go on: Give ends the other one before it returns
// an error. If this one ends before that, the next one ends too, and whoever restarts the daemon
// begins anew.

// ErrHandOver is returned by a part that has stopped because the next process takes over.
var ErrHandOver = errors.New("the next process takes over")

const (
	// readyFor is how long the next process may take to be ready.
	readyFor = 30 * time.Second
	// acceptFor is how long it may then take to accept what it is given, while nobody serves.
	acceptFor = time.Second
)

// predecessorVariable tells a process which descriptor leads to its predecessor, and a note of that,
// as "3:note".
const predecessorVariable = "WEFT_PREDECESSOR"

// draftVariable tells a process which descriptor has the draft of what it will be given. Earlier versions
// set no such variable, and ignore it.
const draftVariable = "WEFT_DRAFT"

// Successor is the next process of this daemon. It is ready, and waits.
type Successor struct {
	// Connections says that it takes connections: it is of a version that does.
	Connections bool

	process *os.Process
	conn    *net.UnixConn
	ended   <-chan struct{}
}

// StartSuccessor starts a program with the arguments and the environment of this process, and returns
// when it is ready. note is for it, and so is draft: what it would be given now, which may be secret. Once
// it is ready, it and this process have all of their programs in memory.
func StartSuccessor(ctx context.Context, program, note string, draft []byte) (*Successor, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("start the next process: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "predecessor")
	conn, err := connOf(pair[0])
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the next process: %w", err), theirs.Close())
	}
	sketch, err := draftFile(draft)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the next process: %w", err), theirs.Close(), conn.Close())
	}
	defer sketch.Close()
	cmd := exec.Command(program, os.Args[1:]...)
	cmd.Env = append(os.Environ(), predecessorVariable+"=3:"+note, draftVariable+"=4")
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = os.Stdin, os.Stdout, os.Stderr, []*os.File{theirs, sketch}
	err = cmd.Start()
	theirs.Close() // so that the end of the process ends the connection
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the next process: %w", err), conn.Close())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cmd.Wait() //nolint:errcheck // the end of the connection tells
	}()
	s := &Successor{process: cmd.Process, conn: conn, ended: ended}
	resident()
	if err := s.ready(ctx); err != nil {
		s.Abandon()
		return nil, fmt.Errorf("the next process, %s, is not ready: %w", program, err)
	}
	return s, nil
}

// connOf makes a connection of a socket.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "handover")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%T: no socket of the kind that is needed", c), c.Close())
	}
	return u, nil
}

func (s *Successor) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyFor, fmt.Errorf("not within %v", readyFor))
	defer cancel()
	says := make([]byte, 1)
	_, err := readFull(ctx, s.conn, says)
	if errors.Is(err, io.EOF) {
		return errors.New("it has ended")
	}
	s.Connections = says[0] >= takesConnections
	return err
}

// What the next process says when it is ready. The first versions say 1, and take no connections and no
// more files than one message carries.
const takesConnections = 2

// maxFiles is how many files one message carries; the kernel takes 253.
const maxFiles = 250

// interrupted ends the reads of a connection when ctx ends, until it is stopped.
func interrupted(ctx context.Context, c *net.UnixConn) (stop func() bool) {
	return context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Unix(1, 0)) }) //nolint:errcheck // it interrupts the read
}

// readFull fills b, until ctx ends.
func readFull(ctx context.Context, c *net.UnixConn, b []byte) (int, error) {
	defer interrupted(ctx, c)()
	n, err := io.ReadFull(c, b)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return n, err
}

// Give hands over, and tells systemd that the next process is the daemon now; the caller ends soon.
// After an error, the next process has ended and has done nothing: the caller may go on.
func (s *Successor) Give(log *slog.Logger, message []byte, files []*os.File) error {
	if err := s.give(message, files); err != nil {
		s.Abandon()
		return fmt.Errorf("hand over to process %d: %w", s.process.Pid, err)
	}
	s.conn.Close()
	notify(log, fmt.Sprintf("MAINPID=%d", s.process.Pid))
	log.Info("handed over to the next process", "process", s.process.Pid)
	return nil
}

func (s *Successor) give(message []byte, files []*os.File) error {
	if err := s.conn.SetDeadline(time.Now().Add(acceptFor)); err != nil {
		return err
	}
	fds, err := descriptors(files)
	if err != nil {
		return err
	}
	parts := slices.Collect(slices.Chunk(fds, maxFiles))
	if len(parts) == 0 {
		parts = [][]int{nil}
	}
	if !s.Connections && len(parts) > 1 {
		return fmt.Errorf("it takes %d files at most, and there are %d", maxFiles, len(fds))
	}
	head := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, uint32(len(message))), uint32(len(parts)-1))
	for i, part := range parts {
		var rights []byte
		if len(part) > 0 {
			rights = unix.UnixRights(part...)
		}
		if i > 0 {
			head = []byte{1}
		}
		if _, _, err := s.conn.WriteMsgUnix(head, rights, nil); err != nil {
			return err
		}
	}
	if _, err := s.conn.Write(message); err != nil {
		return err
	}
	if _, err := io.ReadFull(s.conn, make([]byte, 1)); err != nil {
		return fmt.Errorf("it does not accept: %w", err)
	}
	return nil
}

// descriptors are those of files. Unlike File.Fd it does not make sockets blocking: if the next process
// fails, this one goes on with them.
func descriptors(files []*os.File) (fds []int, err error) {
	for _, f := range files {
		raw, err := f.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) })
		}
		if err != nil {
			return nil, err
		}
	}
	return fds, nil
}

// Abandon ends the next process, and returns when it has ended.
func (s *Successor) Abandon() {
	s.conn.Close()
	_ = s.process.Kill() // it may have ended
	<-s.ended
}

// Predecessor is the process that this one will take over from.
type Predecessor struct {
	Note  string
	Draft []byte // what the other one would give now; nil: it does not say
	conn  *net.UnixConn
}

// FindPredecessor returns the process that has started this one; nil if this is an ordinary start.
func FindPredecessor() (*Predecessor, error) {
	fd, note, ok, err := descriptorIn(predecessorVariable)
	if err != nil || !ok {
		return nil, err
	}
	conn, err := connOf(fd)
	if err != nil {
		return nil, fmt.Errorf("%s=%d: %w", predecessorVariable, fd, err)
	}
	draft, err := findDraft()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read what the previous process has: %w", err), conn.Close())
	}
	return &Predecessor{note, draft, conn}, nil
}

// descriptorIn takes a variable out of the environment, since it is not for programs that this process
// starts: the number of a descriptor, which is not for them either, and after a colon a note.
func descriptorIn(variable string) (fd int, note string, ok bool, err error) {
	text, ok := os.LookupEnv(variable)
	if !ok {
		return 0, "", false, nil
	}
	if err := os.Unsetenv(variable); err != nil {
		return 0, "", false, err
	}
	number, note, _ := strings.Cut(text, ":")
	if fd, err = strconv.Atoi(number); err != nil {
		return 0, "", false, fmt.Errorf("%s=%s: %w", variable, text, err)
	}
	unix.CloseOnExec(fd)
	return fd, note, true, nil
}

// draftFile returns a file in memory that no path leads to.
func draftFile(draft []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("draft", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "draft")
	if _, err := f.WriteAt(draft, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// findDraft returns the draft of what the previous process will give; nil: it told of none.
func findDraft() ([]byte, error) {
	fd, _, ok, err := descriptorIn(draftVariable)
	if err != nil || !ok {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "draft")
	defer f.Close()
	return io.ReadAll(io.NewSectionReader(f, 0, maxHandover))
}

// maxHandover bounds what one process hands over to the next one.
const maxHandover = 1 << 30

// Take says that this process is ready, and returns what it is given when the other one has stopped.
// Accept is next.
func (p *Predecessor) Take(ctx context.Context) (message []byte, files []*os.File, err error) {
	if message, files, err = p.take(ctx); err != nil {
		p.conn.Close()
		for _, f := range files {
			f.Close()
		}
		return nil, nil, fmt.Errorf("take over from the previous process: %w", err)
	}
	return message, files, nil
}

// Accept says that this process goes on with what it was given. After an error it must not: the other
// one may.
func (p *Predecessor) Accept() error {
	defer p.conn.Close()
	if _, err := p.conn.Write([]byte{1}); err != nil {
		return fmt.Errorf("take over from the previous process: %w", err)
	}
	return nil
}

func (p *Predecessor) take(ctx context.Context) (message []byte, files []*os.File, err error) {
	resident()
	if _, err := p.conn.Write([]byte{takesConnections}); err != nil {
		return nil, nil, err
	}
	defer interrupted(ctx, p.conn)()
	head := make([]byte, 8)
	files, err = p.receive(ctx, head)
	if err != nil {
		return nil, files, err
	}
	size := binary.LittleEndian.Uint32(head)
	if size > maxHandover {
		return nil, files, fmt.Errorf("a message of %d bytes", size)
	}
	for range binary.LittleEndian.Uint32(head[4:]) {
		more, err := p.receive(ctx, make([]byte, 1))
		files = append(files, more...)
		if err != nil {
			return nil, files, err
		}
	}
	message = make([]byte, size)
	_, err = readFull(ctx, p.conn, message)
	return message, files, err
}

// receive fills b, and returns the files that came with it.
func (p *Predecessor) receive(ctx context.Context, b []byte) (files []*os.File, err error) {
	rights := make([]byte, unix.CmsgSpace(4*253)) // the kernel's limit
	n, oobn, _, _, err := p.conn.ReadMsgUnix(b, rights)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err == nil && n == 0 || errors.Is(err, io.EOF):
		return nil, errors.New("it has ended without handing over")
	case err != nil:
		return nil, err
	}
	if files, err = filesOf(rights[:oobn]); err != nil {
		return files, err
	}
	_, err = readFull(ctx, p.conn, b[n:])
	return files, err
}

// filesOf returns the files that came with a message.
func filesOf(rights []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}
	return files, nil
}

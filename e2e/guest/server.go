// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// chunk is the most data that one Reply carries.
const chunk = 64 << 10

// Server executes the requests that arrive over one connection.
type Server struct {
	// Setup applies the first request of a boot; nil ignores it.
	Setup func(Setup) error
	// Reset ends the machine.
	Reset func()

	sendMu sync.Mutex
	enc    *gob.Encoder

	mu      sync.Mutex
	running map[uint64]*os.Process // OpRun by request
	daemons map[string]*os.Process // OpStart by name
}

// Serve answers requests from conn until it ends.
func (s *Server) Serve(conn io.ReadWriter, release string) error {
	s.enc = gob.NewEncoder(conn)
	s.running = make(map[uint64]*os.Process)
	s.daemons = make(map[string]*os.Process)
	if err := s.send(Reply{Kind: KindHello, Text: release, Time: time.Now().UnixNano()}); err != nil {
		return fmt.Errorf("greet the test: %w", err)
	}
	dec := gob.NewDecoder(conn)
	for {
		var r Request
		if err := dec.Decode(&r); err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		s.accept(r)
	}
}

// accept executes short requests at once and in order, and all others in goroutines.
func (s *Server) accept(r Request) {
	switch r.Op {
	case OpWrite, OpClock, OpSet, OpAdjust, OpSignal, OpStart:
		s.done(r.ID, s.do(r))
	default:
		go func() { s.done(r.ID, s.do(r)) }()
	}
}

func (s *Server) do(r Request) error {
	switch r.Op {
	case OpSetup:
		return s.setup(r)
	case OpRun:
		return s.run(r)
	case OpStart:
		return s.start(r)
	case OpSignal:
		return s.signal(r)
	case OpRead:
		return s.read(r)
	case OpWrite:
		return write(r)
	case OpClock:
		return nil
	case OpSet:
		return setClock(r.Time)
	case OpAdjust:
		return setClock(time.Now().UnixNano() + r.Time)
	case OpSync:
		unix.Sync()
		return nil
	case OpReset:
		return s.reset(r)
	}
	return fmt.Errorf("unknown request %q", r.Op)
}

func (s *Server) setup(r Request) error {
	if s.Setup == nil || r.Setup == nil {
		return nil
	}
	if err := s.Setup(*r.Setup); err != nil {
		return err
	}
	if r.Setup.Kmsg {
		go s.streamKmsg()
	}
	return nil
}

func (s *Server) reset(r Request) error {
	if r.Sync {
		unix.Sync()
	}
	s.Reset()
	return nil
}

func (s *Server) read(r Request) error {
	f, err := os.Open(r.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyBuffer(struct{ io.Writer }{s.stream(Reply{ID: r.ID, Kind: KindOut})}, struct{ io.Reader }{f}, make([]byte, chunk))
	return err
}

func write(r Request) error {
	flags := os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	if r.Append {
		flags = os.O_WRONLY | os.O_APPEND
	}
	if err := os.MkdirAll(filepath.Dir(r.Path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(r.Path, flags, r.Mode)
	if err != nil {
		return err
	}
	_, err = f.Write(r.Data)
	return errors.Join(err, f.Close())
}

func setClock(ns int64) error {
	ts := unix.NsecToTimespec(ns)
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return nil
}

// streamKmsg sends the kernel's messages forever, oldest first.
func (s *Server) streamKmsg() {
	f, err := os.Open("/dev/kmsg")
	if err != nil {
		s.event(Reply{Kind: KindKmsg, Data: []byte("read /dev/kmsg: " + err.Error())})
		return
	}
	defer f.Close()
	buf := make([]byte, 8<<10) // a read returns one whole message
	for {
		n, err := f.Read(buf)
		if errors.Is(err, unix.EPIPE) { // messages were overwritten before we read them
			continue
		}
		if err != nil {
			return
		}
		s.event(Reply{Kind: KindKmsg, Data: append([]byte(nil), buf[:n]...)})
	}
}

func (s *Server) done(id uint64, err error) {
	r := Reply{ID: id, Kind: KindDone, Time: time.Now().UnixNano()}
	var exit exitError
	switch {
	case errors.As(err, &exit):
		r.Code, r.Text = exit.code, exit.text
	case err != nil:
		r.Code, r.Text = -1, err.Error()
		if errors.Is(err, fs.ErrNotExist) {
			r.Name = "not exist"
		}
	}
	s.event(r)
}

// event sends an event. Its error is ignored: the port is then closed, and Serve's read
// ends too.
func (s *Server) event(r Reply) { _ = s.send(r) }

func (s *Server) send(r Reply) error {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	return s.enc.Encode(r)
}

// stream returns a writer whose writes are sent as the Data of like.
func (s *Server) stream(like Reply) io.Writer { return streamWriter{s, like} }

type streamWriter struct {
	s    *Server
	like Reply
}

func (w streamWriter) Write(p []byte) (int, error) {
	sent := 0
	for len(p) > 0 {
		n := min(len(p), chunk)
		r := w.like
		r.Data = p[:n]
		if err := w.s.send(r); err != nil {
			return sent, err
		}
		sent, p = sent+n, p[n:]
	}
	return sent, nil
}

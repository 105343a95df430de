// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain is also the next process, in the role that the note gives it.
func TestMain(m *testing.M) {
	p, err := FindPredecessor()
	if err != nil {
		panic(err)
	}
	if p == nil {
		os.Exit(m.Run())
	}
	os.Exit(p.play())
}

// play does what the note says; the status of the process tells nobody anything.
func (p *Predecessor) play() int {
	if p.Note == "dies at its start" {
		return 1
	}
	if p.Note == "does not like the draft" && string(p.Draft) == "a draft" {
		return 1
	}
	if p.Note == "dies when it is ready" {
		p.conn.Write([]byte{1}) //nolint:errcheck // the test sees what comes
		return 1
	}
	message, files, err := p.Take(context.Background())
	if err != nil {
		return 1
	}
	switch p.Note {
	case "does not accept":
		return 1
	case "hangs with what it has":
		time.Sleep(time.Minute)
	}
	if err := p.Accept(); err != nil {
		return 1
	}
	for _, f := range files {
		f.Write(append(p.Draft, message...)) //nolint:errcheck // the test sees what comes
	}
	return 0
}

// notices are what the test process tells systemd.
func notices(t *testing.T) *net.UnixConn {
	t.Helper()
	dir, err := os.MkdirTemp("", "notify")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", socket)
	return c
}

func TestTheNextProcessIsGivenFilesAndAMessage(t *testing.T) {
	systemd := notices(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s, err := StartSuccessor(t.Context(), os.Args[0], "writes", []byte("a draft of "))
	if err != nil {
		t.Fatal(err)
	}
	err = s.Give(discard, []byte("an estate"), []*os.File{w})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err != nil || string(got) != "a draft of an estate" {
		t.Errorf("the next process wrote %q, %v", got, err)
	}
	b := make([]byte, 100)
	n, err := systemd.Read(b)
	if err != nil || !strings.HasPrefix(string(b[:n]), "MAINPID=") {
		t.Errorf("systemd was told %q, %v", b[:n], err)
	}
}

// A next process that is not ready, or does not accept, has ended before the caller goes on, and
// systemd is not told of it.
func TestANextProcessThatFailsIsAbandoned(t *testing.T) {
	for _, role := range []string{"dies at its start", "does not like the draft", "dies when it is ready", "does not accept", "hangs with what it has"} {
		t.Run(role, func(t *testing.T) {
			systemd := notices(t)
			began := time.Now()
			s, err := StartSuccessor(t.Context(), os.Args[0], role, []byte("a draft"))
			if role == "dies at its start" || role == "does not like the draft" {
				if d := time.Since(began); err == nil || d > readyFor/2 {
					t.Fatalf("after %v: %v", d, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			socket, err := l.(*net.TCPListener).File()
			if err != nil {
				t.Fatal(err)
			}
			defer socket.Close()
			began = time.Now()
			if err := s.Give(discard, []byte("an estate"), []*os.File{socket}); err == nil {
				t.Error("it has taken over")
			}
			if blocking(t, l.(*net.TCPListener)) {
				t.Error("this process cannot go on with its socket: it waits in calls to the kernel")
			}
			if d := time.Since(began); d > 10*acceptFor {
				t.Errorf("nobody served for %v", d)
			}
			select {
			case <-s.ended:
			default:
				t.Error("it is still there")
			}
			systemd.SetReadDeadline(time.Now().Add(time.Millisecond)) //nolint:errcheck // then the read waits
			b := make([]byte, 100)
			if n, err := systemd.Read(b); err == nil {
				t.Errorf("systemd was told %q", b[:n])
			}
		})
	}
}

func blocking(t *testing.T, l *net.TCPListener) bool {
	t.Helper()
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	flags := 0
	if e := raw.Control(func(fd uintptr) { flags, err = unix.FcntlInt(fd, unix.F_GETFL, 0) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	return flags&unix.O_NONBLOCK == 0
}

func TestAStoppedDaemonStartsNoHandover(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s, err := StartSuccessor(ctx, os.Args[0], "writes", nil); err == nil {
		s.Abandon()
		t.Error("a handover began after the daemon was stopped")
	}
}

// Any number of files is given, in order; one message of the kernel carries 253.
func TestManyFilesAreGiven(t *testing.T) {
	for _, n := range []int{0, 1, maxFiles, maxFiles + 1, 4 * maxFiles} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		near, err := connOf(pair[0])
		if err != nil {
			t.Fatal(err)
		}
		far, err := connOf(pair[1])
		if err != nil {
			t.Fatal(err)
		}
		s, p := &Successor{conn: near}, &Predecessor{conn: far}
		var files []*os.File
		for range n {
			f, err := os.CreateTemp(t.TempDir(), "")
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			files = append(files, f)
		}
		message := bytes.Repeat([]byte{7}, 1<<20)
		given := make(chan error, 1)
		go func() { given <- errors.Join(s.ready(t.Context()), s.give(message, files)) }()
		got, back, err := p.Take(t.Context())
		if err := errors.Join(err, p.Accept(), <-given); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, message) || len(back) != n {
			t.Fatalf("%d of %d files came, with a message of %d bytes", len(back), n, len(got))
		}
		for i, f := range back {
			is, err1 := f.Stat()
			was, err2 := files[i].Stat()
			if err := errors.Join(err1, err2); err != nil || !os.SameFile(is, was) {
				t.Errorf("file %d is another one (%v)", i, err)
			}
			f.Close()
		}
		near.Close()
	}
}

// Once the program is resident, what has not run yet does not fault.
func TestAResidentProgramDoesNotFault(t *testing.T) {
	resident()
	var total, there int
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	mine, program := false, os.Args[0]
	for line := range strings.Lines(string(text)) {
		var kib int
		switch fields := strings.Fields(line); {
		case strings.Contains(fields[0], "-"):
			mine = strings.HasSuffix(line, filepath.Base(program)+"\n") && strings.HasPrefix(fields[1], "r-x")
		case mine && fields[0] == "Size:":
			fmt.Sscan(fields[1], &kib) //nolint:errcheck // 0 fails below
			total += kib
		case mine && fields[0] == "Rss:":
			fmt.Sscan(fields[1], &kib) //nolint:errcheck // 0 fails below
			there += kib
		}
	}
	if total == 0 || there < total {
		t.Errorf("of %d KiB of the program, %d are mapped", total, there)
	}
}

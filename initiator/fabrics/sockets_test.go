// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

func TestDestroyedSocketsFailAndOthersGoOn(t *testing.T) {
	meant, other := listen(t), listen(t)
	a, _ := connect(t, meant)
	b, _ := connect(t, other)
	n, err := New("/sys", "/dev").DestroySockets(t.Context(), portalOf(meant))
	skipUnlessDestroyed(t, err)
	if n != 1 || err != nil {
		t.Fatalf("DestroySockets = %d, %v; want 1, nil", n, err)
	}
	a.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ECONNRESET) && err != io.EOF {
		t.Errorf("read of a destroyed socket = %v, want that the connection was aborted", err)
	}
	if _, err := b.Write([]byte("x")); err != nil {
		t.Errorf("write to the other socket = %v, want nil", err)
	}
}

func TestConnectionsWithoutAnAnswerAreDestroyedAlone(t *testing.T) {
	l := listen(t)
	answered, peer := connect(t, l)
	if _, err := peer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := answered.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	silent, _ := connect(t, l)
	n, err := New("/sys", "/dev").DestroyUnanswered(t.Context(), portalOf(l))
	skipUnlessDestroyed(t, err)
	if n != 1 || err != nil {
		t.Fatalf("DestroyUnanswered = %d, %v; want 1, nil", n, err)
	}
	silent.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := silent.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read of the silent connection = %v, want that it was aborted", err)
	}
	if _, err := peer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	answered.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := answered.Read(make([]byte, 1)); err != nil {
		t.Errorf("read of the connection that was answered = %v", err)
	}
}

func TestPeersOfSocketMessagesAreRead(t *testing.T) {
	message := make([]byte, 72)
	message[0] = unix.AF_INET
	copy(message[4+2:], []byte{0x11, 0x44})
	copy(message[4+20:], []byte{192, 0, 2, 1})
	info := func(received uint64, size int) []byte {
		b := make([]byte, 4+size)
		binary.NativeEndian.PutUint16(b, uint16(len(b)))
		binary.NativeEndian.PutUint16(b[2:], netlink.INET_DIAG_INFO)
		if size >= 136 {
			binary.NativeEndian.PutUint64(b[4+128:], received)
		}
		return append(message[:72:72], b...)
	}
	for _, c := range []struct {
		message  []byte
		answered bool
	}{
		{message, true}, // the kernel does not tell
		{info(0, 104), true},
		{info(0, 232), false},
		{info(1, 232), true},
	} {
		s, ok := parseSocket(c.message)
		if !ok || s.family != unix.AF_INET || s.id.remotePort() != 4420 || s.id.remote(s.family) != netip.MustParseAddr("192.0.2.1") || s.answered != c.answered {
			t.Errorf("parseSocket(%x) = %+v, %v; want 192.0.2.1:4420, answered %v", c.message, s, ok, c.answered)
		}
	}
	for _, short := range []int{0, 20, 71, 73, 75, 80} {
		if s, ok := parseSocket(info(0, 232)[:short]); ok && short < 72 {
			t.Errorf("parseSocket of %d bytes = %+v", short, s)
		}
	}
	s, _ := parseSocket(message)
	again := sockRequest{family: s.family, states: 1, id: s.id}.Serialize()
	if len(again) != 56 || [48]byte(again[8:]) != s.id {
		t.Errorf("Serialize = %x, want the same id at byte 8 of 56", again)
	}
}

// skipUnlessDestroyed skips a test whose machine or user may not destroy sockets.
func skipUnlessDestroyed(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		t.Skipf("this kernel or user cannot destroy sockets: %v", err)
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func portalOf(l net.Listener) block.Portal {
	at := netip.MustParseAddrPort(l.Addr().String())
	return block.Portal{Transport: block.TCP, Address: at.Addr().String(), Port: at.Port()}
}

// connect returns both ends of a connection to l.
func connect(t *testing.T, l net.Listener) (c, peer net.Conn) {
	t.Helper()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	peer, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	return c, peer
}

// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

func TestDestroyedSocketsFailAndOthersGoOn(t *testing.T) {
	meant, other := listen(t), listen(t)
	a, b := dial(t, meant), dial(t, other)
	port := netip.MustParseAddrPort(meant.Addr().String()).Port()

	n, err := New("/sys", "/dev").DestroySockets(t.Context(), block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: port})
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		t.Skipf("this kernel or user cannot destroy sockets: %v", err)
	}
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

func TestPeersOfSocketMessagesAreRead(t *testing.T) {
	message := make([]byte, 72)
	message[0] = unix.AF_INET
	copy(message[4+2:], []byte{0x11, 0x44})
	copy(message[4+20:], []byte{192, 0, 2, 1})
	family, id, ok := parseSocket(message)
	if !ok || family != unix.AF_INET || id.remotePort() != 4420 || id.remote(family) != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("parseSocket = %d, %v:%d, %v; want 192.0.2.1:4420", family, id.remote(family), id.remotePort(), ok)
	}
	if _, _, ok := parseSocket(message[:20]); ok {
		t.Error("parseSocket of a short message succeeded")
	}
	again := sockRequest{family: family, states: 1, id: id}.Serialize()
	if len(again) != 56 || [48]byte(again[8:]) != id {
		t.Errorf("Serialize = %x, want the same id at byte 8 of 56", again)
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

func dial(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	return c
}

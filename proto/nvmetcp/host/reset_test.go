// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"
)

// TestAConnectionThatIsGivenUpSendsNoMoreOfWhatItHas: the peer reads again after the host
// has dropped the connection. Data left in the host's kernel must not reach it: by then the
// host may have sent that data again, and newer data after it.
func TestAConnectionThatIsGivenUpSendsNoMoreOfWhatItHas(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()

	conn.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
	var sent int64
	for n := 0; err == nil; sent += int64(n) { // until the socket is full
		n, err = conn.Write(make([]byte, 64<<10))
	}
	q := &queue{conn: conn}
	q.terminate(errors.New("keep-alive: no answer"))

	peer.SetReadDeadline(time.Now().Add(10 * time.Second))
	got, err := io.Copy(io.Discard, peer)
	if !errors.Is(err, syscall.ECONNRESET) || got >= sent {
		t.Errorf("the peer has read %d of %d bytes and then %v; want it reset before the last", got, sent, err)
	}
}

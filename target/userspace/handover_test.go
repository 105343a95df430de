// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net"
	"testing"
	"time"
)

// A socket is detached again and again at the moment at which somebody begins to accept on it.
func TestASocketIsDetachedFromWhoAcceptsOnIt(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accept := func(l net.Listener, ended chan<- struct{}) {
		defer close(ended)
		if c, err := l.Accept(); err == nil {
			c.Close()
			t.Error("nobody has connected, but somebody is accepted")
		}
	}
	for round := range 5000 {
		ended, next := make(chan struct{}), make(chan net.Listener, 1)
		go accept(l, ended)
		go func() {
			n, err := Detach(l)
			if err != nil {
				t.Error(err)
			}
			next <- n
		}()
		select {
		case l = <-next:
			<-ended
		case <-time.After(10 * time.Second):
			t.Fatalf("round %d: the socket is not detached after 10 s", round)
		}
	}
	l.Close()
}

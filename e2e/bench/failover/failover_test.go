// SPDX-License-Identifier: Apache-2.0

package failover

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// A portal that is cut answers nothing, and loses nothing that was on its way.
func TestAPortalThatIsCutIsSilent(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		if c, err := listener.Accept(); err == nil {
			io.Copy(c, c) //nolint:errcheck // it ends with the test
		}
	}()
	var w wire
	w.cond = sync.NewCond(&w.mu)
	c, err := w.dial(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	answers := make(chan string)
	go func() {
		for b := make([]byte, 3); ; {
			if _, err := io.ReadFull(c, b); err != nil {
				close(answers)
				return
			}
			answers <- string(b)
		}
	}()
	send := func(text string) {
		if _, err := c.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	send("one")
	if got := <-answers; got != "one" {
		t.Fatalf("answered %q", got)
	}
	if err := w.cut([]string{listener.Addr().String()}); err != nil {
		t.Fatal(err)
	}
	send("two")
	select {
	case got := <-answers:
		t.Errorf("a portal that is cut answered %q", got)
	case <-time.After(50 * time.Millisecond):
	}
	w.mend()
	send("now")
	if first, second := <-answers, <-answers; first != "two" || second != "now" {
		t.Errorf("mended, it answered %q and %q", first, second)
	}
	c.Close()
	<-answers
	if err := w.cut([]string{listener.Addr().String()}); err == nil {
		t.Error("a path that nobody uses was cut")
	}
}

func TestAPercentileIsOneOfTheRounds(t *testing.T) {
	var all []time.Duration
	for i := range 10 {
		all = append(all, time.Duration(10-i)*time.Second)
	}
	for percent, want := range map[int]string{50: "5.000 s", 90: "9.000 s", 100: "10.000 s"} {
		if got := at(all, percent); got != want {
			t.Errorf("at(1 s to 10 s, %d) = %s, want %s", percent, got, want)
		}
	}
	if got := at(nil, 50); got != "–" {
		t.Errorf("at(nothing) = %s", got)
	}
}

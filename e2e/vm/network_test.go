// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// nicEnd is a machine's end of its network device, in a test without machines.
type nicEnd struct {
	machine *Machine
	conn    net.Conn
	mac     [6]byte
}

func plugTest(tb testing.TB, n *Network, name string, last byte) *nicEnd {
	tb.Helper()
	ours, theirs, err := socketPair()
	if err != nil {
		tb.Fatal(err)
	}
	a, err := net.FileConn(ours)
	if err != nil {
		tb.Fatal(err)
	}
	b, err := net.FileConn(theirs)
	if err != nil {
		tb.Fatal(err)
	}
	ours.Close()
	theirs.Close()
	done := make(chan struct{})
	go func() { n.plug(name, a); close(done) }()
	tb.Cleanup(func() { b.Close(); <-done })
	return &nicEnd{&Machine{name: name}, b, [6]byte{2, 0, 0, 0, 0, last}}
}

// frame is a frame that carries a text, in the stream's format.
func frame(to, from [6]byte, text string) []byte {
	b := slices.Concat(to[:], from[:], []byte{8, 0}, []byte(text))
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
}

func (e *nicEnd) send(tb testing.TB, to [6]byte, text string) {
	tb.Helper()
	if _, err := e.conn.Write(frame(to, e.mac, text)); err != nil {
		tb.Fatal(err)
	}
}

// receive returns the text of the next frame, or "" if none arrives in time.
func (e *nicEnd) receive(tb testing.TB, within time.Duration) string {
	tb.Helper()
	_ = e.conn.SetReadDeadline(time.Now().Add(within))
	head := make([]byte, 4)
	if _, err := io.ReadFull(e.conn, head); err != nil {
		return ""
	}
	b := make([]byte, binary.BigEndian.Uint32(head))
	if _, err := io.ReadFull(e.conn, b); err != nil {
		tb.Fatal(err)
	}
	return string(b[14:])
}

var broadcast = [6]byte{255, 255, 255, 255, 255, 255}

func TestSwitchLearnsWhereToSend(t *testing.T) {
	n := newNetwork("test", 0, 1500, 1)
	defer n.close()
	a, b, c := plugTest(t, n, "a", 1), plugTest(t, n, "b", 2), plugTest(t, n, "c", 3)
	waitPorts(t, n, 3)
	a.send(t, broadcast, "who is there")
	got := []string{b.receive(t, time.Second), c.receive(t, time.Second)}
	if want := []string{"who is there", "who is there"}; !slices.Equal(got, want) {
		t.Errorf("b and c received %q, want %q", got, want)
	}
	b.send(t, a.mac, "me")
	if got := a.receive(t, time.Second); got != "me" {
		t.Errorf("a received %q, want the answer", got)
	}
	if got := c.receive(t, 50*time.Millisecond); got != "" {
		t.Errorf("c received %q, which was for a alone", got)
	}
}

func waitPorts(t *testing.T, n *Network, want int) {
	t.Helper()
	waitFor(t, "the ports", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.ports) == want
	})
}

func TestSwitchFaults(t *testing.T) {
	n := newNetwork("test", 0, 1500, 1)
	defer n.close()
	a, b := plugTest(t, n, "a", 1), plugTest(t, n, "b", 2)
	waitPorts(t, n, 2)
	exchange := func() [2]string {
		a.send(t, broadcast, "to b")
		b.send(t, broadcast, "to a")
		return [2]string{b.receive(t, 50*time.Millisecond), a.receive(t, 50*time.Millisecond)}
	}
	all, none := [2]string{"to b", "to a"}, [2]string{}
	steps := []struct {
		name string
		do   func()
		want [2]string
	}{
		{"nothing done", func() {}, all},
		{"cut", func() { n.Cut(a.machine, b.machine) }, none},
		{"heal", func() { n.Heal(a.machine, b.machine) }, all},
		{"one direction", func() { n.Set(a.machine, b.machine, Fault{Cut: true}) }, [2]string{"", "to a"}},
		{"isolate over it", func() { n.Isolate(b.machine) }, none},
		{"rejoin", func() { n.Rejoin(b.machine) }, [2]string{"", "to a"}},
		{"heal all", n.HealAll, all},
		{"all lost", func() { n.SetBoth(a.machine, b.machine, Fault{Loss: 1}) }, none},
		{"healed again", n.HealAll, all},
	}
	for _, s := range steps {
		s.do()
		if diff := cmp.Diff(s.want, exchange()); diff != "" {
			t.Errorf("%s: b and a received (-want +got):\n%s", s.name, diff)
		}
	}
}

func TestSwitchDelayKeepsTheOrder(t *testing.T) {
	n := newNetwork("test", 0, 1500, 1)
	defer n.close()
	a, b := plugTest(t, n, "a", 1), plugTest(t, n, "b", 2)
	waitPorts(t, n, 2)
	n.Set(a.machine, b.machine, Fault{Delay: 80 * time.Millisecond})
	begin := time.Now()
	a.send(t, broadcast, "0")
	if got := b.receive(t, time.Second); got != "0" || time.Since(begin) < 80*time.Millisecond {
		t.Errorf("received %q after %s, want 0 after 80ms", got, time.Since(begin))
	}
	a.send(t, broadcast, "1")
	time.Sleep(20 * time.Millisecond)
	n.HealAll()
	for i := 2; i < 20; i++ {
		a.send(t, broadcast, fmt.Sprint(i))
	}
	for i := 1; i < 20; i++ {
		if got := b.receive(t, time.Second); got != fmt.Sprint(i) {
			t.Fatalf("received %q, want %d", got, i)
		}
	}
}

func TestSwitchDropsWhatAMachineDoesNotTake(t *testing.T) {
	n := newNetwork("test", 0, 1500, 1)
	defer n.close()
	a, b := plugTest(t, n, "a", 1), plugTest(t, n, "b", 2)
	waitPorts(t, n, 2)
	text := string(bytes.Repeat([]byte("x"), 9000))
	for range 6000 {
		a.send(t, b.mac, text)
	}
	waitFor(t, "a drop", func() bool { return n.Dropped() > 0 })
}

func BenchmarkSwitch(b *testing.B) {
	for _, mtu := range []int{1500, 9000} {
		b.Run(fmt.Sprint(mtu), func(b *testing.B) {
			n := newNetwork("test", 0, mtu, 1)
			defer n.close()
			from, to := plugTest(b, n, "a", 1), plugTest(b, n, "b", 2)
			go func() { _, _ = io.Copy(io.Discard, to.conn) }()
			burst := bytes.Repeat(frame(to.mac, from.mac, string(make([]byte, mtu))), 8)
			b.SetBytes(int64(len(burst)))
			for b.Loop() {
				if _, err := from.conn.Write(burst); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n.Dropped())/float64(8*b.N), "dropped/frame")
		})
	}
}

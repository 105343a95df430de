// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
)

// pair is a TCP connection over loopback.
func pair(t testing.TB) (a, b *Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); d.Close() })
	return New(c), New(d)
}

// quiet makes the machine seem idle.
func quiet() {
	crowd.until.Store(0)
	crowd.load.score.Store(0)
	crowd.load.next.Store(1 << 62)
}

// processors runs the test with so many of them.
func processors(t testing.TB, n int) {
	old := runtime.GOMAXPROCS(n)
	t.Cleanup(func() { runtime.GOMAXPROCS(old) })
}

func TestMain(m *testing.M) {
	quiet() // tests of looking do not depend on the machine
	os.Exit(m.Run())
}

// send sends p and fails the test if that does not work.
func send(t testing.TB, c *Conn, p []byte) {
	t.Helper()
	pieces := [][]byte{p}
	if done, err := c.Send(&pieces, true); err != nil || !done {
		t.Errorf("Send = %v, %v", done, err)
	}
}

// Data arrives at any moment: before the reader looks, while it looks, while it begins to
// wait, and long after. None of it may be missed, with or without hush.
func TestEveryArrivalIsNoticed(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		processors(t, n)
		a, b := pair(t)
		end := time.Now().Add(time.Second)
		go func() {
			r := rand.New(rand.NewPCG(1, uint64(n)))
			p := make([]byte, 100<<10)
			for time.Now().Before(end) {
				size := 1 + r.IntN(100)
				if r.IntN(10) == 0 {
					size = len(p)
				}
				p[0], p[size-1] = 1, 2
				send(t, a, p[:size])
				pause := time.Duration(r.IntN(120)) * time.Microsecond
				if r.IntN(20) == 0 {
					time.Sleep(pause)
				}
				for from := time.Now(); time.Since(from) < pause; {
					runtime.Gosched()
				}
				// The answer says that all of it has come.
				if _, err := io.ReadFull(a, p[:1]); err != nil {
					t.Errorf("read the answer: %v", err)
				}
			}
			a.Close()
		}()
		p := make([]byte, 200<<10)
		got := 0
		b.SetReadDeadline(end.Add(10 * time.Second))
		for {
			k, err := b.Read(p[got:])
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%d processors: %v", n, err)
			}
			if got += k; p[got-1] == 2 {
				got = 0
				send(t, b, []byte{3})
			}
		}
	}
}

func TestDataThatComesSoonIsNotWaitedFor(t *testing.T) {
	for _, n := range []int{1, 2} {
		processors(t, n)
		a, b := pair(t)
		looks := 0
		b.Expecting = func() bool { // called after b has found nothing
			looks++
			send(t, a, []byte("x"))
			return true
		}
		var p [2]byte
		for range 100 {
			quiet()
			if n, err := b.Read(p[:]); n != 1 || err != nil {
				t.Fatalf("Read = %d, %v", n, err)
			}
			if !b.waited || b.blocked {
				t.Errorf("Read found nothing: %v, waited in the poller: %v; want to find it by looking again", b.waited, b.blocked)
			}
		}
		if looks != 100 {
			t.Errorf("looked again %d times, want 100", looks)
		}
	}
}

func TestNobodyLooksAgainForWhatIsNotExpected(t *testing.T) {
	a, b := pair(t)
	b.Expecting = func() bool {
		time.AfterFunc(time.Millisecond, func() { send(t, a, []byte("x")) })
		return false
	}
	before := b.habit
	if _, err := b.Read(make([]byte, 1)); err != nil || !b.blocked || b.habit != before {
		t.Errorf("Read: %v, waited in the poller: %v, habit %+v", err, b.blocked, b.habit)
	}
}

func TestLookingInVainIsGivenUp(t *testing.T) {
	var h habit
	looks := 0
	const waits = 12_800
	for range waits {
		if h.may() {
			looks++
			h.failed()
		}
	}
	if looks < waits/128 || looks > waits/128+8 {
		t.Errorf("looked again in %d of %d waits, want 1 in 128 in the long run", looks, waits)
	}
	for !h.may() {
	}
	for range 100 {
		h.paid()
		if !h.may() {
			t.Fatal("does not look again although that paid")
		}
	}
}

func TestNoMoreThanHalfOfTheProcessorsLook(t *testing.T) {
	quiet()
	now := time.Now()
	for _, c := range []struct{ processors, most int }{{1, 1}, {2, 1}, {3, 1}, {4, 2}, {64, 32}} {
		got := 0
		for range 2 * c.processors {
			if enter(now, c.processors) {
				got++
			}
		}
		crowd.lookers.Add(int32(-got))
		if got != c.most {
			t.Errorf("%d of %d processors look, want %d", got, c.processors, c.most)
		}
	}
}

func TestLookingEndsForLongerAndLongerBesideOtherPrograms(t *testing.T) {
	defer quiet()
	quiet()
	crowd.pause.Store(0)
	now := time.Now()
	for want := leastPause; want <= mostPause; want *= 2 {
		disturbed(now)
		if enter(now.Add(want-1), 8) {
			t.Fatalf("looked again before %v had passed", want)
		}
		now = now.Add(want)
		if !enter(now, 8) {
			t.Fatalf("did not look again after %v", want)
		}
		crowd.lookers.Add(-1)
	}
	now = now.Add(time.Minute)
	disturbed(now)
	if !enter(now.Add(leastPause), 8) {
		t.Error("after a quiet minute the pause is longer than the least")
	}
	crowd.lookers.Add(-1)
}

// Two ends that answer each other at once never wait, on the only processor. Others must be
// served meanwhile.
func TestOthersAreServedBesideABusyConnection(t *testing.T) {
	processors(t, 1)
	a, b := pair(t)
	echo := func(c *Conn, first bool) {
		var p [1]byte
		for {
			if !first {
				if _, err := c.Read(p[:]); err != nil {
					return
				}
			}
			first = false
			pieces := [][]byte{p[:]}
			if _, err := c.Send(&pieces, true); err != nil {
				return
			}
		}
	}
	go echo(b, false)
	go echo(a, true)
	x, y := pair(t)
	go echo(y, false)
	var all []time.Duration
	for range 50 {
		begin := time.Now()
		if _, err := x.Conn.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
		var p [1]byte
		if _, err := x.Conn.Read(p[:]); err != nil {
			t.Fatal(err)
		}
		all = append(all, time.Since(begin))
		time.Sleep(time.Millisecond)
	}
	a.Close()
	// A median above would mean that only the runtime's monitor serves others, every 10 ms.
	slow := 0
	for _, d := range all {
		if d > 6*time.Millisecond {
			slow++
		}
	}
	if slow > len(all)/2 {
		t.Errorf("%d of %d exchanges beside a busy connection took longer than 6 ms: %v", slow, len(all), all)
	}
}

func TestDeadlinesAndEndsReachTheReader(t *testing.T) {
	a, b := pair(t)
	a.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read after the deadline: %v", err)
	}
	a.SetReadDeadline(time.Time{})
	time.AfterFunc(20*time.Millisecond, func() { a.Close() })
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read of a closed connection: %v", err)
	}
	if _, err := b.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("Read of a connection that the peer closed: %v", err)
	}
	if n, err := b.Read(nil); n != 0 || err != nil {
		t.Errorf("Read of nothing = %d, %v", n, err)
	}
}

func TestReadBothFillsTheFirstAndThenTheSecond(t *testing.T) {
	a, b := pair(t)
	send(t, a, []byte("hello, world"))
	time.Sleep(10 * time.Millisecond)
	p, q := make([]byte, 5), make([]byte, 20)
	if n, err := b.ReadBoth(p, q); n != 12 || err != nil || string(p) != "hello" || string(q[:7]) != ", world" {
		t.Errorf("ReadBoth = %d, %v: %q, %q", n, err, p, q)
	}
}

func TestSendStopsWhenTheSocketIsFull(t *testing.T) {
	a, b := pair(t)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	pieces := [][]byte{data[:1000], data[1000:5000], data[5000:]}
	done, err := a.Send(&pieces, false)
	if done || err != nil {
		t.Fatalf("Send of 16 MiB to a peer that does not read = %v, %v", done, err)
	}
	advanced := 0
	a.Advanced = func() { advanced++ }
	var rest sync.WaitGroup
	rest.Go(func() {
		if done, err := a.Send(&pieces, true); !done || err != nil {
			t.Errorf("Send of the rest = %v, %v", done, err)
		}
		a.Close()
	})
	got, err := io.ReadAll(b)
	rest.Wait()
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes came, %v; want all %d unchanged", len(got), err, len(data))
	}
	if advanced == 0 {
		t.Error("Advanced was not called")
	}
}

func TestWithoutASocketItWorksAsThePipeDoes(t *testing.T) {
	x, y := net.Pipe()
	a, b := New(x), New(y)
	pieces := [][]byte{[]byte("he"), []byte("llo")}
	if done, err := a.Send(&pieces, false); done || err != nil || len(pieces) != 2 {
		t.Errorf("Send without waiting = %v, %v, %d pieces left", done, err, len(pieces))
	}
	go func() {
		a.Send(&pieces, true)
		a.Close()
	}()
	if got, err := io.ReadAll(b); string(got) != "hello" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

func TestReadAndSendTakeNoMemory(t *testing.T) {
	a, b := pair(t)
	p, out := make([]byte, 100), make([][]byte, 1)
	all := func() {
		out[0] = p
		pieces := out
		a.Send(&pieces, false)
		if _, err := b.Read(p); err != nil {
			t.Fatal(err)
		}
	}
	if n := testing.AllocsPerRun(1000, all); n > 0 {
		t.Errorf("an exchange allocates %v times", n)
	}
}

// On one processor the runtime finds data for a waiting reader only when nothing else runs.
// Other programs disturb an attempt, so one of several is enough.
func TestALookEndsWhenAnotherConnectionHasData(t *testing.T) {
	processors(t, 1)
	for range 50 {
		quiet()
		if b := lookBesideAnother(t); b.habit.failures == 0 && b.blocked && !b.Idled() {
			return
		}
	}
	t.Error("it does not make way for the other connection")
}

// lookBesideAnother lets a connection look while another one gets data, on which its own
// data depends.
func lookBesideAnother(t *testing.T) *Conn {
	a, b := pair(t)
	x, y := pair(t)
	var other sync.WaitGroup
	other.Go(func() {
		for range 2 {
			if _, err := y.Read(make([]byte, 1)); err != nil {
				t.Errorf("Read of the other connection: %v", err)
			}
		}
		send(t, a, []byte("b"))
	})
	send(t, x, []byte("1"))
	time.Sleep(5 * time.Millisecond) // y waits for the second now, after a look in vain
	b.Expecting = func() bool {
		send(t, x, []byte("2"))
		return true
	}
	if _, err := b.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	other.Wait()
	return b
}

// With several connections, as of a mirror, the one that reads is often not the one that is owed
// an answer.
func TestOneLooksForTheAnswerThatAnotherIsOwed(t *testing.T) {
	for _, c := range []struct {
		processors int
		owed, want bool
	}{{1, true, true}, {1, false, false}, {2, true, false}} {
		processors(t, c.processors)
		found := false
		for try := 0; try < 50 && !found; try++ { // other programs disturb an attempt
			quiet()
			found = foundForAnother(t, c.owed)
		}
		if found != c.want {
			t.Errorf("%d processors, an answer is owed to another connection: %v; found by looking: %v, want %v", c.processors, c.owed, found, c.want)
		}
	}
}

// foundForAnother lets a connection that expects nothing find nothing, while another one waits for
// data that then comes. It reports whether the first one has looked and found that.
func foundForAnother(t *testing.T, owed bool) bool {
	a, b := pair(t)
	x, y := pair(t)
	var other sync.WaitGroup
	other.Go(func() {
		if _, err := y.Read(make([]byte, 1)); err != nil {
			t.Errorf("Read of the other connection: %v", err)
		}
		send(t, a, []byte("b"))
	})
	time.Sleep(time.Millisecond) // y waits
	if owed {
		y.Owed(true)
		defer y.Owed(false)
	}
	b.Expecting = func() bool {
		go func() { // runs between two looks
			runtime.Gosched()
			send(t, x, []byte("y"))
		}()
		return false
	}
	b.habit.failures = 1
	if _, err := b.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	other.Wait()
	return b.habit.failures == 0
}

func TestNobodyLooksWhileThreadsWaitForAProcessor(t *testing.T) {
	var l load
	l.next.Store(1 << 62)
	l.note(3, 2)
	if l.busy(0) {
		t.Error("one thread too many at one moment counts as busy")
	}
	l.note(3, 2)
	if !l.busy(0) {
		t.Error("threads that keep waiting do not count as busy")
	}
	for range 2 * scoreMost {
		l.note(9, 2)
	}
	for range scoreMost {
		l.note(2, 2)
	}
	if l.busy(0) {
		t.Error("it stays busy although no thread waits any more")
	}
}

func TestTheKernelsCountsAreUnderstood(t *testing.T) {
	for text, want := range map[string]int{"0.20 0.18 0.12 1/80 11206\n": 1, "13.98 10.44 10.15 27/1080 1\n": 27} {
		if n, ok := parseLoad([]byte(text)); n != want || !ok {
			t.Errorf("%q: %d threads are ready, %v; want %d", text, n, ok, want)
		}
	}
	if _, ok := parseLoad([]byte("nonsense")); ok {
		t.Error("nonsense is understood")
	}
	for text, want := range map[string]int{"0\n": 1, "0-1\n": 2, "0-3,8,10-11\n": 7, "": 0, "x": 0} {
		if n := parseOnline(text); n != want {
			t.Errorf("%q: %d processors, want %d", text, n, want)
		}
	}
	if n, ok := readyThreads(); !ok || n < 1 {
		t.Errorf("%d threads are ready here, %v; this one is", n, ok)
	}
	if n := onlineProcessors(); n < runtime.NumCPU() {
		t.Errorf("%d processors, of which this test may use %d", n, runtime.NumCPU())
	}
}

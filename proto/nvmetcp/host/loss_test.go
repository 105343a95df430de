// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// cutter is a dialer whose connections break after a number of bytes in either direction.
type cutter struct {
	mu     sync.Mutex
	budget func() int // of the next connection
}

type cutConn struct {
	net.Conn
	left atomic.Int64
}

func (c *cutter) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	cut := &cutConn{Conn: conn}
	cut.left.Store(int64(c.budget()))
	return cut, nil
}

var errCut = errors.New("cut by the test")

// spend takes n bytes off the budget and returns how many of them may pass.
func (c *cutConn) spend(n int) (int, error) {
	left := c.left.Add(-int64(n))
	if left >= 0 {
		return n, nil
	}
	return max(0, n+int(left)), errCut
}

func (c *cutConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n, cut := c.spend(n); cut != nil {
		c.Conn.Close()
		return n, cut
	}
	return n, err
}

func (c *cutConn) Write(p []byte) (int, error) {
	n, cut := c.spend(len(p))
	n, err := c.Conn.Write(p[:n])
	if cut != nil {
		c.Conn.Close()
		return n, cut
	}
	return n, err
}

// TestNoIOIsLostWhereverTheConnectionBreaks breaks connections after every number of bytes.
// Its writers remember what was acknowledged to them.
func TestNoIOIsLostWhereverTheConnectionBreaks(t *testing.T) {
	device := ramdisk.New(16*block.MiB, blocks)
	w := newWorld(t, device, func(c *controller.Config, s *controller.SubsystemConfig) {
		c.MDTS, s.PerHost = 64*block.KiB, 1
	})
	r := rand.New(rand.NewPCG(11, 12))
	breaks := 0
	const most = 150
	cut := &cutter{budget: func() int {
		if breaks++; breaks > most {
			return 1 << 40
		}
		return 200 + r.IntN(300<<10)
	}}
	cfg := w.config()
	cfg.Dial, cfg.HeaderDigest = cut.dial, true
	cfg.ReconnectMin, cfg.ReconnectMax = time.Millisecond, time.Millisecond
	n := space(t, connect(t, cfg), uuidA)
	var all sync.WaitGroup
	for worker := range 8 {
		all.Go(func() {
			area := int64(worker) << 20
			r := rand.New(rand.NewPCG(uint64(worker), 1))
			for round := range uint64(40) {
				size := 4096 << r.IntN(7)
				off := area + int64(r.IntN((1<<20-size)/4096))*4096
				want, got := noise(size, round<<8|uint64(worker)), make([]byte, size)
				if err := outcome(t, startWrite(n, want, off)); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				if err := outcome(t, startRead(n, got, off)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("read of acknowledged data: %v", err)
					return
				}
			}
		})
	}
	all.Wait()
	if s := n.controller.State(); s.Session < 3 {
		t.Errorf("only %d sessions: too few connections broke", s.Session)
	}
}

func TestAfterACutEverythingFailsAsGone(t *testing.T) {
	p := newPeer(t, 1<<20)
	p.hook = func(*link, *nvmetcp.Command, []byte) bool { return true } // never answers
	c := connect(t, p.config())
	n := space(t, c, uuidA)
	var told []<-chan error
	for i := range 200 { // more than the queue holds
		told = append(told, startWrite(n, make([]byte, 4096<<(i%6)), 0))
	}
	c.Cut()
	for _, o := range told {
		if err := outcome(t, o); !errors.Is(err, block.ErrGone) {
			t.Fatal(err)
		}
	}
	wait(t, c.Done(), "the controller to be over")
	if err := outcome(t, startRead(n, make([]byte, 4096), 0)); !errors.Is(err, block.ErrGone) {
		t.Error(err)
	}
	if err := block.Flush(n); !errors.Is(err, block.ErrGone) {
		t.Error(err)
	}
	if s := c.State(); s.Phase != Closed {
		t.Error(s)
	}
}

func TestCutMayBeCalledByACompletion(t *testing.T) {
	p := newPeer(t, 1<<20)
	c := connect(t, p.config())
	n := space(t, c, uuidA)
	n.Submit(&block.IO{Op: block.OpRead, Data: make([]byte, 4096), Len: 4096, Done: func(*block.IO) { c.Cut() }})
	wait(t, c.Done(), "the controller to be over")
}

func TestCutWhileNothingAnswersEnds(t *testing.T) {
	p := newPeer(t, 1<<20)
	c := connect(t, p.config())
	n := space(t, c, uuidA)
	p.listener.Close()
	p.cutAll()
	o := startRead(n, make([]byte, 4096), 0)
	c.Cut()
	if err := outcome(t, o); !errors.Is(err, block.ErrGone) {
		t.Error(err)
	}
	wait(t, c.Done(), "the controller to be over")
}

func TestIOWaitsForTheSameNamespaceOnly(t *testing.T) {
	p := newPeer(t, 1<<20)
	c := connect(t, p.config())
	n := space(t, c, uuidA)
	set := func(u block.UUID) {
		p.mu.Lock()
		p.uuid = u
		p.mu.Unlock()
	}
	live := func(session uint64) {
		t.Helper()
		for until := time.Now().Add(patience); c.State().Session < session || c.State().Phase != Live; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("no session %d: %+v", session, c.State())
			}
		}
	}
	// It is missing after the reconnect, but may still appear.
	set(block.UUID{})
	p.cutAll()
	o := startWrite(n, noise(4096, 1), 0)
	live(2)
	select {
	case err := <-o:
		t.Fatalf("a write to a missing namespace was answered: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	set(uuidA)
	c.Rescan()
	if err := outcome(t, o); err != nil {
		t.Fatal(err)
	}
	// Another one takes its place.
	set(uuidB)
	p.cutAll()
	o = startWrite(n, noise(4096, 2), 0)
	if err := outcome(t, o); !errors.Is(err, block.ErrGone) {
		t.Fatal(err)
	}
	if !bytes.Equal(p.memory[:4096], noise(4096, 1)) {
		t.Error("a write went to another namespace")
	}
}

// busy is a device that keeps its IOs until the test releases them.
type busy struct {
	block.Device
	goOn chan struct{}
}

func (b busy) Submit(io *block.IO) {
	go func() {
		<-b.goOn
		b.Device.Submit(io)
	}()
}

// TestIOThatWaitsForItsTurnGoesToTheSameNamespaceOnly: an IO waits in a full queue while
// another namespace replaces its own.
func TestIOThatWaitsForItsTurnGoesToTheSameNamespaceOnly(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks))
	slow := busy{ramdisk.New(block.MiB, blocks), make(chan struct{})}
	w.add(2, uuidB, slow)
	cfg := w.config()
	cfg.IOQueues, cfg.QueueDepth = 1, 2
	var told <-chan struct{}
	cfg.OnNamespaces, told = teller()
	c := connect(t, cfg)
	n, other := space(t, c, uuidA), space(t, c, uuidB)
	before := []<-chan error{startWrite(other, noise(4096, 1), 0), startWrite(other, noise(4096, 1), 4096)}
	waits := startWrite(n, noise(4096, 2), 0)
	if err := w.sub.RemoveNamespace(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	another := ramdisk.New(block.MiB, blocks)
	w.add(1, block.UUID{7}, another)
	await(t, told, "the other namespace", func() bool { _, err := c.Namespace(1, block.UUID{7}); return err == nil })
	close(slow.goOn)
	for _, o := range before {
		if err := outcome(t, o); err != nil {
			t.Error(err)
		}
	}
	if err := outcome(t, waits); !errors.Is(err, block.ErrGone) {
		t.Errorf("a write to a replaced namespace: %v", err)
	}
	got := make([]byte, 4096)
	if err := block.ReadAt(another, got, 0); err != nil || !bytes.Equal(got, make([]byte, 4096)) {
		t.Errorf("it went to the replacement (%v)", err)
	}
}

func TestASilentControllerIsNoticed(t *testing.T) {
	for name, change := range map[string]func(*peer, *Config){
		"keep alive not answered": func(p *peer, c *Config) {
			c.KATO = 40 * time.Millisecond
			p.admin = func(l *link, cmd *nvmetcp.Command, _ []byte) bool {
				return l.session == 1 && cmd.Opcode() == nvmetcp.AdminKeepAlive
			}
		},
		"command takes too long": func(_ *peer, c *Config) { c.CommandTimeout = 40 * time.Millisecond },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPeer(t, 1<<20)
			p.hook = func(l *link, _ *nvmetcp.Command, _ []byte) bool { return l.session == 1 }
			cfg := p.config()
			change(p, &cfg)
			n := space(t, connect(t, cfg), uuidA)
			if err := outcome(t, startRead(n, make([]byte, 4096), 0)); err != nil {
				t.Fatal(err)
			}
			if s := n.controller.State(); s.Session != 2 {
				t.Errorf("session %d", s.Session)
			}
		})
	}
}

// TestAControllerThatTakesNothingIsNoticed: the socket is so full that not even a keep
// alive can be sent.
func TestAControllerThatTakesNothingIsNoticed(t *testing.T) {
	p := newPeer(t, 64<<20)
	block1 := make(chan struct{})
	p.hook = func(l *link, _ *nvmetcp.Command, _ []byte) bool {
		if l.session == 1 {
			<-block1
		}
		return false
	}
	defer close(block1)
	cfg := p.config()
	cfg.CommandTimeout = 200 * time.Millisecond
	n := space(t, connect(t, cfg), uuidA)
	var told []<-chan error
	for i := range int64(1000) {
		told = append(told, startWrite(n, make([]byte, 16<<10), i<<14))
	}
	for _, o := range told {
		if err := outcome(t, o); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCloseWaitsForWhatIsUnderWay(t *testing.T) {
	p := newPeer(t, 1<<20)
	release := make(chan struct{})
	p.hook = func(l *link, _ *nvmetcp.Command, _ []byte) bool { <-release; return false }
	c := connect(t, p.config())
	n := space(t, c, uuidA)
	o := startWrite(n, noise(4096, 4), 0)
	closed := make(chan error, 1)
	go func() { closed <- c.Close(t.Context()) }()
	for !c.closing.Load() {
		time.Sleep(time.Millisecond)
	}
	if err := outcome(t, startRead(n, make([]byte, 4096), 0)); !errors.Is(err, block.ErrGone) {
		t.Errorf("an IO after Close: %v", err)
	}
	close(release)
	if err := outcome(t, o); err != nil {
		t.Error(err)
	}
	if err := outcome(t, closed); err != nil {
		t.Error(err)
	}
}

func TestCloseThatTakesTooLongCuts(t *testing.T) {
	p := newPeer(t, 1<<20)
	p.hook = func(*link, *nvmetcp.Command, []byte) bool { return true }
	c := connect(t, p.config())
	o := startWrite(space(t, c, uuidA), noise(4096, 4), 0)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := outcome(t, o); !errors.Is(err, block.ErrGone) {
		t.Error(err)
	}
}

func TestConnectSaysWhyItFailed(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks))
	for name, change := range map[string]func(*Config){
		"connection refused":   func(c *Config) { c.Portals = []string{"127.0.0.1:1"} },
		"invalid parameters":   func(c *Config) { c.Subsystem += "x" },
		"connect invalid host": func(c *Config) { c.Host.NQN += "x" },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		cfg, dials := w.config(), 0
		change(&cfg)
		cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			if dials++; dials == 2 {
				cancel() // the error to return is that of the first attempt
			}
			return new(net.Dialer).DialContext(ctx, network, address)
		}
		_, err := Connect(ctx, cfg)
		cancel()
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Connect(t.Context(), Config{}); err == nil {
		t.Error("an empty Config connects")
	}
}

func TestAStreamThatEndsAnywhereIsNoConnection(t *testing.T) {
	// The controller's side of a connection is cut after each of its bytes.
	p := newPeer(t, 1<<20)
	for n := 1; n < 400; n += 7 {
		left := n
		dial := func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			return &shortConn{Conn: conn, left: &left}, err
		}
		cfg := p.config()
		cfg.Dial, cfg.ReconnectMin = dial, time.Hour
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Millisecond)
		if _, err := Connect(ctx, cfg); err == nil {
			t.Errorf("connected after %d bytes", n)
		}
		cancel()
	}
}

// shortConn delivers a number of bytes and then EOF.
type shortConn struct {
	net.Conn
	left *int
}

func (c *shortConn) Read(p []byte) (int, error) {
	if *c.left <= 0 {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(p[:min(len(p), *c.left)])
	*c.left -= n
	return n, err
}

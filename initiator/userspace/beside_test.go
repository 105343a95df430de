// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// kernelTarget is a target that keeps old controllers, as Linux's does, with two portals and an agent beside it.
type kernelTarget struct {
	*testing.T
	where  lists.Where
	pool   lists.Pool
	listen map[string]string // the real address of each
	uuid   block.UUID

	mu      sync.Mutex
	history []string
	fails   bool
	slow    chan struct{} // if not nil, it replaces nothing until this is closed
	gone    bool          // the agent is
	beside  []net.Conn    // to the agent
}

func newKernelTarget(t *testing.T, offers bool) *kernelTarget {
	k := &kernelTarget{T: t, listen: map[string]string{}, uuid: block.UUID{5}, where: lists.Where{Subsystem: "nqn.2026-11.dev.weft:x", Host: block.HostFromID(block.UUID{9})}}
	k.pool.Dial, k.pool.Log = k.dial, slog.New(slog.DiscardHandler)
	t.Cleanup(k.pool.Close)
	for _, address := range []string{"a", "b"} {
		k.where.Portals = append(k.where.Portals, block.Portal{Transport: block.TCP, Address: address, Port: 4420})
	}
	k.serve([]string{"a:4420", "b:4420"}, controller.SubsystemConfig{})
	beside := controller.SubsystemConfig{PerHost: 1}
	if offers {
		beside.Replace = k.replace
	}
	k.serve([]string{"a:4421", "b:4421"}, beside)
	return k
}

// serve offers a subsystem at some addresses.
func (k *kernelTarget) serve(at []string, c controller.SubsystemConfig) {
	k.Helper()
	target, err := controller.New(controller.Config{})
	if err != nil {
		k.Fatal(err)
	}
	k.Cleanup(func() { target.Close(context.Background()) }) //nolint:errcheck // nothing of it is looked at
	c.NQN, c.Serial, c.Hosts = k.where.Subsystem, "1", []controller.Host{{NQN: k.where.Host.NQN}}
	s, err := target.AddSubsystem(c)
	if err == nil {
		err = s.AddNamespace(controller.NamespaceConfig{NSID: 1, UUID: k.uuid, Device: ramdisk.New(block.MiB, 4*block.KiB)})
	}
	for i, address := range at {
		l, err2 := net.Listen("tcp", "127.0.0.1:0")
		if err = errors.Join(err, err2); err != nil {
			k.Fatal(err)
		}
		k.listen[address] = l.Addr().String()
		if _, err := target.Serve(l, controller.PortConfig{ID: uint16(i + 1), Link: []*controller.Subsystem{s}}); err != nil {
			k.Fatal(err)
		}
	}
}

func (k *kernelTarget) dial(ctx context.Context, network, address string) (net.Conn, error) {
	k.did("dial " + address)
	conn, err := new(net.Dialer).DialContext(ctx, network, k.listen[address])
	k.mu.Lock()
	defer k.mu.Unlock()
	if strings.HasSuffix(address, ":4421") && err == nil {
		if k.gone {
			conn.Close()
			return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
		}
		k.beside = append(k.beside, conn)
	}
	return conn, err
}

func (k *kernelTarget) replace(_ context.Context, by block.ServedBy) error {
	k.did("replace" + map[block.ServedBy]string{block.InProcess: " by the process's"}[by])
	k.mu.Lock()
	slow := k.slow
	k.mu.Unlock()
	if slow != nil {
		<-slow
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fails {
		return errors.New("a drive hangs")
	}
	return nil
}

func (k *kernelTarget) did(what string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.history = append(k.history, what)
}

// took returns what has happened since the last call, without repetitions.
func (k *kernelTarget) took() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	h := slices.Compact(k.history)
	k.history = nil
	return h
}

func (k *kernelTarget) set(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
}

// connect connects through the first portal, and waits until it is known what the agent offers.
func (k *kernelTarget) connect() connection {
	k.Helper()
	c, err := dialHost(k.dial)(k.Context(), dialOptions{
		portal: "a:4420", subsystem: k.where.Subsystem, host: k.where.Host, ioQueues: 1, keepAlive: 10 * time.Second, every: time.Second, ask: time.Second,
		changed: func() {}, log: slog.New(slog.DiscardHandler), beside: k.pool.Beside(k.where),
	})
	if err != nil {
		k.Fatal(err)
	}
	k.Cleanup(c.Cut)
	return c
}

func (k *kernelTarget) until(what string, is func() bool) {
	k.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			k.Fatalf("not within 20 s: %s; %q", what, k.took())
		}
	}
}

func (k *kernelTarget) write(c connection) error {
	d, err := c.Namespace(1, k.uuid)
	if err != nil {
		return err
	}
	return block.WriteAt(d, make([]byte, 4096), 0)
}

func offered(c connection) bool {
	_, beside := c.Replaces()
	return beside
}

// The kernel's target keeps old controllers. So the connection goes on through another portal only after the
// agent beside the target has ended its older one.
func TestAConnectionToTheKernelsTargetMovesOnceItsOldControllerHasEnded(t *testing.T) {
	k := newKernelTarget(t, true)
	c := k.connect()
	if err := k.write(c); err != nil {
		t.Fatal(err)
	}
	k.until("the agent's offer is known", func() bool { return offered(c) })
	c.Answered()
	k.took()
	k.set(func() { k.fails = true })
	c.Move(block.Portal{Transport: block.TCP, Address: "b", Port: 4420}, false)
	time.Sleep(300 * time.Millisecond)
	if got := k.took(); slices.Contains(got, "dial b:4420") || !slices.Contains(got, "replace") {
		t.Errorf("while the old controller cannot be ended: %q, want the agent asked and no connection", got)
	}
	if !c.Answered() {
		t.Error("the target seems to be silent, though the agent beside it answers")
	}
	k.set(func() { k.fails, k.history = false, nil })
	if err := k.write(c); err != nil {
		t.Error(err)
	}
	got := k.took()
	if i := slices.Index(got, "dial b:4420"); i < 1 || !slices.Contains(got[:i], "replace") || slices.Contains(got, "dial a:4420") {
		t.Errorf("then: %q, want it replaced before a connection through the other portal", got)
	}
}

// An agent that is at work is not silent: else the next portal would be tried before it is done, and then the
// first one again, and each would have it begin anew. That lasts for a second.
func TestAConnectionWaitsForAnAgentThatIsAtWork(t *testing.T) {
	t.Parallel() // it takes a while
	k := newKernelTarget(t, true)
	c := k.connect()
	k.until("the agent's offer is known", func() bool { return offered(c) })
	slow := make(chan struct{})
	k.set(func() { k.slow = slow })
	c.Move(block.Portal{Transport: block.TCP, Address: "b", Port: 4420}, false)
	k.until("the agent is asked", func() bool { return slices.Contains(k.took(), "replace") })
	began := time.Now()
	for range 5 {
		if !c.Answered() {
			t.Errorf("the target seems to be silent after %v, though its agent is at work", time.Since(began))
		}
		time.Sleep(100 * time.Millisecond)
	}
	k.until("it is not believed for ever", func() bool { return !c.Answered() })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("an agent that does not answer counts as heard for %v", took)
	}
	close(slow)
	if err := k.write(c); err != nil {
		t.Error(err)
	}
}

// If the agent cannot end the old controller, the connection goes on when the target must have ended it.
func TestAConnectionGoesOnOnceItsTargetMustHaveEndedTheOldController(t *testing.T) {
	t.Parallel() // it takes a while
	k := newKernelTarget(t, true)
	c := k.connect()
	k.until("the agent's offer is known", func() bool { return offered(c) })
	k.set(func() { k.fails = true })
	began := time.Now()
	c.Move(block.Portal{Transport: block.TCP, Address: "b", Port: 4420}, false)
	k.until("the old connection is left", func() bool { return slices.Contains(k.took(), "replace") })
	if err := k.write(c); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < volume.Quiesce || took > volume.Quiesce+10*time.Second {
		t.Errorf("a write took %v, want somewhat more than %v", took, volume.Quiesce)
	}
}

// An agent that has gone offers nothing any more, whatever it has offered before.
func TestAnAgentThatIsGoneOffersNothing(t *testing.T) {
	t.Parallel() // it takes a while
	k := newKernelTarget(t, true)
	b := k.pool.Beside(k.where)
	k.until("the agent's offer is known", b.Replaces)
	k.set(func() {
		k.gone = true
		for _, c := range k.beside {
			c.Close()
		}
	})
	k.until("the agent has been asked again", func() bool { return !b.Replaces() })
}

// A host that has waited until the target must have ended the old controller need not ask.
func TestAConnectionThatHasWaitedMovesAtOnce(t *testing.T) {
	k := newKernelTarget(t, false)
	c := k.connect()
	k.until("the agent is asked", func() bool { return !offered(c) && slices.Contains(k.took(), "dial a:4421") })
	time.Sleep(100 * time.Millisecond)
	if offered(c) {
		t.Error("an agent that offers nothing is believed to")
	}
	k.took()
	c.Move(block.Portal{Transport: block.TCP, Address: "b", Port: 4420}, true)
	var got []string
	k.until("it connects through the other portal", func() bool { got = append(got, k.took()...); return slices.Contains(got, "dial b:4420") })
	if err := k.write(c); err != nil {
		t.Error(err)
	}
	if got = append(got, k.took()...); slices.Contains(got, "replace") {
		t.Errorf("%q, want nobody asked", got)
	}
}

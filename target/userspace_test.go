// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/nvmet/memfs"
	"weft.dev/weft/target/nvmet/nvmettest"
	"weft.dev/weft/target/userspace"
)

// A fence that is reported must also hold for exports that are left in the kernel.
func TestNothingIsServedBesideTheKernel(t *testing.T) {
	c := Config{Node: "t1", Manager: &manager{}, Root: t.TempDir(), Datapath: User}
	before := func() (bool, error) {
		a, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		_, serves, err := a.kernel.before()
		return serves, err
	}
	dir := filepath.Join(c.Root, "sys/kernel/config/nvmet/subsystems")
	for name, want := range map[string]bool{"": false, "nqn.2024-01.org.example:theirs": false, string(block.SubsystemNQN(volumeID(1), 1, host, "t1")): true} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if serves, err := before(); serves != want || err != nil {
			t.Errorf("with %q exported by the kernel: it serves %v, %v; want %v", name, serves, err, want)
		}
		c.FilesOnly = true // an agent that cannot work in the kernel's data path
		if serves, err := before(); serves || (err != nil) != want {
			t.Errorf("with %q exported by the kernel, for an agent on files: it serves %v, %v; want an error %v", name, serves, err, want)
		}
		c.Rehearsal = true
		if serves, err := before(); serves || err != nil {
			t.Errorf("with %q exported by the kernel, for a rehearsal: it serves %v, %v", name, serves, err)
		}
		c.FilesOnly, c.Rehearsal = false, false
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAnAgentOfTheOtherDataPathTakesOver: an agent in user space finds exports in the kernel. They
// keep serving while they are wanted, and are removed without help when they are not; only then
// does the agent serve by itself.
func TestAnAgentOfTheOtherDataPathTakesOver(t *testing.T) {
	in(t, Kernel, func(t *testing.T, w *world) {
		inKernel := func() int {
			tree, err := nvmet.OpenOn(nvmettest.Root, w.targets)
			if err != nil {
				t.Fatal(err)
			}
			c, err := tree.Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return len(c.Subsystems)
		}
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).leg(2, 1, 0, 0).TargetWanted)
		w.until("an export", exportsReady(1))
		w.stop() // right after a detach that the agent has not heard of
		w.both = true
		w.run()
		time.Sleep(time.Minute)
		if inKernel() != 1 || w.user {
			t.Errorf("%d exports in the kernel, and the agent serves in user space %v; want the one that is wanted to serve on", inKernel(), w.user)
		}
		w.manager.set(want().drive(1).leg(1, 1, 1, 0).admit(1, 2).leg(2, 1, 0, 0).TargetWanted)
		w.until("the epoch to be fenced", admitted(1, 2))
		w.until("the agent to serve itself", func(*pb.TargetReport) bool { return w.user })
		if n := inKernel(); n != 0 {
			t.Errorf("%d exports are left in the kernel", n)
		}
		w.mu.Lock()
		mapped := len(w.mapped)
		w.mu.Unlock()
		if mapped != 0 {
			t.Errorf("%d legs are left in the kernel", mapped)
		}
		w.manager.set(want().drive(1).volume(1, 1, 3).leg(2, 1, 0, 0).TargetWanted)
		w.until("an export in user space", exportsReady(1))
		if n := inKernel(); n != 0 {
			t.Errorf("%d exports in the kernel beside the agent's own", n)
		}
	})
}

// leftMapper has devices left by an earlier agent.
type leftMapper struct {
	left []dm.State
	busy string // the name of one that is open
}

func (m *leftMapper) Devices(string) ([]dm.State, error) { return slices.Clone(m.left), nil }

func (m *leftMapper) Do(s dm.Step) error {
	if s.Op != dm.OpRemove || s.Device.Name == m.busy {
		return unix.EBUSY
	}
	m.left = slices.DeleteFunc(m.left, func(d dm.State) bool { return d.Name == s.Device.Name })
	return nil
}

// A mapped leg keeps its drive from being opened by this process.
func TestLegsThatTheKernelHasMappedAreLetGoOf(t *testing.T) {
	m := &leftMapper{left: []dm.State{{Info: dm.Info{Name: "one"}}, {Info: dm.Info{Name: "two"}}}}
	if err := unmapLegs(slog.New(slog.DiscardHandler), m); err != nil || len(m.left) > 0 {
		t.Errorf("unmapLegs = %v and left %v", err, m.left)
	}
	m = &leftMapper{left: []dm.State{{Info: dm.Info{Name: "one"}}, {Info: dm.Info{Name: "two"}}}, busy: "two"}
	if err := unmapLegs(slog.New(slog.DiscardHandler), m); !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "two") {
		t.Errorf("unmapLegs of a leg that is open = %v, want EBUSY and its name", err)
	}
}

func TestTheDataPathIsChecked(t *testing.T) {
	for name, c := range map[string]Config{
		"unknown":             {Datapath: "spdk"},
		"files in the kernel": {Files: []string{"/srv/drive"}},
	} {
		c.Node, c.Manager = "t1", &manager{}
		if _, err := New(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// userKernel is a target in user space over the world's drives. Each agent gets a new one, since
// target and agent are one process.
func (w *world) userKernel(gate *gate) kernel {
	legs := userspace.NewLegs(w.device)
	device := func(path string) (block.Device, error) {
		if !w.canExport(path) {
			return nil, unix.ENOENT
		}
		return legs.Device(path)
	}
	exports, err := userspace.NewExports(slog.New(slog.DiscardHandler), w.listen, device)
	if err != nil {
		w.t.Fatal(err)
	}
	w.legs, w.exports = legs, exports
	kernelTree := w.tree
	w.tree = exports.OpenTree
	var before func() (kernel, bool, error)
	if w.both {
		before = func() (kernel, bool, error) {
			w.user, w.tree = false, kernelTree
			if len(w.exported().Subsystems) > 0 {
				return w.inKernel(gate), true, nil
			}
			m := gatedMapper{w, gate}
			err := unmapLegs(slog.New(slog.DiscardHandler), m)
			w.user, w.tree = true, exports.OpenTree
			return kernel{}, false, err
		}
	}
	return kernel{
		before:   before,
		hardware: gatedHardware{w, gate},
		mapper:   func() (mapper, error) { return gatedMapper{w, gate}, nil },
		names:    legs,
		readOnly: true, integrity: w.integrity,
		paths:   exports.SetPaths,
		exports: func() (exporter, error) { return nvmet.OpenOn(memfs.Root, gatedFiles{exports, gate}) },
		watch:   func(ctx context.Context, _ func()) error { <-ctx.Done(); return context.Cause(ctx) },
		close: func(ctx context.Context) error {
			if err := exports.Close(ctx); err != nil {
				return err
			}
			return legs.Close(context.Background())
		},
	}
}

// device is the drive with a number, as gatedHardware.Number gives it.
func (w *world) device(n block.DeviceNumber) (userspace.Device, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for path, m := range w.media {
		if uint32(path[len(path)-1]) == n.Minor {
			return mediumDevice{m}, nil
		}
	}
	return nil, unix.ENODEV
}

// mediumDevice is a medium that takes IOs.
type mediumDevice struct{ *medium }

func (d mediumDevice) Geometry() block.Geometry {
	return block.Geometry{Size: d.size, BlockSize: 4 * block.KiB, VolatileCache: true}
}

func (d mediumDevice) Losses() uint64 { return 0 }

func (d mediumDevice) Submit(io *block.IO) {
	go func() {
		d.mu.Lock()
		stuck := d.stuck
		d.mu.Unlock()
		if stuck != nil {
			<-stuck
		}
		var err error
		switch io.Op {
		case block.OpRead:
			_, err = d.ReadAt(io.Data, io.Off)
		case block.OpWrite:
			_, err = d.WriteAt(io.Data, io.Off)
		case block.OpFlush:
			err = d.Flush()
		case block.OpWriteZeroes:
			err = d.Zero(context.Background(), block.Size(io.Off), block.Size(io.Len), nil)
		}
		io.Complete(err)
	}()
}

// pipeListener is a portal without a network, so that virtual time works.
type pipeListener struct {
	portal block.Portal
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (w *world) listen(p block.Portal) (net.Listener, error) {
	l := &pipeListener{portal: p, conns: make(chan net.Conn), closed: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[p] = l
	return l, nil
}

// dial connects to a portal that is listened at.
func (w *world) dial(ctx context.Context, _, address string) (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for p, l := range w.listeners {
		if net.JoinHostPort(p.Address, strconv.Itoa(int(p.Port))) != address {
			continue
		}
		here, there := net.Pipe()
		select {
		case l.conns <- there:
			return here, nil
		case <-l.closed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return nil, unix.ECONNREFUSED
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipeListener) Addr() net.Addr {
	return &net.TCPAddr{IP: net.ParseIP(l.portal.Address), Port: int(l.portal.Port)}
}

// Hosts would be told of a portal over RDMA, and find TCP there.
func TestUserSpaceRefusesRDMAPortals(t *testing.T) {
	c := Config{Node: "t1", Manager: &manager{}, Root: t.TempDir(), Datapath: User, Portals: []block.Portal{{Transport: block.RDMA, Address: "192.0.2.1", Port: 4420}}}
	if _, err := New(c); err == nil || !strings.Contains(err.Error(), "rdma://192.0.2.1:4420: the user-space data path has no RDMA") {
		t.Errorf("New = %v, want a refusal that names the portal", err)
	}
}

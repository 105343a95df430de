// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	nvmehost "weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/nvmet"
)

// marker is a kernel that lists writes, in which a test marks them.
type marker struct {
	lists map[block.DeviceNumber]*checkpoint.Tracker

	mu     sync.Mutex
	missed uint64
	broken error
}

// loses counts a write that was missed.
func (m *marker) loses() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.missed++
}

// breaks has the marker fail with err, or work again.
func (m *marker) breaks(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken = err
}

func (m *marker) Track(n block.DeviceNumber, size block.Size) (*checkpoint.Tracker, error) {
	m.lists[n] = checkpoint.NewTracker(size)
	return m.lists[n], nil
}

func (m *marker) Forget(n block.DeviceNumber) error { delete(m.lists, n); return nil }
func (m *marker) Missed(block.DeviceNumber) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.missed, m.broken
}
func (m *marker) Close() error { return nil }

// listedWorld is a leg in the kernel whose list one host can ask for.
type listedWorld struct {
	*testing.T
	marker *marker
	lists  *lists
	leg    block.LegID
	number block.DeviceNumber
	nqn    block.NQN
	host   block.Host
	port   uint16
	ids    nvmet.ControllerIDs // of what is exported in the kernel
}

func newListedWorld(t *testing.T) *listedWorld {
	w := &listedWorld{
		T: t, marker: &marker{lists: map[block.DeviceNumber]*checkpoint.Tracker{}}, leg: block.LegID{UUID: block.UUID{7}},
		number: block.DeviceNumber{Major: 253, Minor: 4}, ids: nvmet.LowIDs, host: block.HostFromID(block.UUID{9}),
	}
	w.nqn = block.SubsystemNQN(block.VolumeID{UUID: block.UUID{1}}, 3, w.host, "t1")
	var err error
	if w.lists, err = newLists(w.marker, "/dev/weft/leg", nil, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.lists.close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	for { // the next port has to be free
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		w.port = uint16(l.Addr().(*net.TCPAddr).Port)
		next, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(w.port)+1)))
		l.Close()
		if err == nil {
			next.Close()
			break
		}
	}
	w.mapped(block.GiB)
	w.serve(w.nqn)
	return w
}

// mapped has the leg mapped with a size.
func (w *listedWorld) mapped(size block.Size) {
	w.lists.track(map[block.LegID]dm.State{w.leg: {Info: dm.Info{Number: w.number, Live: true}, Table: dm.Whole(size, dm.Linear{Device: "8:0"})}})
}

// serve offers the leg in some subsystems.
func (w *listedWorld) serve(subsystems ...block.NQN) {
	c := nvmet.Config{Ports: []nvmet.Port{{Portal: block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: w.port}}}}
	for _, n := range subsystems {
		c.Subsystems = append(c.Subsystems, nvmet.Subsystem{
			NQN: n, Serial: "1", Model: nvmet.Model, CntlidMin: w.ids.Min, CntlidMax: w.ids.Max, AllowedHosts: []nvmet.Link{nvmet.LinkTo(w.host.NQN)},
			Namespaces: []nvmet.Namespace{{NSID: 1, Device: filepath.Join("/dev/weft/leg", w.leg.String()), UUID: block.UUID{5}, NGUID: block.UUID{5}, Enabled: true}},
		})
		c.Ports[0].Subsystems = append(c.Ports[0].Subsystems, nvmet.LinkTo(n))
	}
	w.lists.serve(w.Context(), c, nvmet.Config{})
}

func (w *listedWorld) dial(n block.NQN) (*nvmehost.Controller, error) {
	ctx, cancel := context.WithTimeout(w.Context(), 5*time.Second)
	defer cancel()
	c, err := nvmehost.Connect(ctx, nvmehost.Config{
		Portals: []string{net.JoinHostPort("127.0.0.1", strconv.Itoa(int(w.port)+1))}, Subsystem: n, Host: w.host, IOQueues: 1,
	})
	if err == nil {
		w.Cleanup(c.Cut)
	}
	return c, err
}

func (w *listedWorld) connect(n block.NQN) (*nvmehost.Namespace, error) {
	c, err := w.dial(n)
	if err != nil {
		return nil, err
	}
	return c.Namespace(1, block.UUID{5})
}

func (w *listedWorld) controllerOf(t *testing.T, n block.NQN) *nvmehost.Controller {
	t.Helper()
	c, err := w.dial(n)
	w.must(err)
	return c
}

func (w *listedWorld) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *listedWorld) take(n *nvmehost.Namespace, token uint64) error {
	return errors.Join(n.Checkpoint(w.Context(), false, token), n.Checkpoint(w.Context(), true, token))
}

// written returns the regions that are listed; nil if nothing is known.
func (w *listedWorld) written(n *nvmehost.Namespace) []checkpoint.Range {
	w.Helper()
	log, err := n.Written(w.Context())
	w.must(err)
	if log.Committed == 0 {
		return nil
	}
	return append([]checkpoint.Range{}, checkpoint.Ranges(log.Regions, int64(log.Region), 100)...)
}

func TestHostsAskForTheListsOfLegsInTheKernel(t *testing.T) {
	w := newListedWorld(t)
	n, err := w.connect(w.nqn)
	w.must(err)
	if got := w.written(n); got != nil {
		t.Errorf("before the first checkpoint %v is listed, want nothing known", got)
	}
	w.must(w.take(n, 1))
	w.marker.lists[w.number].Mark(1<<20, 4096)
	want := []checkpoint.Range{{Off: 1 << 20, End: 1<<20 + int64(checkpoint.Region)}}
	if got := w.written(n); !slices.Equal(got, want) {
		t.Errorf("after a write %v is listed, want %v", got, want)
	}
	if err := block.WriteAt(n, make([]byte, 4096), 0); err == nil {
		t.Error("the leg was written to where only its list is served")
	}
	if err := block.ReadAt(n, make([]byte, 4096), 0); err == nil {
		t.Error("the leg was read where only its list is served")
	}
}

// A list that may lack a write is worth nothing until the next checkpoint.
func TestAMissedWriteMakesAListWorthless(t *testing.T) {
	w := newListedWorld(t)
	n, err := w.connect(w.nqn)
	w.must(err)
	w.must(w.take(n, 1))
	w.marker.loses()
	if got := w.written(n); got != nil {
		t.Errorf("after a write was missed %v is listed, want nothing known", got)
	}
	w.must(n.Checkpoint(t.Context(), false, 2))
	w.marker.loses()
	if err := n.Checkpoint(t.Context(), true, 2); !errors.Is(err, nvmetcp.CommandSequenceError) {
		t.Errorf("commit of a checkpoint during which a write was missed: %v, want it refused", err)
	}
	w.must(w.take(n, 3))
	if got := w.written(n); got == nil {
		t.Error("after another checkpoint nothing is known")
	}
	w.marker.breaks(errors.New("cannot tell"))
	if got := w.written(n); got != nil {
		t.Errorf("when the kernel does not say what it missed, %v is listed, want nothing known", got)
	}
	if err := w.take(n, 4); err == nil {
		t.Error("a checkpoint was taken when the kernel does not say what it missed")
	}
}

func TestALegThatHasGrownBeginsANewList(t *testing.T) {
	w := newListedWorld(t)
	n, err := w.connect(w.nqn)
	w.must(err)
	w.must(w.take(n, 1))
	w.mapped(2 * block.GiB)
	if got := w.written(n); got != nil {
		t.Errorf("a leg that has grown lists %v, want nothing known", got)
	}
	w.must(w.take(n, 2))
	w.marker.lists[w.number].Mark(int64(block.GiB), 1)
	if got := w.written(n); len(got) != 1 || got[0].Off != int64(block.GiB) {
		t.Errorf("after a write to its new part it lists %v", got)
	}
}

// The fence: a host that could still take a checkpoint would make the list forget what others write.
func TestAFencedHostTakesNoCheckpoint(t *testing.T) {
	w := newListedWorld(t)
	n, err := w.connect(w.nqn)
	w.must(err)
	w.must(w.take(n, 1))
	next := block.SubsystemNQN(block.VolumeID{UUID: block.UUID{1}}, 4, w.host, "t1")
	w.serve(next)
	if got := w.lists.served(); !slices.Equal(got, []block.NQN{next}) {
		t.Errorf("served are %v, want %v", got, next)
	}
	if err := w.take(n, 2); err == nil {
		t.Error("a host whose export is gone took a checkpoint")
	}
	if _, err := w.connect(w.nqn); err == nil {
		t.Error("it connected again")
	}
	other, err := w.connect(next)
	w.must(err)
	if got := w.written(other); got == nil {
		t.Error("the next host does not know what the first one wrote")
	}
	w.must(w.take(other, 3))
}

func TestAnEpochIsNotOverWhileItsListsAreServed(t *testing.T) {
	v := block.VolumeID{UUID: block.UUID{1}}
	old := block.SubsystemNQN(v, 3, block.HostFromID(block.UUID{9}), "t1")
	p := planner{seen: seen{exports: &nvmet.Config{}, busy: func(block.NQN) bool { return false }}}
	if got := p.exportedBelow(v, 4); got != "" {
		t.Errorf("with nothing left of the epoch: %s", got)
	}
	p.seen.listed = []block.NQN{old}
	if got := p.exportedBelow(v, 4); got == "" {
		t.Error("the epoch is over although its host can take checkpoints")
	}
	if got := p.exportedBelow(v, 3); got != "" {
		t.Errorf("the epoch itself may begin: %s", got)
	}
}

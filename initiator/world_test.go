// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"io"
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

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// world is a machine with its fabric and its manager, as far as the agent can tell: targets
// that answer, fall silent or refuse; heads that disappear and return under new numbers;
// device-mapper tables; logs in real files.
type world struct {
	// listed answers for the lists of writes of a node's legs; nil: none are kept. It holds mu.
	listed func(node string, cmd nvmetcp.Command, data []byte) error

	t      *testing.T
	dir    string
	volume block.VolumeID
	layout block.Layout
	size   block.Size
	boot   string

	mu        sync.Mutex
	history   []string // the calls to the kernel and to the manager, in order
	next      int      // number of the next controller or head
	silent    map[string]chan struct{}
	off       map[string]bool // machines that accept no connections
	down      map[string]bool
	ctrl      []fabrics.Controller
	heads     []fakeHead
	devices   []dm.State
	health    map[dm.Ref]dm.Health
	open      int
	equal     bool // every resync completes at once
	loops     []dm.Loop
	wait      chan struct{} // closed and replaced at each dm event
	stuck     bool          // suspends wait for silent legs
	suspended func()        // called once, when the top device begins to be suspended, which takes a moment then
	written   func()        // called once, when a write below the device begins, with mu held
	reading   func()        // called once, when a leg is read while the top device is suspended, with mu held
	medium    string        // the node whose legs cannot be read from 8192 to 12288
	retries   bool          // commands are repeated as often as can be
	forgets   bool          // the next table of the top device knows no unit of discards once they are off, as with Linux 6.12
	looks     int           // calls of Controllers

	epoch      uint64
	wanted     *pb.InitiatorWanted
	reports    []*pb.InitiatorReport
	streams    []*stream
	managers   bool                                                          // the manager answers
	recordless bool                                                          // but records nothing
	deaf       bool                                                          // and does not even answer
	strict     bool                                                          // and refuses reports to another cluster
	hang       map[string]chan struct{}                                      // by device: its reload hangs in the kernel until this is closed
	firmly     map[string]chan struct{}                                      // by node: the same for a disconnect
	stuckLegs  map[uint32]chan struct{}                                      // by namespace: reads of it hang until this is closed
	transports []pb.Transport                                                // of the portals of each target; TCP if empty
	rails      bool                                                          // each target has a portal on another network, too
	cut        map[string]bool                                               // addresses at which the network is cut
	scans      time.Duration                                                 // how long the kernel takes to find the namespaces of a second controller
	bytes      map[string]map[int64]byte                                     // by node: what its legs hold, where that is known not to be zero
	data       func(ctx context.Context, node string) ([]block.Range, error) // where a node's legs have data; nil: they do not know
	ahead      func(node string, off, n int64) error                         // called for each write beside the tables; nil: there are none
	perHost    bool                                                          // targets end a host's older controller when it connects again
	keepAlives map[string][]time.Duration                                    // by controller: the timeouts that it was given
	beside     func(node string) net.Conn                                    // to the agents beside the targets; nil: they do not listen
	firstOver  map[string]block.Transport
	frozen     map[string]chan struct{} // by node: the same for setting a queue's limits
	grown      map[string]bool          // nodes whose namespaces fit twice the size
	dying      func() bool              // whether one more device can be resized
	slept      time.Duration            // how long the machine was suspended
	still      chan struct{}            // the agent is frozen until it is closed
	log        *slog.Logger             // the agent's log; nil: none
	stop       func()                   // ends the agent that in started
	files      filesystems              // mounted on this machine
}

type fakeHead struct {
	fabrics.Namespace
	nqn  block.NQN
	node string
}

// home is the cluster of the manager.
var home = block.ClusterID{UUID: block.UUIDFromRandom([16]byte{7})}

func newWorld(t *testing.T, stripes, copies int) *world {
	w := &world{
		t: t, dir: t.TempDir(), boot: "boot-1", size: 64 * block.MiB, epoch: 1, managers: true, equal: true,
		volume: block.VolumeID{UUID: block.UUIDFromRandom([16]byte{9})},
		layout: block.Layout{Stripes: stripes, Copies: copies, Chunk: block.DefaultChunk},
		silent: map[string]chan struct{}{}, cut: map[string]bool{}, off: map[string]bool{}, down: map[string]bool{}, health: map[dm.Ref]dm.Health{},
		wait: make(chan struct{}), wanted: &pb.InitiatorWanted{Generation: 1, ClusterId: home.String()},
		bytes: map[string]map[int64]byte{}, keepAlives: map[string][]time.Duration{},
	}
	for copy := range block.MaxSlots {
		w.bytes[node(copy)] = map[int64]byte{}
	}
	return w
}

func (w *world) did(format string, args ...any) {
	w.history = append(w.history, fmt.Sprintf(format, args...))
}

// took returns the history since the last call, with names in place of the ids of legs and the
// numbers of devices.
func (w *world) took() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.history
	w.history = nil
	for i := 0; i < len(h); i++ { // connects that start together end in any order
		from := i
		for i < len(h) && strings.HasPrefix(h[i], "connect ") {
			i++
		}
		slices.Sort(h[from:i])
	}
	return h
}

// ---- the volume ----

func node(copy int) string { return fmt.Sprintf("t%d", copy) }

func legID(column, copy int) block.LegID {
	return block.LegID{UUID: block.UUIDFromRandom([16]byte{1, byte(column), byte(copy)})}
}

func legName(id string) string {
	for c := range 4 {
		for i := range 3 {
			if legID(c, i).String() == id {
				return fmt.Sprintf("c%d.%d", c, i)
			}
		}
	}
	return id
}

func (w *world) nqn(node string) block.NQN {
	h := w.identity()
	return block.SubsystemNQN(w.volume, block.Epoch(w.epoch), h, block.NodeName(node))
}

func (w *world) identity() block.Host {
	h, err := fabrics.HostIdentity(filepath.Join(w.dir, "state"), [16]byte{7})
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// attach makes the volume wanted at the current epoch, with all legs in sync.
func (w *world) attach() *pb.WantedAttachment {
	a := &pb.WantedAttachment{
		VolumeId: w.volume.String(), VolumeName: "db1", SizeBytes: uint64(w.size), Epoch: w.epoch, BootId: w.boot,
		Layout:       &pb.Layout{Stripes: uint32(w.layout.Stripes), Copies: uint32(w.layout.Copies), ChunkBytes: uint64(w.layout.Chunk)},
		LegSizeBytes: uint64(w.layout.LegSize(w.size)),
	}
	for column := range w.layout.Stripes {
		for copy := range w.layout.Copies {
			a.Legs = append(a.Legs, &pb.WantedLink{
				LegId: legID(column, copy).String(), Column: uint32(column), Copy: uint32(copy),
				State: pb.LegState_LEG_STATE_IN_SYNC, Node: node(copy), Nqn: string(w.nqn(node(copy))),
				Nsid: uint32(1 + column*4 + copy), Uuid: block.NamespaceUUID(legID(column, copy), block.Epoch(w.epoch), 0).String(),
				Portals: w.portals(copy),
			})
		}
	}
	w.change(func(all *pb.InitiatorWanted) { all.Attachments = []*pb.WantedAttachment{a} })
	return a
}

// portals are those of a target: one with TCP, or one with each of transports.
func (w *world) portals(copy int) (all []*pb.Portal) {
	transports := w.transports
	if len(transports) == 0 {
		transports = []pb.Transport{pb.Transport_TRANSPORT_TCP}
	}
	for _, t := range transports {
		all = append(all, &pb.Portal{Transport: t, Address: fmt.Sprintf("192.0.2.%d", copy+1), Port: 4420})
	}
	if w.rails {
		all = append(all, &pb.Portal{Address: fmt.Sprintf("198.51.100.%d", copy+1), Port: 4420, Transport: pb.Transport_TRANSPORT_TCP})
	}
	return all
}

// change changes the wanted state and sends it.
func (w *world) change(f func(*pb.InitiatorWanted)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changeLocked(f)
}

func (w *world) changeLocked(f func(*pb.InitiatorWanted)) {
	f(w.wanted)
	w.wanted.Generation++
	for _, s := range w.streams {
		s.send(proto.CloneOf(w.wanted))
	}
}

// comesBack makes the manager list a stale leg as rebuilding.
func (w *world) comesBack(column, copy int, revision uint64) {
	w.wants(w.back(column, copy, revision))
}

// back is a stale leg that has come back.
func (w *world) back(column, copy int, revision uint64) *pb.WantedLink {
	return &pb.WantedLink{
		LegId: legID(column, copy).String(), Column: uint32(column), Copy: uint32(copy), Revision: revision,
		State: pb.LegState_LEG_STATE_REBUILDING, Node: node(copy), Nqn: string(w.nqn(node(copy))),
		Nsid: uint32(1 + column*4 + copy), Uuid: block.NamespaceUUID(legID(column, copy), block.Epoch(w.epoch), revision).String(),
		Portals: w.portals(copy),
	}
}

// wants makes the manager list one more leg.
func (w *world) wants(l *pb.WantedLink) {
	w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs = append(all.Attachments[0].Legs, l) })
}

// reborn makes all targets lose power, and makes the manager keep one copy of each column in
// sync, under a new identity.
func (w *world) reborn(copy int, revision uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changeLocked(func(all *pb.InitiatorWanted) {
		a := all.Attachments[0]
		a.Legs = slices.DeleteFunc(a.Legs, func(l *pb.WantedLink) bool { return int(l.Copy) != copy })
		for _, l := range a.Legs {
			leg, _ := block.ParseLegID(l.LegId)
			l.Revision, l.Reborn = revision, revision
			l.Uuid = block.NamespaceUUID(leg, block.Epoch(w.epoch), revision).String()
		}
		w.heads = nil
		for _, c := range w.ctrl { // they reconnect by themselves
			for _, l := range a.Legs {
				if l.Nqn == string(c.NQN) {
					w.addHead(l, w.nodeAt(c.Address.Traddr), c)
				}
			}
		}
	})
}

// beginRebuild makes t1 fall silent, miss writes to regions of column 0, and return. The
// rebuild does not complete by itself.
func (w *world) beginRebuild(regions ...uint64) {
	w.goesAndReturns(1, regions...)
	time.Sleep(2 * time.Second)
	w.took()
}

// goesAndReturns is beginRebuild for any copy, and returns as soon as the manager lists the leg.
func (w *world) goesAndReturns(copy int, regions ...uint64) {
	w.fallSilent(node(copy))
	time.Sleep(4 * time.Second)
	w.write(0, regions...)
	w.returns(copy)
}

// returns makes a target answer that was silent. The rebuild of its leg does not complete by itself.
func (w *world) returns(copy int) {
	w.answer(node(copy))
	w.mu.Lock()
	w.equal = false
	w.mu.Unlock()
	w.comesBack(0, copy, 1)
}

// ---- the fabric ----

// fallSilent makes a target keep its connections but answer nothing.
func (w *world) fallSilent(node string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.silent[node] = make(chan struct{})
}

func (w *world) answer(node string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.off, node)
	if c := w.silent[node]; c != nil {
		close(c)
		delete(w.silent, node)
	}
}

// freeze stops the agent for a while, but not the kernel.
func (w *world) freeze(d time.Duration) {
	still := make(chan struct{})
	w.mu.Lock()
	w.still = still
	w.mu.Unlock()
	time.Sleep(d)
	w.mu.Lock()
	w.still = nil
	w.mu.Unlock()
	close(still)
}

func (w *world) Controllers(of func(block.NQN) bool) ([]fabrics.Controller, error) {
	w.mu.Lock()
	w.looks++
	still := w.still
	w.mu.Unlock()
	if still != nil {
		<-still
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(w.ctrl), func(c fabrics.Controller) bool { return of != nil && !of(c.NQN) }), nil
}

func (w *world) nodeAt(address string) string {
	return node(int(address[len(address)-1]-'0') - 1)
}

// at names an address, where targets have several.
func (w *world) at(address string) string {
	if !w.rails {
		return ""
	}
	return " at " + address
}

func (w *world) Connect(_ context.Context, o fabrics.Options) (fabrics.Controller, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	target := w.nodeAt(o.Portal.Address)
	if w.down[target] || w.silent[target] != nil || w.cut[o.Portal.Address] {
		return fabrics.Controller{}, fmt.Errorf("connect %s: %w", target, unix.ECONNREFUSED)
	}
	w.next++
	for i := range w.ctrl {
		if w.perHost && w.ctrl[i].NQN == o.NQN {
			w.ctrl[i].State = fabrics.Connecting
		}
	}
	c := fabrics.Controller{
		Name: fmt.Sprintf("nvme%d", w.next), State: fabrics.Live, Transport: o.Portal.Transport, NQN: o.NQN, HostNQN: o.Host.NQN,
		Address: fabrics.Address{Traddr: o.Portal.Address, Trsvcid: strconv.Itoa(int(o.Portal.Port))},
	}
	w.ctrl = append(w.ctrl, c)
	w.keepAlives[c.Name] = []time.Duration{o.KeepAlive}
	over := ""
	if c.Transport != block.TCP {
		over = " over " + string(c.Transport)
	}
	w.did("connect %s%s%s", target, over, w.at(o.Portal.Address))
	if w.firstOver == nil {
		w.firstOver = map[string]block.Transport{}
	}
	if _, again := w.firstOver[target]; !again {
		w.firstOver[target] = c.Transport
	}
	for _, a := range w.wanted.Attachments {
		for _, l := range a.Legs {
			if l.Nqn == string(o.NQN) {
				w.addHead(l, target, c)
			}
		}
	}
	return c, nil
}

func (w *world) addHead(l *pb.WantedLink, target string, c fabrics.Controller) {
	uuid, _ := block.ParseUUID(l.Uuid)
	for i := range w.heads {
		if h := &w.heads[i]; h.nqn == block.NQN(l.Nqn) && h.NSID == l.Nsid && h.UUID == uuid {
			go w.addPath(h.Dev, c)
			return
		}
	}
	w.next++
	size := w.size
	if w.grown[target] {
		size *= 2
	}
	w.heads = append(w.heads, fakeHead{nqn: block.NQN(l.Nqn), node: target, Namespace: fabrics.Namespace{
		Head: fabrics.Head{Name: fmt.Sprintf("nvme%dn1", w.next), NSID: l.Nsid, UUID: uuid, Dev: fmt.Sprintf("259:%d", w.next), Size: w.layout.LegSize(size)},
		Live: true, Paths: []fabrics.Path{{Name: "p", Controller: c.Name}},
	}})
}

// addPath makes a head reachable through another controller, once the kernel has scanned that.
func (w *world) addPath(dev string, c fabrics.Controller) {
	time.Sleep(w.scans)
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.heads {
		if h := &w.heads[i]; h.Dev == dev {
			h.Paths = append(h.Paths, fabrics.Path{Name: "p", Controller: c.Name})
		}
	}
}

func (w *world) FindNamespace(nqn block.NQN, nsid uint32, uuid block.UUID) (fabrics.Namespace, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range w.heads {
		if h.nqn == nqn && h.NSID == nsid && h.UUID == uuid {
			n := h.Namespace
			n.Live = slices.ContainsFunc(w.ctrl, func(c fabrics.Controller) bool { return c.NQN == nqn && c.State == fabrics.Live })
			return n, nil
		}
	}
	return fabrics.Namespace{}, fabrics.ErrNoNamespace
}

func (w *world) Disconnect(ctx context.Context, c fabrics.Controller) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if hang := w.firmly[w.nodeAt(c.Address.Traddr)]; hang != nil {
		for i := range w.ctrl {
			if w.ctrl[i].Name != c.Name {
				continue
			}
			if w.ctrl[i].Going() {
				return fabrics.ErrBusy
			}
			w.ctrl[i].State = "deleting"
		}
		w.mu.Unlock()
		select {
		case <-hang:
			w.mu.Lock()
		case <-ctx.Done():
			w.mu.Lock()
			return ctx.Err()
		}
	}
	w.did("disconnect %s%s", w.nodeAt(c.Address.Traddr), w.at(c.Address.Traddr))
	w.dropLocked(c.Name)
	return nil
}

// vanish removes a target's controllers and heads, as kernels from 6.10 on do when a reconnect
// is refused.
func (w *world) vanish(target string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range slices.Clone(w.ctrl) {
		if w.nodeAt(c.Address.Traddr) == target {
			w.dropLocked(c.Name)
		}
	}
}

// dropLocked removes a controller and its heads; mirrors notice at their next write.
func (w *world) dropLocked(name string) {
	i := slices.IndexFunc(w.ctrl, func(c fabrics.Controller) bool { return c.Name == name })
	if i < 0 {
		return
	}
	nqn := w.ctrl[i].NQN
	w.ctrl = slices.Delete(w.ctrl, i, i+1)
	for i := range w.heads {
		h := &w.heads[i]
		h.Paths = slices.DeleteFunc(slices.Clone(h.Paths), func(p fabrics.Path) bool { return p.Controller == name })
	}
	w.heads = slices.DeleteFunc(w.heads, func(h fakeHead) bool {
		if h.nqn != nqn || len(h.Paths) > 0 {
			return false
		}
		w.health[dm.Ref(h.Dev)] = dm.WriteError
		return true
	})
	w.eventLocked()
}

func (w *world) DestroySockets(_ context.Context, p block.Portal) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.did("destroy-sockets %s", w.nodeAt(p.Address))
	for i := range w.ctrl {
		if w.ctrl[i].Address.Traddr == p.Address && !w.ctrl[i].Going() {
			w.ctrl[i].State = fabrics.Connecting
		}
	}
	return 1, nil
}

func (w *world) DestroyUnanswered(_ context.Context, p block.Portal) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.did("destroy-unanswered %s", w.nodeAt(p.Address))
	return 0, nil
}

func (w *world) SetReconnectDelay(fabrics.Controller, time.Duration) error { return nil }

func (w *world) SetFailFast(c fabrics.Controller, on bool) (late bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.IndexFunc(w.ctrl, func(now fabrics.Controller) bool { return now.Name == c.Name })
	if i < 0 {
		return false, unix.ENOENT
	}
	w.ctrl[i].FailsFast = on
	w.did("fail-fast %s %v", w.nodeAt(c.Address.Traddr), on)
	return w.ctrl[i].State == fabrics.Connecting, nil
}

// notice makes the kernel notice that the connections to a target are gone.
func (w *world) notice(target string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.ctrl {
		if w.nodeAt(w.ctrl[i].Address.Traddr) == target {
			w.ctrl[i].State = fabrics.Connecting
		}
	}
}

func (w *world) SetWriteThrough(fabrics.Head, bool) error { return nil }

func (w *world) RetryMost() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.retries = true
	return nil
}

// dial reaches a target's portal, as long as its machine has power, and the agent beside it, if that listens.
func (w *world) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	node := w.nodeAt(host)
	off, down, beside := w.off[node] || w.cut[host], w.down[node], w.beside
	w.mu.Unlock()
	switch {
	case off:
		<-ctx.Done()
		return nil, ctx.Err()
	case port == "4421" && beside != nil:
		return beside(node), nil
	case down || port != "4420":
		return nil, unix.ECONNREFUSED
	}
	near, far := net.Pipe()
	far.Close()
	return near, nil
}

// unreachable reports whether the network is cut on all paths to a subsystem.
func (w *world) unreachable(nqn block.NQN) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	there := false
	for _, c := range w.ctrl {
		if c.NQN == nqn {
			there = true
			if c.State == fabrics.Live && !w.cut[c.Address.Traddr] {
				return false
			}
		}
	}
	return there
}

// powerOff makes a target's machine answer nothing, connections included.
func (w *world) powerOff(node string) {
	w.fallSilent(node)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.off[node] = true
}

// Admin is answered as the kernel's target does, unless the targets keep lists.
func (w *world) Admin(_ context.Context, c fabrics.Controller, cmd nvmetcp.Command, data []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if cmd.Opcode() == nvmetcp.AdminIdentify {
		about := nvmetcp.Controller{}
		if w.perHost {
			about.PerHost = 1
		}
		copy(data, about.Append(nil))
		return nil
	}
	if f := nvmetcp.ParseFeature(&cmd); cmd.Opcode() == nvmetcp.AdminSetFeatures && f.ID == nvmetcp.FeatureKeepAlive {
		w.keepAlives[c.Name] = append(w.keepAlives[c.Name], time.Duration(f.Value)*time.Millisecond)
		return nil
	}
	if w.listed == nil {
		return nvmetcp.InvalidOpcode | nvmetcp.DNR
	}
	return w.listed(w.nodeAt(c.Address.Traddr), cmd, data)
}

// Allocated says where a leg has data.
func (w *world) Allocated(ctx context.Context, c fabrics.Controller, h fabrics.Head, _ int64) ([]block.Range, int64, error) {
	w.mu.Lock()
	data := w.data
	w.mu.Unlock()
	if data == nil {
		return nil, 0, nvmetcp.InvalidOpcode | nvmetcp.DNR
	}
	found, err := data(ctx, w.nodeAt(c.Address.Traddr))
	return found, int64(h.Size), err
}

// Read reads zeroes, and what a test has put into a node's legs.
func (w *world) Read(h fabrics.Head, p []byte, off int64, _ time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if reads, top := w.reading, w.find(mirror.TopName(w.volume)); reads != nil && top != nil && top.Suspended {
		w.reading = nil
		reads()
	}
	i := slices.IndexFunc(w.heads, func(f fakeHead) bool { return f.Name == h.Name })
	switch {
	case i < 0:
		return unix.ENODEV
	case w.silent[w.heads[i].node] != nil:
		return errors.New("no answer")
	case w.medium == w.heads[i].node && off < 12288 && off+int64(len(p)) > 8192:
		return block.ErrMedium
	}
	clear(p)
	for at, b := range w.bytes[w.heads[i].node] {
		if at >= off && at < off+int64(len(p)) {
			p[at-off] = b
		}
	}
	return nil
}

// Overwrite is as on a kernel that passes no commands through, unless a test has copies ahead.
func (w *world) Overwrite(h fabrics.Head, p []byte, off int64, _ time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.IndexFunc(w.heads, func(f fakeHead) bool { return f.Name == h.Name })
	switch {
	case w.ahead == nil:
		return errors.ErrUnsupported
	case i < 0:
		return unix.ENODEV
	}
	node := w.heads[i].node
	w.mu.Unlock()
	err := w.ahead(node, off, int64(len(p)))
	w.mu.Lock()
	if err != nil {
		return err
	}
	for at, b := range p {
		if b != 0 {
			w.bytes[node][off+int64(at)] = b
		} else {
			delete(w.bytes[node], off+int64(at))
		}
	}
	return nil
}

// MakeEqual is recorded in the history.
func (w *world) MakeEqual(_ context.Context, heads []fabrics.Head, ranges [][2]int64) (fabrics.Compared, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.did("make %d legs equal in %v", len(heads), ranges)
	return fabrics.Compared{}, nil
}

func (w *world) SpreadPaths(n block.NQN) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.did("spread the paths to %s", n)
	return nil
}

func (w *world) SetIOTimeout(p fabrics.Path, _ time.Duration) error {
	w.mu.Lock()
	i := slices.IndexFunc(w.ctrl, func(c fabrics.Controller) bool { return c.Name == p.Controller })
	var frozen chan struct{}
	if i >= 0 {
		frozen = w.frozen[w.nodeAt(w.ctrl[i].Address.Traddr)]
	}
	w.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
	return nil
}

func (w *world) Probe(h fabrics.Head, _ time.Duration) error {
	w.mu.Lock()
	i := slices.IndexFunc(w.heads, func(f fakeHead) bool { return f.Name == h.Name })
	if i < 0 {
		w.mu.Unlock()
		return unix.ENODEV
	}
	silent, stuck, nqn := w.silent[w.heads[i].node], w.stuckLegs[w.heads[i].NSID], w.heads[i].nqn
	w.mu.Unlock()
	for w.unreachable(nqn) { // until the kernel sends it over another path
		time.Sleep(10 * time.Millisecond)
	}
	for _, c := range []chan struct{}{silent, stuck} {
		if c != nil {
			<-c
		}
	}
	return nil
}

// Flush is recorded in the history under the leg's node, once if it is repeated; like a probe it can
// take long.
func (w *world) Flush(h fabrics.Head, limit time.Duration) error {
	if err := w.Probe(h, limit); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if i := slices.IndexFunc(w.heads, func(f fakeHead) bool { return f.Name == h.Name }); i >= 0 {
		if flush := "flush " + w.heads[i].node; len(w.history) == 0 || w.history[len(w.history)-1] != flush {
			w.did("%s", flush)
		}
	}
	return nil
}

// ---- device-mapper ----

func (w *world) eventLocked() {
	close(w.wait)
	w.wait = make(chan struct{})
}

func (w *world) Devices(prefix string) ([]dm.State, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []dm.State
	for _, d := range w.devices {
		if !strings.HasPrefix(d.UUID, prefix) {
			continue
		}
		if d.UUID == mirror.TopUUID(w.volume) {
			d.Open = w.open
		}
		all = append(all, d)
	}
	return all, nil
}

func (w *world) find(name string) *dm.State {
	i := slices.IndexFunc(w.devices, func(d dm.State) bool { return d.Name == name })
	if i < 0 {
		return nil
	}
	return &w.devices[i]
}

func short(name string) string {
	if _, rest, ok := strings.Cut(name, "-c"); ok && len(name) > 41 {
		return "c" + rest
	}
	return "top"
}

func (w *world) Do(s dm.Step) error { return w.DoWith(s, func() error { return nil }) }

func (w *world) DoWith(s dm.Step, between func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.Op != dm.OpRemove && w.tooShort(s.Device.Table) {
		return &dm.Error{Op: "load", Name: s.Device.Name, Err: unix.EINVAL}
	}
	if s.Op == dm.OpResize && w.dying != nil && !w.dying() {
		return &dm.Error{Op: "load", Name: s.Device.Name, Err: unix.EIO}
	}
	switch s.Op {
	case dm.OpCreate:
		w.next++
		made := dm.State{
			Info:  dm.Info{Name: s.Device.Name, UUID: s.Device.UUID, Number: block.DeviceNumber{Major: 253, Minor: uint32(w.next)}, Live: true, ReadOnly: s.Device.ReadOnly},
			Table: s.Device.Table,
		}
		w.devices = append(w.devices, made)
		queue := filepath.Join(w.dir, "sys/block", fmt.Sprintf("dm-%d", w.next), "queue")
		node := filepath.Join(w.dir, "dev", fmt.Sprintf("dm-%d", w.next))
		if err := errors.Join(os.MkdirAll(queue, 0o755), os.MkdirAll(filepath.Dir(node), 0o755), os.WriteFile(node, nil, 0o600), w.takeLimits(made)); err != nil {
			return err
		}
	case dm.OpReload, dm.OpResize:
		if hang := w.hang[short(s.Device.Name)]; hang != nil {
			w.mu.Unlock()
			<-hang
			w.mu.Lock()
		}
		d := w.find(s.Device.Name)
		if w.waitsLocked(d.Table) {
			return fmt.Errorf("suspend %s: would wait for ever", d.Name)
		}
		if err := between(); err != nil {
			return err
		}
		d.Table = s.Device.Table
		if err := w.takeLimits(*d); err != nil {
			return err
		}
	case dm.OpRemove:
		w.devices = slices.DeleteFunc(w.devices, func(d dm.State) bool { return d.Name == s.Device.Name })
	}
	if s.Op == dm.OpRemove {
		w.did("remove %s", short(s.Device.Name))
		return nil
	}
	w.did("%s %s: %s", s.Op, short(s.Device.Name), w.words(s.Device.Table))
	return w.startLogLocked(s)
}

// waitsLocked reports whether a table has I/O that waits on a silent leg whose controller
// still exists: a suspend does not return then.
func (w *world) waitsLocked(t dm.Table) bool {
	if !w.stuck {
		return false
	}
	for _, ref := range t.Refs() {
		for _, h := range w.heads {
			if dm.Ref(h.Dev) == ref && w.silent[h.node] != nil {
				return true
			}
		}
	}
	return false
}

// words prints a table with its legs by name.
func (w *world) words(t dm.Table) string {
	if len(t) == 0 {
		return "-"
	}
	m, ok := t[0].Target.(dm.Mirror)
	if !ok {
		return t[0].Target.Type()
	}
	s := "mirror"
	if m.KeepLog {
		s += " keep_log"
	}
	for _, l := range m.Legs {
		name := string(l.Device)
		if _, isNumber := l.Device.Number(); !isNumber {
			name = short(name)
		}
		for _, h := range w.heads {
			if h.Dev == name {
				name = h.node
			}
		}
		if strings.HasPrefix(name, "259:") {
			name = "dead"
		}
		s += " " + name
	}
	return s
}

// startLogLocked changes a log as a mirror does when it starts.
func (w *world) startLogLocked(s dm.Step) error {
	if len(s.Device.Table) == 0 {
		return nil
	}
	m, ok := s.Device.Table[0].Target.(dm.Mirror)
	if !ok {
		return nil
	}
	regions := raid.Regions(s.Device.Table.Size(), m.Log.Region)
	if image, err := w.getLog(m.Log.Device); err == nil && image.Regions() < regions && m.Log.Sync == dm.UseLog {
		// The kernel treats regions beyond the log as dirty.
		longer := image.Grow(regions)
		for r := image.Regions(); r < regions; r++ {
			longer.Mark(r)
		}
		if err := w.putLog(m.Log.Device, longer); err != nil {
			return err
		}
	}
	if m.Log.Sync == dm.NoSync || m.Log.Sync == dm.UseLog && !m.KeepLog && w.equal {
		return w.putLog(m.Log.Device, mirror.CleanLog(regions))
	}
	return nil
}

func (w *world) fileOf(log dm.Ref) string {
	for _, l := range w.loops {
		if dm.RefTo(l.Number) == log {
			return l.File
		}
	}
	return ""
}

func (w *world) getLog(log dm.Ref) (mirror.LogImage, error) {
	b, err := os.ReadFile(w.fileOf(log))
	if err != nil {
		return mirror.LogImage{}, err
	}
	return mirror.ParseLog(b)
}

func (w *world) putLog(log dm.Ref, image mirror.LogImage) error {
	f, err := os.OpenFile(w.fileOf(log), os.O_WRONLY, 0)
	if err != nil {
		return nil // a log in memory
	}
	_, err = f.WriteAt(image.Bytes(), 0)
	return errors.Join(err, f.Close())
}

// write marks regions that a lost leg misses, as keep_log does.
func (w *world) write(column int, regions ...uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.find(mirror.ColumnName(w.volume, column)).Table[0].Target.(dm.Mirror)
	if !m.KeepLog {
		w.t.Fatalf("column %d does not log what a leg misses: %v", column, m)
	}
	image, err := w.getLog(m.Log.Device)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range regions {
		image.Mark(r)
	}
	if err := w.putLog(m.Log.Device, image); err != nil {
		w.t.Fatal(err)
	}
}

// finishResync completes what the mirrors copy.
func (w *world) finishResync() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.equal = true
	for _, d := range w.devices {
		if err := w.startLogLocked(dm.Step{Device: dm.Device{Table: d.Table}}); err != nil {
			w.t.Fatal(err)
		}
	}
	w.eventLocked()
}

func (w *world) MirrorStatus(name string) (dm.MirrorStatus, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := w.find(name)
	m := d.Table[0].Target.(dm.Mirror)
	s := dm.MirrorStatus{LogDevice: m.Log.Device, LogHealth: dm.Alive}
	for _, l := range m.Legs {
		ref, health := l.Device, dm.Alive
		if below := w.find(string(ref)); below != nil {
			ref = dm.RefTo(below.Number)
			if t, ok := below.Table[0].Target.(dm.Linear); ok && w.health[t.Device] != 0 {
				health = w.health[t.Device]
			}
		}
		if h, ok := w.health[ref]; ok {
			health = h
		}
		s.Legs = append(s.Legs, dm.LegStatus{Device: ref, Health: health})
	}
	s.Total = raid.Regions(d.Table.Size(), m.Log.Region)
	s.InSync = s.Total
	if image, err := w.getLog(m.Log.Device); err == nil {
		s.InSync = s.Total - image.CountDirty()
	}
	return s, nil
}

func (w *world) Load(name string, t dm.Table) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.did("fail %s", short(name))
	w.find(name).Table = t
	return nil
}

func (w *world) Suspend(name string, noflush, skip bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if begun := w.suspended; begun != nil && short(name) == "top" {
		w.suspended = nil
		begun()
		w.mu.Unlock()
		time.Sleep(100 * time.Millisecond)
		w.mu.Lock()
	}
	d := w.find(name)
	if d == nil { // it was removed while the agent asked
		return unix.ENXIO
	}
	d.Suspended = true
	if noflush {
		w.did("suspend %s", short(name))
	}
	return nil
}

func (w *world) Resume(name string, _ dm.Udev) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := w.find(name)
	if d.Suspended && !fails(d.Table) {
		w.did("resume %s", short(name))
	}
	d.Suspended = false
	return nil
}

func (w *world) Remove(name string, _ bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.find(name) == nil {
		return &dm.Error{Op: "remove", Name: name, Err: unix.ENXIO}
	}
	if short(name) == "top" && w.open > 0 {
		return unix.EBUSY
	}
	w.did("remove %s", short(name))
	w.devices = slices.DeleteFunc(w.devices, func(d dm.State) bool { return d.Name == name })
	return nil
}

// Write is a write below the device, which must be suspended. It waits for legs that are silent until they have left
// the table, and reaches the others.
func (w *world) Write(name string, p []byte, off int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if begun := w.written; begun != nil {
		w.written = nil
		begun()
	}
	for w.silentIn(w.find(name)) {
		w.mu.Unlock()
		time.Sleep(10 * time.Millisecond)
		w.mu.Lock()
	}
	if w.find(name) == nil { // it was removed meanwhile
		return unix.EIO
	}
	if top := w.find(mirror.TopName(w.volume)); top == nil || !top.Suspended {
		w.t.Errorf("%s is written while I/O of users is not held", short(name))
	}
	w.did("write %s: %d at %d", short(name), len(p), off)
	for _, h := range w.heads {
		for i, b := range p {
			if w.under(w.find(name), h) {
				w.bytes[h.node][off+int64(i)] = b // of either column
			}
		}
	}
	return nil
}

// silentIn reports whether a device has a leg that is silent.
func (w *world) silentIn(d *dm.State) bool {
	return slices.ContainsFunc(w.heads, func(h fakeHead) bool { return w.silent[h.node] != nil && w.under(d, h) })
}

// under reports whether a device has a leg below it.
func (w *world) under(d *dm.State, h fakeHead) bool {
	return d != nil && slices.ContainsFunc(d.Table.Refs(), func(r dm.Ref) bool { return r == dm.Ref(h.Dev) || w.under(w.find(string(r)), h) })
}

func (w *world) Wait(ctx context.Context, name string, nr uint32) (dm.Info, error) {
	w.mu.Lock()
	d, wait := w.find(name), w.wait
	w.mu.Unlock()
	if d == nil {
		return dm.Info{}, unix.ENXIO
	}
	select {
	case <-wait:
		return dm.Info{EventNr: nr + 1}, nil
	case <-ctx.Done():
		return dm.Info{}, ctx.Err()
	}
}

// loopsOf is the world's loop devices, in a type of its own because method names clash.
type loopsOf struct{ *world }

func (l loopsOf) Find(file string) (dm.Loop, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.world.loops, func(d dm.Loop) bool { return d.File == file })
	if i < 0 {
		return dm.Loop{}, false, nil
	}
	return l.world.loops[i], true, nil
}

func (l loopsOf) Attach(file string) (dm.Loop, error) {
	if d, ok, _ := l.Find(file); ok {
		return d, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next++
	d := dm.Loop{Number: block.DeviceNumber{Major: 7, Minor: uint32(l.next)}, File: file}
	l.world.loops = append(l.world.loops, d)
	return d, nil
}

func (l loopsOf) Detach(d dm.Loop) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.world.loops = slices.DeleteFunc(l.world.loops, func(o dm.Loop) bool { return o == d })
	return nil
}

// ---- the manager ----

type stream struct {
	grpc.ClientStream
	w   *world
	ctx context.Context
	in  chan *pb.InitiatorWanted
}

func (s *stream) send(w *pb.InitiatorWanted) { s.in <- w }

func (s *stream) Send(r *pb.InitiatorReport) error {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	if !s.w.managers {
		return io.EOF
	}
	if own := s.w.wanted.GetClusterId(); s.w.strict && r.GetClusterId() != "" && r.GetClusterId() != own {
		return otherCluster(own)
	}
	s.w.reports = append(s.w.reports, proto.CloneOf(r))
	return nil
}

func (s *stream) Recv() (*pb.InitiatorWanted, error) {
	select {
	case w := <-s.in:
		return w, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

type manager struct {
	pb.AgentsClient
	*world
}

var errAway = status.Error(codes.Unavailable, "connection refused")

func (m manager) Initiator(ctx context.Context, _ ...grpc.CallOption) (grpc.BidiStreamingClient[pb.InitiatorReport, pb.InitiatorWanted], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.managers {
		return nil, errAway
	}
	s := &stream{w: m.world, ctx: ctx, in: make(chan *pb.InitiatorWanted, 100)}
	s.send(proto.CloneOf(m.wanted))
	m.streams = append(m.streams, s)
	return s, nil
}

func otherCluster(own string) error {
	s, _ := status.New(codes.FailedPrecondition, "node h1: it belongs to another cluster").WithDetails(
		&errdetails.ErrorInfo{Reason: "OTHER_CLUSTER", Metadata: map[string]string{"cluster": own}})
	return s.Err()
}

// refuse is an answer of the manager with a reason.
func refuse(reason string) error {
	s, _ := status.New(codes.FailedPrecondition, "refused").WithDetails(&errdetails.ErrorInfo{Domain: "weft.dev", Reason: reason})
	return s.Err()
}

func (m manager) RecordStale(ctx context.Context, r *pb.RecordStaleRequest, _ ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.managers {
		return nil, errAway
	}
	if m.deaf {
		m.mu.Unlock()
		<-ctx.Done()
		m.mu.Lock()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if m.recordless {
		return nil, errAway
	}
	if r.Epoch != m.epoch {
		m.did("refuse record of epoch %d", r.Epoch)
		return nil, refuse("EPOCH_SUPERSEDED")
	}
	names := make([]string, len(r.LegIds))
	for i, id := range r.LegIds {
		names[i] = legName(id)
	}
	m.did("record-stale %s", strings.Join(names, " "))
	m.changeLocked(func(all *pb.InitiatorWanted) {
		a := all.Attachments[0]
		a.Legs = slices.DeleteFunc(a.Legs, func(l *pb.WantedLink) bool { return slices.Contains(r.LegIds, l.LegId) })
	})
	return &pb.RecordStaleResponse{}, nil
}

func (m manager) RecordInSync(_ context.Context, r *pb.RecordInSyncRequest, _ ...grpc.CallOption) (*pb.RecordInSyncResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.managers {
		return nil, errAway
	}
	for _, l := range r.Legs {
		m.did("record-in-sync %s@%d copied %v", legName(l.LegId), l.Revision, block.Size(l.BytesCopied))
		m.changeLocked(func(all *pb.InitiatorWanted) {
			for _, link := range all.Attachments[0].Legs {
				if link.LegId == l.LegId {
					link.State = pb.LegState_LEG_STATE_IN_SYNC
				}
			}
		})
	}
	return &pb.RecordInSyncResponse{}, nil
}

// ---- running ----

// agent makes an agent of the machine, without starting it.
func (w *world) agent(log *slog.Logger) *Agent {
	w.t.Helper()
	w.files.world = w
	a, err := New(Config{Node: "h1", Version: "test", BootID: w.boot, Manager: manager{world: w}, StateDir: filepath.Join(w.dir, "state"), RunDir: filepath.Join(w.dir, "run"), DevDir: filepath.Join(w.dir, "dev"), Clock: w.clock, Log: log, Dial: w.dial, Freezes: &w.files})
	if err != nil {
		w.t.Fatal(err)
	}
	a.path = newKernelPath(a, &kernel{
		host: w, dm: w, loops: loopsOf{w}, runDir: filepath.Join(w.dir, "run"), devDir: filepath.Join(w.dir, "dev"), sysDir: filepath.Join(w.dir, "sys"), book: a.names,
	})
	return a
}

// start runs an agent; stop ends it and leaves the machine as it is.
func (w *world) start() (stop func()) {
	w.t.Helper()
	a := w.agent(w.log)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	var once sync.Once
	end := func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("Run = %v, want nil", err)
		}
		w.mu.Lock()
		w.streams = nil
		w.mu.Unlock()
	}
	w.t.Cleanup(func() {
		for n := range w.silent {
			w.answer(n)
		}
		once.Do(end)
	})
	return func() { once.Do(end) }
}

// clock is the lease clock.
func (w *world) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Add(w.slept)
}

// attachment is the volume's part of the last report.
func (w *world) attachment() *pb.AttachmentReport {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.reports) == 0 {
		return nil
	}
	for _, a := range w.reports[len(w.reports)-1].Attachments {
		if a.VolumeId == w.volume.String() {
			return a
		}
	}
	return nil
}

// until advances the time until the volume is in a phase.
func (w *world) until(phase pb.AttachmentPhase) *pb.AttachmentReport {
	w.t.Helper()
	for range 600 {
		if a := w.attachment(); a.GetPhase() == phase {
			return a
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.t.Fatalf("after a minute the volume is %v, want %v\n%s", w.attachment(), phase, strings.Join(w.took(), "\n"))
	return nil
}

// expect compares the history since the last call.
func (w *world) expect(what string, want ...string) {
	w.t.Helper()
	if diff := cmp.Diff(want, w.took()); diff != "" {
		w.t.Errorf("%s: history (-want +got)\n%s", what, diff)
	}
}

// refOf returns the device of a target's head.
func (w *world) refOf(target string) dm.Ref {
	for _, h := range w.heads {
		if h.node == target {
			return dm.Ref(h.Dev)
		}
	}
	w.t.Fatalf("no head of %s", target)
	return ""
}

func (w *world) closeDevice() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = 0
}

// empty checks that nothing of a volume is left.
func (w *world) empty() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	links, _ := filepath.Glob(filepath.Join(w.dir, "dev/weft/*"))
	links = slices.DeleteFunc(links, func(l string) bool { return strings.HasSuffix(l, ".lock") })
	logs, _ := filepath.Glob(filepath.Join(w.dir, "run/*.log*"))
	if len(w.devices)+len(w.ctrl)+len(w.heads)+len(w.loops)+len(links)+len(logs) > 0 {
		w.t.Errorf("left behind: devices %v, controllers %v, loops %v, names %v, logs %v", w.devices, w.ctrl, w.loops, links, logs)
	}
}

// Figures refuses figures, as a manager of an earlier version does.
func (manager) Figures(context.Context, ...grpc.CallOption) (grpc.ClientStreamingClient[pb.FiguresReport, pb.FiguresResponse], error) {
	return nil, status.Error(codes.Unimplemented, "no figures")
}

// Support is not what these tests are about; a manager of an earlier version answers so, too.
func (manager) Support(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.SupportAnswer, pb.SupportQuestion], error) {
	return nil, status.Error(codes.Unimplemented, "no support bundles")
}

// Counted says that the kernel counts no latencies.
func (w *world) Counted(string) (f figures.Figures, ok bool, err error) { return f, false, nil }

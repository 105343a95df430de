// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/checkpoint"
)

const (
	connecting = pb.AttachmentPhase_ATTACHMENT_PHASE_CONNECTING
	equalizing = pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING
	serving    = pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
	stalled    = pb.AttachmentPhase_ATTACHMENT_PHASE_STALLED
	detaching  = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	clean      = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
	unclean    = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
)

// world is the targets, the manager and the users of one volume, as far as a keeper can tell.
// Copy i of each column is on node ti. The volume itself is a real one of raid/engine.
type world struct {
	t      *testing.T
	volume block.VolumeID
	keeper *Keeper
	names  *keeper.Names
	stop   context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex
	history []string
	nodes   map[string]*fakeNode
	legs    map[block.LegID]*fakeLeg
	gone    map[block.UUID]bool // identities that are no longer served
	wanted  *volume.Wanted
	device  *fakeDevice
	refused error         // what the manager answers to records
	changes error         // what targets answer that are asked to change a subsystem to another part
	deaf    chan struct{} // the manager does not answer until it is closed
	slept   time.Duration // how long the machine was suspended
}

// fakeNode is a target.
type fakeNode struct {
	silent bool
	rails  map[string]bool // addresses that are silent while the target is not
	keeps  bool            // it keeps a host's older controllers, as Linux does
	down   bool            // it also refuses connections
	slow   bool            // it accepts connections, although it is silent
	killed bool            // nobody is there: its connections are closed, and it refuses others
	conns  []*fakeConn
}

// mute reports whether the target does not answer at an address.
func (n *fakeNode) mute(address string) bool { return n.silent || n.killed || n.rails[address] }

// nodeAt is the target at an address: "t0", or "t0-b" for another portal of it.
func nodeAt(address string) string {
	name, _, _ := strings.Cut(address, "-")
	return name
}

// fakeLeg is a leg on its drive.
type fakeLeg struct {
	name    string
	data    []byte
	durable []byte // the data that survives a power loss; nil: zeroes
	err     error  // its answer to writes
	bad     error  // its answer to data reads; probes are at offset 0
	head    error  // its answer to reads at offset 0
	scratch int64  // this place cannot be read until it is written; 0: none
	changes int    // requests other than reads
	reads   int    // data reads
	cached  bool   // written since its last flush
	flushes int
	list    *checkpoint.Tracker // nil: its target keeps none
	listErr error               // the target's answer about the list
	slow    time.Duration       // it takes so long for a data read
}

func legID(column, copy int) block.LegID {
	return block.LegID{UUID: block.UUIDFromRandom([16]byte{1, byte(column), byte(copy)})}
}

func node(copy int) string { return fmt.Sprintf("t%d", copy) }

const volumeSize = 4 * block.MiB

// in runs f with a wanted volume, in a synctest bubble.
func in(t *testing.T, stripes, copies int, f func(w *world)) {
	t.Helper()
	from(t, stripes, copies, func(*world) {}, f)
}

// from is like in, but first changes the world before a keeper starts.
func from(t *testing.T, stripes, copies int, first, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			t: t, volume: block.VolumeID{UUID: block.UUIDFromRandom([16]byte{9})},
			names: keeper.NewNames(filepath.Join(t.TempDir(), "names")),
			nodes: map[string]*fakeNode{}, legs: map[block.LegID]*fakeLeg{},
			gone: map[block.UUID]bool{},
		}
		layout := block.Layout{Stripes: stripes, Copies: copies, Chunk: block.DefaultChunk}
		w.wanted = &volume.Wanted{Volume: w.volume, Name: "db1", Size: volumeSize, Layout: layout, Epoch: 1, BootID: "b"}
		for column := range stripes {
			for copy := range copies {
				w.nodes[node(copy)] = &fakeNode{rails: map[string]bool{}}
				w.legs[legID(column, copy)] = &fakeLeg{name: fmt.Sprintf("c%d.%d", column, copy), data: make([]byte, layout.LegSize(volumeSize))}
				w.wanted.Links = append(w.wanted.Links, w.link(column, copy))
			}
		}
		path := New(Config{
			Node: "h1", Manager: manager{world: w}, Host: func() block.Host { return block.Host{} }, Export: w.export, Names: w.names, Clock: w.clock,
			Dial: func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ECONNREFUSED }, // nobody listens beside the targets
		})
		path.dial, path.reachable = w.dial, w.reachable
		w.keeper = path.Keeper(w.volume)
		first(w)
		w.tell()
		w.run(w.keeper)
		defer func() { w.stop(); <-w.ended }()
		f(w)
	})
}

// run starts k.
func (w *world) run(k *Keeper) {
	ctx, stop := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	w.keeper, w.stop, w.ended = k, stop, ended
	go func() { defer close(ended); k.Run(ctx) }()
}

// served is like in, with a volume that already serves.
func served(t *testing.T, stripes, copies int, f func(w *world)) {
	t.Helper()
	in(t, stripes, copies, func(w *world) {
		w.until(serving)
		w.took()
		f(w)
	})
}

func (w *world) link(column, copy int) volume.Link {
	nqn := block.SubsystemNQN(w.volume, w.wanted.Epoch, block.Host{}, block.NodeName(node(copy)))
	return volume.Link{
		Leg: legID(column, copy), Column: column, Copy: copy, Node: node(copy), NQN: nqn,
		NSID: uint32(1 + 4*column + copy), UUID: block.NamespaceUUID(legID(column, copy), w.wanted.Epoch, 0),
		Portals: []block.Portal{{Transport: block.TCP, Address: node(copy), Port: 4420}},
	}
}

// want changes the wanted state.
func (w *world) want(f func(w *volume.Wanted)) {
	w.mu.Lock()
	changed := *w.wanted
	changed.Links = slices.Clone(changed.Links)
	f(&changed)
	w.wanted = &changed
	w.mu.Unlock()
	w.tell()
}

func (w *world) tell() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.keeper.Want(w.wanted, "", 1)
}

// comesBack makes a leg that was recorded stale wanted again, to be rebuilt.
func (w *world) comesBack(column, copy int, revision uint64) {
	w.want(func(x *volume.Wanted) {
		l := w.link(column, copy)
		l.Rebuilding, l.Revision = true, revision
		l.UUID = block.NamespaceUUID(l.Leg, x.Epoch, revision)
		x.Links = slices.DeleteFunc(x.Links, func(o volume.Link) bool { return o.Leg == l.Leg })
		x.Links = append(x.Links, l)
	})
}

func (w *world) did(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.history = append(w.history, fmt.Sprintf(format, args...))
}

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

// expect compares what has been done since the last call.
func (w *world) expect(when string, want ...string) {
	w.t.Helper()
	synctest.Wait()
	if diff := cmp.Diff(want, w.took()); diff != "" {
		w.t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// clock is the lease clock.
func (w *world) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Add(w.slept)
}

func (w *world) report() *pb.AttachmentReport { return w.keeper.State().Report }

func (w *world) until(phase pb.AttachmentPhase) *pb.AttachmentReport {
	w.t.Helper()
	for range 600 {
		synctest.Wait()
		if r := w.report(); r.GetPhase() == phase {
			return r
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.t.Fatalf("after a minute the volume is %v, want %v\n%s", w.report(), phase, strings.Join(w.took(), "\n"))
	return nil
}

// ---- targets ----

type fakeConn struct {
	w     *world
	node  string
	at    string // the address of the portal
	cut   bool
	mute  time.Time // since when it has been found mute
	again uint64    // how often it was connected anew
	kept  []keptIO  // I/O it does not answer
}

// keptIO is I/O sent to one identity of a leg.
type keptIO struct {
	id     block.UUID
	answer func(error)
}

func (w *world) dial(ctx context.Context, o dialOptions) (connection, error) {
	at, _, _ := strings.Cut(o.portal, ":")
	name := nodeAt(at)
	w.mu.Lock()
	n := w.nodes[name]
	switch {
	case n.down || n.killed:
		w.mu.Unlock()
		return nil, syscall.ECONNREFUSED
	case n.mute(at):
		w.mu.Unlock()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	c := &fakeConn{w: w, node: name, at: at}
	n.conns = append(n.conns, c)
	w.mu.Unlock()
	w.did("connect %s", at)
	return c, nil
}

func (w *world) reachable(ctx context.Context, portal string) error {
	at, _, _ := strings.Cut(portal, ":")
	w.mu.Lock()
	n := w.nodes[nodeAt(at)]
	down, mute := n.down || n.killed, n.mute(at) && !n.slow
	w.mu.Unlock()
	switch {
	case down:
		return syscall.ECONNREFUSED
	case mute:
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (c *fakeConn) Live() (bool, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return !c.cut && !c.w.nodes[c.node].killed, nil // a silent target still counts as connected
}

func (c *fakeConn) Session() uint64 {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return 1 + c.again
}

func (c *fakeConn) Answered() bool {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return !c.w.nodes[c.node].mute(c.at)
}

func (c *fakeConn) Unanswered() time.Time {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	switch {
	case !c.w.nodes[c.node].mute(c.at):
		c.mute = time.Time{}
	case c.mute.IsZero():
		c.mute = time.Now()
	}
	return c.mute
}

func (c *fakeConn) Refused() time.Time {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.w.nodes[c.node].killed {
		return time.Now()
	}
	return time.Time{}
}

func (c *fakeConn) Replaces() (own, beside bool) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return !c.w.nodes[c.node].keeps, false
}

// Change has an agent beside the kernel's target change a subsystem to another part.
func (c *fakeConn) Change(_ context.Context, through block.Portal, by block.ServedBy) error {
	c.w.did("change to %v, asked beside %s", by, through.HostPort())
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return c.w.changes
}

// Move sends the I/O that was not answered again, through the other portal.
func (c *fakeConn) Move(to block.Portal, _ bool) {
	c.w.mu.Lock()
	c.at = to.Address
	kept := c.kept
	c.kept = nil
	c.w.mu.Unlock()
	c.w.did("move to %s", c.at)
	for _, k := range kept {
		k.answer(nil)
	}
}

func (c *fakeConn) Namespace(_ uint32, id block.UUID) (block.Device, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	for _, l := range c.w.wanted.Links {
		if l.UUID == id {
			d, leg := &fakeDev{c: c, id: id, leg: c.w.legs[l.Leg]}, c.w.legs[l.Leg]
			if leg.list != nil {
				return listedDev{d, leg}, nil
			}
			return d, nil
		}
	}
	return nil, fmt.Errorf("no namespace %v", id)
}

func (c *fakeConn) Cut() {
	c.w.mu.Lock()
	was := c.cut
	c.cut = true
	kept := c.kept
	c.kept = nil
	c.w.mu.Unlock()
	if !was {
		c.w.did("cut %s", c.node)
	}
	for _, k := range kept {
		k.answer(block.ErrGone)
	}
}

// Rescan returns I/O sent to legs that no longer exist.
func (c *fakeConn) Rescan() {
	c.w.mu.Lock()
	var gone, kept []keptIO
	for _, k := range c.kept {
		if c.w.gone[k.id] {
			gone = append(gone, k)
		} else {
			kept = append(kept, k)
		}
	}
	c.kept = kept
	c.w.mu.Unlock()
	for _, k := range gone {
		k.answer(block.ErrGone)
	}
}

func (c *fakeConn) Close(context.Context) error {
	c.w.mu.Lock()
	c.cut = true
	c.w.mu.Unlock()
	c.w.did("disconnect %s", c.node)
	return nil
}

type fakeDev struct {
	c   *fakeConn
	id  block.UUID
	leg *fakeLeg
}

func (d *fakeDev) Geometry() block.Geometry {
	d.c.w.mu.Lock()
	defer d.c.w.mu.Unlock()
	return block.Geometry{Size: block.Size(len(d.leg.data)), BlockSize: 512, VolatileCache: true}
}

func (d *fakeDev) Submit(io *block.IO) {
	w := d.c.w
	w.mu.Lock()
	answer := func(err error) { io.Complete(err) }
	switch {
	case d.c.cut:
		w.mu.Unlock()
		answer(block.ErrGone)
		return
	case w.nodes[d.c.node].mute(d.c.at), w.gone[d.id]:
		d.c.kept = append(d.c.kept, keptIO{d.id, func(err error) {
			if err == nil {
				d.Submit(io)
			} else {
				answer(err)
			}
		}})
		w.mu.Unlock()
		return
	}
	var err error
	if io.Op != block.OpRead {
		d.leg.changes++
	}
	if io.Op == block.OpFlush {
		d.leg.flushes++
	}
	switch io.Op {
	case block.OpRead:
		err = d.leg.bad
		if io.Off == 0 {
			err = d.leg.head
		} else {
			d.leg.reads++
		}
		if s := d.leg.scratch; s != 0 && io.Off <= s && s < io.Off+io.Len {
			err = block.ErrMedium
		}
		if err == nil {
			copy(io.Data, d.leg.data[io.Off:])
		}
	case block.OpWrite:
		if err = d.leg.err; err == nil {
			copy(d.leg.data[io.Off:], io.Data)
			d.leg.cached = true
			if s := d.leg.scratch; io.Off <= s && s < io.Off+io.Len {
				d.leg.scratch = 0
			}
		}
		if err == nil && io.FUA {
			copy(d.leg.kept()[io.Off:], io.Data)
		}
	case block.OpFlush:
		copy(d.leg.kept(), d.leg.data)
		d.leg.cached = false
	}
	slow := d.leg.slow
	w.mu.Unlock()
	if slow > 0 && io.Op == block.OpRead && io.Off > 0 {
		time.AfterFunc(slow, func() { answer(err) })
		return
	}
	answer(err)
}

func (w *world) fallSilent(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes[name].silent = true
}

// answer makes a target answer again, including I/O sent meanwhile.
func (w *world) answer(name string) {
	w.mu.Lock()
	n := w.nodes[name]
	n.silent = false
	var kept []keptIO
	for _, c := range n.conns {
		kept = append(kept, c.kept...)
		c.kept = nil
	}
	w.mu.Unlock()
	for _, k := range kept {
		k.answer(nil)
	}
}

// kept is the data that survives a power loss.
func (l *fakeLeg) kept() []byte {
	if l.durable == nil {
		l.durable = make([]byte, len(l.data))
	}
	return l.durable
}

// losePower cuts a target's power: its legs lose what only their caches held, and their
// identities are no longer served.
func (w *world) losePower(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.wanted.Links {
		if l.Node == name {
			copy(w.legs[l.Leg].data, w.legs[l.Leg].kept())
			w.gone[l.UUID] = true
		}
	}
}

// reborn makes the manager keep a leg that lost its cache in sync, and drop all other copies
// of its column.
func (w *world) reborn(column, copy int, revision uint64) {
	w.want(func(x *volume.Wanted) {
		l := w.link(column, copy)
		l.Revision, l.Reborn = revision, revision
		l.UUID = block.NamespaceUUID(l.Leg, x.Epoch, revision)
		x.Links = slices.DeleteFunc(x.Links, func(o volume.Link) bool { return o.Column == column })
		x.Links = append(x.Links, l)
	})
}

// ---- the device ----

type fakeDevice struct {
	w      *world
	volume block.Device
	users  string
	refuse error // Resize answers this
	resume string
	done   chan struct{}
	once   sync.Once
}

func (w *world) export(_ context.Context, v block.Device, of Of) (Exported, error) {
	d := &fakeDevice{w: w, volume: v, resume: of.Resume, done: make(chan struct{})}
	w.mu.Lock()
	w.device = d
	w.mu.Unlock()
	if of.Volume != w.volume {
		w.t.Errorf("the device of volume %v is made, want that of %v", of.Volume, w.volume)
	}
	w.did("export %s", of.Name)
	return d, nil
}

func (d *fakeDevice) Path() string          { return "/dev/weft/db1" }
func (d *fakeDevice) Number() string        { return "7:4" }
func (d *fakeDevice) Done() <-chan struct{} { return d.done }

// Survives: devices of this world do if they were made with a token.
func (d *fakeDevice) Survives() bool { return d.resume != "" }

func (d *fakeDevice) Leave() {
	d.w.did("leave the device")
}

func (d *fakeDevice) Resize(context.Context) error {
	d.w.mu.Lock()
	refuse := d.refuse
	d.w.mu.Unlock()
	if refuse == nil {
		d.w.did("resize to %v", d.volume.Geometry().Size)
	}
	return refuse
}

func (d *fakeDevice) Close(_ context.Context, force bool) error {
	d.w.mu.Lock()
	users := d.users
	d.w.mu.Unlock()
	if users != "" && !force {
		return fmt.Errorf("%w: %s has it open", blockdev.ErrBusy, users)
	}
	d.once.Do(func() {
		close(d.done)
		d.w.mu.Lock()
		d.w.device = nil
		d.w.mu.Unlock()
		d.w.did("close%s", map[bool]string{true: " by force"}[force])
	})
	return nil
}

func (w *world) opened(by string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.device.users = by
}

// write starts a write of one block through the device.
func (w *world) write(at int64, value byte) <-chan error {
	w.t.Helper()
	w.mu.Lock()
	d := w.device
	w.mu.Unlock()
	if d == nil {
		w.t.Fatal("write: there is no device")
	}
	done := make(chan error, 1)
	go func() { done <- block.WriteAt(d.volume, bytes.Repeat([]byte{value}, 512), at) }()
	return done
}

func (w *world) read(at int64) (byte, error) {
	w.mu.Lock()
	d := w.device
	w.mu.Unlock()
	p := make([]byte, 512)
	err := block.ReadAt(d.volume, p, at)
	return p[0], err
}

// holds returns the byte that a leg has at an offset.
func (w *world) holds(column, copy int, at int64) byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.legs[legID(column, copy)].data[at]
}

func pending(done <-chan error) bool {
	synctest.Wait()
	return len(done) == 0
}

// ---- the manager ----

type manager struct {
	pb.AgentsClient
	world *world
}

func (m manager) ask(ctx context.Context, what string) error {
	w := m.world
	w.mu.Lock()
	deaf, refused := w.deaf, w.refused
	w.mu.Unlock()
	if deaf != nil {
		select {
		case <-deaf:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if refused != nil {
		return refused
	}
	w.did("%s", what)
	return nil
}

func (m manager) RecordStale(ctx context.Context, r *pb.RecordStaleRequest, _ ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	return &pb.RecordStaleResponse{}, m.ask(ctx, "record-stale "+m.names(r.GetLegIds()))
}

func (m manager) RecordInSync(ctx context.Context, r *pb.RecordInSyncRequest, _ ...grpc.CallOption) (*pb.RecordInSyncResponse, error) {
	var legs []string
	for _, l := range r.GetLegs() {
		legs = append(legs, l.GetLegId())
	}
	return &pb.RecordInSyncResponse{}, m.ask(ctx, fmt.Sprintf("record-in-sync %s", m.names(legs)))
}

func (m manager) names(ids []string) string {
	var all []string
	for _, id := range ids {
		leg, _ := block.ParseLegID(id)
		all = append(all, m.world.legs[leg].name)
	}
	return strings.Join(all, " ")
}

func refusal(reason string) error {
	s, _ := status.New(codes.FailedPrecondition, "refused").WithDetails(&errdetails.ErrorInfo{Domain: "weft.dev", Reason: reason})
	return s.Err()
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/nvmet/nvmettest"
	"weft.dev/weft/target/userspace"
)

// world is a machine with its kernel, and a manager: everything that outlives an agent.
type world struct {
	log  *slog.Logger   // of the agent; nil: none
	more []block.Portal // portals besides the first

	healthEvery time.Duration // see Config
	integrity   bool          // the data path keeps checksums
	lists       func() *lists // see kernel
	t           *testing.T
	root        string

	mu      sync.Mutex
	media   map[string]*medium // by path; those that are plugged in
	mapped  map[string]dm.State
	minor   uint32
	targets *nvmettest.FS
	nvmet   nvmetTroubles
	manager manager

	// Set when the agent runs with a target in user space.
	user      bool
	both      bool // it comes after one with a target in the kernel
	legs      *userspace.Legs
	exports   *userspace.Exports
	listeners map[block.Portal]*pipeListener

	process bool               // one serves beside the kernel
	beside  *userspace.Exports // of that process; nil: there is none

	opening  func(path string) // is called before a drive is opened
	looking  func()            // is called once, before the legs are looked at: the drives were before
	sequence string            // of all disks
	losses   uint32            // losses of acknowledged writes found by the process

	// tree and labels show the machine's state independently of the agent.
	tree   func() (*nvmet.Tree, error)
	labels func() []*drive.Label

	goodbye func(context.Context) bool // of the agent's configuration

	gate  *gate // of the agent that runs
	stop  func()
	leave func() time.Duration // stops the agent in order, and returns how long that took
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, root: t.TempDir(), media: map[string]*medium{}, mapped: map[string]dm.State{}, targets: nvmettest.New()}
	w.manager = manager{world: w, changed: make(chan struct{})}
	w.targets.Exists = w.canExport
	w.tree = func() (*nvmet.Tree, error) { return nvmet.OpenOn(nvmettest.Root, w.targets) }
	w.labels = w.mediaLabels
	w.stop = func() {}
	w.listeners = map[block.Portal]*pipeListener{}
	for file, text := range map[string]string{"boot_id": "11111111-2222-4333-8444-555555555555\n", "../osrelease": "6.1.0\n"} {
		file = filepath.Join(w.root, "proc/sys/kernel/random", file)
		if err := errors.Join(os.MkdirAll(filepath.Join(w.root, "proc/sys/kernel/random"), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// run starts an agent; stopping it leaves the world as it is.
func (w *world) run() { w.runUntil(-1) }

// runUntil starts an agent that dies after so many operations; -1: never.
func (w *world) runUntil(operations int) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	gate := &gate{left: operations, crash: cancel}
	a, err := New(Config{
		Node: "t1", Labels: map[string]string{"rack": "r1"}, Manager: &w.manager, Version: "test", Root: w.root,
		Portals:     append([]block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}}, w.more...),
		HealthEvery: w.healthEvery,
		Log:         cmp.Or(w.log, slog.New(slog.DiscardHandler)),
		Goodbye:     w.goodbye,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	if w.root != "/" {
		a.kernel = w.kernel(gate)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = a.Run(ctx) }() //nolint:errcheck // it ends when it is told to
	w.gate = gate
	w.leave = func() time.Duration {
		began := time.Now()
		cancel()
		<-ended
		return time.Since(began)
	}
	w.stop = func() {
		gate.shut()
		cancel()
		<-ended
		if w.root != "/" { // an operation of the dead agent that has passed the gate ends before the next agent runs
			synctest.Wait()
		}
		w.stop = func() {}
	}
}

// kernel gives one agent its access to the world.
func (w *world) kernel(gate *gate) kernel {
	if w.user || w.both {
		return w.userKernel(gate)
	}
	if w.process {
		return w.withProcess(gate)
	}
	return w.inKernel(gate)
}

func (w *world) inKernel(gate *gate) kernel {
	return kernel{
		hardware: gatedHardware{w, gate},
		mapper:   func() (mapper, error) { return gatedMapper{w, gate}, nil },
		names:    names{filepath.Join(w.root, "dev/weft/leg")},
		exports:  func() (exporter, error) { return nvmet.OpenOn(nvmettest.Root, gatedFiles{w.targets, gate}) },
		watch:    func(ctx context.Context, _ func()) error { <-ctx.Done(); return context.Cause(ctx) },
		close:    func(context.Context) error { return nil },

		integrity: w.integrity, lists: w.lists,
	}
}

// ---- operations, counted ----

var errCrashed = errors.New("the agent is dead")

// gate lets a number of operations pass and then kills the agent, wherever it is.
type gate struct {
	mu    sync.Mutex
	left  int // -1: no end
	done  int
	dead  bool
	crash func()
}

func (g *gate) pass() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left == 0 && !g.dead {
		g.dead = true
		g.crash()
	}
	if g.dead {
		return errCrashed
	}
	g.left = max(g.left-1, -1)
	g.done++
	return nil
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.dead = true
}

func (g *gate) crashed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.dead
}

// ---- devices ----

// medium is a device in memory; blocks never written read as zeroes.
type medium struct {
	mu     sync.Mutex
	size   block.Size
	blocks map[int64][4096]byte
	fail   error         // of all writes
	hang   chan struct{} // writes wait until it is closed
	stuck  chan struct{} // hosts' I/O waits until it is closed
	mute   bool          // a scan gets no answer from it
	after  func()        // is called after each flush
	slow   chan struct{} // Zero takes one from it for each chunk
	wwid   string

	smart  *pb.SmartLog
	unread error         // why smart cannot be read
	silent chan struct{} // reading smart waits until it is closed
	ios    drive.IOs
	reads  int // of smart
}

func (w *world) plug(path string, size block.Size, wwid string) *medium {
	m := &medium{size: size, blocks: map[int64][4096]byte{}, wwid: wwid}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.media[path] = m
	return m
}

func (w *world) pull(path string) *medium {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.media[path]
	delete(w.media, path)
	return m
}

func (w *world) medium(path string) (*medium, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.media[path]; m != nil {
		return m, nil
	}
	return nil, unix.ENOENT
}

func (m *medium) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

func (m *medium) Size() block.Size      { return m.size }
func (m *medium) BlockSize() block.Size { return 4096 }
func (m *medium) Close() error          { return nil }

func (m *medium) Flush() error {
	err := m.ready()
	if m.after != nil {
		m.after()
	}
	return err
}

func (m *medium) ready() error {
	m.mu.Lock()
	fail, hang := m.fail, m.hang
	m.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return fail
}

func (m *medium) ReadAt(p []byte, offset int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := int(max(0, min(int64(len(p)), int64(m.size)-offset)))
	for done := 0; done < n; {
		at := offset + int64(done)
		part := p[done:min(n, done+4096-int(at%4096))]
		if b, ok := m.blocks[at/4096]; ok {
			copy(part, b[at%4096:])
		} else {
			clear(part)
		}
		done += len(part)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (m *medium) WriteAt(p []byte, offset int64) (int, error) {
	if err := m.ready(); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := 0; i < len(p); i += 4096 {
		m.blocks[(offset+int64(i))/4096] = [4096]byte(p[i : i+4096])
	}
	return len(p), nil
}

func (m *medium) Zero(ctx context.Context, offset, length block.Size, progress func(block.Size)) error {
	const chunk = 64 * block.MiB
	for done := block.Size(0); done < length; done += chunk {
		if err := errors.Join(ctx.Err(), m.ready()); err != nil {
			return err
		}
		m.mu.Lock()
		slow := m.slow
		m.mu.Unlock()
		if slow != nil {
			select {
			case <-slow:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		from, to := int64(offset+done)/4096, int64(offset+min(length, done+chunk))/4096
		m.mu.Lock()
		maps.DeleteFunc(m.blocks, func(b int64, _ [4096]byte) bool { return b >= from && b < to })
		m.mu.Unlock()
		if progress != nil {
			progress(min(length, done+chunk))
		}
	}
	return nil
}

type gatedHardware struct {
	world *world
	gate  *gate
}

func (h gatedHardware) Scan(context.Context) ([]*pb.Device, error) {
	h.world.mu.Lock()
	media := maps.Clone(h.world.media)
	h.world.mu.Unlock()
	var out []*pb.Device
	for _, path := range slices.Sorted(maps.Keys(media)) {
		m := media[path]
		d := &pb.Device{Path: path, Wwid: m.wwid, SizeBytes: uint64(m.size), BlockSize: 4096}
		m.mu.Lock()
		mute := m.mute
		m.mu.Unlock()
		if mute { // as the inventory reports a drive with legs
			d.Unread, d.Refused = "it does not answer, since a while", "in use: dm-0 (weft-leg-x)"
			out = append(out, d)
			continue
		}
		if l, err := drive.ReadLabel(m, m.size); err == nil {
			d.DriveId = l.Drive.String()
		}
		var err error
		if d.Signatures, err = drive.Signatures(m, m.size); err != nil {
			return nil, err
		}
		if what := strings.Join(d.Signatures, ", "); what != "" { // as the inventory reports it
			d.Refused = fmt.Sprintf("it carries %s, which is erased only if forced by exactly that name", what)
		}
		out = append(out, d)
	}
	return out, nil
}

func (h gatedHardware) Open(path string) (disk, error) {
	m, err := h.world.medium(path)
	if err != nil {
		return nil, err
	}
	if h.world.opening != nil {
		h.world.opening(path)
	}
	d, err := drive.Open(m, block.ClusterID{})
	if err != nil {
		return nil, err
	}
	return gatedDisk{d, h.gate, h.world, d.Label().Incarnation}, nil
}

func (h gatedHardware) Format(path string, c block.ClusterID, id block.DriveID, force string) error {
	m, err := h.world.medium(path)
	if err := errors.Join(err, h.gate.pass()); err != nil {
		return err
	}
	return drive.Format(m, c, id, force)
}

func (h gatedHardware) Number(path string) (block.DeviceNumber, error) {
	_, err := h.world.medium(path)
	return block.DeviceNumber{Major: 259, Minor: uint32(path[len(path)-1])}, err
}

func (h gatedHardware) Sequence(block.DeviceNumber) string {
	h.world.mu.Lock()
	defer h.world.mu.Unlock()
	return h.world.sequence
}

// Smart does not count as an operation: it changes nothing.
func (h gatedHardware) Smart(path string) (*pb.SmartLog, error) {
	m, err := h.world.medium(path)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.reads++
	silent := m.silent
	m.mu.Unlock()
	if silent != nil {
		<-silent
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return proto.CloneOf(m.smart), m.unread
}

func (h gatedHardware) IOs(path string) drive.IOs {
	m, err := h.world.medium(path)
	if err != nil {
		return drive.IOs{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ios
}

type gatedDisk struct {
	*drive.Drive
	gate  *gate
	world *world
	began uint32
}

func (d gatedDisk) Incarnation() uint32 {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	return d.began + d.world.losses
}

func (d gatedDisk) Update(change func(*drive.Label) error) error {
	if err := d.gate.pass(); err != nil {
		return err
	}
	return d.Drive.Update(change)
}

func (d gatedDisk) Rewrite() error {
	if err := d.gate.pass(); err != nil {
		return err
	}
	return d.Drive.Rewrite()
}

func (d gatedDisk) Erase() error {
	if err := d.gate.pass(); err != nil {
		return err
	}
	return d.Drive.Erase()
}

func (d gatedDisk) ZeroLeg(ctx context.Context, id block.LegID, progress func(block.Size)) error {
	if err := d.gate.pass(); err != nil {
		return err
	}
	return d.Drive.ZeroLeg(ctx, id, progress)
}

// ---- device mapper and configfs ----

type gatedMapper struct {
	world *world
	gate  *gate
}

func (m gatedMapper) Devices(prefix string) ([]dm.State, error) {
	m.world.mu.Lock()
	looking := m.world.looking
	m.world.looking = nil
	m.world.mu.Unlock()
	if looking != nil {
		looking()
	}
	if m.world.user {
		return m.world.legs.Devices(prefix)
	}
	m.world.mu.Lock()
	defer m.world.mu.Unlock()
	var out []dm.State
	for _, name := range slices.Sorted(maps.Keys(m.world.mapped)) {
		if strings.HasPrefix(name, prefix) {
			out = append(out, m.world.mapped[name])
		}
	}
	return out, nil
}

func (m gatedMapper) Info(name string) (dm.Info, error) {
	m.world.mu.Lock()
	defer m.world.mu.Unlock()
	if s, ok := m.world.mapped[name]; ok {
		return s.Info, nil
	}
	return dm.Info{}, unix.ENXIO
}

func (m gatedMapper) List() (all []dm.Listed, _ error) {
	m.world.mu.Lock()
	defer m.world.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(m.world.mapped)) {
		all = append(all, dm.Listed{Name: name, Number: m.world.mapped[name].Number})
	}
	return all, nil
}

func (m gatedMapper) Do(s dm.Step) error {
	if err := m.gate.pass(); err != nil {
		return err
	}
	inUse := m.world.exportedNode(s.Device.Name)
	if m.world.user {
		if s.Op == dm.OpRemove && inUse {
			m.world.t.Errorf("%s is to be removed while it is exported", s.Device.Name)
		}
		return m.world.legs.Do(s)
	}
	m.world.mu.Lock()
	defer m.world.mu.Unlock()
	switch state, exists := m.world.mapped[s.Device.Name]; s.Op {
	case dm.OpCreate:
		if exists {
			return unix.EBUSY
		}
		m.world.minor++
		m.world.mapped[s.Device.Name] = dm.State{
			Info:  dm.Info{Name: s.Device.Name, UUID: s.Device.UUID, Number: block.DeviceNumber{Major: 253, Minor: m.world.minor}, Live: true},
			Table: s.Device.Table,
		}
	case dm.OpReload, dm.OpResize:
		if s.Device.Table.Size() < state.Table.Size() {
			m.world.t.Errorf("%s is to become smaller: %v", s.Device.Name, s.Device.Table)
		}
		state.Table = s.Device.Table
		m.world.mapped[s.Device.Name] = state
	case dm.OpRemove:
		if inUse {
			m.world.t.Errorf("%s is to be removed while it is exported", s.Device.Name)
			return unix.EBUSY
		}
		delete(m.world.mapped, s.Device.Name)
	default:
		return fmt.Errorf("unexpected %v", s)
	}
	return nil
}

// state is the mapped device that a path leads to.
func (w *world) state(path string) (dm.State, bool) {
	id, ok := legOf(filepath.Dir(path), path)
	if !ok {
		return dm.State{}, false
	}
	node, ok := w.names()[id]
	for _, s := range w.mappedLegs() {
		if ok && dm.NodePath(s.Number) == node {
			return s, true
		}
	}
	return dm.State{}, false
}

func (w *world) mappedLegs() []dm.State {
	if w.user {
		states, err := w.legs.Devices("")
		if err != nil {
			w.t.Error(err)
		}
		return states
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Values(w.mapped))
}

func (w *world) names() map[block.LegID]string {
	var n naming = names{filepath.Join(w.root, "dev/weft/leg")}
	if w.user {
		n = w.legs
	}
	list, err := n.List()
	if err != nil {
		w.t.Error(err)
	}
	return list
}

// canExport runs at each enable=1 and fails the test on a wrong export.
func (w *world) canExport(path string) bool {
	s, ok := w.state(path)
	if !ok {
		return false
	}
	leg := strings.TrimPrefix(s.Name, dmPrefix)
	if leg != strings.TrimSuffix(filepath.Base(path), userspace.ReadOnly) {
		w.t.Errorf("the name of leg %s leads to %s", filepath.Base(path), s.Name)
	}
	if r := w.record(leg); r == nil || !r.GetZeroed() {
		w.t.Errorf("leg %s is exported before it is zeroed", leg)
	}
	return true
}

func (w *world) exportedNode(name string) bool {
	for path := range w.exported().devicesOf() {
		if s, ok := w.state(path); ok && s.Name == name {
			return true
		}
	}
	return false
}

type exported struct{ nvmet.Config }

func (w *world) exported() exported { return exported{merged(w.read(w.tree), w.exportedBeside())} }

// read returns what one target exports.
func (w *world) read(open func() (*nvmet.Tree, error)) nvmet.Config {
	tree, err := open()
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := tree.Read(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (e exported) devicesOf() map[string]block.NQN {
	out := map[string]block.NQN{}
	for _, s := range e.Subsystems {
		for _, ns := range s.Namespaces {
			if ns.Enabled {
				out[ns.Device] = s.NQN
			}
		}
	}
	return out
}

// record is a leg as the drives' labels record it.
func (w *world) record(leg string) *pb.LegLabel {
	for _, l := range w.labels() {
		for _, r := range l.Legs {
			if r.GetLegId() == leg {
				return r
			}
		}
	}
	return nil
}

func (w *world) mediaLabels() []*drive.Label {
	w.mu.Lock()
	media := slices.Collect(maps.Values(w.media))
	w.mu.Unlock()
	var out []*drive.Label
	for _, m := range media {
		if l, err := drive.ReadLabel(m, m.size); err == nil {
			out = append(out, l)
		}
	}
	return out
}

type gatedFiles struct {
	nvmet.Files
	gate *gate
}

func (f gatedFiles) Mkdir(path string) error {
	return errorOr(f.gate, func() error { return f.Files.Mkdir(path) })
}
func (f gatedFiles) Rmdir(path string) error {
	return errorOr(f.gate, func() error { return f.Files.Rmdir(path) })
}
func (f gatedFiles) Write(path, value string) error {
	return errorOr(f.gate, func() error { return f.Files.Write(path, value) })
}
func (f gatedFiles) WriteSecret(path, value string) error {
	return errorOr(f.gate, func() error { return f.Files.WriteSecret(path, value) })
}
func (f gatedFiles) Symlink(to, path string) error {
	return errorOr(f.gate, func() error { return f.Files.Symlink(to, path) })
}
func (f gatedFiles) Unlink(path string) error {
	return errorOr(f.gate, func() error { return f.Files.Unlink(path) })
}

func errorOr(g *gate, f func() error) error {
	if err := g.pass(); err != nil {
		return err
	}
	return f()
}

// ---- manager ----

// manager is a volume manager that wants what the test tells it.
type manager struct {
	pb.AgentsClient
	world *world

	mu      sync.Mutex
	away    bool
	refuse  error // its answer to reports; nil: it accepts them
	want    *pb.TargetWanted
	changed chan struct{}
	last    *pb.TargetReport
	reports int
	hears   func(*pb.TargetReport) // is called with each report
}

// set makes m the wanted state, with the next generation.
func (m *manager) set(want *pb.TargetWanted) {
	m.mu.Lock()
	defer m.mu.Unlock()
	want = proto.CloneOf(want)
	want.Generation = m.want.GetGeneration() + 1
	m.want = want
	close(m.changed)
	m.changed = make(chan struct{})
}

// generation is that of the wanted state.
func (m *manager) generation() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.want.GetGeneration()
}

func (m *manager) reported() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reports
}

func (m *manager) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = nil
}

func (m *manager) Target(ctx context.Context, _ ...grpc.CallOption) (grpc.BidiStreamingClient[pb.TargetReport, pb.TargetWanted], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.away {
		return nil, errors.New("connection refused")
	}
	return &managerStream{manager: m, ctx: ctx}, nil
}

type managerStream struct {
	grpc.ClientStream
	manager *manager
	ctx     context.Context //nolint:containedctx // a stream has one
	sent    *pb.TargetWanted
}

func (s *managerStream) Send(r *pb.TargetReport) error {
	if s.manager.world.root != "/" { // scanning a real machine takes time, and can hang
		s.manager.world.checkAdmissions(r)
	}
	s.manager.mu.Lock()
	defer s.manager.mu.Unlock()
	if s.manager.refuse != nil {
		return s.manager.refuse
	}
	if s.manager.hears != nil {
		s.manager.hears(r)
	}
	s.manager.last = proto.CloneOf(r)
	s.manager.reports++
	return nil
}

func (s *managerStream) Recv() (*pb.TargetWanted, error) {
	for {
		s.manager.mu.Lock()
		want, changed := s.manager.want, s.manager.changed
		s.manager.mu.Unlock()
		if want != nil && want != s.sent {
			s.sent = want
			return proto.CloneOf(want), nil
		}
		select {
		case <-changed:
		case <-s.ctx.Done():
			return nil, s.ctx.Err()
		}
	}
}

// checkAdmissions compares each admission with the kernel and the labels.
func (w *world) checkAdmissions(r *pb.TargetReport) {
	exports := w.exported()
	for _, a := range r.GetAdmissions() {
		for _, s := range exports.Subsystems {
			v, e, _, _, err := block.ParseSubsystemNQN(s.NQN)
			if err == nil && v.String() == a.GetVolumeId() && e < block.Epoch(a.GetEpoch()) {
				w.t.Errorf("epoch %d of volume %v is reported admitted, and %s is there", a.GetEpoch(), v, s.NQN)
			}
		}
		for _, d := range r.GetDrives() {
			for _, l := range d.GetLegs() {
				on := w.record(l.GetLegId())
				if d.GetError() == "" && on.GetVolume().GetVolumeId() == a.GetVolumeId() && on.GetAdmittedEpoch() < a.GetEpoch() {
					w.t.Errorf("epoch %d of volume %s is reported admitted, the label has %d", a.GetEpoch(), a.GetVolumeId(), on.GetAdmittedEpoch())
				}
			}
		}
	}
}

// until waits for a report that satisfies is.
func (w *world) until(what string, is func(*pb.TargetReport) bool) *pb.TargetReport {
	w.t.Helper()
	for range 600 {
		w.manager.mu.Lock()
		r := w.manager.last
		w.manager.mu.Unlock()
		if r != nil && is(r) {
			return r
		}
		if w.gate.crashed() {
			return r
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.t.Fatalf("not in a minute: %s; last report:\n%v", what, w.manager.last)
	return nil
}

// Figures refuses figures, as a manager of an earlier version does.
func (*manager) Figures(context.Context, ...grpc.CallOption) (grpc.ClientStreamingClient[pb.FiguresReport, pb.FiguresResponse], error) {
	return nil, status.Error(codes.Unimplemented, "no figures")
}

// Support is not what these tests are about; a manager of an earlier version answers so, too.
func (*manager) Support(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.SupportAnswer, pb.SupportQuestion], error) {
	return nil, status.Error(codes.Unimplemented, "no support bundles")
}

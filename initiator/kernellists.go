// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	nvmehost "weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file takes checkpoints of the targets' lists of writes on the kernel's data path; see package
// raid/checkpoint. The kernel does not say when a write that it has accepted is on all legs. But before
// dm-mirror sends a write to the legs it has marked the write's region dirty in its log, and it clears the
// mark when all legs have all writes to the region. So a region that is seen clean after the checkpoint has
// begun has everything from before, and the regions that were never seen clean are told to the targets as
// what may differ, like what a leg lacks.
//
// What this relies on, and who sees to it:
//
//   - The log in use is the file that is read, and its marks are those of all writes: the column is flat, a
//     mirror of legs in sync with a log of its own, or one of a leg in sync and another that is copied to (publish).
//     To that one is told what it may lack; regions that are not copied yet are never clean. Of a leg that is copied to
//     before it joins (kernelahead.go), the copy knows them, and the log has what users have written since.
//   - Where a leg is copied to beside several in sync, these are a mirror of their own without a log. So I/O is held
//     for each checkpoint, until nothing is under way, at most every holdEvery (hold).
//   - No write waits outside of the log. While a table is changed, dm holds back writes that one leg may
//     have had already, and they are marked again only when dm sends them again. So after a change I/O is
//     held once, until nothing is under way (drain).
//   - A write that was given up on all legs marks its region until the next change alone, so no checkpoint
//     is taken after one (spoiled).

// logLooks is how often a column's log is looked at for a checkpoint, at most, logPause apart.
const (
	logLooks = 10
	logPause = 20 * time.Millisecond
)

// drainRetry is how long after one time I/O is held again. holdEvery is how often it is held for checkpoints of a column
// while a leg is copied to, and holdFor how long that is awaited.
const (
	drainRetry = 10 * time.Second
	holdEvery  = 30 * time.Second
	holdFor    = drainRetry + 2*time.Second // another column may have had it held a moment ago
)

// listing is what a keeper knows of the lists of writes to its columns.
type listing struct {
	pool    *lists.Pool
	beside  map[block.NQN]*lists.Beside // of the subsystems that are connected
	columns map[int]*listedColumn
	drains  time.Time // not before that, I/O is held again
	equal   map[int]*madeEqual
	asked   map[int]*asking // by column: the last question
	awaits  map[int]awaits  // by column: what the copy waits for that is to begin
	ahead   map[int]*aheadOf
	found   map[int]time.Time // by column: since when a file of aheadFile is there, and no copy is under way
}

// listedColumn takes the checkpoints of one column. The keeper's goroutine owns it, except for now.
type listedColumn struct {
	now     atomic.Pointer[columnNow] // nil: no checkpoint may be taken
	running atomic.Bool               // somebody takes checkpoints while there is a now
	stay    uint64                    // grows with each change, and with the members
	changed uint64                    // grows with each change
	drained bool                      // since the last change, nothing was under way at one time
	drains  bool                      // it is to be drained, since a checkpoint waits for that
	asked   uint64                    // the last request to hold I/O that the keeper knows of
	asks    atomic.Uint64             // the last one
	held    atomic.Uint64             // the last one after which nothing was under way
	spoiled bool                      // a write may have been given up
	last    columnNow                 // the last that was published
}

// columnNow is a column as checkpoints are taken of it.
type columnNow struct {
	members []checkpoint.Member
	drained bool
	several bool              // legs are in sync beside one that is copied to
	legs    map[int]lists.Leg // by copy
	since   map[int]uint64    // by copy: see checkpoint.Behind
	device  block.DeviceNumber
	log     string                 // the file
	left    func() mirror.LogImage // what is not copied yet of a leg that is copied to ahead; nil: none is
	regions uint64
	region  block.Size
}

func newListing(dial userspace.Dial, log *slog.Logger) listing {
	return listing{pool: &lists.Pool{Dial: dial, Log: log}, beside: map[block.NQN]*lists.Beside{}, columns: map[int]*listedColumn{}, equal: map[int]*madeEqual{}, asked: map[int]*asking{}, awaits: map[int]awaits{}, ahead: map[int]*aheadOf{}, found: map[int]time.Time{}}
}

func (l *listing) column(i int) *listedColumn {
	if l.columns[i] == nil {
		l.columns[i] = &listedColumn{}
	}
	return l.columns[i]
}

// changes is called before a column is changed in the kernel: no checkpoint ends during a change.
func (c *listedColumn) changes() {
	c.now.Store(nil)
	c.stay++
	c.changed++
	c.drained = false
}

// listsOfLeg is where to ask for the list of writes to a leg.
func (k *kernelKeeper) listsOfLeg(l *volume.Link) lists.Leg {
	return lists.Either(ownConnection{k.kernel.host, l.NQN, l.NSID}, k.lists.pool.Leg(k.whereBeside(l)))
}

// whereBeside is where something may answer beside the target of a leg.
func (k *kernelKeeper) whereBeside(l *volume.Link) lists.Where {
	w := lists.Where{Portals: l.Portals, Subsystem: l.NQN, Host: k.agent.host(), NSID: l.NSID, UUID: l.UUID}
	if !l.Keys.IsZero() {
		w.Host, w.Keys = l.Host, l.Keys
	}
	return w
}

// beside is the agent beside the target of a subsystem; nil if no portals of that are known.
func (k *kernelKeeper) beside(n block.NQN) *lists.Beside {
	i := slices.IndexFunc(k.links, func(l volume.Link) bool { return l.NQN == n && len(l.Portals) > 0 })
	if b := k.lists.beside[n]; b != nil || i < 0 {
		return b
	}
	b := k.lists.pool.Beside(k.whereBeside(&k.links[i]))
	k.lists.beside[n] = b
	return b
}

// publish says of which columns checkpoints may be taken, and has them taken.
func (k *kernelKeeper) publish(ctx context.Context, w *volume.Wanted, s *seen) {
	k.lists.pool.Keep(func(n block.NQN) bool { return len(s.controllers[n]) > 0 })
	maps.DeleteFunc(k.lists.beside, func(n block.NQN, _ *lists.Beside) bool { return len(s.controllers[n]) == 0 })
	if s.Device.Exists {
		clear(k.lists.equal) // from now on, they may differ again
	}
	drain := false
	for i := range s.columns {
		c := k.lists.column(i)
		rests := (!s.Device.Exists || s.Held) && k.changes[i] == nil // seen after the keeper learnt of the requests so far
		if rests {
			c.drained, c.drains = true, false
		}
		now := k.columnNow(w, s, i, c)
		if now == nil {
			c.now.Store(nil)
			continue
		}
		drain = drain || c.drains && (!c.drained || now.several)
		if c.now.Load() == nil || !now.same(&c.last) {
			c.stay++
			now.mark(c.stay)
			c.last = *now
			c.now.Store(now)
		}
		if rests {
			c.held.Store(c.asked)
		}
		if c.running.CompareAndSwap(false, true) {
			go k.takeCheckpoints(ctx, c, i)
		}
	}
	if drain {
		k.drain(ctx, s)
	}
}

// same reports whether nothing has changed, except that mark was called for one of the two.
func (n *columnNow) same(o *columnNow) bool {
	return n.drained == o.drained && n.device == o.device && n.regions == o.regions &&
		slices.EqualFunc(n.members, o.members, func(a, b checkpoint.Member) bool { return a.Copy == b.Copy && a.Copying == b.Copying })
}

// mark gives the members of a column a stay, so that those before and after a change are told apart.
func (n *columnNow) mark(stay uint64) {
	for i := range n.members {
		n.members[i].Stay = stay
	}
}

// listable reports whether checkpoints of a column may be taken: it is a mirror of legs in sync alone, or of them and
// one that is copied to, which marks writes in its own log, under a device in use.
func (k *kernelKeeper) listable(w *volume.Wanted, s *seen, column int) bool {
	if w == nil || w.ReadOnly || w.Detach || !k.memory.Of(w) || !s.Device.Exists || s.Device.Failed || k.changes[column] != nil {
		return false
	}
	c := &s.columns[column]
	mirrors := c.Kind == mirror.ShapeFlat && len(c.Sources) > 1 || c.Kind == mirror.ShapeRebuilding && len(c.Sources) > 0
	if k.lists.ahead[column].under(c) && len(c.Sources) > 0 {
		// The lists of the legs in sync have what was discarded while this one was away, which a log that has all of its
		// writes has not.
		mirrors = !k.memory.slot(column, c.Copy).logged()
	}
	return mirrors && c.Log != "" && c.Log == c.log.device
}

// well reports whether no leg of a column has an error, and none of its writes can have been given up.
func (c *listedColumn) well(seen *columnSeen) bool {
	ill := 0
	for _, d := range seen.Sources {
		if seen.health[d] != dm.Alive {
			ill++
		}
	}
	c.spoiled = c.spoiled || ill == len(seen.Sources)
	if seen.Kind == mirror.ShapeRebuilding && seen.health[seen.Back] != dm.Alive {
		ill++
	}
	return ill == 0 && !c.spoiled
}

// columnNow describes a column of which checkpoints can be taken; nil if that is not so.
func (k *kernelKeeper) columnNow(w *volume.Wanted, s *seen, column int, listed *listedColumn) *columnNow {
	c := &s.columns[column]
	if !k.listable(w, s, column) || !listed.well(c) {
		return nil
	}
	now := &columnNow{drained: listed.drained, legs: map[int]lists.Leg{}, since: map[int]uint64{}, log: c.log.file, region: c.Region}
	now.regions = c.Regions()
	for _, d := range c.devices {
		if d.Name == c.name {
			now.device = d.Number
		}
	}
	for copy, d := range c.at {
		l := k.link(column, copy)
		if copying := c.Kind == mirror.ShapeRebuilding && c.Copy == copy && d == c.Back; c.has(d) && l != nil && l.Rebuilding == copying {
			now.members = append(now.members, checkpoint.Member{Copy: copy, Copying: copying})
			now.legs[copy], now.since[copy] = k.listsOfLeg(l), k.memory.slot(column, copy).Whole
		}
	}
	legs := len(c.Sources)
	if h := k.lists.ahead[column]; c.Kind == mirror.ShapeTracked {
		now.members = append(now.members, checkpoint.Member{Copy: h.copy, Copying: true})
		now.legs[h.copy], now.since[h.copy], now.left = k.listsOfLeg(k.link(column, h.copy)), h.since, h.Left
	}
	if c.Kind != mirror.ShapeFlat {
		if now.several = legs > 1; now.several { // I/O is held each time
			now.drained = true
		}
		legs++
	}
	if len(now.members) != legs {
		return nil
	}
	return now
}

// drain holds I/O once, until nothing is under way. The planner resumes it at the next look.
func (k *kernelKeeper) drain(ctx context.Context, s *seen) {
	if s.Now.Before(k.lists.drains) {
		return
	}
	if k.holdOnce(ctx, s) {
		k.lists.drains = s.Now.Add(drainRetry)
	}
}

// holdOnce holds I/O until the next look, unless it is held already.
func (k *kernelKeeper) holdOnce(ctx context.Context, s *seen) bool {
	if k.suspends || s.Held {
		return false
	}
	k.drains.Store(true)
	k.draining.Add(1)
	k.suspendTop(ctx, k.draining.Done)
	return true
}

// endDrain resumes I/O that is held only for a checkpoint or a repair, when the keeper ends: nobody else would before
// another agent begins. A suspend that does not return is taken back by the kernel with the process.
func (k *kernelKeeper) endDrain() {
	ended := make(chan struct{})
	go func() { k.draining.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(callTimeout):
		k.log.Warn("I/O may be held until the next agent begins")
		return
	}
	if !k.drains.Load() || k.seen == nil || !k.seen.Device.Exists || k.leaseLeft() <= 0 {
		return
	}
	if err := k.kernel.dm.Resume(k.top.Name, dm.UdevNormal); err != nil {
		k.log.Warn("I/O is held until the next agent begins", "err", err)
	}
}

// leaseLeft is how long the volume may still be read by what was seen last.
func (k *kernelKeeper) leaseLeft() time.Duration {
	w, now := cmp.Or(k.Last().Wanted, k.Kept()), k.seen.Seen
	now.Clock = k.agent.cfg.Clock()
	return volume.LeaseLeft(w, &k.memory.Memory, &now, volume.Limits{Lease: k.agent.cfg.Lease}, capabilities)
}

// takeCheckpoints takes checkpoints of a column as long as they may be taken.
func (k *kernelKeeper) takeCheckpoints(ctx context.Context, c *listedColumn, column int) {
	pace := &lists.Pace{Log: k.log.With("column", column)}
	t := &taker{kernel: k.kernel, column: c, drain: func(n uint64) {
		k.Tell(func() { c.drains, c.asked = true, max(c.asked, n) })
		k.Poke()
	}}
	t.rest = func() { k.Tell(func() { c.drains = false }) }
	t.heldAt = time.Now() // the column has just changed
	for {
		now := c.now.Load()
		if now == nil || ctx.Err() != nil {
			c.running.Store(false)
			if now = c.now.Load(); now == nil || ctx.Err() != nil || !c.running.CompareAndSwap(false, true) {
				return
			}
		}
		pause := t.look(ctx, now, pace)
		select {
		case <-ctx.Done():
		case <-time.After(beat.Pause(pause)):
		}
	}
}

// taker takes checkpoints of a column.
type taker struct {
	kernel *kernel
	column *listedColumn
	drain  func(n uint64) // asks for it, with the number of the request
	rest   func()         // asks for it no more

	now       *columnNow
	heldAt    time.Time // when I/O was to be held last
	unsettled []checkpoint.Range
}

// look takes a checkpoint if one is due, and says how long to wait for the next look.
func (t *taker) look(ctx context.Context, now *columnNow, pace *lists.Pace) time.Duration {
	written, err := t.kernel.written(now.device)
	if err != nil {
		return lists.LookIdle // the device is going
	}
	if now.several && time.Since(t.heldAt) < holdEvery {
		return lists.LookIdle
	}
	t.now = now
	return pace.Look(ctx, lists.Moment{At: time.Now(), Written: written, Members: now.members}, t)
}

// hold has I/O held once, and waits until nothing is under way: all that was accepted before is then on the legs in sync.
func (t *taker) hold(ctx context.Context) error {
	t.heldAt = time.Now()
	n := t.column.asks.Add(1)
	t.drain(n)
	ctx, cancel := context.WithTimeout(ctx, holdFor)
	defer cancel()
	if !poll(ctx, logPause, func() bool { return t.column.held.Load() >= n }) {
		t.rest()
		return errNotHeld
	}
	return nil
}

var errNotHeld = errors.New("I/O was not held in time")

var errNotDrained = errors.New("writes may be held back since the column was changed; I/O is held to find out")

// Members implements checkpoint.Column.
func (t *taker) Members() []checkpoint.Member {
	if now := t.column.now.Load(); now != nil {
		return now.members
	}
	return nil
}

// Settle implements checkpoint.Column: it finds the regions that may not have everything yet.
func (t *taker) Settle(ctx context.Context) error {
	if !t.now.drained {
		t.drain(0)
		return errNotDrained
	}
	if t.now.several {
		if err := t.hold(ctx); err != nil {
			return err
		}
	}
	var busy mirror.LogImage
	for i := range logLooks {
		image, err := t.kernel.readLog(t.now.log, t.now.regions)
		if err != nil {
			return err
		}
		if i == 0 {
			busy = image
		} else if busy, err = busy.Both(image); err != nil {
			return err
		}
		if busy.AllClean() {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(logPause):
		}
	}
	if left := t.now.left; left != nil {
		var err error
		if busy, err = busy.Merge(left()); err != nil {
			return err
		}
	}
	t.unsettled = checkpoint.Ranges(busy.DirtyWords(), int64(t.now.region), nvmetcp.MostBehind)
	return nil
}

// Begin implements checkpoint.Column.
func (t *taker) Begin(ctx context.Context, m checkpoint.Member, token checkpoint.Token) error {
	ctx, cancel := context.WithTimeout(ctx, lists.TargetTimeout)
	defer cancel()
	if m.Copying {
		return t.now.legs[m.Copy].CheckpointBehind(ctx, false, uint64(token), nvmetcp.Behind{})
	}
	return t.now.legs[m.Copy].Checkpoint(ctx, false, uint64(token))
}

// Commit implements checkpoint.Column.
func (t *taker) Commit(ctx context.Context, m checkpoint.Member, token checkpoint.Token) error {
	ctx, cancel := context.WithTimeout(ctx, lists.TargetTimeout)
	defer cancel()
	leg := t.now.legs[m.Copy]
	switch {
	case m.Copying:
		return leg.CheckpointBehind(ctx, true, uint64(token), lists.Behind(t.now.since[m.Copy], t.unsettled))
	case len(t.unsettled) == 0, t.equal():
		return leg.Checkpoint(ctx, true, uint64(token))
	}
	return leg.CheckpointBehind(ctx, true, uint64(token), lists.Behind(0, t.unsettled))
}

// equal reports whether the legs in sync cannot differ where something is not settled: beside a leg that is copied to,
// there is one, or nothing was under way.
func (t *taker) equal() bool {
	return slices.ContainsFunc(t.now.members, func(m checkpoint.Member) bool { return m.Copying })
}

// ownConnection is a leg whose target is asked on the kernel's own connection.
type ownConnection struct {
	kernel nvmeHost
	nqn    block.NQN
	nsid   uint32
}

// nvmeHost is the part of the kernel's NVMe host that carries admin commands.
type nvmeHost interface {
	Controllers(of func(block.NQN) bool) ([]fabrics.Controller, error)
	Admin(ctx context.Context, c fabrics.Controller, cmd nvmetcp.Command, data []byte) error
}

func (o ownConnection) send(ctx context.Context, cmd nvmetcp.Command, data []byte) error {
	c, err := liveController(o.kernel, o.nqn)
	if err != nil {
		return err
	}
	return o.kernel.Admin(ctx, c, cmd, data)
}

func (o ownConnection) Checkpoint(ctx context.Context, commit bool, token uint64) error {
	return o.send(ctx, nvmetcp.Checkpoint{NSID: o.nsid, Commit: commit, Token: token}.Command(), nil)
}

func (o ownConnection) CheckpointBehind(ctx context.Context, commit bool, token uint64, behind nvmetcp.Behind) error {
	return o.send(ctx, nvmetcp.Checkpoint{NSID: o.nsid, Commit: commit, Token: token, Behind: &behind}.Command(), behind.Append(nil))
}

func (o ownConnection) Written(ctx context.Context) (nvmetcp.WrittenLog, error) {
	return nvmehost.ReadWritten(o.nsid, adminPiece, func(cmd nvmetcp.Command, data []byte) error { return o.send(ctx, cmd, data) })
}

// adminPiece is how much of a log one command reads.
const adminPiece = 64 << 10

// written is how much was written to a device since it was made, in bytes. A write counts as one region
// of a list at least.
func (k *kernel) written(n block.DeviceNumber) (uint64, error) {
	fields, err := k.statistics(n)
	if err != nil {
		return 0, err
	}
	if len(fields) < 7 {
		return 0, fmt.Errorf("count the writes to device %v: %d fields", n, len(fields))
	}
	writes, err1 := strconv.ParseUint(fields[4], 10, 64)
	sectors, err2 := strconv.ParseUint(fields[6], 10, 64)
	return max(writes*uint64(checkpoint.Region), sectors*uint64(block.SectorSize)), errors.Join(err1, err2)
}

// readLog reads the log of a column that is in use. The kernel may write it meanwhile: each bit is as it
// was at some time during the call.
func (k *kernel) readLog(file string, regions uint64) (image mirror.LogImage, err error) {
	f, err := os.Open(file)
	if err != nil {
		return image, fmt.Errorf("read log: %w", err)
	}
	defer f.Close()
	b := make([]byte, mirror.LogSize(regions))
	if _, err := f.ReadAt(b, 0); err != nil {
		return image, fmt.Errorf("read log: %w", err)
	}
	image, err = mirror.ParseLog(b)
	if err == nil && image.Regions() != regions {
		err = fmt.Errorf("read log: it has %d regions, and the column %d", image.Regions(), regions)
	}
	return image, err
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// What can be wrong with a tree, or with a request to it.
var (
	ErrUnfinished = errors.New("tree was never completely formatted")
	ErrDamaged    = errors.New("tree is damaged")
	ErrNewer      = errors.New("tree of a newer format")
	ErrFailed     = errors.New("tree stopped after an error of its drive")
	ErrUnknown    = errors.New("no such layer")
	ErrExists     = errors.New("layer exists already")
	ErrInUse      = errors.New("layer is in use")
	ErrState      = errors.New("layer is in another state")
	ErrTooMany    = errors.New("superblock has no room for more")
)

// Place says where a tree is. The caller takes it from the drive's label.
type Place struct {
	Device      block.Device // the drive
	First       block.Size   // where on it extent 0 begins
	Tree, Drive block.UUID
	// Extents are the tree's, by their numbers on the drive. The first is the home extent, with the
	// superblock. One that the tree has not used yet is initialized.
	Extents []uint32
	// Base are the extents of the leg that was there before the tree, in its order; see FormatOver. There
	// may be more than the tree knows: behind those it knows they hold zeroes, and it takes them.
	Base []uint32
	// Losses counts the times that the drive may have lost acknowledged writes, whoever made them. If it grows
	// the tree stops, on a drive with a volatile cache: records that are only in memory now would look written.
	// Opened again, the tree has what the drive has. Nil: it is not known.
	Losses func() uint64
}

func (p *Place) home() uint32 { return p.Extents[0] }

// offset is where an extent begins on the drive.
func (p *Place) offset(extent uint32) int64 { return int64(p.First) + int64(extent)*extentSize }

func (p *Place) check() error {
	g := p.Device.Geometry()
	if len(p.Extents) == 0 {
		return errors.New("no extents")
	}
	if b := g.BlockSize; b == 0 || unit%b != 0 || p.First%unit != 0 {
		return fmt.Errorf("blocks of %v and extents from %v on: %w", g.BlockSize, p.First, block.ErrUnsupported)
	}
	seen := map[uint32]bool{}
	for _, e := range slices.Concat(p.Extents, p.Base) {
		if seen[e] || e > 1<<21 || uint64(p.offset(e)+extentSize) > uint64(g.Size) {
			return fmt.Errorf("extent %d is there twice or beyond the end of the drive: %w", e, block.ErrRange)
		}
		seen[e] = true
	}
	return nil
}

const stripeCount = 256

// Tree is an open tree. All methods may be called concurrently.
type Tree struct {
	place    Place
	below    block.Device
	volatile bool   // the drive's acknowledged writes need a flush to be durable
	losses   uint64 // of the drive, when the tree was opened
	seq      atomic.Uint64
	failure  atomic.Pointer[error]
	damage   *DamageError // nil: none; see Damage
	closing  atomic.Bool

	shared  sharedFlushes
	extents atomic.Pointer[[]*extent] // by index; a slot's number is index<<slotShift + its place in the table
	space   space
	idlers  idlers

	// admin is held while layers or extents change, reclaiming while space is given back, and moving while a
	// chunk is merged or a layer removed for that.
	admin, reclaiming, moving turn
	// preparing is held while chunks are zeroed.
	preparing turn
	prepared  preparing             // guarded by preparing
	super     *super                // guarded by admin
	pins      map[block.UUID]uint32 // the layers of what is pinned; guarded by admin
	kin       atomic.Pointer[[]Layer]

	// What follows is read under any one stripe and changed under all of them. first and the
	// records of a chunk are guarded by that chunk's stripe.
	stripes [stripeCount]stripe
	layers  map[uint32]*layer
	legs    []*Leg
	first   []uint32 // by chunk of the legs: the slot at which its chain of records begins
	base    []int64  // where on the drive each extent of the base begins
	settled bool     // the base holds all of the leg that is alone in the tree, until the layers change
}

// turn is a lock that is held during I/O. A channel waits so that virtual time goes on (package
// testing/synctest); a mutex does not.
type turn chan struct{}

// Lock and Unlock are those of a sync.Locker.
func (t turn) Lock()   { t <- struct{}{} }
func (t turn) Unlock() { <-t }

// stripe guards the chunks of the legs whose numbers are equal modulo stripeCount.
type stripe struct {
	mu   sync.Mutex
	idle sync.Cond // something in busy has ended
	busy map[uint32]*busy
	far  map[farChunk]*far
	_    [8]byte
}

// layer is a Layer as look-ups need it. Its descendants are those whose number is in [in, out].
type layer struct {
	Layer
	in, out uint32
	chunks  *atomic.Int64 // that its records have; it stays when the superblock changes
	records *atomic.Int64 // in chains; it stays as well
	based   bool          // what no record decides that it sees is in the base
}

// sees reports whether o decides what l does not: it is l itself or an ancestor.
func (l *layer) sees(o *layer) bool { return o.in <= l.in && l.in <= o.out }

// extent is an extent in memory.
type extent struct {
	number uint32
	at     int64 // offset on the drive
	gone   bool  // given back: none of its slots is free or in use
	blocks [slotCount / perBlock]tableBlock
	blank  [chunkCount / 64]atomic.Uint64 // a bit for each slot with a chunk; see prepare.go
}

func newTree(p Place) *Tree {
	t := &Tree{place: p, below: p.Device, volatile: p.Device.Geometry().VolatileCache, layers: map[uint32]*layer{},
		admin: make(turn, 1), reclaiming: make(turn, 1), moving: make(turn, 1), preparing: make(turn, 1), pins: map[block.UUID]uint32{}}
	t.space.ahead = prepareAhead
	t.extents.Store(&[]*extent{})
	for i := range t.stripes {
		s := &t.stripes[i]
		s.idle.L, s.busy = &s.mu, map[uint32]*busy{}
	}
	t.space.freed = make(chan struct{})
	t.losses = t.lossesNow()
	return t
}

func (t *Tree) lossesNow() uint64 {
	if t.place.Losses == nil || !t.volatile {
		return 0
	}
	return t.place.Losses()
}

func (t *Tree) stripe(chunk uint32) *stripe { return &t.stripes[chunk%stripeCount] }

// lockAll stops every look-up and change of the map.
func (t *Tree) lockAll() {
	for i := range t.stripes {
		t.stripes[i].mu.Lock()
	}
}

func (t *Tree) unlockAll() {
	for i := range t.stripes {
		t.stripes[i].mu.Unlock()
	}
}

// fail stops the tree for good: what is on the drive is not known any more.
func (t *Tree) fail(err error) error {
	err = fmt.Errorf("%w: %w", ErrFailed, err)
	t.failure.CompareAndSwap(nil, &err)
	return *t.failure.Load()
}

// Err is the error that stopped the tree, nil while it works.
func (t *Tree) Err() error {
	if p := t.failure.Load(); p != nil {
		return *p
	}
	if t.lossesNow() != t.losses {
		return t.fail(errLostCache)
	}
	return nil
}

var errLostCache = errors.New("its drive may have lost writes that were not flushed")

// Close waits for the I/O under way in all legs. Whatever is asked of the tree later fails with
// block.ErrGone. It does not close the drive.
func (t *Tree) Close() {
	t.closing.Store(true)
	t.reclaiming.Lock()
	defer t.reclaiming.Unlock()
	t.admin.Lock()
	legs := t.legs
	t.admin.Unlock()
	for _, l := range legs {
		l.Close()
	}
	t.preparing.Lock() // nothing may be written to the chunks of the next process
	defer t.preparing.Unlock()
	err := fmt.Errorf("tree %v: %w", t.place.Tree, block.ErrGone)
	t.failure.CompareAndSwap(nil, &err)
}

// extent returns the extent of a slot.
func (t *Tree) extent(slot uint32) *extent { return (*t.extents.Load())[slot>>slotShift] }

// record returns a slot's record. The slot must have been in use.
func (t *Tree) record(slot uint32) *record {
	return &t.extent(slot).blocks[slot%slotCount/perBlock].records.Load()[slot%perBlock]
}

// data is where the bytes of a slot's chunk begin.
func (t *Tree) data(slot uint32) int64 {
	return t.extent(slot).at + int64(slot%slotCount)*ChunkSize
}

// hasChunk reports whether a slot has a chunk for data.
func hasChunk(slot uint32) bool { return slot%slotCount < chunkCount }

// flush makes every acknowledged write durable; afterwards, chunks that were freed before it began
// may be used again.
func (t *Tree) flush() error {
	batch := t.space.takeQuarantine()
	err := block.Flush(t.below)
	t.flushed(batch, err)
	if err == nil { // another flush may have failed meanwhile, and this one not
		err = t.Err()
	}
	return err
}

// flushed ends a flush that was to make the slots of a batch free.
func (t *Tree) flushed(batch []uint32, err error) {
	t.space.endFlush(batch, err == nil)
	if err != nil {
		if t.volatile {
			t.fail(err) //nolint:errcheck // the flush has failed with err
		}
		return
	}
	for _, slot := range batch {
		t.whenIdle(slot, t.space.put)
	}
}

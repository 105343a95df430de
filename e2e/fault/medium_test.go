// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/userspace"
)

// platter is a drive. It can be slow, hang, fail, refuse writes, and lose power. If it has a
// volatile cache, each sector that was not flushed then holds its content of the last flush,
// or any that was written since. It outlives the processes that use it, and lies below
// everything that Weft does to keep data and labels.
type platter struct {
	file *os.File

	mu       sync.Mutex
	random   *rand.Rand
	lent     []*grip // given to agents since the last loss of power
	volatile bool
	instant  bool          // while drives are added: a bubble's time stops while mutexes are waited for
	each     time.Duration // the most that an IO takes,
	straggle time.Duration // except one in eight, which takes up to this
	stuck    chan struct{} // closed when a hanging drive continues; nil: it does not hang
	readable bool          // while it hangs, reads are answered
	err      error         // the answer to all IO
	badData  error         // the answer to reads and writes of data
	smart    *pb.SmartLog  // what its health log says; nil: it has none
	problem  *pb.Problem   // that its target reports; nil: none
	refusal  error         // the answer to writes
	cacheErr error         // the answer to flushes, each of which then loses what it should make durable
	lie      func(op) bool // whether to answer a write or flush without doing it
	writes   uint64
	flushed  uint64               // number of the last write that is certainly durable
	before   map[int64][]replaced // by sector
}

// op is what an IO does.
type op int

const (
	opRead op = iota
	opWrite
	opFlush
)

// replaced is the content that a write has replaced.
type replaced struct {
	write uint64
	data  []byte
	lost  bool // a flush has failed: no later one makes the write durable
}

const sector = int64(block.SectorSize)

// The longest times that drives take.
const (
	labelTakes = 20 * time.Millisecond // to read, write or flush a label
	flushTakes = 4 * time.Millisecond
)

func newPlatter(path string, volatile bool) (*platter, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	return &platter{file: file, volatile: volatile, instant: true, random: rand.New(rand.NewPCG(1, 2)), before: map[int64][]replaced{}}, err
}

// lend gives the drive to one run of an agent.
func (p *platter) lend(to *machine) *grip {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := &grip{platter: p, to: to, dead: make(chan struct{}), killed: make(chan struct{})}
	p.lent = append(p.lent, g)
	return g
}

// killed makes the drive answer the requests of a killed process. A process ends, and releases
// its locks, only when its last system call returns. Here all agents share one process, and an
// agent gives its exports up for good after some seconds.
func (p *platter) killed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.lent {
		select {
		case <-g.killed:
		default:
			close(g.killed)
		}
	}
}

// set changes how the drive behaves.
func (p *platter) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// well ends everything that is wrong with a drive, except for lost data.
func (p *platter) well() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.each, p.straggle, p.err, p.badData, p.refusal, p.cacheErr = 0, 0, nil, nil, nil, nil
	p.goOnLocked()
}

func (p *platter) goOnLocked() {
	if p.stuck != nil {
		close(p.stuck)
		p.stuck, p.readable = nil, false
	}
}

// hang makes the drive answer nothing until well is called.
func (p *platter) hang() { p.set(func() { p.hangLocked(false) }) }

// hangWrites makes the drive answer only reads until well is called.
func (p *platter) hangWrites() { p.set(func() { p.hangLocked(true) }) }

// overtake ends a hang for all requests but those that the drive holds back now: it does so until
// goOn is called.
func (p *platter) overtake() (goOn func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	held := p.stuck
	p.stuck, p.readable = nil, false
	return sync.OnceFunc(func() { close(held) })
}

func (p *platter) hangLocked(readable bool) {
	if p.stuck == nil {
		p.stuck, p.readable = make(chan struct{}), readable
	}
}

// failing reports whether the drive returns errors.
func (p *platter) failing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err != nil || p.badData != nil || p.refusal != nil || p.cacheErr != nil
}

// powerOff stops all further requests to the drive. Of writes under way, whole blocks of 4 KiB
// may still be written, and of labels whole sectors.
func (p *platter) powerOff() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.lent {
		g.off = true
		close(g.dead)
	}
	p.lent = nil
}

// forget gives each unflushed block of that size any of the contents that it has had since. No
// IO may be under way.
func (p *platter) forget(random *rand.Rand, blocks int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	from := map[int64]uint64{}                               // by block, the first lost write; 0: none
	for _, off := range slices.Sorted(maps.Keys(p.before)) { // sorted, so that a seed always loses the same
		olds := p.undurableLocked(off)
		if _, known := from[off/blocks]; !known {
			from[off/blocks] = 0
			if i := random.IntN(len(olds) + 1); i < len(olds) {
				from[off/blocks] = olds[i].write
			}
		}
		lost := from[off/blocks]
		i := slices.IndexFunc(olds, func(r replaced) bool { return r.write >= lost })
		if lost == 0 || i < 0 {
			continue
		}
		if _, err := p.file.WriteAt(olds[i].data, off); err != nil {
			return err
		}
	}
	clear(p.before)
	return nil
}

// undurableLocked lists what a sector has held since it was durable, oldest first.
func (p *platter) undurableLocked(off int64) []replaced {
	return since(p.before[off], p.flushed)
}

// since returns what was replaced after the last durable write, if flushes have covered the
// writes up to a number.
func since(olds []replaced, flushed uint64) []replaced {
	for i, r := range slices.Backward(olds) {
		if !r.lost && r.write <= flushed {
			return olds[i+1:]
		}
	}
	return olds
}

// loseLocked makes sure that no later flush makes durable what is not durable now.
func (p *platter) loseLocked() {
	for _, olds := range p.before {
		for i := range olds {
			olds[i].lost = olds[i].lost || olds[i].write > p.flushed
		}
	}
}

// dropLostLocked makes sectors that a failed flush has lost show what is on the drive, unless
// they were written since.
func (p *platter) dropLostLocked() error {
	for off := range p.before {
		olds := p.undurableLocked(off)
		if len(olds) == 0 || !olds[len(olds)-1].lost {
			continue
		}
		if _, err := p.file.WriteAt(olds[0].data, off); err != nil {
			return err
		}
		delete(p.before, off)
	}
	return nil
}

// rememberLocked keeps the content that a write is about to replace.
func (p *platter) rememberLocked(off, n int64) error {
	p.writes++
	if !p.volatile {
		return nil
	}
	all := make([]byte, n)
	if _, err := p.file.ReadAt(all, off); err != nil {
		return err
	}
	for at := int64(0); at < n; at += sector {
		p.before[off+at] = append(p.undurableLocked(off+at), replaced{write: p.writes, data: all[at : at+sector]})
	}
	return nil
}

// settleLocked marks the writes of a range up to a number as durable.
func (p *platter) settleLocked(off, n int64, number uint64) {
	for at := off; at < off+n; at += sector {
		if len(p.before[at]) > 0 {
			p.before[at] = since(p.before[at], number)
		}
	}
}

// grip is a platter in the hands of one run of an agent.
type grip struct {
	platter *platter
	to      *machine
	off     bool          // under platter.mu
	dead    chan struct{} // closed when the power goes
	killed  chan struct{} // closed when its process is killed
}

// access is a grip for data or for labels.
type access struct {
	*grip
	data bool
}

var errNoPower = errors.New("no power")

// do performs an IO after the time that it takes; if the power goes meanwhile, torn decides
// what is written. Both run with the platter locked.
func (g access) do(what op, how func() error, torn func()) error {
	p := g.platter
	g.to.awake()
	defer g.to.awake()
	p.mu.Lock()
	d, stuck := g.takes(what), p.stuck
	if what == opRead && p.readable {
		stuck = nil
	}
	late := !g.off && (d > 0 || stuck != nil)
	p.mu.Unlock()
	if late {
		g.wait(d, stuck)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.off {
		if late && torn != nil {
			torn()
		}
		return errNoPower
	}
	switch {
	case p.err != nil:
		return p.err
	case g.data && what != opFlush && p.badData != nil:
		return p.badData
	case what == opWrite && p.refusal != nil:
		return p.refusal
	case what != opRead && p.lie != nil && p.lie(what):
		return nil
	}
	return how()
}

// takes is how long an IO takes. Making data durable takes time, and the power may go
// meanwhile. The platter is locked.
func (g access) takes(what op) (d time.Duration) {
	p := g.platter
	if p.each > 0 {
		d = time.Duration(p.random.Int64N(int64(p.each)))
	}
	if p.straggle > 0 && p.random.IntN(8) == 0 {
		d = time.Duration(p.random.Int64N(int64(p.straggle)))
	}
	switch {
	case p.instant:
	case !g.data:
		d += time.Duration(p.random.Int64N(int64(labelTakes)))
	case what == opFlush:
		d += time.Duration(p.random.Int64N(int64(flushTakes)))
	}
	return d
}

func (g *grip) wait(d time.Duration, stuck chan struct{}) {
	if stuck != nil {
		select {
		case <-stuck:
		case <-g.killed:
		case <-g.dead:
		}
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-g.killed:
	case <-g.dead:
	}
}

// flush makes durable what was written before it began.
func (g access) flush() error {
	p := g.platter
	p.mu.Lock()
	upTo := p.writes
	p.mu.Unlock()
	return g.do(opFlush, func() error {
		if p.cacheErr != nil {
			p.loseLocked() // as in the kernel, which marks the pages clean
			return p.cacheErr
		}
		p.flushed = max(p.flushed, upTo)
		return nil
	}, nil)
}

// write writes, and keeps the content that it replaces.
func (g access) write(data []byte, off int64, atom int64, how func([]byte, int64) (int, error)) (n int, err error) {
	p := g.platter
	err = g.do(opWrite, func() error {
		if err := p.rememberLocked(off, int64(len(data))); err != nil {
			return err
		}
		n, err = how(data, off)
		return err
	}, func() {
		for at := int64(0); at < int64(len(data)); at += atom {
			if part := data[at:min(at+atom, int64(len(data)))]; p.random.IntN(2) == 0 {
				p.rememberLocked(off+at, int64(len(part))) //nolint:errcheck // if it fails, the file is unchanged
				p.file.WriteAt(part, off+at)               //nolint:errcheck // its writer is dead, so its atomicity no longer counts
			}
		}
	})
	if err == nil {
		n = len(data)
	}
	return n, err
}

// ---- the data of a drive ----

// calls are the system calls on a platter's data area.
type calls struct {
	access
	kernel userspace.Calls
}

func (c calls) Pread(data []byte, off int64) (n int, err error) {
	err = c.do(opRead, func() error { n, err = c.kernel.Pread(data, off); return err }, nil)
	return max(n, 0), err
}

func (c calls) Pwrite(data []byte, off int64) (int, error) {
	return c.write(data, off, unit, c.kernel.Pwrite)
}

func (c calls) PwriteDurable(data []byte, off int64) (int, error) {
	return c.write(data, off, unit, func(data []byte, off int64) (int, error) {
		n, err := c.kernel.Pwrite(data, off)
		if err == nil {
			c.platter.settleLocked(off, int64(len(data)), c.platter.writes)
		}
		return n, err
	})
}

func (c calls) Fallocate(mode uint32, off, n int64) error {
	if mode&^unix.FALLOC_FL_KEEP_SIZE != unix.FALLOC_FL_PUNCH_HOLE {
		return unix.EOPNOTSUPP
	}
	return c.punch(off, n, func() error { return c.kernel.Fallocate(mode, off, n) })
}

func (c calls) Fdatasync() error { return c.flush() }

func (c calls) FadviseDontNeed() error {
	c.platter.mu.Lock()
	defer c.platter.mu.Unlock()
	if c.off {
		return errNoPower
	}
	return c.platter.dropLostLocked()
}

// punch zeroes a range by calling how, and keeps the data that was there.
func (g access) punch(off, n int64, how func() error) error {
	return g.do(opWrite, func() error {
		for _, s := range g.platter.data(off, n) {
			if err := g.platter.rememberLocked(s[0], s[1]); err != nil {
				return err
			}
		}
		return how()
	}, nil)
}

// overwriteEnd zeroes the last 9 MiB of a drive, as a partitioning tool might.
func (p *platter) overwriteEnd() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	const n = 9 << 20
	info, err := p.file.Stat()
	if err != nil {
		return err
	}
	end := info.Size()
	maps.DeleteFunc(p.before, func(off int64, _ []replaced) bool { return off >= end-n })
	return unix.Fallocate(int(p.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, end-n, n)
}

// data lists the parts of a range that are not holes: offsets and lengths.
func (p *platter) data(off, n int64) (all [][2]int64) {
	fd := int(p.file.Fd())
	for end := off + n; off < end; {
		from, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if err != nil || from >= end {
			return all
		}
		to, err := unix.Seek(fd, from, unix.SEEK_HOLE)
		if err != nil {
			to = end
		}
		from, to = max(from, off), min(to, end)
		all = append(all, [2]int64{from, to - from})
		off = to
	}
	return all
}

// geometry is a drive's data with or without a cache.
type geometry struct {
	block.Device
	platter *platter
}

func (g geometry) Geometry() block.Geometry {
	x := g.Device.Geometry()
	g.platter.mu.Lock()
	defer g.platter.mu.Unlock()
	x.VolatileCache = g.platter.volatile
	return x
}

// ---- its label ----

// label is the drive as it is used for reading and writing its label.
type label struct {
	drive.Medium
	access
}

func (l label) ReadAt(data []byte, off int64) (n int, err error) {
	err = l.do(opRead, func() error { n, err = l.Medium.ReadAt(data, off); return err }, nil)
	if errors.Is(err, io.EOF) {
		err = io.EOF
	}
	return n, err
}

func (l label) WriteAt(data []byte, off int64) (int, error) {
	return l.write(data, off, sector, l.Medium.WriteAt)
}

func (l label) Flush() error { return l.flush() }

func (l label) Zero(ctx context.Context, off, n block.Size, progress func(block.Size)) error {
	err := l.punch(int64(off), int64(n), func() error { return l.Medium.Zero(ctx, off, n, progress) })
	if err != nil {
		return err
	}
	return l.flush()
}

var (
	errMedium   = fmt.Errorf("this drive has a bad day: %w", syscall.EIO)
	errReadOnly = fmt.Errorf("this drive takes no more writes: %w", syscall.EROFS)
	errCache    = fmt.Errorf("this drive has lost its cache: %w", syscall.EIO)
)

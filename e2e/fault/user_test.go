// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine/history"
)

const (
	volumeSize = 8 * block.MiB  // of the volume at the start
	mostSize   = 12 * block.MiB // that it grows to
	unit       = 4096           // that the user writes at once, and tracks
	units      = int64(mostSize) / unit
	longest    = 8   // units of most operations
	large      = 160 // units of some: more than one chunk of each column
)

// user reads and writes the volume, wherever it is attached, and knows what each unit may
// hold. Any other content fails the test.
//
// Each write has a number. Its data in a unit is made from the number and the unit's place, so
// that a read shows which write the whole unit comes from.
type user struct {
	cluster *cluster
	name    block.VolumeName
	workers sync.WaitGroup
	flushes int // one in so many operations is a flush

	mu      sync.Mutex
	changed chan struct{} // closed and replaced
	units   []history.Unit
	moments *atomic.Int64   // counts events, of all users of the cluster
	out     map[*write]bool // operations under way
	hot     []hotPlace      // where an older operation may still be under way
	numbers *atomic.Uint64  // of the writes of all users of the cluster
	pins    map[any]int64   // what units held since these moments is remembered
	at      string          // the node that should have the volume
	device  *device
	mayLose bool       // drives lost their caches: the next device may lack unflushed data
	losing  int        // drives that lose what they should flush
	ghosts  []*device  // devices that are still used although they were taken away
	open    bool       // or the user has closed the device
	size    block.Size // the largest size of a device so far
	working bool       // or the workers pause
	ended   bool
	busy    int // workers with an operation under way
	broken  int // drives that return errors
	errors  int // how often a drive began to return errors
	wrong   int
	counts  map[string]int
}

// write is an operation of the user, even one that writes nothing.
type write struct {
	device   *device
	first, n int64  // units
	number   uint64 // of the data that it writes
	began    int64
	at       time.Time
	late     bool // there was a newer device when it began
	errors   int  // drive errors counted when it began
	over     bool // nobody waits for it any more
}

// hotPlace is a place that the user uses more often for a while. An operation there took long,
// or was under way when the volume moved: it may land late.
type hotPlace struct {
	first, n int64
	until    time.Time
}

const (
	hotFor  = 30 * time.Second // a drive may hold back a write for 25 s
	hotLate = 500 * time.Millisecond
	hotMost = 64
)

func (u *user) heatLocked(w *write) {
	if w.n == 0 {
		return
	}
	u.hot = slices.DeleteFunc(u.hot, func(h hotPlace) bool { return time.Now().After(h.until) })
	if len(u.hot) == hotMost {
		u.hot = slices.Delete(u.hot, 0, 1)
	}
	u.hot = append(u.hot, hotPlace{w.first, w.n, time.Now().Add(hotFor)})
}

// heat makes the user return to the places of pending operations.
func (u *user) heat() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.heatAllLocked()
}

func (u *user) heatAllLocked() {
	for w := range u.out {
		u.heatLocked(w)
	}
}

// hotUnit returns a unit of such a place; false if there is none.
func (u *user) hotUnit(random *rand.Rand) (int64, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.hot) == 0 {
		return 0, false
	}
	h := u.hot[random.IntN(len(u.hot))]
	return h.first + random.Int64N(h.n), time.Now().Before(h.until)
}

// device is a volume on a client, for one export of it.
type device struct {
	*export
	user       *user
	superseded bool // under user.mu: there was a newer one
	taken      bool // under user.mu: it was taken away by force, and may return errors
}

func newUser(c *cluster) *user {
	return &user{
		cluster: c, name: volumeName, flushes: 20, changed: make(chan struct{}), units: history.Zeroes(int(units)), open: true, working: true,
		out: map[*write]bool{}, counts: map[string]int{}, pins: map[any]int64{}, moments: &atomic.Int64{}, numbers: &atomic.Uint64{},
	}
}

// beside makes a user of another volume of the cluster, which holds what these writes left.
func (u *user) beside(name block.VolumeName, holds []uint64) *user {
	o := newUser(u.cluster)
	o.name, o.flushes, o.units, o.moments, o.numbers = name, u.flushes, history.Known(holds), u.moments, u.numbers
	u.mu.Lock()
	defer u.mu.Unlock()
	o.broken, o.errors, o.losing = u.broken, u.errors, u.losing
	return o
}

// now is the next moment.
func (u *user) now() int64 { return u.moments.Add(1) }

func (u *user) wakeLocked() {
	close(u.changed)
	u.changed = make(chan struct{})
}

// ---- the device comes and goes ----

// found is called when a client has made a device.
func (u *user) found(at *machine, volume block.Device, name block.VolumeName) userspace.Exported {
	d := &device{export: newExport(at, volume, name), user: u}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.device != nil {
		u.device.superseded = true
	}
	u.device = d
	now := u.now()
	for i := range u.units {
		u.units[i].Crashed(now) // the older writes are fenced
	}
	u.counts["device made"]++
	u.heatAllLocked()
	if u.mayLose || u.losing > 0 {
		u.mayLose = false
		for i := range u.units {
			u.units[i].PowerLost(now)
		}
	}
	u.wakeLocked()
	return d
}

func (d *device) Close(ctx context.Context, force bool) error {
	d.user.mu.Lock()
	open := d.user.open && d.user.device == d
	d.user.mu.Unlock()
	if open && !force && !d.over() {
		return fmt.Errorf("%w: the user has it open", blockdev.ErrBusy)
	}
	return d.export.Close(ctx, force)
}

// died is called when a client's process dies: no acknowledgment of it counts any more.
func (u *user) died(at *machine) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, d := range append(u.ghosts, u.device) {
		if d != nil && d.at == at {
			d.die()
		}
	}
}

func (u *user) moveTo(node string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.at = node
	u.wakeLocked()
}

func (u *user) node() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.at
}

func (u *user) nodes() []string { return []string{u.node()} }

// pause lets the workers finish their operations; false if they do not in time.
func (u *user) pause(within time.Duration) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.working = false
	deadline := time.Now().Add(within)
	for u.busy > 0 {
		if !u.awaitLocked(deadline) {
			u.working = true
			u.wakeLocked()
			return false
		}
	}
	return true
}

// close makes the user close the device, so that the volume can be detached. The workers
// pause.
func (u *user) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open = false
}

// resume makes the user open the device, when there is one, and continue.
func (u *user) resume() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open, u.working = true, true
	u.wakeLocked()
}

// medium notes that a drive starts or stops returning errors.
func (u *user) medium(errors bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if errors {
		u.broken++
		u.errors++
	} else {
		u.broken--
	}
}

// cachesLost notes that drives have lost the data in their caches. Only Weft can tell the user
// so, by a device that fails; as long as the device does not fail, all data must be there.
func (u *user) cachesLost() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.mayLose = true
}

// cacheLoses notes that a drive starts or stops losing what it should flush.
func (u *user) cacheLoses(loses bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if loses {
		u.losing++
		return
	}
	u.losing--
	u.mayLose = true
}

// taken notes that the device is about to be taken away by force. The old client keeps using
// it for as long as that works.
func (u *user) taken(seed uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	d := u.device
	if d == nil || d.taken || u.ended {
		return
	}
	d.taken = true
	u.ghosts = append(slices.DeleteFunc(u.ghosts, func(d *device) bool { return d.over() }), d)
	u.workers.Go(func() {
		for i := uint64(0); i < mostHaunting && !d.over(); i++ {
			u.workers.Go(func() { u.operate(d, rand.New(rand.NewPCG(seed, i))) }) // it may be held
			time.Sleep(haunting)
		}
	})
}

// A client that has lost a volume by force starts an operation this often, up to this many.
const (
	haunting     = 25 * time.Millisecond
	mostHaunting = 1000
)

func (u *user) stop() {
	u.mu.Lock()
	u.ended = true
	for _, d := range append(u.ghosts, u.device) {
		if d != nil {
			d.die()
		}
	}
	u.wakeLocked()
	u.mu.Unlock()
	u.workers.Wait()
}

// awaitLocked waits for a change; false if there is none by the deadline, if that is not zero.
// u is locked before and after.
func (u *user) awaitLocked(deadline time.Time) bool {
	changed := u.changed
	u.mu.Unlock()
	defer u.mu.Lock()
	if deadline.IsZero() {
		<-changed
		return true
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-changed:
		return true
	case <-timer.C:
		return false
	}
}

// usable waits for a device that a worker may use; nil at the end.
func (u *user) usable() *device {
	u.mu.Lock()
	defer u.mu.Unlock()
	for !u.ended {
		if d := u.currentLocked(); u.working && d != nil {
			u.busy++
			return d
		}
		u.awaitLocked(time.Time{})
	}
	return nil
}

// deviceSize is the size of the device that the user has; 0 if there is none.
func (u *user) deviceSize() block.Size {
	u.mu.Lock()
	defer u.mu.Unlock()
	if d := u.currentLocked(); d != nil {
		return d.volume.Geometry().Size
	}
	return 0
}

// currentLocked returns the device where the volume should be; nil if there is none.
func (u *user) currentLocked() *device {
	if d := u.device; u.open && d != nil && d.at.host == u.at && !d.over() {
		return d
	}
	return nil
}

func (u *user) leave() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.busy--
	u.wakeLocked()
}

// ---- work ----

// work starts to read and write.
func (u *user) work(seed uint64, workers int) {
	for i := range workers {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		u.workers.Go(func() {
			for d := u.usable(); d != nil; d = u.usable() {
				u.operate(d, random)
				u.leave()
				time.Sleep(time.Duration(random.ExpFloat64() * float64(30*time.Millisecond)))
			}
		})
	}
}

// operate does one operation. Others may be under way in the same place.
func (u *user) operate(d *device, random *rand.Rand) {
	if random.IntN(u.flushes) == 0 {
		u.submit(d, &block.IO{Op: block.OpFlush}, &write{device: d})
		return
	}
	w := &write{device: d, n: 1 + random.Int64N(longest)}
	if random.IntN(16) == 0 {
		w.n = 1 + random.Int64N(large)
	}
	end := u.reach(d)
	w.first = random.Int64N(end - w.n + 1)
	if random.IntN(3) == 0 { // around the boundary of a chunk, where others write, too
		bound := append(bounds, end)[random.IntN(len(bounds)+1)]
		w.first = max(0, min(bound+random.Int64N(6)-3, end-w.n))
	}
	if at, ok := u.hotUnit(random); ok && at < end && random.IntN(2) == 0 {
		w.first, w.n = at, 1
	}
	io := &block.IO{Off: w.first * unit, Len: w.n * unit}
	switch random.IntN(20) {
	case 0, 1:
		io.Op, io.FUA = block.OpWriteZeroes, random.IntN(4) == 0
	case 2:
		io.Op = block.OpDiscard
	case 3, 4, 5, 6, 7, 8, 9:
		io.Op, io.Data = block.OpRead, make([]byte, io.Len)
	default:
		io.Op, io.Data, io.FUA = block.OpWrite, make([]byte, io.Len), random.IntN(8) == 0
		w.number = u.number()
		for i := range w.n {
			fill(io.Data[i*unit:][:unit], w.number, w.first+i)
		}
	}
	u.submit(d, io, w)
}

// bounds are units at which chunks start, and the end of the smallest volume.
var bounds = []int64{0, 32, 64, units / 2, int64(volumeSize) / unit}

// reach is how many units a device has now. A volume never shrinks, wherever it goes.
func (u *user) reach(d *device) int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	size := d.volume.Geometry().Size
	if !d.superseded && !d.over() {
		if size < u.size {
			u.fault("the volume has %v on %s, and had %v", size, d.at.host, u.size)
		}
		if u.size > 0 && size > u.size {
			u.counts["grown"]++
		}
		u.size = max(u.size, size)
	}
	return int64(size) / unit
}

func (u *user) number() uint64 { return u.numbers.Add(1) }

// submit does an operation and waits for its outcome, or for the user's death.
func (u *user) submit(d *device, io *block.IO, w *write) {
	u.begin(io, w)
	outcome := make(chan struct{})
	io.Done = func(io *block.IO) {
		u.mu.Lock()
		if !w.over {
			u.outcome(io, w)
		}
		u.mu.Unlock()
		close(outcome)
	}
	d.at.awake()
	d.volume.Submit(io)
	select {
	case <-outcome:
	case <-d.dead:
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	w.over = true
	delete(u.out, w)
}

func (u *user) begin(io *block.IO, w *write) {
	u.mu.Lock()
	defer u.mu.Unlock()
	w.began, w.at, w.late, w.errors = u.now(), time.Now(), w.device.superseded, u.errors
	if u.broken > 0 {
		w.errors-- // an error is expected while a drive returns errors
	}
	u.out[w] = true
	if io.Op == block.OpRead || io.Op == block.OpFlush || w.late { // a late write may never land
		return
	}
	oldest := w.began
	for _, since := range u.pins {
		oldest = min(oldest, since)
	}
	for o := range u.out {
		oldest = min(oldest, o.began)
	}
	for i := range w.n {
		g := &u.units[w.first+i]
		g.Prune(oldest)
		g.Write(w.number, w.began)
	}
}

// outcome records the outcome of an operation.
func (u *user) outcome(io *block.IO, w *write) {
	d := w.device
	what := fmt.Sprintf("%v of %d units at %d on %s", io.Op, w.n, w.first, d.at.host)
	if io.Err != nil {
		u.counts[io.Op.String()+" failed"]++
		if !d.superseded && !d.taken && !u.mayLose && !d.over() && u.errors == w.errors {
			u.fault("%s, by a healthy device: %v", what, io.Err)
		}
		return
	}
	if time.Since(w.at) > hotLate {
		u.heatLocked(w)
	}
	now := u.now()
	u.counts[io.Op.String()]++
	if w.late && io.Op != block.OpFlush { // a late flush may have had nothing to do
		u.fault("%s was answered after the volume had gone elsewhere", what)
	}
	if io.Op == block.OpFlush && !d.superseded {
		for i := range int64(u.size) / unit {
			u.units[i].Flushed(w.began, now)
		}
	}
	for i := range w.n {
		if err := u.learn(io, w, i, now); err != nil {
			u.fault("%s, unit %d: %v", what, w.first+i, err)
		}
	}
}

// learn records what an operation reveals about one of its units.
func (u *user) learn(io *block.IO, w *write, i, now int64) error {
	g := u.units[w.first+i]
	switch io.Op {
	case block.OpRead:
		got, err := parse(io.Data[i*unit:][:unit], w.first+i)
		if err != nil {
			return fmt.Errorf("%w; it may hold %v", err, g.At(w.began))
		}
		return g.Read(got, w.began, now)
	case block.OpDiscard:
		g.Discarded(w.began, now)
		return nil
	}
	if io.FUA && !w.device.superseded {
		g.Durable(w.began, now)
	}
	return g.Acked(w.began, now)
}

// powerLost notes that drives may have lost all writes that were not durable, and that no write under way
// can still happen.
func (u *user) powerLost() {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.now()
	for i := range u.units {
		u.units[i].PowerLost(now)
	}
}

// fault records a violation. The test continues to its next step, and fails.
func (u *user) fault(format string, args ...any) {
	u.wrong++
	u.cluster.did("WRONG: "+string(u.name)+": "+format, args...)
}

// verify reads everything; the workers pause.
func (u *user) verify() error {
	for first, n := int64(0), int64(32); n > 0; first += n {
		u.mu.Lock()
		d := u.currentLocked()
		u.mu.Unlock()
		if d == nil {
			return errors.New("there is no device")
		}
		if n = min(n, u.reach(d)-first); n <= 0 {
			break
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			u.submit(d, &block.IO{Op: block.OpRead, Off: first * unit, Len: n * unit, Data: make([]byte, n*unit)}, &write{device: d, first: first, n: n})
		}()
		select {
		case <-ended:
		case <-time.After(patience):
			return fmt.Errorf("units %d to %d: no answer within %v", first, first+n-1, patience)
		}
	}
	return nil
}

// ---- what units hold ----

// fill makes the data that a write puts into a unit. Write 0 stands for zeroes.
func fill(p []byte, number uint64, at int64) {
	x := number*0x9e3779b97f4a7c15 ^ uint64(at)
	for i := 0; i < len(p); i += 16 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(p[i:], number)
		binary.LittleEndian.PutUint64(p[i+8:], x)
	}
}

// parse returns the number of the write that a unit's content comes from.
func parse(p []byte, at int64) (number uint64, err error) {
	number = binary.LittleEndian.Uint64(p)
	want := make([]byte, len(p))
	if number != 0 {
		fill(want, number, at)
	}
	for i := 0; i < len(p); i += int(block.SectorSize) {
		if s := p[i : i+int(block.SectorSize)]; !slices.Equal(s, want[i:i+len(s)]) {
			return 0, fmt.Errorf("it holds write %d in its first sector, and %d in sector %d", number, binary.LittleEndian.Uint64(s), i/int(block.SectorSize))
		}
	}
	return number, nil
}

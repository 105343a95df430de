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
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
)

const (
	volumeSize = 8 * block.MiB
	unit       = 4096 // what the user writes at once, and remembers
	units      = int64(volumeSize) / unit
	longest    = 8 // units of one operation
)

// user reads and writes the volume, wherever it is attached, and knows what each
// unit may hold. Whatever else it is given is a failure of the test.
//
// Each write has a number. What it writes to a unit is made of the number and the
// unit's place, so that what is read tells which write it is of, wholly.
type user struct {
	cluster *cluster
	workers sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced
	units   [units]state
	numbers uint64
	at      string // the node that should have the volume
	device  *device
	open    bool // or the user has closed the device
	working bool // or the workers pause
	ended   bool
	busy    int // workers that are at it
	broken  int // drives that give errors
	errors  int // how often one began to
	wrong   int
	counts  map[string]int
}

// state is what is known of a unit.
type state struct {
	may    []uint64 // the writes of which it may hold the data; 0: zeroes
	busy   bool
	device *device // that wrote to it, or read it, last
	read   bool    // by that one, before it wrote anything
}

// device is a volume on a client, as one export of it.
type device struct {
	user   *user
	at     *machine
	volume block.Device
	name   block.VolumeName

	dead       chan struct{} // the client's process has died
	deadOnce   sync.Once
	done       chan struct{} // it was closed
	doneOnce   sync.Once
	superseded bool // under user.mu: there was a newer one
}

func newUser(c *cluster) *user {
	u := &user{cluster: c, changed: make(chan struct{}), open: true, working: true, counts: map[string]int{}}
	for i := range u.units {
		u.units[i].may = []uint64{0}
	}
	return u
}

func (u *user) wakeLocked() {
	close(u.changed)
	u.changed = make(chan struct{})
}

// ---- the device comes and goes ----

// found is called when a client has made a device.
func (u *user) found(at *machine, volume block.Device, name block.VolumeName) *device {
	d := &device{user: u, at: at, volume: volume, name: name, dead: make(chan struct{}), done: make(chan struct{})}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.device != nil {
		u.device.superseded = true
	}
	u.device = d
	u.counts["device made"]++
	u.wakeLocked()
	return d
}

func (d *device) Path() string          { return "/dev/weft/" + string(d.name) }
func (d *device) Done() <-chan struct{} { return d.done }

func (d *device) Close(_ context.Context, force bool) error {
	d.user.mu.Lock()
	open := d.user.open && d.user.device == d
	d.user.mu.Unlock()
	if open && !force && !d.over() {
		return fmt.Errorf("%w: the user has it open", blockdev.ErrBusy)
	}
	d.doneOnce.Do(func() { close(d.done) })
	return nil
}

// over reports whether nobody can use the device any more.
func (d *device) over() bool {
	select {
	case <-d.dead:
	case <-d.done:
	default:
		return false
	}
	return true
}

// died is called when a client's process dies: what it was about to acknowledge
// is acknowledged to nobody.
func (u *user) died(at *machine) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.device != nil && u.device.at == at {
		u.device.deadOnce.Do(func() { close(u.device.dead) })
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

// pause has the workers end what they are at, or returns false after some time.
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

// close has the user close the device, so that the volume can be detached. The
// workers pause.
func (u *user) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open = false
}

// resume has the user open the device, when there is one, and go on.
func (u *user) resume() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open, u.working = true, true
	u.wakeLocked()
}

// medium says that a drive gives errors now, or does no longer.
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

func (u *user) stop() {
	u.mu.Lock()
	u.ended = true
	if u.device != nil {
		u.device.deadOnce.Do(func() { close(u.device.dead) })
	}
	u.wakeLocked()
	u.mu.Unlock()
	u.workers.Wait()
}

// awaitLocked waits for a change; false if there is none until a time that is not
// zero. u is locked before and after.
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

// usable waits for a device that a worker may work with; nil at the end.
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

func (u *user) hasDevice() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.currentLocked() != nil
}

// currentLocked is the device where the volume should be; nil if there is none.
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

// work begins to read and write.
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

// operate does one operation.
func (u *user) operate(d *device, random *rand.Rand) {
	if random.IntN(20) == 0 {
		u.submit(d, &block.IO{Op: block.OpFlush}, 0, 0, 0)
		return
	}
	n := 1 + random.Int64N(longest)
	first := random.Int64N(units - n + 1)
	if !u.take(first, n) {
		return
	}
	io := &block.IO{Off: first * unit, Len: n * unit}
	var number uint64
	switch random.IntN(10) {
	case 0:
		io.Op = block.OpWriteZeroes
	case 1, 2, 3, 4:
		io.Op, io.Data = block.OpRead, make([]byte, n*unit)
	default:
		io.Op, io.Data, io.FUA = block.OpWrite, make([]byte, n*unit), random.IntN(8) == 0
		number = u.number()
		for i := range n {
			fill(io.Data[i*unit:][:unit], number, first+i)
		}
	}
	u.submit(d, io, first, n, number)
}

func (u *user) number() uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.numbers++
	return u.numbers
}

// take reserves units, unless one of them is under way.
func (u *user) take(first, n int64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if slices.ContainsFunc(u.units[first:first+n], func(s state) bool { return s.busy }) {
		return false
	}
	for i := range n {
		u.units[first+i].busy = true
	}
	return true
}

// submit does an operation and waits for its outcome, or for the user's death.
func (u *user) submit(d *device, io *block.IO, first, n int64, number uint64) {
	u.mu.Lock()
	late := d.superseded
	// An error is in its place if a drive gave any meanwhile.
	errors := u.errors
	if u.broken > 0 {
		errors--
	}
	if io.Op == block.OpWrite || io.Op == block.OpWriteZeroes {
		for i := range n {
			s := &u.units[first+i]
			s.see(d)
			s.read = false
			s.may = append(s.may, number)
		}
	}
	u.mu.Unlock()
	outcome := make(chan struct{})
	over := false // under u.mu: nobody waits any more
	io.Done = func(io *block.IO) {
		u.mu.Lock()
		if !over {
			over = true
			u.outcome(d, io, first, n, number, late, errors)
		}
		u.mu.Unlock()
		close(outcome)
	}
	d.volume.Submit(io)
	select {
	case <-outcome:
	case <-d.dead:
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	over = true
	for i := range n {
		u.units[first+i].busy = false
	}
}

// see begins what is known through a device.
func (s *state) see(d *device) {
	if s.device != d {
		s.device, s.read = d, false
	}
}

// outcome takes note of what an operation gave; late means that it was begun when
// there was a newer device already, and errors is how often a drive had begun to
// give errors by then.
func (u *user) outcome(d *device, io *block.IO, first, n int64, number uint64, late bool, errors int) {
	if io.Err != nil {
		u.counts[io.Op.String()+" failed"]++
		if !d.superseded && !d.over() && u.errors == errors {
			u.fault("%v of %d units at %d by a healthy device of %s: %v", io.Op, n, first, d.at.host, io.Err)
		}
		return
	}
	u.counts[io.Op.String()]++
	if late {
		u.fault("%v of %d units at %d was answered on %s after the volume had gone elsewhere", io.Op, n, first, d.at.host)
	}
	for i := range n {
		s := &u.units[first+i]
		switch {
		case io.Op == block.OpRead:
			got, err := parse(io.Data[i*unit:][:unit], first+i)
			if err != nil {
				u.fault("unit %d, read on %s: %v; it may hold %v", first+i, d.at.host, err, s.may)
			} else if !d.superseded {
				s.saw(u, d, first+i, got)
			}
		case !d.superseded || s.device == d:
			s.may = []uint64{number}
		case s.read && s.device != d && !slices.Contains(s.may, number):
			// It was acknowledged on the old device, after the new one had read
			// something else, and had not written.
			u.fault("unit %d: write %d was acknowledged on %s, but is not there; it holds %v", first+i, number, d.at.host, s.may)
		}
	}
}

// saw pins what a unit holds: what was read once is there until it is overwritten.
func (s *state) saw(u *user, d *device, at int64, got uint64) {
	if !slices.Contains(s.may, got) {
		u.fault("unit %d, read on %s, holds write %d; it may hold %v", at, d.at.host, got, s.may)
	}
	if s.device != d {
		s.device, s.read = d, true
	}
	s.may = []uint64{got}
}

// fault notes what may never happen. The test goes on to its next step, and fails.
func (u *user) fault(format string, args ...any) {
	u.wrong++
	u.cluster.did("WRONG: "+format, args...)
}

// verify reads everything; the workers pause.
func (u *user) verify() error {
	for first := int64(0); first < units; first += 32 {
		u.mu.Lock()
		d := u.currentLocked()
		u.mu.Unlock()
		if d == nil {
			return errors.New("there is no device")
		}
		if !u.take(first, 32) {
			return errors.New("the workers do not pause")
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			u.submit(d, &block.IO{Op: block.OpRead, Off: first * unit, Len: 32 * unit, Data: make([]byte, 32*unit)}, first, 32, 0)
		}()
		select {
		case <-ended:
		case <-time.After(patience):
			return fmt.Errorf("units %d to %d: no answer within %v", first, first+31, patience)
		}
	}
	return nil
}

// ---- what units hold ----

// fill makes what a write leaves in a unit. Write 0 leaves zeroes.
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

// parse tells which write left what a unit holds.
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

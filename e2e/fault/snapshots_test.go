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
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/engine/history"
	"weft.dev/weft/target/treecheck"
)

// archive takes snapshots of the volumes of a life, alone and in groups, makes clones of snapshots
// that other users work with, and deletes all of them in any order, at any time. It knows what each
// snapshot may hold:
//
//   - Of the moments between the request and the answer that it is ready, there is one at which each
//     unit may have held what the snapshot has of it. It is the same for all snapshots of a group.
//   - All copies are equal, and whoever reads the snapshot later reads the same.
//
// A clone's user begins with what its snapshot holds. From then on the same rules hold for it as for
// any volume. The writes of all users have different numbers, so none is taken for another's.
type archive struct {
	cluster *cluster
	api     pb.ManagerClient
	hangUp  func() error
	ended   context.Context //nolint:containedctx // of all goroutines
	stop    context.CancelFunc
	work    sync.WaitGroup

	mu      sync.Mutex
	next    int
	held    bool
	ending  bool                 // nothing new is begun, but what is there is deleted
	busy    map[string]time.Time // what is under way, since when
	lost    int                  // how often the store was
	volumes map[block.VolumeName]*tended
	taken   map[block.VolumeName]*picture
	shown   map[string]*export // snapshots that hosts have, by name and host, the newest
	counts  map[string]int
}

// tended is a volume that the archive attaches to one host or another.
type tended struct {
	user  *user
	node  string // that shall have it; empty: none
	whole bool   // it has had all its copies: only now its user works with it
	gone  bool
	// sealed is what it holds, once it is sealed: then hosts read it as they read snapshots. nil: it is not.
	sealed *picture
	turn   chan struct{} // held by who moves or deletes it
}

// picture is a snapshot that is complete, or a volume that is sealed.
type picture struct {
	name     block.VolumeName
	shot     *shot
	user     *user // of its origin
	units    []history.Unit
	numbers  []uint64 // what it holds, once it was read
	deleting bool
}

// shot is snapshots that were taken at the same moment.
type shot struct {
	asked, ready int64
	pictures     []*picture
}

const (
	longestTry   = 4 * time.Minute
	mostPictures = 8
	mostClones   = 3
	second       = "db2" // a second volume, which is there all the time
)

// roomForSnapshots gives a cluster drives of ten extents. With seven, those of volumes that are not thin, of
// what they were before they went back, and of their trees can take all: a leg of a clone then waits for space.
func (c *cluster) roomForSnapshots() {
	for _, h := range c.targets {
		if err := os.Truncate(h.platter.file.Name(), 11*int64(block.ExtentSize)); err != nil {
			panic(err)
		}
	}
}

func (c *cluster) newArchive(seed uint64) *archive {
	k := &archive{
		cluster: c, busy: map[string]time.Time{}, volumes: map[block.VolumeName]*tended{}, taken: map[block.VolumeName]*picture{},
		shown: map[string]*export{}, counts: map[string]int{},
	}
	k.ended, k.stop = context.WithCancel(context.Background())
	var options []grpc.DialOption
	if c.lieOfShots != nil {
		options = append(options, grpc.WithUnaryInterceptor(c.lieOfShots))
	}
	conn := c.dialManager(c.network.boot("archive"), options...)
	k.api, k.hangUp = pb.NewManagerClient(conn), conn.Close
	c.archive = k
	c.users = owners{c}
	c.eventually("create "+second, func(ctx context.Context) error {
		v, err := c.operator.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: second, SizeBytes: uint64(volumeSize), Copies: uint32(c.layout.Copies), Stripes: 1, Thin: c.thin})
		if err == nil && v.GetState() != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.GetState())
		}
		return err
	})
	random := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, n)) }
	k.keep(second, make([]uint64, units), seed)
	k.attach(k.volumes[second], c.clients[len(c.clients)-1].name)
	takes, tends, looks := random(60), random(61), random(62)
	k.work.Go(func() { k.repeat(takes, k.take) })
	k.work.Go(func() { k.repeat(tends, k.tend) })
	k.work.Go(func() { k.repeat(looks, k.look) })
	return k
}

// every does something with each user. There may be none but one.
func (c *cluster) every(do func(*user)) {
	all := []*user{c.user}
	if k := c.archive; k != nil {
		k.mu.Lock()
		for _, name := range slices.Sorted(maps.Keys(k.volumes)) {
			all = append(all, k.volumes[name].user)
		}
		k.mu.Unlock()
	}
	for _, u := range all {
		do(u)
	}
}

// owners are the users of all volumes.
type owners struct{ cluster *cluster }

func (o owners) nodes() []string { return o.cluster.user.nodes() }

func (o owners) found(at *machine, volume block.Device, name block.VolumeName) userspace.Exported {
	if o.cluster.shows != nil {
		volume = o.cluster.shows(volume, name)
	}
	if name == volumeName {
		return o.cluster.user.found(at, volume, name)
	}
	k := o.cluster.archive
	k.mu.Lock()
	if v := k.volumes[name]; v != nil && v.sealed == nil {
		k.mu.Unlock()
		return v.user.found(at, volume, name)
	}
	defer k.mu.Unlock()
	d := newExport(at, volume, name)
	k.shown[string(name)+" "+at.host] = d
	return d
}

func (o owners) died(at *machine) {
	o.cluster.every(func(u *user) { u.died(at) })
	k := o.cluster.archive
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range k.shown {
		if d.at == at {
			d.die()
		}
	}
}

// ---- what goes on ----

// repeat does something now and then.
func (k *archive) repeat(random *rand.Rand, do func(*rand.Rand)) {
	for k.ended.Err() == nil {
		k.sleep(time.Duration(random.ExpFloat64() * float64(k.cluster.shotsEvery)))
		k.mu.Lock()
		held := k.held || k.ending
		k.mu.Unlock()
		if !held {
			do(random)
		}
	}
}

func (k *archive) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-k.ended.Done():
	}
}

// begun notes that something is under way; the result notes its end. It does not begin while all rests.
func (k *archive) begun(format string, args ...any) (end func(), ok bool) {
	what := fmt.Sprintf(format, args...)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held {
		return nil, false
	}
	k.busy[what] = time.Now()
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.busy, what)
	}, true
}

// rest waits until nothing is under way.
func (k *archive) rest() {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.held = true
	k.mu.Unlock()
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		k.mu.Lock()
		stuck := slices.Sorted(maps.Keys(k.busy))
		k.mu.Unlock()
		if len(stuck) == 0 {
			break
		}
		if time.Now().After(deadline) {
			k.cluster.t.Fatalf("%v: not within %v\n%s", stuck, patience, k.explain())
		}
	}
}

// attachAll attaches what is detached: a clone of a snapshot that lacks copies gets them while a host has it.
func (k *archive) attachAll() {
	if k == nil {
		return
	}
	k.mu.Lock()
	var all []*tended
	for _, name := range slices.Sorted(maps.Keys(k.volumes)) {
		if v := k.volumes[name]; v.node == "" && v.sealed == nil {
			all = append(all, v)
		}
	}
	k.mu.Unlock()
	for _, v := range all {
		v.turn <- struct{}{}
		k.attach(v, k.cluster.clients[0].name)
		<-v.turn
	}
}

func (k *archive) goOn() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.held = false
}

// close ends everything.
func (k *archive) close() {
	if k == nil {
		return
	}
	k.stop()
	k.work.Wait()
	if err := k.hangUp(); err != nil {
		k.cluster.t.Errorf("%v", err)
	}
}

func (k *archive) wrong(format string, args ...any) {
	k.cluster.user.mu.Lock()
	defer k.cluster.user.mu.Unlock()
	k.cluster.user.fault(format, args...)
}

func (k *archive) count(what string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.counts[what]++
}

func (k *archive) counted() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return fmt.Sprint(k.counts)
}

// until repeats something until it succeeds, or all ends; false if that is so. A refusal, which
// repeating does not change, ends it too.
func (k *archive) until(every time.Duration, try func(ctx context.Context) (bool, error)) bool {
	deadline := time.Now().Add(longestTry)
	for k.ended.Err() == nil {
		ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
		done, err := try(ctx)
		cancel()
		if done && err == nil {
			return true
		}
		if time.Now().After(deadline) {
			k.wrong("what is under way has not ended within %v: %v\n%s", longestTry, err, k.explain())
			return false
		}
		k.sleep(every)
	}
	return false
}

// refuses reports whether an error is a manager's decision.
func refuses(err error) bool {
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.NotFound, codes.AlreadyExists, codes.ResourceExhausted, codes.InvalidArgument, codes.Unimplemented:
		return true
	}
	return false
}

func (k *archive) volume(ctx context.Context, name block.VolumeName) (*pb.Volume, error) {
	return k.api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: string(name)})
}

// ---- snapshots ----

// take takes snapshots of some volumes at one moment.
func (k *archive) take(random *rand.Rand) {
	c := k.cluster
	var all []*user
	c.every(func(u *user) {
		if random.IntN(2) == 0 {
			all = append(all, u)
		}
	})
	k.mu.Lock()
	full := len(k.taken) >= mostPictures
	k.mu.Unlock()
	if len(all) == 0 || full {
		return
	}
	k.shoot(all, random)
}

// shoot takes snapshots of the volumes of some users at one moment; nil if it did not begin, or was refused.
func (k *archive) shoot(all []*user, random *rand.Rand) *shot {
	c := k.cluster
	k.mu.Lock()
	k.next++
	name, lost := fmt.Sprintf("s%d", k.next), k.lost
	k.mu.Unlock()
	end, ok := k.begun("take snapshots %s", name)
	if !ok {
		return nil
	}
	defer end()
	s := &shot{}
	for _, u := range all {
		s.pictures = append(s.pictures, &picture{name: u.name.Snapshot(name), shot: s, user: u})
		defer u.pin(s)()
	}
	s.asked = c.user.now()
	c.did("snapshots %s are asked for, of %v", name, all)
	if err := k.ask(s, name); err != nil {
		k.count("refused")
		c.did("snapshots %s: %v", name, err)
		return nil
	}
	k.await(s, lost, random)
	return s
}

// String is the name of the user's volume.
func (u *user) String() string { return string(u.name) }

// pin keeps what units hold from now on from being forgotten.
func (u *user) pin(s *shot) (unpin func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.pins[s] = u.moments.Load()
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		delete(u.pins, s)
	}
}

// ask asks for snapshots until that is acknowledged or refused.
func (k *archive) ask(s *shot, name string) (refused error) {
	in := &pb.CreateSnapshotsRequest{}
	for _, p := range s.pictures {
		in.Snapshots = append(in.Snapshots, &pb.NewSnapshot{Volume: string(p.user.name), Name: name})
	}
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		_, err := k.api.CreateSnapshots(ctx, in)
		if refuses(err) {
			refused = err
			return true, nil
		}
		return true, err
	})
	return refused
}

// await waits until snapshots are complete, or have failed.
func (k *archive) await(s *shot, lost int, random *rand.Rand) {
	c := k.cluster
	ready, failed := map[*picture]bool{}, map[*picture]string{}
	var aborted *picture
	mayAbort := random.IntN(12) == 0
	for _, p := range s.pictures {
		k.until(20*time.Millisecond, func(ctx context.Context) (bool, error) {
			v, err := k.volume(ctx, p.name)
			switch {
			case status.Code(err) == codes.NotFound:
				failed[p] = k.reason(ctx, p.name)
				return failed[p] != "", nil
			case err != nil:
				return false, err
			case v.GetState() == pb.VolumeState_VOLUME_STATE_READY:
				ready[p] = true
				return true, nil
			case v.GetState() == pb.VolumeState_VOLUME_STATE_DELETING:
				failed[p] = "it is being deleted: " + v.GetFailed()
				if v.GetFailed() == "" && p != aborted {
					failed[p] = "" // the store was lost
				}
				return true, nil
			case mayAbort && aborted == nil && random.IntN(20) == 0:
				aborted = p
				_, err = k.api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: string(p.name)})
				c.did("%s is deleted while it is taken: %v", p.name, err)
			}
			return false, err
		})
	}
	for p := range ready {
		k.toldOfLoss(p.user)
	}
	if k.ended.Err() != nil {
		return
	}
	s.ready = c.user.now()
	k.mu.Lock()
	store := k.lost
	k.mu.Unlock()
	for p, why := range failed {
		c.did("%s is not taken: %s", p.name, why)
		if why == "" && p != aborted && store == lost {
			k.wrong("%s is not taken, and there is no reason", p.name)
		}
		if len(ready) > 0 && store == lost && aborted == nil {
			k.wrong("%s is not taken, and others of its group are", p.name)
		}
	}
	for _, p := range s.pictures {
		if !ready[p] {
			k.count("failed")
			continue
		}
		p.remember()
		k.count("taken")
		c.did("%s is ready", p.name)
		k.mu.Lock()
		k.taken[p.name] = p
		k.mu.Unlock()
	}
}

// remember keeps what the units of its volume may have held.
func (p *picture) remember() {
	p.user.mu.Lock()
	defer p.user.mu.Unlock()
	for _, u := range p.user.units {
		p.units = append(p.units, slices.Clone(u))
	}
}

// toldOfLoss notes that a snapshot may lack unflushed writes, if drives have lost their caches and the manager
// has said that writes are lost. No host has had a new device since.
func (k *archive) toldOfLoss(u *user) {
	u.mu.Lock()
	mayLose := u.mayLose
	u.mu.Unlock()
	if !mayLose {
		return
	}
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		newest, err := k.newestOf(ctx, u.name)
		if newest["volume.writes-lost"] > newest["volume.attached"] {
			u.powerLost()
			k.count("lacks what was lost")
		}
		return err == nil, err
	})
}

// reason is why a snapshot that is gone was not taken, by the events.
func (k *archive) reason(ctx context.Context, name block.VolumeName) string {
	events, err := k.api.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + string(name), Limit: 100})
	if err != nil {
		return ""
	}
	for _, e := range events.GetEvents() {
		if e.GetKind() == "snapshot.failed" || e.GetKind() == "volume.deleting" {
			return e.GetText()
		}
	}
	return fmt.Sprintf("nothing is known of it, in %d events", len(events.GetEvents()))
}

// saw notes what a snapshot holds.
func (k *archive) saw(p *picture, numbers []uint64, how string) {
	k.mu.Lock()
	was, s := p.numbers, p.shot
	if was == nil {
		p.numbers = numbers
	}
	k.counts["reads "+how]++
	k.mu.Unlock()
	for i, n := range was {
		if i < len(numbers) && numbers[i] != n {
			k.wrong("%s, read %s, holds write %d in unit %d, and held %d", p.name, how, numbers[i], i, n)
			return
		}
	}
	if was != nil {
		return
	}
	var held [][]history.Span
	for _, p := range s.pictures {
		for i, n := range p.numbers {
			spans := p.units[i].Held(n, s.asked, s.ready)
			if len(spans) == 0 {
				k.wrong("%s, asked for at %d and ready at %d, read %s, holds write %d in unit %d; it may hold %v", p.name, s.asked, s.ready, how, n, i, p.units[i].At(s.asked))
				return
			}
			held = append(held, spans)
		}
	}
	if k.named(p.name) == nil { // it is a sealed volume, and this is what snapshots of it hold
		p.user.reads(numbers)
	}
	if _, ok := history.Common(held); !ok {
		k.wrong("%s: there is no moment from %d to %d at which it, and the others of its group, may have held what they do%s", p.name, s.asked, s.ready, s.latest())
	}
}

// latest tells which unit begins last, and which ends first.
func (s *shot) latest() string {
	from, to, first, last := int64(0), int64(1<<62), "", ""
	for _, p := range s.pictures {
		for i, n := range p.numbers {
			spans := p.units[i].Held(n, s.asked, s.ready)
			a, b := spans[0].From, spans[len(spans)-1].To
			if a > from {
				from, last = a, fmt.Sprintf("%s has write %d in unit %d, begun at %d", p.name, n, i, a)
			}
			if b < to {
				to, first = b, fmt.Sprintf("%s has write %d in unit %d, replaced at %d", p.name, n, i, b)
			}
		}
	}
	return fmt.Sprintf(": %s; %s", last, first)
}

// pick returns a snapshot that is complete and not being deleted; nil if there is none.
func (k *archive) pick(random *rand.Rand, is func(*picture) bool) *picture {
	return anyOf(random, slices.DeleteFunc(k.pictures(), func(p *picture) bool { return k.named(p.name) == nil || !is(p) }))
}

// anyOf is one of some; the zero value if there is none.
func anyOf[T any](random *rand.Rand, all []T) (one T) {
	if len(all) > 0 {
		one = all[random.IntN(len(all))]
	}
	return one
}

// pictures are all snapshots that are complete, and all sealed volumes, but those that are being deleted.
func (k *archive) pictures() (all []*picture) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(k.taken)) {
		all = append(all, k.taken[name])
	}
	for _, name := range slices.Sorted(maps.Keys(k.volumes)) {
		if p := k.volumes[name].sealed; p != nil {
			all = append(all, p)
		}
	}
	return slices.DeleteFunc(all, func(p *picture) bool { return p.deleting })
}

// look attaches a snapshot, or a sealed volume, to some hosts at once, which read it.
func (k *archive) look(random *rand.Rand) {
	p := anyOf(random, k.pictures())
	if p == nil {
		return
	}
	var hosts sync.WaitGroup
	first := random.IntN(len(k.cluster.clients))
	for i := range 1 + random.IntN(len(k.cluster.clients)) {
		host := k.cluster.clients[(first+i)%len(k.cluster.clients)].name
		hosts.Go(func() { k.lookOn(p, host) })
	}
	hosts.Wait()
}

func (k *archive) lookOn(p *picture, host string) {
	end, ok := k.begun("look at %s on %s", p.name, host)
	if !ok {
		return
	}
	defer end()
	patient := time.Now().Add(20 * time.Second)
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		_, err := k.api.Attach(ctx, &pb.AttachRequest{Volume: string(p.name), Node: host})
		if refuses(err) || time.Now().After(patient) {
			return true, nil
		}
		return err == nil && k.export(p.name, host) != nil, err
	})
	if d := k.export(p.name, host); d != nil {
		if numbers, err := k.readAll(p, d); err != nil {
			k.cluster.did("%s on %s: %v", p.name, host, err)
		} else {
			k.saw(p, numbers, "by a host")
			k.triesToWrite(p, d)
		}
	}
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		_, err := k.api.Detach(ctx, &pb.DetachRequest{Volume: string(p.name), Node: host})
		if err != nil && !refuses(err) {
			return false, err
		}
		return k.detachedFrom(ctx, p.name, host)
	})
}

// export is the device of a snapshot on a host; nil if it has none.
func (k *archive) export(name block.VolumeName, host string) *export {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.shown[string(name)+" "+host]; d != nil && !d.over() {
		return d
	}
	return nil
}

// readAll reads a snapshot through a device.
func (k *archive) readAll(p *picture, d *export) (numbers []uint64, err error) {
	size := int64(d.volume.Geometry().Size)
	for at := int64(0); at < size; {
		n := min(32*unit, size-at)
		data, done := make([]byte, n), make(chan error, 1)
		d.at.awake()
		d.volume.Submit(&block.IO{Op: block.OpRead, Off: at, Len: n, Data: data, Done: func(io *block.IO) { done <- io.Err }})
		select {
		case err := <-done:
			if err != nil {
				return nil, err
			}
		case <-d.dead:
			return nil, errors.New("the host has died")
		case <-time.After(10 * time.Second):
			return nil, errors.New("no answer within 10 s")
		}
		for i := int64(0); i < n; i += unit {
			number, err := parse(data[i:][:unit], (at+i)/unit)
			if err != nil {
				k.wrong("%s, read by %s, unit %d: %v", p.name, d.at.host, (at+i)/unit, err)
			}
			numbers = append(numbers, number)
		}
		at += n
	}
	return numbers, nil
}

// ---- clones, and what is deleted ----

// tend makes, moves or deletes something.
func (k *archive) tend(random *rand.Rand) {
	switch random.IntN(12) {
	case 0, 1:
		k.clone(random)
	case 2, 3:
		k.move(random)
	case 4:
		k.deleteClone(random)
	case 5, 6:
		k.restore(random)
	case 7:
		k.flatten(random)
	case 8:
		k.seal(random)
	default:
		if p := k.pick(random, func(*picture) bool { return true }); p != nil {
			k.deletePicture(p)
		}
	}
}

// anyClone returns one of the clones; nil if there is none.
func (k *archive) anyClone(random *rand.Rand) *tended {
	k.mu.Lock()
	defer k.mu.Unlock()
	name := anyOf(random, slices.DeleteFunc(slices.Sorted(maps.Keys(k.volumes)), func(n block.VolumeName) bool { return n == second }))
	return k.volumes[name]
}

// flatten has a clone made independent of what it began as, and does not wait for it.
func (k *archive) flatten(random *rand.Rand) {
	v := k.anyClone(random)
	if v == nil {
		return
	}
	name := v.user.name
	end, ok := k.begun("flatten %s", name)
	if !ok {
		return
	}
	defer end()
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		_, err := k.api.FlattenVolume(ctx, &pb.FlattenVolumeRequest{Volume: string(name)})
		if refuses(err) {
			k.cluster.did("%s: %v", name, err)
			return true, nil
		}
		if err == nil {
			k.cluster.did("%s is to be flattened", name)
			k.count("flattened")
		}
		return true, err
	})
}

// flat waits until the clones that were to be flattened are, and finds one whose layers are over others.
func (k *archive) flat() {
	k.cluster.t.Helper()
	k.cluster.eventually("all is flattened that is to be", func(ctx context.Context) error {
		list, err := k.api.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true})
		if err != nil {
			return err
		}
		for _, v := range list.GetVolumes() {
			if v.GetFlattening() == nil {
				continue
			}
			if v.GetState() == pb.VolumeState_VOLUME_STATE_READY && v.GetFlattening().GetEnded() == nil {
				return fmt.Errorf("%s is not flat: %v", v.GetName(), v.GetFlattening())
			}
			if err := k.cluster.needsNothing(v, list.GetVolumes()); err != nil {
				return err
			}
		}
		return nil
	})
}

// needsNothing finds a layer of a volume that is over one of another volume.
func (c *cluster) needsNothing(v *pb.Volume, all []*pb.Volume) error {
	own := map[string]bool{}
	for _, x := range all {
		for _, l := range x.GetLegs() {
			if x.GetId() == v.GetId() || x.GetSnapshot().GetVolumeId() == v.GetId() {
				own[l.GetId()] = true
			}
		}
	}
	for _, h := range c.targets {
		trees, err := treesOn(h.platter.file)
		if err != nil {
			return err
		}
		for _, t := range trees {
			layers := map[uint32]treecheck.Layer{}
			for _, l := range t.Layers {
				layers[l.ID] = l
			}
			for _, leg := range v.GetLegs() {
				for _, l := range t.Layers {
					if l.Object.String() != leg.GetId() || leg.GetState() == pb.LegState_LEG_STATE_DELETING {
						continue
					}
					for at := l; at.Parent != 0; at = layers[at.Parent] {
						if p := layers[at.Parent]; !own[p.Object.String()] && p.State != "doomed" {
							return fmt.Errorf("%s: %s is flattened, and its layer %d is over %d of leg %v", h.name, v.GetName(), l.ID, p.ID, p.Object)
						}
					}
				}
			}
		}
	}
	return nil
}

func (k *archive) deletePicture(p *picture) {
	end, ok := k.begun("delete %s", p.name)
	if !ok {
		return
	}
	defer end()
	k.mu.Lock()
	p.deleting = true
	k.mu.Unlock()
	k.cluster.did("%s is deleted", p.name)
	if k.remove(p.name) {
		k.cluster.did("%s is gone", p.name)
		k.count("deleted")
		k.mu.Lock()
		delete(k.taken, p.name)
		k.mu.Unlock()
	}
}

// remove deletes a volume.
func (k *archive) remove(name block.VolumeName) bool {
	return k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		if _, err := k.api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: string(name)}); err != nil {
			return false, err
		}
		_, err := k.volume(ctx, name)
		return status.Code(err) == codes.NotFound, nil
	})
}

// clone makes a clone of a snapshot whose content is known.
func (k *archive) clone(random *rand.Rand) {
	p := k.pick(random, func(p *picture) bool { return p.numbers != nil })
	k.mu.Lock()
	k.next++
	name, full := block.VolumeName(fmt.Sprintf("k%d", k.next)), len(k.volumes) > mostClones
	k.mu.Unlock()
	if p == nil || full {
		return
	}
	end, ok := k.begun("clone %s as %s", p.name, name)
	if !ok {
		return
	}
	defer end()
	in := &pb.CreateVolumeRequest{Name: string(name), From: string(p.name)}
	if random.IntN(4) == 0 {
		in.SizeBytes = uint64(mostSize)
	}
	k.cluster.did("%s is to be a clone of %s", name, p.name)
	created := false
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		v, err := k.api.CreateVolume(ctx, in)
		if refuses(err) {
			k.cluster.did("%s: %v", name, err)
			return true, nil
		}
		created = v.GetState() == pb.VolumeState_VOLUME_STATE_READY
		return created, err
	})
	if !created {
		return
	}
	k.count("cloned")
	k.cluster.did("%s is a clone", name)
	k.keep(name, p.numbers, random.Uint64())
}

// keep gives a volume a user.
func (k *archive) keep(name block.VolumeName, numbers []uint64, seed uint64) {
	holds := make([]uint64, units)
	copy(holds, numbers)
	u := k.cluster.user.beside(name, holds)
	k.mu.Lock()
	k.volumes[name] = &tended{user: u, turn: make(chan struct{}, 1)}
	k.mu.Unlock()
	u.close()
	u.work(seed, 2)
}

// move detaches a volume, attaches it, or does one after the other.
func (k *archive) move(random *rand.Rand) {
	k.mu.Lock()
	all := slices.Sorted(maps.Keys(k.volumes))
	v := k.volumes[all[random.IntN(len(all))]]
	k.mu.Unlock()
	end, ok := k.begun("move %s", v.user.name)
	if !ok {
		return
	}
	defer end()
	v.turn <- struct{}{}
	defer func() { <-v.turn }()
	if v.gone {
		return
	}
	if v.sealed != nil {
		k.asksToWrite(v, random)
		return
	}
	if v.node != "" {
		k.detach(v, random)
	}
	if v.node == "" && random.IntN(4) > 0 {
		k.attach(v, k.cluster.clients[random.IntN(len(k.cluster.clients))].name)
	}
}

func (k *archive) attach(v *tended, host string) {
	k.cluster.did("%s goes to %s", v.user.name, host)
	k.mu.Lock()
	v.node = host
	k.mu.Unlock()
	v.user.moveTo(host)
	patient := time.Now().Add(20 * time.Second)
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		a, err := k.api.Attach(ctx, &pb.AttachRequest{Volume: string(v.user.name), Node: host})
		if err != nil && k.lost > 0 && time.Now().After(patient) {
			k.cluster.choose(ctx, v.user.name)
		}
		return a.GetState() == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED, err
	})
	if v.whole || k.becomesWhole(v) {
		v.user.resume()
	}
}

// becomesWhole reports whether a clone has all its copies. If its only one lost power in a write, there
// would be no other for what is torn.
func (k *archive) becomesWhole(v *tended) bool {
	ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
	defer cancel()
	now, err := k.volume(ctx, v.user.name)
	v.whole = err == nil && now.GetHealth() == pb.Health_HEALTH_HEALTHY
	return v.whole
}

// detach detaches a volume; by force if it cannot be had in good order.
func (k *archive) detach(v *tended, random *rand.Rand) {
	host := v.node
	force := !v.user.pause(10 * time.Second)
	if !force {
		v.user.close()
	}
	k.cluster.did("%s leaves %s", v.user.name, host)
	patient := time.Now().Add(15 * time.Second)
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		if force = force || time.Now().After(patient); force {
			v.user.taken(random.Uint64())
		}
		_, err := k.api.Detach(ctx, &pb.DetachRequest{Volume: string(v.user.name), Node: host, Force: force})
		if err != nil && !refuses(err) {
			return false, err
		}
		now, err := k.volume(ctx, v.user.name)
		return now.GetAttachment() == nil, err
	})
	k.mu.Lock()
	v.node = ""
	k.mu.Unlock()
	k.cluster.did("%s is detached, by force: %v", v.user.name, force)
}

func (k *archive) deleteClone(random *rand.Rand) {
	if v := k.anyClone(random); v != nil {
		k.deleteKept(v, random)
	}
}

func (k *archive) deleteKept(v *tended, random *rand.Rand) {
	end, ok := k.begun("delete %s", v.user.name)
	if !ok {
		return
	}
	defer end()
	v.turn <- struct{}{}
	defer func() { <-v.turn }()
	if v.node != "" {
		k.detach(v, random)
	}
	v.gone = true
	if v.sealed != nil {
		k.mu.Lock()
		v.sealed.deleting = true
		k.mu.Unlock()
	}
	k.cluster.did("%s is deleted", v.user.name)
	if k.remove(v.user.name) {
		k.count("clones deleted")
		k.mu.Lock()
		delete(k.volumes, v.user.name)
		k.mu.Unlock()
		v.user.stop()
	}
}

// closeAt has the users close the devices that a host has, until resume is called. Not ok: one has I/O that
// does not end, because it waits for space, for example.
func (k *archive) closeAt(h *clientHost) (resume func(), ok bool) {
	if k == nil {
		return func() {}, true
	}
	ok = true
	var closed []*user
	k.cluster.every(func(u *user) {
		switch {
		case u == k.cluster.user || u.node() != h.name:
		case !u.pause(10 * time.Second):
			ok = false
		default:
			u.close()
			closed = append(closed, u)
		}
	})
	return func() {
		for _, u := range closed {
			u.resume()
		}
	}, ok
}

// mayLose notes that a drive has lost its cache. A clone may have had a single copy.
func (k *archive) mayLose() {
	if k == nil {
		return
	}
	k.cluster.every(func(u *user) {
		if u != k.cluster.user {
			u.cachesLost()
		}
	})
}

// choose takes a copy of each snapshot of which none is certain: a volume may be going back to it. So it does
// of each sealed volume.
func (k *archive) choose(ctx context.Context) {
	if k == nil {
		return
	}
	for _, p := range k.pictures() {
		k.cluster.choose(ctx, p.name)
	}
}

// lose notes that the managers' store is lost.
func (k *archive) lose() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lost++
}

// begin goes on over another store, which knows of no attachment.
func (k *archive) begin() {
	if k == nil {
		return
	}
	k.mu.Lock()
	all := slices.Collect(maps.Values(k.volumes))
	k.mu.Unlock()
	for _, v := range all {
		v.user.taken(1)
	}
}

// attachAgain attaches what is attached no more to the hosts that had it.
func (k *archive) attachAgain() {
	if k == nil {
		return
	}
	k.mu.Lock()
	var all []*tended
	for _, name := range slices.Sorted(maps.Keys(k.volumes)) {
		if v := k.volumes[name]; v.node != "" {
			all = append(all, v)
		}
	}
	k.mu.Unlock()
	for _, v := range all {
		v.turn <- struct{}{}
		if v.node != "" && !v.gone {
			k.attach(v, v.node)
		}
		<-v.turn
	}
}

// ---- checks while nothing goes on ----

// inspect reads the snapshots and the sealed volumes from the drives: all copies in sync are equal.
func (k *archive) inspect() {
	if k == nil {
		return
	}
	c := k.cluster
	c.t.Helper()
	for _, p := range k.pictures() {
		c.eventually("the same on all copies of "+string(p.name), func(ctx context.Context) error {
			if err := c.compareCopiesOf(ctx, p.name); err != nil {
				return err
			}
			v, err := k.volume(ctx, p.name)
			if err != nil {
				return err
			}
			k.staysSealed(p, v)
			numbers, err := c.raw(v)
			if err != nil && k.lost > 0 {
				c.choose(ctx, p.name)
			}
			if err != nil {
				return err
			}
			k.saw(p, numbers, "from the drives")
			return nil
		})
	}
}

// raw reads a volume from one copy of each column.
func (c *cluster) raw(v *pb.Volume) ([]uint64, error) {
	layout, size := layoutOf(v), int64(v.GetSizeBytes())
	columns := make([]io.Reader, layout.Stripes)
	for _, l := range v.GetLegs() {
		if l.GetState() == pb.LegState_LEG_STATE_IN_SYNC {
			r, err := c.rawLeg(l, layout.LegSize(block.Size(size)))
			if err != nil {
				return nil, err
			}
			columns[l.GetColumn()] = r
		}
	}
	numbers, p := make([]uint64, size/unit), make([]byte, unit)
	for at := int64(0); at < size; at += unit {
		column := at / int64(max(layout.Chunk, 1)) % int64(layout.Stripes)
		if columns[column] == nil {
			return nil, fmt.Errorf("%s: no copy of column %d is in sync\n%s", v.GetName(), column, c.archive.explain())
		}
		if _, err := io.ReadFull(columns[column], p); err != nil {
			return nil, err
		}
		n, err := parse(p, at/unit)
		if err != nil {
			return nil, fmt.Errorf("%s, on a drive, unit %d: %w", v.GetName(), at/unit, err)
		}
		numbers[at/unit] = n
	}
	return numbers, nil
}

// clear deletes all snapshots and clones. What they took comes free.
func (k *archive) clear() {
	if k == nil {
		return
	}
	c := k.cluster
	c.t.Helper()
	k.rest()
	c.resume()
	k.flat()
	c.did("all snapshots and clones are deleted")
	random := rand.New(rand.NewPCG(1, 1))
	k.mu.Lock()
	k.held, k.ending = false, true
	var all []func()
	for _, p := range k.taken {
		all = append(all, func() { k.deletePicture(p) })
	}
	for name, v := range k.volumes {
		if name != second {
			all = append(all, func() { k.deleteKept(v, random) })
		}
	}
	k.mu.Unlock()
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, do := range all {
		do()
	}
	k.rest()
	c.eventually("all is deleted", func(ctx context.Context) error {
		left, err := k.api.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true})
		for _, v := range left.GetVolumes() {
			if _, err := k.api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.GetName()}); err != nil {
				return err
			}
			err = fmt.Errorf("%s is %v", v.GetName(), v.GetState())
		}
		return err
	})
	c.eventually("the space of what was deleted comes free", func(context.Context) error {
		c.pause()
		defer c.resume()
		return c.onlyHeads()
	})
	c.healthy()
	c.pause()
	c.verify()
	c.sameCopies()
}

// onlyHeads checks that trees hold the legs of volumes, and nothing else.
func (c *cluster) onlyHeads() error {
	for _, h := range c.targets {
		trees, err := treesOn(h.platter.file)
		if err != nil {
			return err
		}
		for _, t := range trees {
			var own uint64
			for _, l := range t.Layers {
				if l.Parent != 0 || l.State != "open" || l.OverBase {
					return fmt.Errorf("%s: tree %v has a layer %d of leg %v, %s over %d", h.name, t.ID, l.ID, l.Object, l.State, l.Parent)
				}
				own += l.UsedBytes
			}
			if own != t.UsedBytes || len(t.Findings) > 0 {
				return fmt.Errorf("%s: tree %v has %d bytes in use, its legs have %d; %v", h.name, t.ID, t.UsedBytes, own, t.Findings)
			}
		}
	}
	return nil
}

// explain is what an operator would be told of the snapshots and clones.
func (k *archive) explain() string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	text := ""
	for _, snapshots := range []bool{false, true} {
		all, err := k.api.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: snapshots})
		if err != nil {
			text += fmt.Sprintf("list: %v\n", err)
		}
		for _, v := range all.GetVolumes() {
			text += fmt.Sprintf("%s is %v: %s", v.GetName(), v.GetState(), k.cluster.explainVolume(ctx, v.GetName()))
			for _, l := range v.GetLegs() {
				text += fmt.Sprintf("  leg %d.%d on %s is %v, revision %d: %s\n", l.GetColumn(), l.GetCopy(), l.GetNode(), l.GetState(), l.GetRevision(), l.GetReason())
			}
		}
	}
	return text + k.cluster.explainDrives(ctx)
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Volumes go back to their snapshots while all faults go on. What a volume held before is then in the
// snapshot that was taken first, if one was, and nowhere else: see user.wentBack.

// restore has a volume of the archive go back to one of its snapshots.
func (k *archive) restore(random *rand.Rand) {
	p := k.pick(random, func(p *picture) bool { return p.numbers != nil && p.user != k.cluster.user })
	if p == nil {
		return
	}
	k.mu.Lock()
	v := k.volumes[p.user.name]
	k.mu.Unlock()
	if v == nil {
		return
	}
	end, ok := k.begun("have %s go back to %s", v.user.name, p.name)
	if !ok {
		return
	}
	defer end()
	v.turn <- struct{}{}
	defer func() { <-v.turn }()
	if v.gone {
		return
	}
	if v.node != "" {
		k.detach(v, random)
	}
	back := k.keepAndGoBack(v.user, p, random)
	if v.sealed != nil {
		if back {
			k.wrong("%s is sealed, and has gone back to %s", v.user.name, p.name)
		}
		return
	}
	if back {
		v.whole = false // copies that could not go back are made again
	}
	if random.IntN(4) > 0 {
		k.attach(v, k.cluster.clients[random.IntN(len(k.cluster.clients))].name)
	}
}

// keepAndGoBack has a detached volume go back to one of its snapshots, and sometimes takes another
// snapshot before.
func (k *archive) keepAndGoBack(u *user, p *picture, random *rand.Rand) bool {
	if random.IntN(2) == 0 {
		kept := k.shoot([]*user{u}, random)
		if kept == nil || k.named(kept.pictures[0].name) == nil {
			k.cluster.did("%s does not go back to %s: what it holds could not be kept", u.name, p.name)
			return false
		}
	}
	began := u.now()
	back := k.goesBack(u, p)
	if back {
		u.wentBack(p.numbers, began)
	}
	return back
}

// named returns a snapshot that is complete; nil if it is not.
func (k *archive) named(name block.VolumeName) *picture {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.taken[name]
}

// goesBack asks for a detached volume to go back to a snapshot, and waits until that is over.
func (k *archive) goesBack(u *user, p *picture) (back bool) {
	var asked, going bool // it may have been carried out; it was
	var before uint64
	k.cluster.did("%s is to go back to %s", u.name, p.name)
	k.until(50*time.Millisecond, func(ctx context.Context) (bool, error) {
		v, err := k.volume(ctx, u.name)
		if err != nil {
			return false, err
		}
		if asked && !going {
			going, err = k.wasTold(ctx, u.name, before)
		} else if !asked {
			before, err = k.newestEvent(ctx)
		}
		switch {
		case err != nil:
			return false, err
		case v.GetRestoringTo() != "":
			asked, going = true, true
			return false, fmt.Errorf("%s goes back to %s", u.name, v.GetRestoringTo())
		case going:
			back = v.GetFailed() == ""
			k.cluster.did("%s went back to %s: %v %s", u.name, p.name, back, v.GetFailed())
			k.count(map[bool]string{true: "gone back", false: "not gone back in time"}[back])
			return true, nil
		}
		asked = true
		_, err = k.api.RestoreVolume(ctx, &pb.RestoreVolumeRequest{Volume: string(u.name), Snapshot: string(p.name), IfGeneration: v.GetGeneration(), IfEpoch: v.GetEpoch()})
		if refuses(err) {
			told, failed := k.wasTold(ctx, u.name, before) // an earlier attempt, whose answer was lost
			if told || failed != nil {
				return false, failed
			}
			k.cluster.did("%s does not go back to %s: %v", u.name, p.name, err)
			k.count("refused to go back")
			return true, nil
		}
		going = err == nil
		return false, err
	})
	return back
}

// newestEvent is the number of the newest event.
func (k *archive) newestEvent(ctx context.Context) (uint64, error) {
	list, err := k.api.ListEvents(ctx, &pb.ListEventsRequest{Limit: 1})
	if err != nil || len(list.GetEvents()) == 0 {
		return 0, err
	}
	return list.GetEvents()[0].GetSeq(), nil
}

// wasTold reports whether there is an event after another one that says that a volume goes back.
func (k *archive) wasTold(ctx context.Context, name block.VolumeName, after uint64) (bool, error) {
	newest, err := k.newestOf(ctx, name)
	return newest["volume.restoring"] > after, err
}

// newestOf has the number of the newest event of each kind of a volume.
func (k *archive) newestOf(ctx context.Context, name block.VolumeName) (map[string]uint64, error) {
	list, err := k.api.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + string(name), Limit: 100})
	newest := map[string]uint64{}
	for _, e := range list.GetEvents() {
		newest[e.GetKind()] = max(newest[e.GetKind()], e.GetSeq())
	}
	return newest, err
}

// wentBack notes that the volume, which no host had, was made what these writes had left, at a moment from
// began to now. That is on the drives, and what was there before does not come back.
func (u *user) wentBack(numbers []uint64, began int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.now()
	for i := range u.units {
		n := uint64(0) // a volume that has grown since holds zeroes there
		if i < len(numbers) {
			n = numbers[i]
		}
		u.units[i].Replaced(n, began, now)
	}
	u.counts["gone back"]++
}

// ---- the first volume ----

// detached detaches the volume and does something with it, while faults go on; then it attaches it again,
// to this or another host. It returns false if it did nothing.
func (r *chaos) detached(do func()) bool {
	c, from, to := r.cluster, r.client(), r.other()
	if from.process == nil || !c.user.pause(10*time.Second) {
		return false
	}
	if to == nil || r.random.IntN(2) == 0 {
		to = from
	}
	c.user.close()
	r.detachAt(from, func() {})
	do()
	c.attach(to)
	c.user.resume()
	return true
}

// beside does something beside the faults that end meanwhile.
func (r *chaos) beside(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	for !closed(done) {
		r.wait(20 * time.Millisecond)
	}
}

// ofFirst picks a snapshot of the volume, of which it is known what it holds.
func (r *chaos) ofFirst() *picture {
	k := r.cluster.archive
	return k.pick(r.random, func(p *picture) bool { return p.numbers != nil && p.user == r.cluster.user })
}

// goBack has the volume go back to one of its snapshots. Something else may happen just then.
func (r *chaos) goBack() string {
	c, p := r.cluster, r.ofFirst()
	if p == nil {
		return ""
	}
	meanwhile := []func() string{r.killTarget, r.killManager, r.losePower, r.isolate, r.slowMedium}
	random := rand.New(rand.NewPCG(r.random.Uint64(), 1))
	did := r.detached(func() {
		if at := r.random.IntN(3 * len(meanwhile)); at < len(meanwhile) {
			delay := time.Duration(r.random.Int64N(int64(300 * time.Millisecond)))
			r.undo = append(r.undo, repair{time.Now().Add(delay), "meanwhile", func() { c.did("%s", meanwhile[at]()) }})
		}
		r.beside(func() { c.archive.keepAndGoBack(c.user, p, random) })
	})
	if !did {
		return ""
	}
	return "the volume was to go back to " + string(p.name)
}

// loseStoreGoingBack loses the managers' store while the volume goes back to a snapshot. After that it
// holds what the snapshot does, or what it held before if no label said yet that it goes back; nothing else.
func (r *chaos) loseStoreGoingBack() string {
	c, k, h, p := r.cluster, r.cluster.archive, r.client(), r.ofFirst()
	if p == nil || h.process == nil || !c.user.pause(10*time.Second) {
		return ""
	}
	c.user.close()
	r.detachAt(h, func() {})
	r.heal()
	k.rest()
	began := c.user.now()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	_, err := k.api.RestoreVolume(ctx, &pb.RestoreVolumeRequest{Volume: volumeName, Snapshot: string(p.name)})
	cancel()
	c.did("the volume is to go back to %s: %v", p.name, err)
	time.Sleep(time.Duration(r.random.Int64N(int64(400 * time.Millisecond))))
	r.loseStore()
	c.eventually("read what the volume holds", func(context.Context) error {
		holds, err := k.first()
		if err != nil {
			return err
		}
		back := slices.Equal(holds, slices.Concat(p.numbers, make([]uint64, max(0, len(holds)-len(p.numbers)))))
		if back {
			c.user.wentBack(p.numbers, began)
		}
		c.did("the volume went back to %s: %v", p.name, back)
		k.count(map[bool]string{true: "gone back without the store", false: "left as it was without the store"}[back])
		return nil
	})
	if err := c.user.verify(); err != nil {
		c.t.Fatalf("%v\n%s", err, c.explain())
	}
	c.user.resume()
	return "the store was lost while the volume was to go back to " + string(p.name)
}

// first reads what the first volume holds, which its user does not use now.
func (k *archive) first() ([]uint64, error) {
	u := k.cluster.user
	u.mu.Lock()
	u.open = true
	d := u.currentLocked()
	u.mu.Unlock()
	if d == nil {
		return nil, errors.New("there is no device")
	}
	return k.readAll(&picture{name: volumeName}, d.export)
}

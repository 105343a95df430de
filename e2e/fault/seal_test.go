// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// healAfter is how soon hosts copy to a detached volume where volumes are sealed: no other host could, and
// what lacks a copy counts as wrong.
const healAfter = 5 * time.Second

// seal seals a clone, which is detached for it. From then on hosts read it as they read snapshots, and what
// it holds is known in the same way: the moment was between the request and the answer.
func (k *archive) seal(random *rand.Rand) {
	v := k.anyClone(random)
	if v == nil {
		return
	}
	end, ok := k.begun("seal %s", v.user.name)
	if !ok {
		return
	}
	defer end()
	v.turn <- struct{}{}
	defer func() { <-v.turn }()
	if v.gone || v.sealed != nil {
		return
	}
	if v.node != "" {
		k.detach(v, random)
	}
	p := &picture{name: v.user.name, user: v.user, shot: &shot{asked: k.cluster.user.now()}}
	p.shot.pictures = []*picture{p}
	defer v.user.pin(p.shot)()
	if !k.asksToSeal(p.name) {
		k.count("not sealed")
		return
	}
	k.toldOfLoss(p.user)
	p.shot.ready = k.cluster.user.now()
	p.remember()
	k.count("sealed")
	k.cluster.did("%s is sealed", p.name)
	k.mu.Lock()
	defer k.mu.Unlock()
	v.sealed = p
}

// asksToSeal asks for a volume to be sealed, until the labels of all copies say so: then a store that is rebuilt
// from them knows it, too. It returns false if that is refused.
func (k *archive) asksToSeal(name block.VolumeName) (sealed bool) {
	k.cluster.did("%s is to be sealed", name)
	acked, store := false, 0
	k.until(100*time.Millisecond, func(ctx context.Context) (bool, error) {
		k.mu.Lock()
		lost := k.lost
		k.mu.Unlock()
		_, err := k.api.SealVolume(ctx, &pb.SealVolumeRequest{Volume: string(name)})
		if refuses(err) {
			k.cluster.did("%s is not sealed: %v", name, err)
			if acked && store == lost {
				k.wrong("%s was sealed, and is not any more: %v", name, err)
			}
			return true, nil
		}
		if err != nil {
			return false, err
		}
		acked, store = true, lost
		e, err := k.api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: string(name)})
		for _, what := range e.GetWaits() {
			if strings.Contains(what, "to say that the volume is sealed") {
				return false, errors.New(what)
			}
		}
		sealed = err == nil
		return sealed, err
	})
	return sealed
}

// asksToWrite has a host ask for a sealed volume for writing, alone or with others. Nobody gets it.
func (k *archive) asksToWrite(v *tended, random *rand.Rand) {
	host := k.cluster.clients[random.IntN(len(k.cluster.clients))].name
	mode := []pb.AttachMode{pb.AttachMode_ATTACH_MODE_EXCLUSIVE, pb.AttachMode_ATTACH_MODE_SHARED_BLOCK}[random.IntN(2)]
	ctx, cancel := context.WithTimeout(k.ended, 2*time.Second)
	defer cancel()
	if _, err := k.api.Attach(ctx, &pb.AttachRequest{Volume: string(v.user.name), Node: host, Mode: mode}); err == nil {
		k.wrong("%s is sealed, and %s gets it as %v", v.user.name, host, mode)
	} else if refuses(err) {
		k.count("refused to be written")
	}
}

// triesToWrite writes to the device of a snapshot, or of a sealed volume, which refuses it.
func (k *archive) triesToWrite(p *picture, d *export) {
	data, done := make([]byte, unit), make(chan error, 1)
	fill(data, p.user.number(), 0)
	d.volume.Submit(&block.IO{Op: block.OpWrite, Len: unit, Data: data, Done: func(io *block.IO) { done <- io.Err }})
	select {
	case err := <-done:
		if err == nil {
			k.wrong("%s has written %s, which never changes", d.at.host, p.name)
		}
	case <-d.dead:
	case <-time.After(10 * time.Second):
	}
}

// staysSealed checks that a sealed volume is one still, also in a store that was rebuilt.
func (k *archive) staysSealed(p *picture, now *pb.Volume) {
	if now.GetSnapshot() == nil && now.GetSealed() == nil {
		k.wrong("%s was sealed, and is not any more", p.name)
	}
}

// reads notes that everything was read.
func (u *user) reads(numbers []uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for i, n := range numbers {
		now := u.now()
		if err := u.units[i].Read(n, now, now); err != nil {
			u.fault("sealed, unit %d: %v", i, err)
		}
	}
}

// detachedFrom reports whether a host does not have a volume any more.
func (k *archive) detachedFrom(ctx context.Context, name block.VolumeName, host string) (bool, error) {
	v, err := k.volume(ctx, name)
	if status.Code(err) == codes.NotFound {
		return true, nil
	}
	for _, a := range v.GetAttachments() {
		if a.GetNode() == host {
			return false, fmt.Errorf("%s is %v on %s", name, a.GetState(), host)
		}
	}
	return err == nil, err
}

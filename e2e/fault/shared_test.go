// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// sharers are the users of a volume that several clients have at once. Each write covers all
// of it with one edition. A reader never sees an older edition than any reader had seen before
// its read began, nor two editions in one block.
type sharers struct {
	cluster *cluster
	mu      sync.Mutex
	devices map[string]*export // by client, the newest
	newest  uint64             // the edition being written, or the newest one read
	reads   map[string]int
}

// sharedUnits is the number of units of a volume that does not grow.
const sharedUnits = int64(volumeSize) / unit

// share makes a cluster's clients share what they attach.
func share(c *cluster) *sharers {
	s := &sharers{cluster: c, devices: map[string]*export{}, reads: map[string]int{}}
	c.users = s
	return s
}

func (s *sharers) died(*machine) {}

func (s *sharers) nodes() []string { return names(s.cluster.clients) }

func (s *sharers) found(at *machine, volume block.Device, name block.VolumeName) userspace.Exported {
	d := newExport(at, volume, name)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.devices[at.host] = d
	return d
}

func (s *sharers) device(client string) *export {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.devices[client]
}

// edition returns a block that holds one edition.
func edition(number uint64) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, number), unit/8)
}

// write writes an edition.
func (s *sharers) write(client string, number uint64) error {
	d := s.device(client)
	for at := range sharedUnits {
		if err := block.WriteAt(d.volume, edition(number), at*unit); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest = max(s.newest, number)
	return nil
}

// read makes a client read until ctx ends, whatever device it has.
func (s *sharers) read(ctx context.Context, client string, random *rand.Rand) {
	for ctx.Err() == nil {
		d := s.device(client)
		if d != nil {
			s.readOne(client, d, random.Int64N(sharedUnits))
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *sharers) readOne(client string, d *export, at int64) {
	s.mu.Lock()
	least := s.newest
	s.mu.Unlock()
	got := make([]byte, unit)
	done := make(chan error, 1)
	d.volume.Submit(&block.IO{Op: block.OpRead, Data: got, Off: at * unit, Len: unit, Done: func(io *block.IO) { done <- io.Err }})
	select {
	case err := <-done:
		if err != nil {
			if !errors.Is(err, block.ErrGone) { // the device was closed
				s.cluster.t.Errorf("%s reads unit %d: %v", client, at, err)
			}
			return
		}
	case <-time.After(30 * time.Second): // the read is held
		return
	}
	number := binary.LittleEndian.Uint64(got)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads[client]++
	if !bytes.Equal(got, edition(number)) || number < least {
		s.cluster.t.Errorf("%s reads edition %d of unit %d, %d was written or read before", client, number, at, least)
	}
	s.newest = max(s.newest, number)
}

func (s *sharers) count(client string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reads[client]
}

// progress waits until clients read again.
func (s *sharers) progress(what string, clients ...*clientHost) {
	s.cluster.t.Helper()
	for _, h := range clients {
		was := s.count(h.name)
		s.cluster.eventually(h.name+" reads "+what, func(context.Context) error {
			if n := s.count(h.name); n < was+5 {
				return fmt.Errorf("%d reads", n-was)
			}
			return nil
		})
	}
}

func (c *cluster) attachAs(to *clientHost, mode pb.AttachMode) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("attach to %s as %v", to.name, mode), func(ctx context.Context) error {
		a, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: to.name, Mode: mode})
		if err == nil && a.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			err = fmt.Errorf("it is %v, waits for %s", a.GetState(), a.GetWaitingFor())
		}
		return err
	})
}

// shared runs f over a mirrored volume with edition 1, read by three clients.
func shared(t *testing.T, f func(c *cluster, s *sharers)) {
	synctest.Test(t, func(t *testing.T) {
		var s *sharers
		c := newCluster(t, 3, 3, func(c *cluster) { s = share(c) })
		defer c.close()
		c.createVolume(block.Layout{Stripes: 2, Copies: 2})
		c.attachAs(c.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
		if err := s.write("c1", 1); err != nil {
			t.Fatal(err)
		}
		c.detach(c.clients[0], false)
		var readers sync.WaitGroup
		ctx, stop := context.WithCancel(context.Background())
		defer func() { stop(); readers.Wait() }()
		for i, h := range c.clients {
			c.attachAs(h, pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY)
			readers.Go(func() { s.read(ctx, h.name, rand.New(rand.NewPCG(uint64(i), 0))) })
		}
		s.progress("at first", c.clients...)
		f(c, s)
	})
}

func TestReadersLiveThroughTheDeathOfTargetsManagerAndOneAnother(t *testing.T) {
	shared(t, func(c *cluster, s *sharers) {
		if err := block.WriteAt(s.device("c2").volume, make([]byte, unit), 0); !errors.Is(err, block.ErrReadOnly) {
			t.Errorf("a write of a reader = %v, want %v", err, block.ErrReadOnly)
		}
		for _, h := range c.targets {
			h.kill()
			s.progress("without "+h.name, c.clients...)
			h.start()
			time.Sleep(20 * time.Second)
		}
		c.killManager()
		s.progress("without the manager", c.clients...)
		c.targets[0].powerOff(rand.New(rand.NewPCG(1, 1)))
		s.progress("without the manager and t1", c.clients...)
		c.targets[0].start()
		c.startManager()

		c.clients[2].kill()
		c.detachByForce(c.clients[2], 2)
		s.progress("without c3", c.clients[:2]...)
		v, err := c.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: volumeName})
		for _, l := range v.GetLegs() {
			if err != nil || l.GetState() != pb.LegState_LEG_STATE_IN_SYNC || l.GetRevision() != 1 {
				t.Errorf("leg %d.%d is %v at revision %d, %v; want it as it was", l.GetColumn(), l.GetCopy(), l.GetState(), l.GetRevision(), err)
			}
		}
		// c3 restarts, and no longer has the volume; later it does.
		c.clients[2].start()
		c.attachAs(c.clients[2], pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY)
		s.progress("with c3 again", c.clients...)
	})
}

// A reader that does not hear of the end of its epoch keeps reading from a target that does
// not hear of it either. The writer's attach waits for that, however long it takes.
func TestAWriterWaitsForReadersThatCanNotBeFenced(t *testing.T) {
	shared(t, func(c *cluster, s *sharers) {
		ctx := context.Background()
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if err != nil {
			t.Fatal(err)
		}
		target := v.GetLegs()[0].GetNode() // not every target has a leg
		for _, deaf := range []string{"c1", target} {
			c.network.part(deaf, "m1", true)
		}
		time.Sleep(10 * time.Second)
		if _, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Force: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: "c2"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		v, err = c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if err != nil || v.GetAttachment().GetState() != pb.AttachmentState_ATTACHMENT_STATE_GRANTING {
			t.Errorf("the writer's attachment is %v, %v; want it waiting for %s", v.GetAttachment().GetState(), err, target)
		}
		c.network.heal()
		c.attachAs(c.clients[1], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
		if err := s.write("c2", 2); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		c.detach(c.clients[1], false)
		for _, h := range c.clients {
			c.attachAs(h, pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY)
		}
		s.progress("the second edition", c.clients...)
	})
}

// A host that was detached by force and fenced may be let in again before it has heard of
// either, as when a live migration goes back. Its writes from before must not reach the
// volume, although the epoch is the same.
func TestAFencedSharersWriteDoesNotLandAfterItIsLetInAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *sharers
		c := newCluster(t, 1, 2, func(c *cluster) { s = share(c) })
		defer c.close()
		const mode = pb.AttachMode_ATTACH_MODE_SHARED_BLOCK
		c.createVolume(block.Layout{Stripes: 1, Copies: 1})
		c.attachAs(c.clients[0], mode)
		c.attachAs(c.clients[1], mode)
		put := func(d *export, number uint64) error { return block.WriteAt(d.volume, edition(number), 0) }
		lost, kept := s.device("c1"), s.device("c2")
		if err := put(kept, 1); err != nil {
			t.Fatal(err)
		}
		for _, peer := range []string{"m1", "t1"} {
			c.network.part("c1", peer, true)
		}
		late := make(chan error, 1)
		go func() { late <- put(lost, 666) }()
		time.Sleep(3 * time.Second)
		c.detachByForce(c.clients[0], 1)
		if err := put(kept, 2); err != nil {
			t.Fatal(err)
		}
		c.eventually("ask for c1 to have it again", func(ctx context.Context) error {
			_, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: "c1", Mode: mode})
			return err
		})
		c.network.part("c1", "t1", false)
		time.Sleep(20 * time.Second) // it reaches the target, but has not heard yet
		reads := func(when string) {
			t.Helper()
			got := make([]byte, unit)
			if err := block.ReadAt(kept.volume, got, 0); err != nil {
				t.Fatal(err)
			}
			if number := binary.LittleEndian.Uint64(got); number != 2 {
				t.Errorf("%s: c2 wrote edition 2 after c1 was fenced, and reads edition %d", when, number)
			}
		}
		reads("c1 does not hear of it")
		c.network.heal()
		c.attachAs(c.clients[0], mode)
		if err := <-late; err == nil {
			t.Error("the write of the grant that is over = nil, want an error")
		}
		reads("c1 has it again")
		if again := s.device("c1"); again == lost {
			t.Error("c1 goes on with the device of the grant that is over")
		} else if err := put(again, 3); err != nil {
			t.Errorf("a write of the grant that stands = %v", err)
		}
	})
}

// detachByForce takes a shared volume from a client; some others keep it.
func (c *cluster) detachByForce(from *clientHost, others int) {
	c.t.Helper()
	c.eventually(from.name+" is taken out", func(ctx context.Context) error {
		if _, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Node: from.name, Force: true}); err != nil {
			return err
		}
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if n := len(v.GetAttachments()); err == nil && n != others {
			err = fmt.Errorf("%d attachments", n)
		}
		return err
	})
}

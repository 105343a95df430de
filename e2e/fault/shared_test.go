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

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// sharers are the users of a volume that several clients have at once. What was
// written to all of it is one edition; a reader never sees an older one than any
// reader saw before it began, nor two in one block.
type sharers struct {
	cluster *cluster
	mu      sync.Mutex
	devices map[string]*sharedDevice // by client, the newest
	newest  uint64                   // edition that is written, or that somebody has read
	reads   map[string]int
}

type sharedDevice struct {
	volume block.Device
	done   chan struct{}
	once   sync.Once
}

// sharedUnits are those of a volume that does not grow.
const sharedUnits = int64(volumeSize) / unit

func (s *sharers) found(at *machine, volume block.Device) *sharedDevice {
	d := &sharedDevice{volume: volume, done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.devices[at.host] = d
	return d
}

func (d *sharedDevice) Path() string                 { return "/dev/weft/" + volumeName }
func (d *sharedDevice) Number() string               { return "7:4" }
func (d *sharedDevice) Done() <-chan struct{}        { return d.done }
func (d *sharedDevice) Resize(context.Context) error { return nil }
func (d *sharedDevice) Close(context.Context, bool) error {
	d.once.Do(func() { close(d.done) })
	return nil
}

func (s *sharers) device(client string) *sharedDevice {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.devices[client]
}

// edition is a block of one, wholly.
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

// read has a client read for as long as ctx lives, whatever device it has.
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

func (s *sharers) readOne(client string, d *sharedDevice, at int64) {
	s.mu.Lock()
	least := s.newest
	s.mu.Unlock()
	got := make([]byte, unit)
	done := make(chan error, 1)
	d.volume.Submit(&block.IO{Op: block.OpRead, Data: got, Off: at * unit, Len: unit, Done: func(io *block.IO) { done <- io.Err }})
	select {
	case err := <-done:
		if err != nil {
			if !errors.Is(err, block.ErrGone) { // it was let go
				s.cluster.t.Errorf("%s reads unit %d: %v", client, at, err)
			}
			return
		}
	case <-time.After(30 * time.Second): // it is held
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

// shared runs f over a mirrored volume with edition 1, which three clients read.
func shared(t *testing.T, f func(c *cluster, s *sharers)) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 3, 3, func(c *cluster) {
			c.sharers = &sharers{cluster: c, devices: map[string]*sharedDevice{}, reads: map[string]int{}}
		})
		defer c.close()
		s := c.sharers
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
		c.eventually("c3 is taken out", func(ctx context.Context) error {
			if _, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Node: "c3", Force: true}); err != nil {
				return err
			}
			v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
			if n := len(v.GetAttachments()); err == nil && n != 2 {
				err = fmt.Errorf("%d attachments", n)
			}
			return err
		})
		s.progress("without c3", c.clients[:2]...)
		v, err := c.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: volumeName})
		for _, l := range v.GetLegs() {
			if err != nil || l.GetState() != pb.LegState_LEG_STATE_IN_SYNC || l.GetRevision() != 1 {
				t.Errorf("leg %d.%d is %v at revision %d, %v; want it as it was", l.GetColumn(), l.GetCopy(), l.GetState(), l.GetRevision(), err)
			}
		}
		// c3 begins again, and the volume is not its own any more; then it is.
		c.clients[2].start()
		c.attachAs(c.clients[2], pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY)
		s.progress("with c3 again", c.clients...)
	})
}

// A reader that does not hear of the end of its epoch reads on from a target that
// does not hear of it either. Who is to write waits for that, however long.
func TestAWriterWaitsForReadersThatCanNotBeFenced(t *testing.T) {
	shared(t, func(c *cluster, s *sharers) {
		for _, deaf := range []string{"c1", "t1"} {
			c.network.cut(deaf, "m1", true)
			c.network.cut("m1", deaf, true)
		}
		time.Sleep(10 * time.Second)
		ctx := context.Background()
		if _, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Force: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: "c2"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if err != nil || v.GetAttachment().GetState() != pb.AttachmentState_ATTACHMENT_STATE_GRANTING {
			t.Errorf("the writer's attachment is %v, %v; want it waiting for t1", v.GetAttachment().GetState(), err)
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

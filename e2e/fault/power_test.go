// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// TestALossOfAllCachesIsToldToTheHost cuts the power of all targets while the client lives.
// Its acknowledged but unflushed writes may be lost: then its device must fail before any
// later operation succeeds, and is made again. If everything was flushed, the device
// continues.
func TestALossOfAllCachesIsToldToTheHost(t *testing.T) {
	for _, layout := range []block.Layout{{Stripes: 1, Copies: 1}, {Stripes: 1, Copies: 2}, {Stripes: 2, Copies: 2}} {
		for _, flushed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%dx%d flushed %v", layout.Stripes, layout.Copies, flushed), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { loseAllCaches(t, layout, flushed) })
			})
		}
	}
}

func loseAllCaches(t *testing.T, layout block.Layout, flushed bool) {
	var s *sharers
	c := newCluster(t, 2, 1, func(c *cluster) { s = share(c) })
	defer c.close()
	c.createVolume(layout)
	c.attachAs(c.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
	first := s.device("c1")
	const n = 64
	write := func(number uint64, flush bool) {
		t.Helper()
		var err error
		for i := range int64(n) {
			err = errors.Join(err, block.WriteAt(first.volume, edition(number), i*unit))
		}
		if flush {
			err = errors.Join(err, block.Flush(first.volume))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write(1, true)
	write(2, flushed)
	random := rand.New(rand.NewPCG(1, 1))
	for _, h := range c.targets {
		h.loseAll(random)
	}
	time.Sleep(5 * time.Second)
	underWay := make(chan error, 1)
	go func() { underWay <- block.WriteAt(first.volume, edition(3), n*unit) }()
	for _, h := range c.targets {
		h.start()
	}
	switch err := block.Flush(first.volume); {
	case !flushed && err == nil:
		t.Error("a flush succeeded over writes that are lost")
	case flushed && err != nil:
		t.Errorf("flush = %v, though nothing is lost", err)
	}
	if err := <-underWay; (err == nil) != flushed {
		t.Errorf("a write that was under way = %v", err)
	}
	if !flushed { // the manager may not know yet that the device has failed
		c.eventually("the device is made anew", func(context.Context) error {
			if s.device("c1") == first {
				return errors.New("it is the old one")
			}
			return nil
		})
	}
	c.attachedAndHealthy()
	now := s.device("c1")
	if (now == first) != flushed {
		t.Errorf("it is the same device: %v", now == first)
	}
	if !flushed {
		if err := block.ReadAt(first.volume, make([]byte, unit), 0); err == nil {
			t.Error("the device that had lost writes is read again")
		}
	}
	for i, number := range editions(t, now.volume, n) {
		if number != 2 && (flushed || number != 1) {
			t.Errorf("unit %d holds edition %d", i, number)
		}
	}
	c.toldOf(t, "volume.writes-lost", !flushed)
}

// The link to one copy is cut, and while the host gives that copy up, the target of the other one
// loses its power, with writes in its drive's cache. Whenever that happens, the first copy is not
// given up unless the other one has the writes on its medium.
func TestACutAndAPowerCutLoseNothingThatWasAcknowledged(t *testing.T) {
	for after := 600 * time.Millisecond; after <= 1400*time.Millisecond; after += 100 * time.Millisecond {
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			mirrored(t, func(*cluster) {}, func(m *mirror) {
				m.put("c1", 1, everyUnit...)
				m.flush("c1")
				m.put("c1", 2, everyUnit...)
				m.network.delay("c1", "m1", 300*time.Millisecond) // the record is on its way for so long
				m.network.part("c1", m.second.name, true)
				time.Sleep(after)
				m.first.powerOff(rand.New(rand.NewPCG(1, 1)))
				time.Sleep(5 * time.Second)
				m.network.heal()
				m.first.start()
				m.attachedAndHealthy()
				m.holds("c1", 2, everyUnit...)
				m.sameCopies()
			})
		})
	}
}

// attachedAndHealthy waits until the client has the volume, and all of its copies.
func (c *cluster) attachedAndHealthy() {
	c.t.Helper()
	c.eventually("the client has the volume again", func(ctx context.Context) error {
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if err == nil && (v.GetHealth() != pb.Health_HEALTH_HEALTHY || v.GetAttachment().GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED) {
			err = fmt.Errorf("it is %v and %v", v.GetHealth(), v.GetAttachment().GetState())
		}
		return err
	})
}

// editions reads the edition that each of the first units holds.
func editions(t *testing.T, d block.Device, units int) (numbers []uint64) {
	t.Helper()
	got := make([]byte, unit)
	for i := range int64(units) {
		if err := block.ReadAt(d, got, i*unit); err != nil {
			t.Fatal(err)
		}
		numbers = append(numbers, binary.LittleEndian.Uint64(got))
	}
	return numbers
}

// toldOf checks whether the volume has an event of a kind.
func (c *cluster) toldOf(t *testing.T, kind string, want bool) {
	t.Helper()
	all, err := c.operator.ListEvents(context.Background(), &pb.ListEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range all.GetEvents() {
		if e.GetKind() == kind && e.GetSeverity() == pb.Severity_SEVERITY_ERROR {
			n++
			t.Log(e.GetText())
		}
	}
	if (n > 0) != want || n > 1 {
		t.Errorf("%d events %s, want some: %v", n, kind, want)
	}
}

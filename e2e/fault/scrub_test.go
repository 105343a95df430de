// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// flip changes a byte of a target's copy on its drive.
func (m *mirror) flip(on *targetHost, at int64) {
	m.t.Helper()
	m.flush("c1")
	s := m.dataOf(m.leg(on), block.Size(at+1)*unit)
	off := int64(s[0].Offset) + at*unit
	m.did("a byte changes in unit %d of the copy on %v", at, on)
	on.platter.set(func() {
		var b [1]byte
		_, err := on.platter.file.ReadAt(b[:], off)
		if b[0] ^= 1; err == nil {
			_, err = on.platter.file.WriteAt(b[:], off)
		}
		if err != nil {
			m.t.Fatal(err)
		}
	})
}

func (m *mirror) scrub(r *pb.ScrubVolumeRequest) {
	m.t.Helper()
	r.Volume = volumeName
	if _, err := m.operator.ScrubVolume(context.Background(), r); err != nil {
		m.t.Fatal(err)
	}
}

// place is the place of a target's leg.
func (m *mirror) place(on *targetHost) *pb.Place {
	l := m.leg(on)
	return &pb.Place{Column: l.GetColumn(), Copy: l.GetCopy()}
}

// scrubbed waits for the end of a scrub.
func (m *mirror) scrubbed(found, repaired uint64) {
	m.t.Helper()
	m.eventually("the scrub ends", func(context.Context) error {
		if c := m.volume().GetScrub(); c.GetEnded() == nil {
			return fmt.Errorf("it is at %d of %d bytes", c.GetDoneBytes(), c.GetTotalBytes())
		}
		return nil
	})
	if c := m.volume().GetScrub(); c.GetFound() != found || c.GetRepaired() != repaired || c.GetDoneBytes() != c.GetTotalBytes() {
		m.t.Errorf("the scrub has found %d and repaired %d, at %d of %d bytes; want %d and %d at the end", c.GetFound(), c.GetRepaired(), c.GetDoneBytes(), c.GetTotalBytes(), found, repaired)
	}
}

func TestCopiesThatRotAreRepairedUnderWrites(t *testing.T) {
	copied(t, 3, 1, withoutCaches, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		m.flip(m.first, 5)
		m.flip(m.second, 9)
		m.flip(m.first, sharedUnits-1)
		m.scrub(&pb.ScrubVolumeRequest{Repair: true})
		for n := uint64(2); n < 12; n++ {
			m.put("c1", n, 4, 6, 8, 10, sharedUnits-1)
		}
		m.eventually("the scrub ends", func(context.Context) error {
			if m.volume().GetScrub().GetEnded() == nil {
				return fmt.Errorf("it has not")
			}
			return nil
		})
		if c := m.volume().GetScrub(); c.GetFound() < 2 || c.GetRepaired() != c.GetFound() {
			t.Errorf("the scrub has found %d and repaired %d", c.GetFound(), c.GetRepaired())
		}
		m.sameCopies()
		m.holds("c1", 1, 5, 9)
		m.holds("c1", 11, 4, 6, 8, 10, sharedUnits-1)
	})
}

// Of two copies that differ nothing is written, until an operator names one.
func TestTheCopyThatAnOperatorNamesIsRight(t *testing.T) {
	mirrored(t, withoutCaches, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		m.flip(m.first, 7)
		m.scrub(&pb.ScrubVolumeRequest{Repair: true})
		m.scrubbed(1, 0)
		m.scrub(&pb.ScrubVolumeRequest{Repair: true, From: []*pb.Place{m.place(m.second)}})
		m.scrubbed(1, 1)
		m.sameCopies()
		m.holds("c1", 1, everyUnit...)
	})
}

// A scrub of two minutes is cut by the end of the manager and that of the client's agent, and
// goes on where it was.
func TestAScrubGoesOnAfterRestarts(t *testing.T) {
	large := func(c *cluster) {
		withoutCaches(c)
		c.size = mostSize
	}
	mirrored(t, large, func(m *mirror) {
		last := int64(mostSize)/unit - 1
		m.put("c1", 1, last)
		m.scrub(&pb.ScrubVolumeRequest{Repair: true, From: []*pb.Place{m.place(m.first)}, BytesPerSecond: 96 << 10})
		time.Sleep(80 * time.Second)
		m.killManager()
		m.startManager()
		time.Sleep(20 * time.Second)
		m.clients[0].kill()
		m.clients[0].start()
		time.Sleep(5 * time.Second) // until the manager knows
		m.attachedAndHealthy()
		m.flip(m.second, last)
		began := time.Now()
		m.scrubbed(1, 1)
		if took := time.Since(began); took > 100*time.Second {
			t.Errorf("the rest took %v: it has begun at the beginning", took)
		}
		m.sameCopies()
		m.holds("c1", 1, last)
	})
}

// scrub begins, changes or ends a scrub of the volume. Without bit rot it must find no difference;
// see noDifference.
func (r *chaos) scrub() string {
	c := r.cluster
	if r.world.layout.Copies == 1 {
		return ""
	}
	in := &pb.ScrubVolumeRequest{Volume: volumeName}
	switch r.random.IntN(6) {
	case 0:
		in.Stop = true
	case 1:
		in.Pause = true
	case 2:
		in.Resume = true
	case 3:
	default:
		in.Repair = true
	}
	if r.random.IntN(2) == 0 {
		in.BytesPerSecond = uint64(block.MiB) << r.random.IntN(5)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := c.operator.ScrubVolume(ctx, in); err != nil {
		c.did("scrub: %v", err)
	}
	return fmt.Sprintf("scrub: %v", in)
}

// noDifference checks that no scrub has found copies that differ.
func (c *cluster) noDifference() {
	c.t.Helper()
	c.eventually("the events", func(ctx context.Context) error {
		events, err := c.operator.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + volumeName, Limit: 1000})
		for _, e := range events.GetEvents() {
			if e.GetKind() == "volume.scrub-found" && strings.Contains(e.GetText(), "≠") {
				c.t.Errorf("%v: %s", e.GetTime().AsTime(), e.GetText())
			}
		}
		return err
	})
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/pb"
)

func withIntegrity(c *cluster) { c.integrity = true }

// repairs are the events that tell of data that did not match its checksum.
func (c *cluster) repairs() (all []*pb.Event) {
	c.t.Helper()
	c.eventually("the events", func(ctx context.Context) error {
		events, err := c.operator.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + volumeName, Limit: 10000})
		all = nil
		for _, e := range events.GetEvents() {
			if e.GetKind() == "volume.read-repair" {
				all = append(all, e)
			}
		}
		return err
	})
	return all
}

// A bit changes in every unit of the volume, now on one drive, now on the other. Each read is right,
// each flip is told and repaired, and afterwards both drives hold what was written.
func TestFlippedBitsAreNeverReadAndAreRepaired(t *testing.T) {
	mirrored(t, withIntegrity, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		time.Sleep(20 * time.Second) // all checksums are on the drives
		for at := range sharedUnits {
			m.flip([]*targetHost{m.first, m.second}[at%2], at)
		}
		m.holds("c1", 1, everyUnit...)
		m.scrub(&pb.ScrubVolumeRequest{Repair: true}) // reads both copies
		m.eventually("the scrub ends", func(context.Context) error {
			if c := m.volume().GetScrub(); c.GetEnded() == nil || c.GetFound() != c.GetRepaired() {
				return fmt.Errorf("it has found %d and repaired %d", c.GetFound(), c.GetRepaired())
			}
			return nil
		})
		m.sameCopies()
		m.holds("c1", 1, everyUnit...)
		told := m.repairs()
		if len(told) == 0 {
			t.Error("no event tells of a repair")
		}
		for _, e := range told {
			if !strings.Contains(e.GetText(), "written again") && !strings.Contains(e.GetText(), "more did not match") {
				t.Errorf("event: %s", e.GetText())
			}
		}
		if text := m.explain(); !strings.Contains(text, "did not match their checksums and were written again") {
			t.Errorf("it is not explained:\n%s", text)
		}
	})
}

// A power cut while units are being written is no bit rot: everything can be read, whichever target
// lost its power, and nothing is repaired by its checksums.
func TestAPowerCutIsNoBitRot(t *testing.T) {
	mirrored(t, withIntegrity, func(m *mirror) {
		for n, h := range []*targetHost{m.first, m.second, m.first} {
			m.put("c1", uint64(n+1), everyUnit...)
			m.powerCut(h)
			m.put("c1", uint64(n+10), everyUnit[:100]...)
			m.attachedAndHealthy()
			m.holds("c1", uint64(n+1), everyUnit[100:]...)
			m.holds("c1", uint64(n+10), everyUnit[:100]...)
		}
		m.sameCopies()
		m.scrub(&pb.ScrubVolumeRequest{})
		m.scrubbed(0, 0)
		if told := m.repairs(); len(told) > 0 {
			t.Errorf("%d repairs, such as: %s", len(told), told[0].GetText())
		}
	})
}

// A copy that has rotted is not the source of a rebuild: the new data comes from the copy that is
// right.
func TestARebuildDoesNotSpreadWhatHasRotted(t *testing.T) {
	copied(t, 3, 1, withIntegrity, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		time.Sleep(20 * time.Second)
		m.powerCut(m.targets[1])
		m.put("c1", 2, everyUnit[:64]...) // it misses these
		for at := int64(64); at < sharedUnits; at += 7 {
			m.flip(m.first, at)
		}
		m.attachedAndHealthy()
		m.holds("c1", 2, everyUnit[:64]...)
		m.holds("c1", 1, everyUnit[64:]...)
		m.scrub(&pb.ScrubVolumeRequest{Repair: true})
		m.eventually("the scrub ends", func(context.Context) error {
			if c := m.volume().GetScrub(); c.GetEnded() == nil || c.GetFound() != c.GetRepaired() {
				return fmt.Errorf("it has found %d and repaired %d", c.GetFound(), c.GetRepaired())
			}
			return nil
		})
		m.sameCopies()
	})
}

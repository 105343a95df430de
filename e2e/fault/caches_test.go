// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// hundreds gives a cluster a volume whose copies have 700 regions of 1 MiB.
func hundreds(c *cluster) {
	c.size = 700 * block.MiB
	for _, h := range c.targets {
		if err := os.Truncate(h.platter.file.Name(), 2<<30); err != nil {
			panic(err)
		}
	}
}

// expectRebuilt checks how many regions were copied to a target's leg, and that the event says why.
func (m *mirror) expectRebuilt(h *targetHost, regions block.Size, why string) {
	m.t.Helper()
	m.attachedAndHealthy()
	told := ""
	for _, e := range m.events() {
		if e.GetKind() == "leg.in-sync" {
			told = e.GetText()
		}
	}
	m.t.Log(told)
	all := m.copiedTo(h)
	if len(all) == 0 || all[len(all)-1] != regions*block.MiB || !strings.Contains(told, why) {
		m.t.Errorf("copied were %v (%s), want at last %v, and %q", all, told, regions*block.MiB, why)
	}
}

// The power of a target is cut, and its drive loses its cache. The host copies what it had not flushed
// there, and what it has written since.
func TestAPowerCutCostsACopyOfWhatWasNotFlushed(t *testing.T) {
	const region = int64(block.MiB) / unit
	kinds := map[string]func(*cluster){
		"plain":          hundreds,
		"with checksums": func(c *cluster) { hundreds(c); c.integrity = true },
		"thin":           func(c *cluster) { hundreds(c); c.thin = true },
	}
	for name, set := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mirrored(t, set, func(m *mirror) {
				m.put("c1", 1, everyUnit...)
				m.flush("c1")
				m.put("c1", 2, 0, region, 3*region) // which the cut may lose
				m.powerOffAnd(m.second, func() {
					m.put("c1", 2, 5*region) // waits until the loss of the second copy is recorded
				})
				m.expectRebuilt(m.second, 4, "only in its drive's cache")
				m.sameCopies()
				m.holdsWithout(m.first, 2, 0, region, 3*region, 5*region)
				m.holds("c1", 1, 1, region+1, 2*region, 4*region)
			})
		})
	}
}

// powerOffAnd cuts a target's power, and restores it when meanwhile has ended.
func (m *mirror) powerOffAnd(h *targetHost, meanwhile func()) {
	m.t.Helper()
	h.powerOff(rand.New(rand.NewPCG(1, 1)))
	meanwhile()
	h.start()
}

// A second cut comes while the first one's losses are copied: what was copied and not flushed is lost
// again.
func TestAPowerCutDuringTheCopyCostsNoMore(t *testing.T) {
	const region = int64(block.MiB) / unit
	mirrored(t, hundreds, func(m *mirror) {
		m.slow()
		m.put("c1", 1, everyUnit...)
		m.flush("c1")
		m.powerOffAnd(m.second, func() { m.put("c1", 2, 0, region, 3*region) })
		m.eventually("the copy has begun", func(context.Context) error {
			if s := m.leg(m.second).GetState(); s == pb.LegState_LEG_STATE_STALE {
				return errors.New("it has not")
			}
			return nil
		})
		time.Sleep(1500 * time.Millisecond)
		m.powerOffAnd(m.second, func() { m.put("c1", 2, 5*region) })
		m.expectRebuilt(m.second, 4, "only in its drive's cache")
		m.holdsWithout(m.first, 2, 0, region, 3*region, 5*region)
	})
}

// The host's process is another one since the power was cut, or the volume is at another host: nobody
// knows what had not been flushed.
func TestAHostThatHasNotTrackedALossCopiesAll(t *testing.T) {
	for name, change := range map[string]func(m *mirror) (client string){
		"its process has ended": func(m *mirror) string {
			m.clients[0].kill()
			time.Sleep(time.Second)
			m.clients[0].start()
			return "c1"
		},
		"the volume is elsewhere": func(m *mirror) string {
			m.takenTo(m.clients[1], m.clients[0])
			return "c2"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mirrored(t, hundreds, func(m *mirror) {
				m.put("c1", 1, everyUnit...)
				m.flush("c1")
				m.put("c1", 2, everyUnit...)
				var client string
				m.powerOffAnd(m.second, func() {
					m.put("c1", 2, everyUnit...)
					client = change(m)
				})
				m.expectRebuilt(m.second, 700, "all of it")
				m.sameCopies()
				m.first.kill()
				m.holds(client, 2, everyUnit...)
			})
		})
	}
}

// The manager restarts between the loss of a cache and its record, or after it: what is to be copied
// stays the same.
func TestALossOfACacheOutlivesTheManager(t *testing.T) {
	const region = int64(block.MiB) / unit
	mirrored(t, hundreds, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		m.flush("c1")
		m.powerOffAnd(m.second, func() {
			m.put("c1", 2, 0, region)
			m.managers[0].kill()
		})
		time.Sleep(time.Second)
		m.managers[0].start()
		m.expectRebuilt(m.second, 2, "only in its drive's cache")
		m.holdsWithout(m.first, 2, 0, region)
	})
}

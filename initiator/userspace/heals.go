// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"crypto/rand"
	"log/slog"
	"slices"
	"sync"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid/engine"
)

// lastHeals is how many ranges that were healed are reported, the last ones. All of them are logged
// and counted.
const lastHeals = 64

// heals are the ranges of a volume that did not match their checksums. Its methods may be called
// concurrently.
type heals struct {
	mu  sync.Mutex
	all volume.HealsSeen
}

func newHeals() *heals { return &heals{all: volume.HealsSeen{Run: rand.Text()}} }

// note adds what became of a range.
func (h *heals) note(log *slog.Logger, f engine.Finding, o engine.Outcome, err error) {
	log.Warn("data did not match its checksum", "column", f.Column, "offset", f.Off, "length", f.Length, "copies", f.Unreadable, "outcome", o.String(), "err", err)
	told := volume.ScrubFinding{Column: f.Column, Off: f.Off, Length: f.Length, Unreadable: f.Unreadable, Right: -1, Outcome: outcomes[o]}
	if err != nil {
		told.Error = err.Error()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all.Count++
	if o != engine.Repaired {
		h.all.Failed++
	}
	h.all.Last = append(slices.Clone(h.all.Last[max(0, len(h.all.Last)-lastHeals+1):]), told) // reports have the old ones
}

// seen are the heals so far; nil: none.
func (h *heals) seen() *volume.HealsSeen {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all.Count == 0 {
		return nil
	}
	all := h.all
	return &all
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"strings"
)

// Health is the state of a leg as its mirror has seen it since the table was resumed.
type Health byte

// The kernel's letters.
const (
	Alive      Health = 'A'
	WriteError Health = 'D'
	SyncError  Health = 'S' // while recovering a region
	ReadError  Health = 'R'
	FlushError Health = 'F'
	Unknown    Health = 'U'
)

func (h Health) String() string { return string(rune(h)) }

// MirrorStatus is the state of a mirror.
type MirrorStatus struct {
	Legs          []LegStatus
	InSync, Total uint64 // regions
	LogDevice     Ref    // empty for a core log
	// LogHealth is Alive, or WriteError or FlushError if the log device failed. After
	// that, all writes are held (with KeepLog, they fail).
	LogHealth Health
}

// LegStatus is the state of one leg of a mirror.
type LegStatus struct {
	Device Ref
	Health Health
}

// Synced reports whether all regions are in sync.
func (s MirrorStatus) Synced() bool { return s.InSync == s.Total }

// Healthy reports whether neither a leg nor the log has failed.
func (s MirrorStatus) Healthy() bool {
	for _, l := range s.Legs {
		if l.Health != Alive {
			return false
		}
	}
	return s.LogHealth == Alive
}

// String prints the status as the kernel does: "2 7:0 7:1 9/10 1 AD 1 core".
func (s MirrorStatus) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d", len(s.Legs))
	for _, l := range s.Legs {
		fmt.Fprintf(&b, " %s", l.Device)
	}
	fmt.Fprintf(&b, " %d/%d 1 ", s.InSync, s.Total)
	for _, l := range s.Legs {
		b.WriteByte(byte(l.Health))
	}
	if s.LogDevice == "" {
		return b.String() + " 1 core"
	}
	fmt.Fprintf(&b, " 3 disk %s %c", s.LogDevice, s.LogHealth)
	return b.String()
}

// ParseMirrorStatus reads the status line of a mirror target.
func ParseMirrorStatus(params string) (MirrorStatus, error) {
	w := &words{left: strings.Fields(params)}
	s := w.mirrorStatus()
	if err := w.end(); err != nil {
		return MirrorStatus{}, fmt.Errorf("mirror status %q: %w", params, err)
	}
	return s, nil
}

func (w *words) mirrorStatus() (s MirrorStatus) {
	for range w.count() {
		s.Legs = append(s.Legs, LegStatus{Device: Ref(w.next())})
	}
	s.InSync, s.Total = w.ratio()
	if one := w.next(); one != "1" {
		w.fail("%q where 1 was expected", one)
	}
	letters := w.next()
	if len(letters) != len(s.Legs) {
		w.fail("%d legs, health %q", len(s.Legs), letters)
		return s
	}
	for i := range s.Legs {
		s.Legs[i].Health = w.health(letters[i])
	}
	s.LogHealth = Alive
	switch n, kind := w.count(), w.next(); {
	case n == 1 && kind == "core":
	case n == 3 && kind == "disk":
		s.LogDevice = Ref(w.next())
		h := w.next()
		if len(h) != 1 {
			w.fail("log health %q", h)
			return s
		}
		s.LogHealth = w.health(h[0])
	default:
		w.fail("log %q with %d words", kind, n)
	}
	return s
}

func (w *words) ratio() (a, b uint64) {
	text := w.next()
	x, y, ok := strings.Cut(text, "/")
	v := &words{left: []string{x, y}}
	a, b = v.number(), v.number()
	if !ok || v.err != nil || a > b {
		w.fail("%q is not a ratio", text)
	}
	return a, b
}

func (w *words) health(c byte) Health {
	if !strings.ContainsRune("ADSRFU", rune(c)) {
		w.fail("health %q unknown", c)
	}
	return Health(c)
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// Leg is a device under a Striped or Mirror target, used from Offset on.
type Leg struct {
	Device Ref
	Offset block.Size
}

func (l Leg) String() string { return fmt.Sprintf("%s %d", l.Device, sectors(l.Offset)) }

func (l Leg) check() error {
	if l.Device == "" || strings.ContainsAny(string(l.Device), " \t\n/\\") {
		return fmt.Errorf("device %q: not a number or the name of a mapped device", l.Device)
	}
	if l.Offset%block.SectorSize != 0 {
		return fmt.Errorf("offset %d is not a multiple of %d", l.Offset, block.SectorSize)
	}
	return nil
}

// Linear maps to a device, from Offset on.
type Linear struct {
	Device Ref
	Offset block.Size
}

// Checked maps to extents of a device that also hold checksums of their data, one after another from
// Offset on: see target/integrity. The kernel has no such target.
type Checked struct {
	Device Ref
	Offset block.Size
	Leg    block.LegID
}

// Striped maps chunks to its legs in turn (RAID0).
type Striped struct {
	Chunk block.Size
	Legs  []Leg
}

// Mirror is dm-raid1. In regions that are in sync, it writes to all legs; in others, to the
// default leg alone. It reads from the default leg, which is the first one until that
// fails.
type Mirror struct {
	Log  Log
	Legs []Leg
	// HandleErrors makes it hold every write that a leg failed, until the table is
	// swapped (suspended without a flush). Without it, such a write is acknowledged.
	HandleErrors bool
	// KeepLog makes it acknowledge such writes after all, and keep their regions marked in
	// the log. It is safe only where at most one leg is alive.
	KeepLog bool
}

// ErrorTarget fails all I/O.
type ErrorTarget struct{}

// Zero reads as zeroes and drops writes.
type Zero struct{}

// Unwritable passes reads on to a device, at the same place, and fails all else, flushes too. A device that is
// ReadOnly cannot be opened for writing, as nvmet opens what it exports; this one can. It is dm-flakey that is
// always down and fails writes (drivers/md/dm-flakey.c).
type Unwritable struct{ Device Ref }

// Other is a target that this package does not parse.
type Other struct{ Name, Params string }

// Log is the dirty-region log of a mirror. It is in memory ("core") if Device is empty,
// else on that device ("disk"). Region is the unit of tracking, a power of two.
type Log struct {
	Device Ref
	Region block.Size
	Sync   Sync
}

// Sync says which regions a mirror treats as in sync: with a disk log, each time that it is
// resumed; with a core log, once.
type Sync string

// The kernel's words.
const (
	UseLog Sync = ""       // those that a disk log calls clean; with a core log, none
	NoSync Sync = "nosync" // all
	ReSync Sync = "sync"   // none
)

// Type is the kernel's name of the target.
func (Linear) Type() string      { return "linear" }
func (Checked) Type() string     { return "weft-checked" }
func (Striped) Type() string     { return "striped" }
func (Mirror) Type() string      { return "mirror" }
func (ErrorTarget) Type() string { return "error" }
func (Zero) Type() string        { return "zero" }
func (Unwritable) Type() string  { return "flakey" }
func (o Other) Type() string     { return o.Name }

func (t Linear) String() string { return Leg(t).String() }

func (t Checked) String() string { return fmt.Sprintf("%v %v", Leg{t.Device, t.Offset}, t.Leg) }

func (t Striped) String() string {
	return fmt.Sprintf("%d %d %s", len(t.Legs), sectors(t.Chunk), joinLegs(t.Legs))
}

func (t Mirror) String() string {
	s := fmt.Sprintf("%v %d %s", t.Log, len(t.Legs), joinLegs(t.Legs))
	var features []string
	if t.HandleErrors {
		features = append(features, "handle_errors")
	}
	if t.KeepLog {
		features = append(features, "keep_log")
	}
	if len(features) == 0 {
		return s
	}
	return fmt.Sprintf("%s %d %s", s, len(features), strings.Join(features, " "))
}

func (ErrorTarget) String() string  { return "" }
func (Zero) String() string         { return "" }
func (t Unwritable) String() string { return fmt.Sprintf("%v %s", Leg{Device: t.Device}, alwaysDown) }
func (o Other) String() string      { return o.Params }

// String prints the log as it appears in a mirror's parameters: "disk 3 7:0 2048 nosync".
func (l Log) String() string {
	kind, args := "core", []string{strconv.FormatUint(sectors(l.Region), 10)}
	if l.Device != "" {
		kind, args = "disk", append([]string{string(l.Device)}, args...)
	}
	if l.Sync != UseLog {
		args = append(args, string(l.Sync))
	}
	return fmt.Sprintf("%s %d %s", kind, len(args), strings.Join(args, " "))
}

// alwaysDown: up for 0 s, down for 1 s, and one feature.
const alwaysDown = "0 1 1 error_writes"

func joinLegs(legs []Leg) string {
	words := make([]string, len(legs))
	for i, l := range legs {
		words[i] = l.String()
	}
	return strings.Join(words, " ")
}

func (t Linear) mapRefs(f func(Ref) Ref) Target { t.Device = f(t.Device); return t }

func (t Checked) mapRefs(f func(Ref) Ref) Target { t.Device = f(t.Device); return t }

func (t Striped) mapRefs(f func(Ref) Ref) Target { t.Legs = mapLegs(t.Legs, f); return t }

func (t Mirror) mapRefs(f func(Ref) Ref) Target {
	if t.Log.Device != "" {
		t.Log.Device = f(t.Log.Device)
	}
	t.Legs = mapLegs(t.Legs, f)
	return t
}

func (t ErrorTarget) mapRefs(func(Ref) Ref) Target  { return t }
func (t Zero) mapRefs(func(Ref) Ref) Target         { return t }
func (t Unwritable) mapRefs(f func(Ref) Ref) Target { t.Device = f(t.Device); return t }
func (o Other) mapRefs(func(Ref) Ref) Target        { return o }

func mapLegs(legs []Leg, f func(Ref) Ref) []Leg {
	mapped := make([]Leg, len(legs))
	for i, l := range legs {
		mapped[i] = Leg{f(l.Device), l.Offset}
	}
	return mapped
}

func (t Linear) check() error { return Leg(t).check() }

func (t Checked) check() error { return Leg{t.Device, t.Offset}.check() }

func (t Striped) check() error {
	if len(t.Legs) == 0 || t.Chunk < 4*block.KiB || t.Chunk&(t.Chunk-1) != 0 {
		return fmt.Errorf("%d legs in chunks of %v: want at least one leg, and a power of two from 4KiB", len(t.Legs), t.Chunk)
	}
	return checkLegs(t.Legs)
}

func (t Mirror) check() error {
	switch {
	case len(t.Legs) < 1 || len(t.Legs) > 8:
		return fmt.Errorf("%d legs: must be 1 to 8", len(t.Legs))
	case t.Log.Region < 4*block.KiB || t.Log.Region&(t.Log.Region-1) != 0:
		return fmt.Errorf("region %v: must be a power of two from 4KiB", t.Log.Region)
	}
	return checkLegs(t.Legs)
}

func (ErrorTarget) check() error  { return nil }
func (Zero) check() error         { return nil }
func (t Unwritable) check() error { return Leg{Device: t.Device}.check() }
func (o Other) check() error      { return checkTypeName(o.Name) }

func checkLegs(legs []Leg) error {
	for i, l := range legs {
		if err := l.check(); err != nil {
			return fmt.Errorf("leg %d: %w", i, err)
		}
	}
	return nil
}

func checkTypeName(name string) error {
	if name == "" || len(name) > 15 || strings.ContainsAny(name, " \t\n\x00") {
		return fmt.Errorf("target type %q: must be 1 to 15 characters without spaces", name)
	}
	return nil
}

// ParseTarget parses the parameters of a target, as Target.String or the kernel prints them.
func ParseTarget(kind, params string) (Target, error) {
	w := &words{left: strings.Fields(params)}
	var t Target
	switch kind {
	case "linear":
		t = Linear(w.leg())
	case "striped":
		n := w.count()
		t = Striped{Chunk: w.size(), Legs: w.legs(n)}
	case "mirror":
		t = w.mirror()
	case "error":
		t = ErrorTarget{}
	case "zero":
		t = Zero{}
	case "flakey":
		l := w.leg()
		if w.err != nil || l.Offset != 0 || strings.Join(w.left, " ") != alwaysDown {
			return Other{kind, params}, nil
		}
		t, w.left = Unwritable{l.Device}, nil
	default:
		return Other{kind, params}, checkTypeName(kind)
	}
	if err := w.end(); err != nil {
		return nil, fmt.Errorf("%s parameters %q: %w", kind, params, err)
	}
	return t, nil
}

// words reads parameters. After the first error, all further values are zero.
type words struct {
	left []string
	err  error
}

func (w *words) next() string {
	if w.err == nil && len(w.left) == 0 {
		w.err = fmt.Errorf("ends too early")
	}
	if w.err != nil {
		return ""
	}
	s := w.left[0]
	w.left = w.left[1:]
	return s
}

func (w *words) end() error {
	if w.err == nil && len(w.left) > 0 {
		w.err = fmt.Errorf("%q is too much", strings.Join(w.left, " "))
	}
	return w.err
}

// count reads the number of words that follow; more than are left is an error.
func (w *words) count() int {
	s := w.next()
	n, err := strconv.Atoi(s)
	if w.err == nil && (err != nil || n < 0 || n > len(w.left)) {
		w.err = fmt.Errorf("%q is not a count of what follows", s)
	}
	if w.err != nil {
		return 0
	}
	return n
}

func (w *words) number() uint64 {
	s := w.next()
	n, err := strconv.ParseUint(s, 10, 64)
	if w.err == nil && err != nil {
		w.err = fmt.Errorf("%q is not a number", s)
	}
	return n
}

func (w *words) size() block.Size {
	s := w.next()
	if w.err != nil {
		return 0
	}
	n, err := parseSectors(s)
	w.err = err
	return n
}

func (w *words) leg() Leg { return Leg{Ref(w.next()), w.size()} }

func (w *words) legs(n int) []Leg {
	var legs []Leg
	for range n {
		legs = append(legs, w.leg())
	}
	return legs
}

func (w *words) mirror() Mirror {
	m := Mirror{Log: w.log()}
	m.Legs = w.legs(w.count())
	if w.err != nil || len(w.left) == 0 {
		return m
	}
	for range w.count() {
		switch s := w.next(); s {
		case "handle_errors":
			m.HandleErrors = true
		case "keep_log":
			m.KeepLog = true
		default:
			w.err = fmt.Errorf("feature %q unknown", s)
		}
	}
	return m
}

func (w *words) log() (l Log) {
	kind, n := w.next(), w.count()
	switch kind {
	case "disk":
		l.Device = Ref(w.next())
		n--
	case "core":
	default:
		w.fail("log type %q unknown", kind)
	}
	l.Region = w.size()
	switch n {
	case 1:
	case 2:
		l.Sync = Sync(w.next())
		if l.Sync != NoSync && l.Sync != ReSync {
			w.fail("%q is neither sync nor nosync", string(l.Sync))
		}
	default:
		w.fail("%s log with %d arguments", kind, n)
	}
	return l
}

func (w *words) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

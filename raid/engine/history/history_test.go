// SPDX-License-Identifier: Apache-2.0

package history

import (
	"slices"
	"testing"
)

// play does steps, one at each moment from 1 on, and returns the first that is
// wrong; the unit holds zeroes before.
func play(steps ...func(u *Unit, now int64) error) (wrong int) {
	u := &Zeroes(1)[0]
	for i, step := range steps {
		if step(u, int64(i)+1) != nil {
			return i + 1
		}
	}
	return 0
}

type step = func(*Unit, int64) error

func fine(f func(u *Unit, now int64)) step {
	return func(u *Unit, now int64) error { f(u, now); return nil }
}

func write(number uint64) step { return fine(func(u *Unit, now int64) { u.Write(number, now) }) }
func repeated(number uint64) step {
	return fine(func(u *Unit, now int64) { u.WriteRepeated(number, now) })
}
func acked(began int64) step     { return func(u *Unit, now int64) error { return u.Acked(began, now) } }
func discarded(began int64) step { return fine(func(u *Unit, now int64) { u.Discarded(began, now) }) }
func flushed(began int64) step   { return fine(func(u *Unit, now int64) { u.Flushed(began, now) }) }
func durable(began int64) step   { return fine(func(u *Unit, now int64) { u.Durable(began, now) }) }
func read(number uint64) step {
	return func(u *Unit, now int64) error { return u.Read(number, now, now) }
}
func late(number uint64, at int64) step {
	return func(u *Unit, now int64) error { return u.Read(number, at, now) }
}

func replaced(number uint64) step {
	return fine(func(u *Unit, now int64) { u.Replaced(number, now, now) })
}

var (
	wait   = fine(func(*Unit, int64) {})
	crash  = fine(func(u *Unit, now int64) { u.Crashed(now) })
	outage = fine(func(u *Unit, now int64) { u.PowerLost(now) })
)

func TestWhatAUserMaySee(t *testing.T) {
	for _, c := range []struct {
		name  string
		steps []step
		wrong int // the step that is; 0: none
	}{
		{"zeroes before any write", []step{read(0)}, 0},
		{"what nobody wrote", []step{read(7)}, 1},
		{"a write that is acknowledged stays", []step{write(1), acked(1), read(1), read(0)}, 4},
		{"a write under way is there or not", []step{write(1), read(0), read(0), read(1)}, 0},
		{"what was seen is there for good", []step{write(1), read(1), read(0)}, 3},
		{"a read that began before sees the old", []step{write(1), wait, acked(1), late(0, 2)}, 0},
		{"writes that overlap come in any order", []step{write(1), write(2), acked(1), acked(2), read(1)}, 0},
		{"their order is settled once it was seen", []step{write(1), write(2), acked(1), acked(2), read(1), read(2)}, 6},
		{"a write that is sent again happens again", []step{repeated(1), read(1), repeated(2), acked(3), read(2), acked(1), read(1)}, 0},
		{"once acknowledged it is not sent again", []step{repeated(1), read(1), acked(1), repeated(2), acked(4), read(1)}, 6},
		{"once its host is fenced it is not sent again", []step{repeated(1), read(1), discarded(1), repeated(2), acked(4), read(1)}, 6},
		{"what was before it does not come back", []step{repeated(1), read(1), read(0)}, 3},
		{"a crash: it happened", []step{write(1), crash, read(1), read(1)}, 0},
		{"a crash: what did not happen does not come", []step{write(1), crash, read(0), read(1)}, 4},
		{"a crash: what did not happen is not acknowledged", []step{write(1), crash, read(0), acked(1)}, 4},
		{"a crash: what was overwritten may be acknowledged", []step{write(1), write(2), acked(2), crash, read(2), acked(1)}, 0},
		{"a discard may leave what there was", []step{write(1), acked(1), write(0), discarded(3), read(1)}, 0},
		{"a discard may leave zeroes", []step{write(1), acked(1), write(0), discarded(3), read(0)}, 0},
		{"an outage takes what was not flushed", []step{write(1), acked(1), outage, read(0)}, 0},
		{"an outage leaves what was flushed", []step{write(1), acked(1), wait, flushed(3), outage, read(0)}, 6},
		{"a flush is of what was acknowledged before it", []step{write(1), acked(1), wait, flushed(1), outage, read(0)}, 0},
		{"what was put in its place is there", []step{write(1), acked(1), write(2), acked(3), replaced(1), read(1), read(2)}, 7},
		{"a write under way before does not happen after", []step{write(1), replaced(0), read(0), read(1)}, 4},
		{"a read that began before sees what was there", []step{write(1), acked(1), wait, replaced(0), late(1, 3), late(1, 5)}, 6},
		{"an outage leaves what was put in its place", []step{write(1), acked(1), replaced(0), outage, read(0), read(1)}, 6},
		{"what is put there can be written over", []step{write(1), replaced(7), write(2), acked(3), read(2), read(7)}, 6},
		{"and comes back if that is lost", []step{write(1), replaced(7), write(2), acked(3), outage, read(7)}, 0},
		{"an outage leaves what was written through", []step{write(1), durable(1), acked(1), outage, read(0)}, 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			if wrong := play(c.steps...); wrong != c.wrong {
				t.Errorf("step %d is wrong, want %d", wrong, c.wrong)
			}
		})
	}
}

// A unit held a value from the beginning of its write until a newer one had replaced it, and units that
// were seen together held what they did at a moment that is common to all.
func TestWhenAUnitHeldAValue(t *testing.T) {
	u := Known([]uint64{7})[0]
	u.Write(8, 3)
	u.Write(9, 6)
	if err := u.Acked(3, 5); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		number   uint64
		from, to int64
		want     []Span
	}{
		{7, 1, 9, []Span{{1, 5}}},
		{7, 6, 9, nil},
		{8, 1, 9, []Span{{3, 9}}},
		{9, 1, 9, []Span{{6, 9}}},
		{9, 1, 5, nil},
		{4, 1, 9, nil},
	} {
		if got := u.Held(c.number, c.from, c.to); !slices.Equal(got, c.want) {
			t.Errorf("Held(%d, %d, %d) = %v, want %v", c.number, c.from, c.to, got, c.want)
		}
	}
	for _, c := range []struct {
		held [][]Span
		want int64 // 0: there is none
	}{
		{[][]Span{{{1, 5}}, {{3, 9}}}, 3},
		{[][]Span{{{1, 5}}, {{6, 9}}}, 0},
		{[][]Span{{{1, 2}, {6, 7}}, {{4, 9}}, {{1, 3}, {7, 8}}}, 7},
		{[][]Span{{{1, 2}, {6, 7}}, {{4, 5}}}, 0},
		{[][]Span{{{1, 5}}, nil}, 0},
	} {
		if got, ok := Common(c.held); got != c.want || ok != (c.want > 0) {
			t.Errorf("Common(%v) = %d, %v; want %d", c.held, got, ok, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
)

const region = int64(checkpoint.Region)

// export makes the leg of mapLeg available to one more host.
func export(t *testing.T, l *Legs) *exported {
	t.Helper()
	d, err := l.Device("/dev/weft/leg/" + leg.String())
	must(t, err)
	e := d.(*exported)
	e.opened()
	return e
}

func (e *exported) take(t *testing.T, token uint64) {
	t.Helper()
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: token}))
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: token, Commit: true}))
}

// listed returns the regions that a leg lists; nil if it does not know.
func listed(t *testing.T, e *exported) []int {
	t.Helper()
	l, err := e.Written()
	must(t, err)
	if l.Committed == 0 {
		return nil
	}
	all := []int{}
	for i := range len(l.Regions) * 64 {
		if l.Regions[i/64]>>(i%64)&1 == 1 {
			all = append(all, i)
		}
	}
	return all
}

// newListed is a leg of 16 regions on a drive, with a checkpoint.
func newListed(t *testing.T) (*Legs, *spare, *exported) {
	d := newSpare(32 * checkpoint.Region)
	l := legsOn(map[block.DeviceNumber]*spare{one: d})
	mapLeg(t, l, tableOn(one, 8*region/unit, 16*region/unit))
	e := export(t, l)
	if got := listed(t, e); got != nil {
		t.Fatalf("before the first checkpoint the leg lists %v, want nothing known", got)
	}
	e.take(t, 1)
	return l, d, e
}

func TestALegListsWhatIsWritten(t *testing.T) {
	_, d, e := newListed(t)
	must(t, block.WriteAt(e, make([]byte, unit), 0))
	must(t, block.Do(e, &block.IO{Op: block.OpWriteZeroes, Off: 3 * region, Len: 2 * region}))
	must(t, block.Do(e, &block.IO{Op: block.OpDiscard, Off: 7*region - unit, Len: 2 * unit}))
	must(t, block.ReadAt(e, make([]byte, unit), 10*region))
	must(t, block.Flush(e))
	want := []int{0, 3, 4, 6, 7}
	if got := listed(t, e); !slices.Equal(got, want) {
		t.Errorf("after a write, zeroes and a discard the leg lists %v, want %v", got, want)
	}

	d.hold = true
	done := make(chan error, 1)
	go func() { done <- block.WriteAt(e, make([]byte, unit), 12*region) }()
	for {
		d.mu.Lock()
		n := len(d.kept)
		d.mu.Unlock()
		if n > 0 {
			break
		}
	}
	want = append(want, 12)
	if got := listed(t, e); !slices.Equal(got, want) {
		t.Errorf("while a write is in the drive the leg lists %v, want %v", got, want)
	}
	d.letGo()
	must(t, <-done)
	e.take(t, 2)
	if got := listed(t, e); len(got) > 0 || got == nil {
		t.Errorf("after a checkpoint the leg lists %v, want none", got)
	}
}

func TestTheListOutlivesAnExportButNotATable(t *testing.T) {
	l, _, e := newListed(t)
	must(t, block.WriteAt(e, make([]byte, unit), 0))
	e.closed()
	next := export(t, l)
	if got := listed(t, next); !slices.Equal(got, []int{0}) {
		t.Errorf("the next export lists %v, want region 0", got)
	}
	must(t, l.Do(step(dm.OpReload, tableOn(one, 8*region/unit, 20*region/unit))))
	if got := listed(t, next); got != nil {
		t.Errorf("with another table the leg lists %v, want nothing known", got)
	}
}

func TestAHostThatMayNotBeAloneTakesNoCheckpoint(t *testing.T) {
	l, _, e := newListed(t)
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: 2}))
	other := export(t, l)
	for name, k := range map[string]nvmetcp.Checkpoint{"commit": {Token: 2, Commit: true}, "begin": {Token: 3}} {
		if err := e.Checkpoint(k); !errors.Is(err, block.ErrUnsupported) {
			t.Errorf("%s while another host can write: %v, want %v", name, err, block.ErrUnsupported)
		}
	}
	if err := other.Checkpoint(nvmetcp.Checkpoint{Token: 3}); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("checkpoint of the second host: %v, want %v", err, block.ErrUnsupported)
	}
	other.closed() // what it wrote may be on some copies only
	if err := e.Checkpoint(nvmetcp.Checkpoint{Token: 4}); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("checkpoint after another host could write: %v, want %v", err, block.ErrUnsupported)
	}
	e.closed()
	if err := e.Checkpoint(nvmetcp.Checkpoint{Token: 4}); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("checkpoint of a host that was fenced: %v, want %v", err, block.ErrUnsupported)
	}
	export(t, l).take(t, 5)
}

// What a host says that a leg lacks is kept until the next checkpoint, and a checkpoint that begins
// for a leg that is copied to does not look like one of a leg in sync.
func TestATargetKeepsWhatALegLacks(t *testing.T) {
	_, d, e := newListed(t)
	lacks := &nvmetcp.Behind{Since: 4, Ranges: [][2]int64{{region, 5 * region}}}
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: 2, Behind: &nvmetcp.Behind{}}))
	if l, err := e.Written(); err != nil || l.Begun != 0 {
		t.Errorf("a checkpoint has begun for a leg that is copied to: its list says %d, %v", l.Begun, err)
	}
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: 2, Commit: true, Behind: lacks}))
	if l, err := e.Written(); err != nil || l.Committed != 2 || !reflect.DeepEqual(l.Behind, lacks) {
		t.Errorf("the list is %+v, %v, want that the leg lacks %+v", l, err, lacks)
	}
	e.take(t, 3)
	if l, err := e.Written(); err != nil || l.Behind != nil {
		t.Errorf("after a checkpoint of a leg in sync it lacks %+v, %v", l.Behind, err)
	}
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: 4, Behind: &nvmetcp.Behind{}}))
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: 4, Commit: true, Behind: lacks}))
	d.mu.Lock()
	d.losses++
	d.mu.Unlock()
	if l, err := e.Written(); err != nil || l.Committed != 0 {
		t.Errorf("after a loss the list is %+v, %v, want nothing known", l, err)
	}
}

func TestAfterALossNothingIsKnown(t *testing.T) {
	l, d, e := newListed(t)
	must(t, e.Checkpoint(nvmetcp.Checkpoint{Token: 2}))
	d.mu.Lock()
	d.losses++
	d.mu.Unlock()
	if got := listed(t, e); got != nil {
		t.Errorf("after a loss the leg lists %v, want nothing known", got)
	}
	for name, k := range map[string]nvmetcp.Checkpoint{"commit": {Token: 2, Commit: true}, "begin": {Token: 3}} {
		if err := e.Checkpoint(k); !errors.Is(err, errLosses) {
			t.Errorf("%s after a loss: %v, want %v", name, err, errLosses)
		}
	}
	e.closed()
	next := export(t, l)
	must(t, next.Checkpoint(nvmetcp.Checkpoint{Token: 4}))
	if got := listed(t, next); got != nil {
		t.Errorf("before the first checkpoint after a loss the leg lists %v, want nothing known", got)
	}
	next.take(t, 5)
	if got := listed(t, next); got == nil {
		t.Error("after a checkpoint of the next export nothing is known")
	}
}

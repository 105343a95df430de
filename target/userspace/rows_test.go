// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/mapped"
)

// fakeMapper is the kernel's device mapper over the file of a drive. It outlives processes.
type fakeMapper struct {
	t       *testing.T
	path    string
	devices map[string]*dm.State
	flushes map[string]bool // devices whose flushes reach their tables
	minor   uint32
	lacks   string            // a target's type
	left    int               // changes that still succeed; -1: all
	busy    string            // a device that somebody has open
	removed func(name string) // is called after each removal
}

var errKilled = errors.New("the process is dead")

func newMapper(t *testing.T, path string) *fakeMapper {
	return &fakeMapper{t: t, path: path, devices: map[string]*dm.State{}, flushes: map[string]bool{}, left: -1}
}

// under has the kernel map legs on drives.
func (k *fakeMapper) under(d *Drives) *Rows {
	r := d.InKernel(func() (KernelMapper, error) { return k, nil })
	r.settle = func(n block.DeviceNumber) error {
		if k.left == 0 {
			return errKilled
		}
		k.left = max(k.left-1, -1)
		delete(k.flushes, k.numbered(dm.RefTo(n)).Name)
		return nil
	}
	return r
}

func (k *fakeMapper) numbered(r dm.Ref) *dm.State {
	for _, d := range k.devices {
		if r == dm.RefTo(d.Number) || r == dm.Ref(d.Name) {
			return d
		}
	}
	return nil
}

func (k *fakeMapper) Devices(prefix string) (all []dm.State, err error) {
	for _, name := range slices.Sorted(maps.Keys(k.devices)) {
		if strings.HasPrefix(k.devices[name].UUID, prefix) {
			all = append(all, *k.devices[name])
		}
	}
	return all, nil
}

func (k *fakeMapper) List() (all []dm.Listed, err error) {
	for _, name := range slices.Sorted(maps.Keys(k.devices)) {
		all = append(all, dm.Listed{Name: name, Number: k.devices[name].Number})
	}
	return all, nil
}

func (k *fakeMapper) Info(name string) (dm.Info, error) {
	if d := k.devices[name]; d != nil {
		return d.Info, nil
	}
	return dm.Info{}, unix.ENXIO
}

func (k *fakeMapper) Do(s dm.Step) error {
	name := s.Device.Name
	d := k.devices[name]
	switch {
	case k.left == 0:
		return errKilled
	case s.Op != dm.OpCreate && d == nil:
		return unix.ENXIO
	case s.Op == dm.OpCreate:
		return k.create(s.Device)
	case s.Op != dm.OpRemove:
		k.t.Errorf("%v: not expected", s)
	case k.users(d) > 0 || k.busy == name:
		return unix.EBUSY
	}
	k.left = max(k.left-1, -1)
	delete(k.devices, name)
	if k.removed != nil {
		k.removed(name)
	}
	return nil
}

func (k *fakeMapper) create(d dm.Device) error {
	switch {
	case k.devices[d.Name] != nil:
		return unix.EBUSY
	case d.Table.Check() != nil || slices.ContainsFunc(d.Table, func(r dm.Row) bool { return r.Target.Type() == k.lacks }):
		return unix.EINVAL
	}
	k.left = max(k.left-1, -1)
	k.minor++
	state := &dm.State{Info: dm.Info{Name: d.Name, UUID: d.UUID, Number: block.DeviceNumber{Major: 253, Minor: k.minor}, Live: true}, Table: d.Table}
	k.devices[d.Name], k.flushes[d.Name] = state, true
	return nil
}

func (k *fakeMapper) users(d *dm.State) (n int) {
	for _, o := range k.devices {
		if slices.ContainsFunc(o.Table.Refs(), func(r dm.Ref) bool { return k.numbered(r) == d }) {
			n++
		}
	}
	return n
}

// read reads a part of a device as the kernel does.
func (k *fakeMapper) read(name string, off int64, n int) []byte {
	d := k.devices[name]
	if d == nil {
		k.t.Fatalf("no device %s", name)
	}
	for _, r := range d.Table {
		if off < int64(r.Start) || off >= int64(r.Start+r.Length) {
			continue
		}
		switch to := r.Target.(type) {
		case dm.Unwritable:
			return k.read(k.numbered(to.Device).Name, off, n)
		case dm.Zero:
			return make([]byte, n)
		case dm.Linear:
			b := make([]byte, n)
			f, err := os.Open(k.path)
			must(k.t, err)
			defer f.Close()
			_, err = f.ReadAt(b, int64(to.Offset)+off-int64(r.Start))
			must(k.t, err)
			return b
		}
	}
	k.t.Fatalf("%s has nothing at %d", name, off)
	return nil
}

// holds checks the first bytes of the first chunks of a leg.
func (k *fakeMapper) holds(id block.LegID, want string) {
	k.t.Helper()
	got := make([]byte, len(want))
	for i := range got {
		if got[i] = k.read(legPrefix+id.String(), int64(i)<<20, 4096)[0]; got[i] == 0 {
			got[i] = '-'
		}
	}
	if string(got) != want {
		k.t.Errorf("in the kernel, leg %v holds %s, want %s", id, got, want)
	}
}

func (k *fakeMapper) names() []string { return slices.Sorted(maps.Keys(k.devices)) }

// inKernel is a planted drive whose legs the kernel can map as well. Of two snapshots the second one is over the first.
func inKernel(t *testing.T) *plantedDrive {
	t.Helper()
	p := newPlanted(t)
	p.kernel = newMapper(t, p.path)
	p.rows = p.kernel.under(p.machine.Drives)
	p.stop(t)
	p.carve(t, monday, tuesday)
	p.write(t, leg, 'a', 0, 1, 2, 3)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	p.write(t, leg, 'b', 1)
	must(t, p.prepare(tuesday, block.GiB, freezeOf(leg)))
	return p
}

// kernelStep changes the device of a leg.
func (p *plantedDrive) kernelStep(t *testing.T, op dm.Op, id block.LegID) dm.Step {
	t.Helper()
	n, err := p.machine.Drives.Number(p.path)
	must(t, err)
	name := legPrefix + id.String()
	return dm.Step{Op: op, Device: dm.Device{Name: name, UUID: name, Table: MappedTable(n, leg.String(), id, block.GiB)}}
}

func TestTheKernelServesWhatIsNeverWritten(t *testing.T) {
	p := inKernel(t)
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.kernel.holds(tuesday, "abaa-")
	want := p.kernelStep(t, dm.OpCreate, tuesday).Device
	if all, err := p.rows.Devices(legPrefix); err != nil || len(all) != 1 || len(dm.Diff(all, []dm.Device{want})) > 0 {
		t.Errorf("the kernel has %+v, %v; want %+v", all, err, want)
	}
	if top := p.kernel.devices[want.Name]; top.Table[0].Target.Type() != (dm.Unwritable{}).Type() || p.kernel.flushes[want.Name] {
		t.Errorf("hosts reach %v, flushes reach it: %v; want what cannot be written, and no flushes", top.Table, p.kernel.flushes[want.Name])
	}
	p.write(t, leg, 'c', 0, 1, 2, 3, 4, 5)
	if err := p.disk.FreeLeg(tuesday); err == nil {
		t.Error("a leg is freed that the kernel serves")
	}
	if _, err := p.machine.Drives.leg(p.disk.held.number, leg.String(), tuesday, block.GiB); !errors.Is(err, mapped.ErrInUse) {
		t.Errorf("the process opens it as well: %v", err)
	}
	must(t, p.disk.FreeLeg(monday))
	p.idle(t)
	p.end(t)
	p.kernel.holds(tuesday, "abaa-") // there is no process
	p.start(t)
	p.open(t)
	p.write(t, leg, 'd', 6, 7, 8, 9)
	p.idle(t)
	if l := treeLayers(t, p); len(l) != 3 || l[0].State != mapped.StateDoomed {
		t.Errorf("the tree has %+v; want the deleted layer to stay while the kernel has the leg over it", l)
	}
	p.kernel.holds(tuesday, "abaa-")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
	if left := p.kernel.names(); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
	p.holds(t, tuesday, "abaa-")
	p.idle(t)
	if l := treeLayers(t, p); len(l) != 2 {
		t.Errorf("the tree has %+v; want the deleted layer to be gone", l)
	}
	p.holds(t, tuesday, "abaa-")
	p.holds(t, leg, "ccccccddd")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.kernel.holds(tuesday, "abaa-")
	must(t, errors.Join(p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)), p.disk.FreeLeg(tuesday)))
	p.end(t)
}

// The kernel gets no snapshot that is not known as a whole: it would read zeroes for the rest. One that is known it gets.
func TestTheKernelGetsNothingThatIsUnknown(t *testing.T) {
	p := inKernel(t)
	p.loseRecord(t, 7) // what tuesday has over monday
	err := p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday))
	if !errors.Is(err, mapped.ErrDamaged) || p.rows.Refused(tuesday) == "" || len(p.kernel.names()) > 0 {
		t.Errorf("create = %v, refused: %q; the kernel has %v", err, p.rows.Refused(tuesday), p.kernel.names())
	}
	p.end(t)
}

// A process dies after each change that it makes in the kernel. The next one serves the leg from either place.
func TestAProcessMayDieWhileTheKernelGetsALeg(t *testing.T) {
	for after := 0; ; after++ {
		done := false
		t.Run(fmt.Sprint("after ", after), func(t *testing.T) {
			for _, then := range []string{"kernel", "process"} {
				p := inKernel(t)
				must(t, p.rows.Able()) // finding out is not a part of it
				p.kernel.left = after
				err := cmp.Or(p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)), p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
				done = err == nil
				p.kernel.left = -1
				p.end(t)
				p.start(t)
				p.open(t)
				must(t, p.disk.FreeLeg(monday))
				p.write(t, leg, 'c', 0, 1, 2, 3, 4, 5)
				p.machine.Drives.background.Wait()
				p.write(t, leg, 'd', 10, 11, 12, 13)
				upper := slices.Contains(p.kernel.names(), legPrefix+tuesday.String())
				if upper {
					p.kernel.holds(tuesday, "abaa-")
				}
				switch {
				case then == "kernel" && !upper:
					must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
				case then == "process" && upper:
					must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
				}
				if then == "process" {
					p.holds(t, tuesday, "abaa-")
					p.idle(t)
				} else {
					if _, err := p.rows.Devices(legPrefix); err != nil || p.kernel.flushes[legPrefix+tuesday.String()] {
						t.Errorf("flushes reach the kernel's leg (%v)", err)
					}
					p.kernel.holds(tuesday, "abaa-")
					must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
				}
				if left := p.kernel.names(); len(left) > 0 {
					t.Errorf("%v are left", left)
				}
				must(t, p.disk.FreeLeg(tuesday))
				p.end(t)
			}
		})
		if done || t.Failed() {
			if after < 4 {
				t.Errorf("it died in %d places", after)
			}
			return
		}
	}
}

// Programs that do not know of pins must not touch the drive while the kernel reads it.
func TestTheLabelSaysThatTheKernelReads(t *testing.T) {
	p := inKernel(t)
	pinned := func(want bool, when string) {
		t.Helper()
		if got := p.disk.Label().Pinned; got != want {
			t.Errorf("%s: the label says %v, want %v", when, got, want)
		}
	}
	pinned(false, "before")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, monday)))
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	pinned(true, "with two legs")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, monday)))
	pinned(true, "with one leg")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
	pinned(false, "with none")

	p.rows.most = 0
	if err := p.rows.Do(p.kernelStep(t, dm.OpCreate, monday)); err == nil {
		t.Error("created without any row")
	}
	pinned(false, "of a leg that is refused")
	p.rows.most = mostRows
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.end(t)
	p.start(t)
	p.open(t)
	pinned(true, "without a process")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday))) // its tree is not open
	pinned(false, "removed by the next process")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.end(t)
	clear(p.kernel.devices) // the machine has booted
	p.start(t)
	p.open(t)
	p.holds(t, tuesday, "abaa-")
	pinned(false, "after a boot")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.end(t)
	clear(p.kernel.devices)
	p.kernel = nil // the process serves alone
	p.start(t)
	p.open(t)
	p.holds(t, tuesday, "abaa-")
	pinned(false, "in user space")
	p.end(t)
}

// Another leg of the drive is removed in the middle of this one's removal, and takes what is under this one along.
func TestALegIsLetGoOfWhoeverRemovesItsRows(t *testing.T) {
	p := inKernel(t)
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, monday)))
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.kernel.removed = func(name string) {
		if name == legPrefix+tuesday.String() {
			p.kernel.removed = nil
			must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, monday)))
		}
	}
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
	if left := p.kernel.names(); len(left) > 0 || p.rows.unsure() {
		t.Errorf("%v are left, unsure: %v", left, p.rows.unsure())
	}
	p.holds(t, tuesday, "abaa-")
	must(t, errors.Join(p.disk.FreeLeg(monday), p.disk.FreeLeg(tuesday)))
	p.end(t)
}

// An observation that was too early has a leg created that is there. It stays pinned.
func TestALegIsGivenToTheKernelTwice(t *testing.T) {
	p := inKernel(t)
	for range 2 {
		must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	}
	must(t, p.disk.FreeLeg(monday))
	p.write(t, leg, 'c', 0, 1, 2, 3, 4)
	p.idle(t)
	p.write(t, leg, 'd', 5, 6, 7, 8)
	p.kernel.holds(tuesday, "abaa-")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
	p.end(t)
}

// A device that somebody has open for a moment is removed later, and keeps nothing then.
func TestADeviceThatIsBusyIsRemovedLater(t *testing.T) {
	p := inKernel(t)
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
	p.kernel.busy = RowsPrefix + tuesday.String()
	if err := p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)); !errors.Is(err, unix.EBUSY) {
		t.Errorf("removed: %v", err)
	}
	p.kernel.busy = ""
	p.holds(t, tuesday, "abaa-")
	if left := p.kernel.names(); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, leg)))
	p.kernel.busy = RowsPrefix + leg.String()
	if err := p.rows.Do(p.kernelStep(t, dm.OpRemove, leg)); !errors.Is(err, unix.EBUSY) {
		t.Errorf("removed: %v", err)
	}
	must(t, errors.Join(p.disk.FreeLeg(monday), p.disk.FreeLeg(tuesday)))
	p.machine.Drives.background.Wait()
	if err := p.disk.FreeLeg(leg); err == nil {
		t.Error("the last leg of a tree is freed while the kernel has its drive")
	}
	p.kernel.busy = ""
	must(t, p.disk.FreeLeg(leg))
	p.end(t)
}

// A tree that has stopped is opened again for its other legs, although the kernel has one of it.
func TestATreeThatIsKeptIsOpenedAgain(t *testing.T) {
	var broken atomic.Bool
	p := newPlantedOn(t, func(_ string, data block.Device) block.Device { return switchable{data, &broken, new(atomic.Int64)} })
	p.kernel = newMapper(t, p.path)
	p.rows = p.kernel.under(p.machine.Drives)
	p.stop(t)
	p.carve(t, monday, tuesday)
	p.write(t, leg, 'a', 0, 1)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, monday)))
	must(t, p.disk.Keep(leg.String()))
	if seen := p.disk.Trees()[leg.String()]; seen.Err != "" || !seen.Idle {
		t.Errorf("the tree is %+v, want it open and idle", seen)
	}
	broken.Store(true)
	if err := p.prepare(tuesday, block.GiB, freezeOf(leg)); !errors.Is(err, mapped.ErrFailed) {
		t.Errorf("the tree has not stopped: %v", err)
	}
	broken.Store(false)
	p.write(t, leg, 'b', 1)
	p.holds(t, leg, "ab")
	p.kernel.holds(monday, "aa-")
	must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, monday)))
	p.holds(t, monday, "aa-")
	p.end(t)
}

func TestWhatTheKernelIsNotGiven(t *testing.T) {
	t.Run("a leg in too many pieces", func(t *testing.T) {
		p := inKernel(t)
		p.use(t, leg, func(d Device) {
			for grain := range int64(64) {
				must(t, block.WriteAt(d, bytes.Repeat([]byte("x"), 4096), grain*2*mapped.GrainSize))
			}
		})
		p.rows.most = 100
		err := p.rows.Do(p.kernelStep(t, dm.OpCreate, leg))
		if !errors.Is(err, mapped.ErrTooManyRows) || !strings.Contains(p.rows.Refused(leg), "too many") || len(p.kernel.names()) > 0 {
			t.Errorf("created: %v, refused: %q, in the kernel: %v", err, p.rows.Refused(leg), p.kernel.names())
		}
		p.holds(t, leg, "xx")
		p.end(t)
	})
	t.Run("to a kernel that lacks a target", func(t *testing.T) {
		for _, lacks := range []string{"zero", "flakey"} {
			p := inKernel(t)
			p.kernel.lacks = lacks
			err := p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday))
			if !errors.Is(err, errNotAble) || p.rows.Able() == nil || p.rows.Refused(tuesday) == "" || len(p.kernel.names()) > 0 {
				t.Errorf("without %s: %v, able: %v, refused: %q, in the kernel: %v", lacks, err, p.rows.Able(), p.rows.Refused(tuesday), p.kernel.names())
			}
			p.end(t)
		}
	})
	t.Run("a leg that it fails to map again and again", func(t *testing.T) {
		p := inKernel(t)
		must(t, p.rows.Able())
		p.kernel.lacks = "linear"
		for n := range mostFailures {
			if refused := p.rows.Refused(tuesday); refused != "" {
				t.Errorf("refused after %d failures: %s", n, refused)
			}
			if err := p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)); err == nil {
				t.Error("created")
			}
		}
		if p.rows.Refused(tuesday) == "" {
			t.Error("it is to be tried for ever")
		}
		p.holds(t, tuesday, "abaa-")
		p.end(t)
	})
	t.Run("a leg that the process has open", func(t *testing.T) {
		p := inKernel(t)
		p.use(t, tuesday, func(Device) {
			if err := p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)); !errors.Is(err, mapped.ErrInUse) || p.rows.Refused(tuesday) != "" {
				t.Errorf("created: %v, refused: %q; it is to be tried again", err, p.rows.Refused(tuesday))
			}
		})
		must(t, p.rows.Do(p.kernelStep(t, dm.OpCreate, tuesday)))
		must(t, p.rows.Do(p.kernelStep(t, dm.OpRemove, tuesday)))
		p.end(t)
	})
}

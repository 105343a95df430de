// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

const diskSize = 16 * block.MiB

// world is a kernel to run the suite over: the fake, or the real one.
type world struct {
	client  *Client
	kernel  kernel
	disks   []Ref                                // of diskSize
	prefix  string                               // of names and uuids
	hold    func(name string) (release func())   // opens a device
	failLeg func(name string)                    // makes the second leg of a mirror, an error device, fail a write
	ios     func(name string, reads, writes int) // does so many, of 4 KiB each
}

func (w *world) name(s string) string { return w.prefix + s }

func (w *world) device(s string, t Table) Device {
	return Device{Name: w.name(s), UUID: w.name(s), Table: t}
}

func TestOverTheFake(t *testing.T) { runSuite(t, fakeWorld) }

func runSuite(t *testing.T, newWorld func(*testing.T) *world) {
	for name, test := range map[string]func(*testing.T, *world){
		"a device goes from created to live to removed":          lifecycle,
		"a name or uuid that is taken is busy":                   taken,
		"a device that does not exist is not found":              missing,
		"an open device is not removed":                          open,
		"a loaded table shows only after a resume":               inactive,
		"tables come back as they were loaded":                   tables,
		"a table that the kernel refuses changes nothing":        refused,
		"long tables fit":                                        long,
		"names stand for devices in a table":                     names,
		"a mirror tells how it fares, and when that changes":     mirror,
		"wait ends with its context, and when the device goes":   wait,
		"the kernel tells its version and its targets":           versions,
		"a stack is built, changed and removed by differences":   stack,
		"a plan that is cut anywhere is finished by the next":    cut,
		"only an explicit resize changes a size, and only grows": resize,
		"something is done between the old table and the new":    between,
		"a reload that nobody waits for leaves the old table":    secondThought,
		"a device takes another name":                            rename,
		"a message that no target knows is refused":              message,
		"a device's I/O is counted if it was made so":            count,
		"counts have each I/O, and outlive a table":              countAll,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			t.Cleanup(func() { w.removeAll(t) })
			test(t, w)
		})
	}
}

// removeAll removes the devices that a test made. If that fails, the test fails.
func (w *world) removeAll(t *testing.T) {
	got, err := w.client.Devices(w.prefix)
	if err != nil {
		t.Error(err)
	}
	for _, s := range Diff(got, nil) {
		if err := w.remove(s.Device.Name); err != nil {
			t.Error(err)
		}
	}
}

// remove tries again while the device is open, by udev or by the kernel's own scan of the
// partition table.
func (w *world) remove(name string) error {
	var err error
	for range 50 {
		if err = w.client.Remove(name, false); !errors.Is(err, syscall.EBUSY) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) linear(disk int) Table { return Whole(diskSize/2, Linear{Device: w.disks[disk]}) }

func lifecycle(t *testing.T, w *world) {
	name := w.name("a")
	created, err := w.client.Create(name, w.name("uuid"))
	must(t, err)
	info, err := w.client.Info(name)
	must(t, err)
	want := Info{Name: name, UUID: w.name("uuid"), Number: created.Number}
	if info != want {
		t.Errorf("Info of a new device = %+v, want %+v", info, want)
	}
	must(t, w.client.Load(name, w.linear(0)))
	must(t, w.client.Resume(name, UdevInner))
	want.Live = true
	if info, err = w.client.Info(name); err != nil || info.Live != true || info.Inactive || info.Suspended {
		t.Errorf("Info after resume = %+v, %v; want %+v", info, err, want)
	}
	must(t, w.client.Suspend(name, false, true))
	must(t, w.client.Suspend(name, true, true)) // a second time is no error
	if info, err = w.client.Info(name); err != nil || !info.Suspended {
		t.Errorf("Info after suspend = %+v, %v; want it suspended", info, err)
	}
	must(t, w.client.Resume(name, UdevInner))
	must(t, w.client.Resume(name, UdevInner))
	list, err := w.client.List()
	if err != nil || !slices.Contains(list, Listed{name, created.Number}) {
		t.Errorf("List() = %v, %v; want %s in it", list, err, name)
	}
	deps, err := w.client.Deps(name)
	if err != nil || len(deps) != 1 || RefTo(deps[0]) != w.disks[0] {
		t.Errorf("Deps(%s) = %v, %v; want %s", name, deps, err, w.disks[0])
	}
	must(t, w.remove(name))
	if _, err := w.client.Info(name); !NotFound(err) {
		t.Errorf("Info of a removed device: %v, want ENXIO", err)
	}
}

func taken(t *testing.T, w *world) {
	_, err := w.client.Create(w.name("a"), w.name("uuid"))
	must(t, err)
	if _, err := w.client.Create(w.name("a"), w.name("other")); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Create with a name that is taken: %v, want EBUSY", err)
	}
	if _, err := w.client.Create(w.name("b"), w.name("uuid")); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Create with a uuid that is taken: %v, want EBUSY", err)
	}
}

func missing(t *testing.T, w *world) {
	for op, err := range errorsOfAll(w.client, w.name("nobody"), w.linear(0)) {
		if op != "create" && !NotFound(err) {
			t.Errorf("%s of a device that does not exist: %v, want ENXIO", op, err)
		}
	}
}

// errorsOfAll calls every method that names a device, and then removes what create made.
func errorsOfAll(c *Client, name string, table Table) map[string]error {
	got := map[string]error{}
	_, got["info"] = c.Info(name)
	got["load"] = c.Load(name, table)
	got["clear"] = c.Clear(name)
	got["resume"] = c.Resume(name, UdevInner)
	got["suspend"] = c.Suspend(name, true, true)
	got["remove"] = c.Remove(name, false)
	got["rename"] = c.Rename(name, name+"-2")
	_, got["table"] = c.Table(name)
	_, got["status"] = c.Status(name)
	_, got["deps"] = c.Deps(name)
	_, got["message"] = c.Message(name, 0, "hello")
	return got
}

func open(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	must(t, w.client.Do(Step{OpCreate, w.device("b", Whole(block.MiB, Linear{Device: Ref(w.name("a"))}))}))
	if err := w.client.Remove(w.name("a"), false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Remove under another device: %v, want EBUSY", err)
	}
	release := w.hold(w.name("b"))
	if err := w.client.Remove(w.name("b"), false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Remove of an open device: %v, want EBUSY", err)
	}
	if info, err := w.client.Info(w.name("b")); err != nil || info.Open < 1 {
		t.Errorf("Info of an open device = %+v, %v; want it open", info, err)
	}
	must(t, w.client.Remove(w.name("b"), true))
	release()
	for range 50 {
		if _, err := w.client.Info(w.name("b")); NotFound(err) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Error("a device removed deferred is still there after its last user left")
}

func inactive(t *testing.T, w *world) {
	name := w.name("a")
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	must(t, w.client.Load(name, w.linear(1)))
	if got, err := w.client.Table(name); err != nil || !got.Equal(w.linear(0)) {
		t.Errorf("Table before the resume = %v, %v; want %v", got, err, w.linear(0))
	}
	if info, err := w.client.Info(name); err != nil || !info.Inactive || !info.Live {
		t.Errorf("Info = %+v, %v; want both tables", info, err)
	}
	must(t, w.client.Clear(name))
	must(t, w.client.Clear(name)) // a second time is no error
	if info, err := w.client.Info(name); err != nil || info.Inactive {
		t.Errorf("Info after clear = %+v, %v; want no inactive table", info, err)
	}
	must(t, w.client.Load(name, w.linear(1)))
	must(t, w.client.Resume(name, UdevInner))
	if got, err := w.client.Table(name); err != nil || !got.Equal(w.linear(1)) {
		t.Errorf("Table after the resume = %v, %v; want %v", got, err, w.linear(1))
	}
}

func tables(t *testing.T, w *world) {
	loaded, err := w.client.Targets()
	must(t, err)
	d := w.disks
	legs := []Leg{{d[0], 0}, {d[1], block.MiB}}
	for i, target := range []Target{
		Linear{d[0], 4 * block.KiB},
		Striped{64 * block.KiB, legs},
		ErrorTarget{},
		Zero{},
		Unwritable{d[0]},
		Mirror{Log: Log{Region: block.MiB, Sync: NoSync}, Legs: legs},
		Mirror{Log: Log{Region: block.MiB}, Legs: legs, HandleErrors: true},
		Mirror{Log: Log{Device: d[2], Region: 64 * block.KiB}, Legs: legs, HandleErrors: true, KeepLog: true},
		Mirror{Log: Log{Device: d[2], Region: block.MiB, Sync: NoSync}, Legs: append(legs, Leg{d[3], 0}), HandleErrors: true},
		Mirror{Log: Log{Device: d[2], Region: block.MiB, Sync: ReSync}, Legs: legs, HandleErrors: true},
	} {
		if _, ok := loaded[target.Type()]; !ok && slices.Contains([]string{"zero", "flakey"}, target.Type()) {
			continue // modules of their own, which a kernel may lack
		}
		name := fmt.Sprint("t", i)
		want := Whole(block.MiB*8, target)
		if err := w.client.Do(Step{OpCreate, w.device(name, want)}); err != nil {
			t.Error(err)
			continue
		}
		got, err := w.client.Table(w.name(name))
		if err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("Table = %v, %v; want %v", got, err, want)
		}
		must(t, w.remove(w.name(name)))
	}
}

func refused(t *testing.T, w *world) {
	name := w.name("a")
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	for _, table := range []Table{
		nil,
		{{Start: block.MiB, Length: block.MiB, Target: ErrorTarget{}}},
		Whole(1000, ErrorTarget{}),
		Whole(block.MiB, nil),
		Whole(block.MiB, Linear{Device: "99:99"}),
		Whole(block.MiB, Linear{Device: Ref(w.name("nobody"))}),
		Whole(block.MiB, Linear{Device: "/dev/null"}),
		Whole(block.MiB, Other{Name: "weft-no-target"}),
		Whole(block.MiB, Striped{Chunk: 96 * block.KiB, Legs: []Leg{{w.disks[0], 0}}}),
		Whole(block.MiB+block.SectorSize, Striped{Chunk: 64 * block.KiB, Legs: []Leg{{w.disks[0], 0}, {w.disks[1], 0}}}),
	} {
		if err := w.client.Load(name, table); err == nil {
			t.Errorf("Load(%v) succeeded", table)
		}
	}
	if err := w.client.Do(Step{OpReload, w.device("a", Whole(diskSize/2, Linear{Device: "99:99"}))}); err == nil {
		t.Error("reload with a table that cannot be loaded succeeded")
	}
	if err := w.client.Do(Step{OpCreate, w.device("b", Whole(block.MiB, Linear{Device: "99:99"}))}); err == nil {
		t.Error("create with a table that cannot be loaded succeeded")
	}
	got, err := w.client.Devices(w.prefix)
	must(t, err)
	if len(got) != 1 || !got[0].Table.Equal(w.linear(0)) || got[0].Suspended || got[0].Inactive {
		t.Errorf("Devices = %+v, want only %s as it was", got, name)
	}
}

func long(t *testing.T, w *world) {
	var want Table
	for i := range block.Size(1500) {
		want = append(want, Row{i * block.MiB, block.MiB, Linear{w.disks[i%3], i * block.SectorSize}})
	}
	must(t, w.client.Do(Step{OpCreate, w.device("a", want)}))
	got, err := w.client.Table(w.name("a"))
	if err != nil || !got.Equal(want) {
		t.Errorf("a table of %d rows came back with %d, %v", len(want), len(got), err)
	}
	if status, err := w.client.Status(w.name("a")); err != nil || len(status) != len(want) {
		t.Errorf("Status has %d rows, %v; want %d", len(status), err, len(want))
	}
}

func names(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	must(t, w.client.Do(Step{OpCreate, w.device("b", Whole(block.MiB, Linear{Ref(w.name("a")), block.MiB}))}))
	info, err := w.client.Info(w.name("a"))
	must(t, err)
	want := Whole(block.MiB, Linear{RefTo(info.Number), block.MiB})
	if got, err := w.client.Table(w.name("b")); err != nil || !got.Equal(want) {
		t.Errorf("Table = %v, %v; want %v", got, err, want)
	}
	got, err := w.client.Devices(w.prefix)
	must(t, err)
	want = Whole(block.MiB, Linear{Ref(w.name("a")), block.MiB})
	if len(got) != 2 || !got[1].Table.Equal(want) {
		t.Errorf("Devices = %+v, want the second as %v", got, want)
	}
}

func mirror(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("bad", Whole(diskSize/2, ErrorTarget{}))}))
	must(t, w.client.Do(Step{OpCreate, w.device("m", Whole(diskSize/2, Mirror{
		Log:          Log{Device: w.disks[2], Region: block.MiB, Sync: NoSync},
		Legs:         []Leg{{w.disks[0], 0}, {Ref(w.name("bad")), 0}},
		HandleErrors: true,
	}))}))
	bad, err := w.client.Info(w.name("bad"))
	must(t, err)
	got, err := w.client.MirrorStatus(w.name("m"))
	must(t, err)
	want := MirrorStatus{
		Legs:   []LegStatus{{w.disks[0], Alive}, {RefTo(bad.Number), Alive}},
		InSync: 8, Total: 8, LogDevice: w.disks[2], LogHealth: Alive,
	}
	if d := cmp.Diff(want, got); d != "" || !got.Healthy() || !got.Synced() {
		t.Errorf("MirrorStatus = %v, want %v", got, want)
	}
	before, err := w.client.Info(w.name("m"))
	must(t, err)
	w.failLeg(w.name("m"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	after, err := w.client.Wait(ctx, w.name("m"), before.EventNr)
	if err != nil || after.EventNr == before.EventNr {
		t.Errorf("Wait = %+v, %v; want another event number than %d", after, err, before.EventNr)
	}
	for range 100 { // the event may come before the region is marked
		if got, err = w.client.MirrorStatus(w.name("m")); err == nil && !got.Synced() {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	want.Legs[1].Health, want.InSync = WriteError, 7
	if d := cmp.Diff(want, got); d != "" || got.Healthy() || got.Synced() {
		t.Errorf("MirrorStatus after a failed write = %v, want %v", got, want)
	}
	if _, err := w.client.MirrorStatus(w.name("bad")); err == nil {
		t.Error("MirrorStatus of an error device succeeded")
	}
	// Release the held write.
	must(t, w.client.Do(Step{OpReload, w.device("m", w.linear(0))}))
}

func wait(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	info, err := w.client.Info(w.name("a"))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := w.client.Wait(ctx, w.name("a"), info.EventNr); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait without an event: %v, want the context's error", err)
	}
	if _, err := w.client.Wait(t.Context(), w.name("a"), info.EventNr+1); err != nil {
		t.Errorf("Wait for another number than the present one: %v, want none", err)
	}
	ended := make(chan error, 1)
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() {
		_, err := w.client.Wait(ctx, w.name("a"), info.EventNr)
		ended <- err
	}()
	must(t, w.remove(w.name("a")))
	if err := <-ended; !NotFound(err) {
		t.Errorf("Wait on a removed device: %v, want ENXIO", err)
	}
}

func versions(t *testing.T, w *world) {
	if v, err := w.client.Version(); err != nil || v[0] != 4 {
		t.Errorf("Version() = %v, %v; want 4.x", v, err)
	}
	targets, err := w.client.Targets()
	must(t, err)
	for _, name := range []string{"linear", "striped", "mirror", "error"} {
		if _, ok := targets[name]; !ok {
			t.Errorf("Targets() = %v, want %s in it", targets, name)
		}
	}
}

// towers are stacks such as a volume has. The tests change each of them into each other.
func (w *world) towers() [][]Device {
	d := w.disks
	half := diskSize / 2
	log := Log{Device: d[2], Region: block.MiB, Sync: NoSync}
	top := func(t Target) Device { dev := w.device("top", Whole(half, t)); dev.Udev = UdevNormal; return dev }
	return [][]Device{
		nil,
		{w.device("c", w.linear(0)), top(Linear{Device: Ref(w.name("c"))})},
		{
			w.device("c", Whole(half, Mirror{Log: log, Legs: []Leg{{d[0], 0}, {d[1], 0}}, HandleErrors: true})),
			top(Linear{Device: Ref(w.name("c"))}),
		},
		{
			w.device("lost", Whole(half, ErrorTarget{})),
			w.device("c", Whole(half, Mirror{Log: Log{Device: d[2], Region: block.MiB}, Legs: []Leg{{d[0], 0}, {Ref(w.name("lost")), 0}}, HandleErrors: true, KeepLog: true})),
			top(Linear{Device: Ref(w.name("c"))}),
		},
		{
			w.device("c", w.linear(0)), w.device("e", w.linear(1)),
			top(Striped{Chunk: 64 * block.KiB, Legs: []Leg{{Ref(w.name("c")), 0}, {Ref(w.name("e")), 0}}}),
		},
	}
}

func stack(t *testing.T, w *world) {
	for i, from := range w.towers() {
		for j, to := range w.towers() {
			w.reach(t, from)
			w.reach(t, to)
			if got, err := w.client.Devices(w.prefix); err != nil || len(Diff(got, to)) != 0 {
				t.Errorf("from %d to %d: Diff = %v, %v; want nothing left", i, j, Diff(got, to), err)
			}
		}
	}
	w.reach(t, nil)
}

// reach applies differences until there are none.
func (w *world) reach(t *testing.T, want []Device) {
	t.Helper()
	var last error
	for range 50 {
		got, err := w.client.Devices(w.prefix)
		must(t, err)
		steps := Diff(got, want)
		if len(steps) == 0 {
			return
		}
		for _, s := range steps {
			if last = w.client.Do(s); last != nil {
				time.Sleep(20 * time.Millisecond) // a busy device
				break
			}
		}
	}
	t.Fatalf("differences do not end; the last error is %v", last)
}

// cutKernel allows a number of calls that change something, and then fails all calls.
type cutKernel struct {
	kernel
	left int
}

var errCut = errors.New("cut")

func (k *cutKernel) ioctl(cmd uint32, buf []byte) error {
	switch cmd {
	case cmdCreate, cmdTableLoad, cmdTableClear, cmdSuspend, cmdRemove:
		if k.left == 0 {
			return errCut
		}
		k.left--
	}
	return k.kernel.ioctl(cmd, buf)
}

func cut(t *testing.T, w *world) {
	towers := w.towers()
	for _, pair := range [][2]int{{0, 2}, {2, 3}, {3, 2}, {1, 4}, {4, 0}} {
		for n := range 40 {
			w.reach(t, towers[pair[0]])
			got, err := w.client.Devices(w.prefix)
			must(t, err)
			dying := &Client{&cutKernel{w.kernel, n}}
			err = nil
			for _, s := range Diff(got, towers[pair[1]]) {
				if err = dying.Do(s); err != nil {
					break
				}
			}
			w.reach(t, towers[pair[1]])
			if err == nil {
				break // not cut any more: all prefixes are done
			}
			if n == 39 {
				t.Errorf("from %d to %d: still cut after %d calls", pair[0], pair[1], n)
			}
		}
	}
	w.reach(t, nil)
}

func resize(t *testing.T, w *world) {
	small := w.device("a", Whole(block.MiB, Linear{Device: w.disks[0]}))
	large := w.device("a", Whole(2*block.MiB, Linear{Device: w.disks[0]}))
	must(t, w.client.Do(Step{OpCreate, small}))
	got, err := w.client.Devices(w.prefix)
	must(t, err)
	steps := Diff(got, []Device{large})
	if len(steps) != 1 || steps[0].Op != OpResize {
		t.Fatalf("Diff to a larger size = %v, want a resize", steps)
	}
	must(t, w.client.Do(steps[0]))
	if got, err := w.client.Table(w.name("a")); err != nil || got.Size() != 2*block.MiB {
		t.Errorf("size after the resize = %v, %v; want 2MiB", got.Size(), err)
	}
	if err := w.client.Do(Step{OpResize, small}); err == nil {
		t.Error("a resize to a smaller size succeeded")
	}
}

func between(t *testing.T, w *world) {
	small := w.device("a", Whole(block.MiB, Linear{Device: w.disks[0]}))
	large := w.device("a", Whole(2*block.MiB, Linear{Device: w.disks[0]}))
	must(t, w.client.Do(Step{OpCreate, small}))
	times := 0
	look := func() error {
		times++
		info, err := w.client.Info(w.name("a"))
		table, _ := w.client.Table(w.name("a"))
		if err != nil || !info.Suspended || !info.Inactive || table.Size() != block.MiB {
			t.Errorf("between: %+v of %v, %v; want it suspended, with the old table live and the new one loaded", info, table.Size(), err)
		}
		return nil
	}
	if err := w.client.DoWith(Step{OpResize, large}, func() error { look(); return errCut }); !errors.Is(err, errCut) {
		t.Errorf("DoWith of what fails = %v, want its error", err)
	}
	got, err := w.client.Devices(w.prefix)
	if err != nil || len(Diff(got, []Device{small})) != 0 {
		t.Errorf("then Devices = %+v, %v; want the old table, live and not suspended", got, err)
	}
	must(t, w.client.DoWith(Step{OpResize, large}, look))
	if got, err := w.client.Table(w.name("a")); err != nil || got.Size() != 2*block.MiB || times != 2 {
		t.Errorf("size = %v, %v, after %d times; want 2MiB after two", got.Size(), err, times)
	}
	if err := w.client.DoWith(Step{OpRemove, large}, look); err == nil || times != 2 {
		t.Errorf("DoWith of a remove = %v, after %d times; want it refused", err, times)
	}
}

// endDuring is a kernel that ends a context while it suspends.
type endDuring struct {
	kernel
	end context.CancelCauseFunc
}

func (k endDuring) ioctl(cmd uint32, buf []byte) error {
	if h, err := decodeHeader(buf); cmd == cmdSuspend && err == nil && h.flags&flagSuspend != 0 {
		k.end(errCut)
	}
	return k.kernel.ioctl(cmd, buf)
}

func secondThought(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	ctx, cancel := context.WithCancelCause(t.Context())
	slow := &Client{endDuring{w.kernel, cancel}}
	if err := slow.DoContext(ctx, Step{OpReload, w.device("a", w.linear(1))}); !errors.Is(err, errCut) {
		t.Errorf("DoContext with a context that ended = %v, want its cause", err)
	}
	got, err := w.client.Devices(w.prefix)
	if err != nil || len(Diff(got, []Device{w.device("a", w.linear(0))})) != 0 {
		t.Errorf("Devices = %+v, %v; want the old table, live and not suspended", got, err)
	}
	must(t, w.client.DoContext(t.Context(), Step{OpReload, w.device("a", w.linear(1))}))
}

func rename(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	must(t, w.client.Rename(w.name("a"), w.name("b")))
	if info, err := w.client.Info(w.name("b")); err != nil || info.UUID != w.name("a") {
		t.Errorf("Info after rename = %+v, %v; want the uuid kept", info, err)
	}
	if err := w.client.Rename(w.name("b"), ""); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Rename to nothing: %v, want EINVAL", err)
	}
}

func message(t *testing.T, w *world) {
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	if _, err := w.client.Message(w.name("a"), 0, "hello there"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Message: %v, want EINVAL", err)
	}
}

func TestNamesThatDoNotFitAreRefused(t *testing.T) {
	w := fakeWorld(t)
	for _, name := range []string{"", strings.Repeat("x", 128), "a/b", "a\x00b"} {
		if _, err := w.client.Create(name, "u"); err == nil {
			t.Errorf("Create(%q) succeeded", name)
		}
	}
	if _, err := w.client.Create("x", strings.Repeat("u", 129)); err == nil {
		t.Error("Create with a uuid of 129 bytes succeeded")
	}
}

// failing answers every ioctl with one error.
type failing struct {
	kernel
	err error
}

func (f failing) ioctl(uint32, []byte) error { return f.err }

func TestEveryMethodGivesTheKernelsErrno(t *testing.T) {
	table := Whole(block.MiB, ErrorTarget{})
	for _, errno := range []syscall.Errno{syscall.EPERM, syscall.ENXIO, syscall.EBUSY, syscall.EINVAL, syscall.ENOMEM, syscall.EIO, syscall.ENODEV} {
		c := &Client{failing{newFakeKernel(nil), errno}}
		got := errorsOfAll(c, "a", table)
		_, got["create"] = c.Create("a", "u")
		for op, err := range got {
			want := &Error{Op: op, Name: "a", Err: errno}
			if e, ok := errors.AsType[*Error](err); !ok || *e != *want || !errors.Is(err, errno) {
				t.Errorf("%s with %v: %#v, want %#v", op, errno, err, want)
			}
		}
		_, got["version"] = c.Version()
		_, got["list targets"] = c.Targets()
		_, got["list"] = c.List()
		_, got["devices"] = c.Devices("")
		_, got["wait"] = c.Wait(t.Context(), "a", 0)
		for op, err := range got {
			if _, ok := errors.AsType[*Error](err); !ok || !errors.Is(err, errno) {
				t.Errorf("%s with %v: %v, want it wrapped in *Error", op, errno, err)
			}
		}
		for _, op := range []Op{OpCreate, OpReload, OpResize, OpResume, OpClear, OpRemove} {
			if err := c.Do(Step{op, Device{Name: "a", Table: table}}); !errors.Is(err, errno) {
				t.Errorf("Do(%s) with %v: %v", op, errno, err)
			}
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/backend"
)

// RAM disks of the machine in which mapped legs are measured beside dm-thin.
const (
	ramPlain, ramTree, ramPool, ramMeta = 0, 1, 2, 3
	ramSize                             = treeSize
	thinBlock                           = 64 << 10
	// thinSpan is how much is used of each device: an emulated machine is slow.
	thinSpan = 64 << 20
)

// Thin measures mapped legs beside dm-thin, in one virtual machine. No network is in front: each
// device is used by the same program through the same calls, the leg in its process, dm-thin in the
// kernel. Both are on RAM disks of the kernel, below dm-linear, and are divided by such a disk.
func Thin(t vm.TB, o Options) {
	m := vm.NewCluster(t).Start("thin", vm.CPUs(2), vm.Memory(3072), vm.Modules("dm_mod", "dm_thin_pool", fmt.Sprintf("brd rd_nr=4 rd_size=%d", ramSize/1024)))
	program, err := os.Executable()
	if err == nil {
		err = m.Push(t.Context(), program, "/tmp/bench")
	}
	if err != nil {
		t.Fatalf("copy the program into the machine: %v", err)
	}
	fmt.Fprintf(o.Out, "\nkernel %s in a virtual machine, two processors: IOPS as a ratio to a RAM disk, without a network; dm-thin with blocks of 64 KiB\n\n", vm.KernelVersion())
	d, err := m.Start(t.Context(), "bench", "/tmp/bench", Role, "thin", strconv.Itoa(o.Rounds), fmt.Sprint(o.Seconds), strconv.Itoa(o.Count), o.Only)
	if err != nil {
		t.Fatalf("start the benchmark in the machine: %v", err)
	}
	code, err := d.MayExit().Wait(t.Context())
	fmt.Fprint(o.Out, d.Log()) // also of one that was interrupted
	if err != nil || code != 0 {
		t.Fatalf("measure dm-thin: exit code %d, %v", code, err)
	}
}

// thinProcess measures in the machine.
func thinProcess(args []string) (err error) {
	if len(args) != 4 {
		return fmt.Errorf("thin: want rounds, seconds, a count and a name, have %q", args)
	}
	o := Options{Rounds: number(args[0]), Count: number(args[2]), Only: args[3], Out: os.Stdout}
	if o.Seconds, err = strconv.ParseFloat(args[1], 64); err != nil {
		return err
	}
	client, err := dm.Open()
	if err != nil {
		return err
	}
	defer client.Close()
	lab := &thinLab{dm: client}
	c, err := lab.contest()
	if err != nil {
		return err
	}
	ctx := context.Background()
	if err := compareStates(ctx, o, []contest{c}, thinSpan); err != nil {
		return err
	}
	return lifetimes(ctx, o, []lifecycle{&thinTreeLife{lab: lab}, &thinLife{lab: lab}}, thinSpan)
}

// thinLab makes mapped legs and thin devices on the machine's RAM disks.
type thinLab struct {
	dm   *dm.Client
	path map[int]string // of the linear devices over the RAM disks
}

func (l *thinLab) contest() (contest, error) {
	l.path = map[int]string{}
	for _, n := range []int{ramPlain, ramTree, ramPool, ramMeta} {
		number, err := dm.MajorMinor(fmt.Sprintf("/dev/ram%d", n))
		if err != nil {
			return contest{}, err
		}
		if l.path[n], err = l.make(fmt.Sprintf("linear%d", n), dm.Whole(ramSize, dm.Linear{Device: dm.RefTo(number)})); err != nil {
			return contest{}, err
		}
	}
	raw, err := backend.Open(l.path[ramPlain], backend.Options{})
	if err != nil {
		return contest{}, err
	}
	if err := fill(plainDevice{raw}, thinSpan); err != nil {
		return contest{}, err
	}
	return contest{"in the machine", ofDevice(raw, func() { raw.Close() }), []subject{{"mapped leg", l.leg, true}, {"dm-thin", l.prepared, true}}}, nil
}

// ofDevice is a device that this process uses itself.
func ofDevice(d block.Device, closed func()) measured {
	return measured{close: closed, do: func(j job) (result, error) { return loadDevice(d, j) }}
}

// make makes a mapped device with a table, and returns its path.
func (l *thinLab) make(name string, table dm.Table) (string, error) {
	for _, step := range dm.Diff(nil, []dm.Device{{Name: name, UUID: "bench-" + name, Table: table}}) {
		if err := l.dm.Do(step); err != nil {
			return "", err
		}
	}
	info, err := l.dm.Info(name)
	return dm.NodePath(info.Number), err
}

// treeOn is a new tree on the machine's disk for it.
func (l *thinLab) treeOn(wrap func(block.Device) block.Device) (*tree, func(), error) {
	d, err := backend.Open(l.path[ramTree], backend.Options{})
	if err != nil {
		return nil, nil, err
	}
	t, err := newTree(wrap(d))
	if err != nil {
		return nil, nil, errors.Join(err, d.Close())
	}
	return t, func() { t.close(); d.Close() }, nil
}

func (l *thinLab) leg(s state) (measured, error) {
	t, closed, err := l.treeOn(func(d block.Device) block.Device { return d })
	if err != nil {
		return measured{}, err
	}
	if err := prepare(t, s, thinSpan); err != nil {
		closed()
		return measured{}, err
	}
	return ofDevice(t.leg, closed), nil
}

// thin is a thin device in a new pool, with its snapshots.
type thin struct {
	lab *thinLab
	plainDevice
	file *backend.File
}

func (l *thinLab) thin() (_ *thin, err error) {
	t := &thin{lab: l}
	defer func() {
		if err != nil {
			t.close()
		}
	}()
	meta, err := backend.Open(l.path[ramMeta], backend.Options{})
	if err != nil {
		return nil, err
	}
	// Metadata that begins with zeroes is made anew.
	err = errors.Join(block.Do(meta, &block.IO{Op: block.OpWrite, Len: 4096, Data: backend.Aligned(4096)}), meta.Close())
	if err != nil {
		return nil, err
	}
	_, err = l.make("pool", dm.Whole(ramSize, dm.Other{Name: "thin-pool", Params: fmt.Sprintf("%s %s %d 0", l.number(ramMeta), l.number(ramPool), thinBlock/512)}))
	if err != nil {
		return nil, err
	}
	if _, err := l.dm.Message("pool", 0, "create_thin 0"); err != nil {
		return nil, err
	}
	pool, err := l.dm.Info("pool")
	if err != nil {
		return nil, err
	}
	path, err := l.make("thin", dm.Whole(deviceSize, dm.Other{Name: "thin", Params: fmt.Sprintf("%s 0", pool.Number)}))
	if err != nil {
		return nil, err
	}
	if t.file, err = backend.Open(path, backend.Options{}); err != nil {
		return nil, err
	}
	t.plainDevice = plainDevice{t.file}
	return t, nil
}

// number is the number of a linear device.
func (l *thinLab) number(n int) block.DeviceNumber {
	number, err := dm.MajorMinor(l.path[n])
	if err != nil {
		panic(err) // it was made before
	}
	return number
}

// snapshot is made as device-mapper asks for it: while the device is suspended.
func (t *thin) snapshot(n int) error {
	if err := t.lab.dm.Suspend("thin", false, true); err != nil {
		return err
	}
	_, err := t.lab.dm.Message("pool", 0, fmt.Sprintf("create_snap %d 0", n))
	return errors.Join(err, t.lab.dm.Resume("thin", 0))
}

func (t *thin) close() {
	if t.file != nil {
		t.file.Close()
	}
	for _, name := range []string{"thin", "pool"} {
		_ = t.lab.dm.Remove(name, false) // it may not be there; making it again would say so
	}
}

func (l *thinLab) prepared(s state) (measured, error) {
	t, err := l.thin()
	if err != nil {
		return measured{}, err
	}
	if err := prepare(t, s, thinSpan); err != nil {
		t.close()
		return measured{}, err
	}
	return ofDevice(t.file, t.close), nil
}

// thinLife is a thin device whose snapshots come and go.
type thinLife struct {
	lab *thinLab
	*thin
}

func (*thinLife) name() string { return "dm-thin" }

func (t *thinLife) begin() (err error) {
	t.thin, err = t.lab.thin()
	return err
}

// clone makes a snapshot of a snapshot, which takes writes as any other. Nothing has it open.
func (t *thinLife) clone(n int) error {
	_, err := t.lab.dm.Message("pool", 0, fmt.Sprintf("create_snap %d %d", 10000+n, n))
	return err
}

func (t *thinLife) remove(n int, clone bool) error {
	if clone {
		n += 10000
	}
	_, err := t.lab.dm.Message("pool", 0, fmt.Sprintf("delete %d", n))
	return err
}

// written is what the kernel has written to the pool's devices.
func (t *thinLife) written() (sum int64, err error) {
	for _, n := range []int{ramPool, ramMeta} {
		text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(t.lab.path[n]), "stat"))
		if err != nil {
			return 0, err
		}
		sectors, err := strconv.ParseInt(strings.Fields(string(text))[6], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += sectors * 512
	}
	return sum, nil
}

func (t *thinLife) end() {
	if t.thin != nil {
		t.close()
	}
}

// thinTreeLife is treeLife on the machine's disk.
type thinTreeLife struct {
	treeLife
	lab    *thinLab
	closed func()
}

func (t *thinTreeLife) begin() (err error) {
	t.tree, t.closed, err = t.lab.treeOn(func(d block.Device) block.Device { return writesCounted{d, &t.sum} })
	return err
}

func (t *thinTreeLife) end() {
	if t.closed != nil {
		t.closed()
	}
}

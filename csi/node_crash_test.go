// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

var errCrashed = errors.New("the process is dead")

// moment is when a process dies: at its n-th step, before, after or in the middle of it, if it has
// a middle.
type moment struct {
	step int
	when string
}

var whens = []string{"before", "after", "amid"}

// mortal counts the steps of a process, and fails them all from its moment on.
type mortal struct {
	mu    sync.Mutex
	at    moment
	steps int
	dead  bool
	died  string // at which step
}

// do carries out a step; amid is half of it.
func (m *mortal) do(name string, whole func() error, amid func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errCrashed
	}
	m.steps++
	if m.steps != m.at.step {
		return whole()
	}
	m.dead, m.died = true, m.at.when+" "+name
	switch m.at.when {
	case "after":
		_ = whole()
	case "amid": // of a step that is one, after
		if amid == nil {
			_ = whole()
		} else {
			amid()
		}
	}
	return errCrashed
}

// mortalKernel is the kernel of a process that dies. Reading is no step: dying there is the same as
// dying before the next step.
type mortalKernel struct {
	mount.Kernel
	*mortal
	spoil func(device block.DeviceNumber) // what a cut off mkfs leaves
}

func (k mortalKernel) Mount(d mount.Disk, source, target, fsType string, options []string) error {
	return k.do("mount", func() error { return k.Kernel.Mount(d, source, target, fsType, options) }, nil)
}

func (k mortalKernel) Bind(device block.DeviceNumber, source, target string, readOnly bool) error {
	return k.do("bind", func() error { return k.Kernel.Bind(device, source, target, readOnly) }, nil)
}

func (k mortalKernel) BindDisk(d mount.Disk, target string, readOnly bool) error {
	return k.do("bind the device", func() error { return k.Kernel.BindDisk(d, target, readOnly) }, nil)
}

func (k mortalKernel) Unmount(target string, lazy bool) error {
	return k.do("unmount", func() error { return k.Kernel.Unmount(target, lazy) }, nil)
}

func (k mortalKernel) MakeDir(path string) error {
	return k.do("mkdir", func() error { return k.Kernel.MakeDir(path) }, nil)
}

func (k mortalKernel) MakeFile(path string) error {
	return k.do("create", func() error { return k.Kernel.MakeFile(path) }, nil)
}

func (k mortalKernel) Remove(path string) error {
	return k.do("remove", func() error { return k.Kernel.Remove(path) }, nil)
}

func (k mortalKernel) Run(d mount.Disk, program string, args ...string) (r mount.Result, err error) {
	var amid func()
	if strings.HasPrefix(program, "mkfs") && args[0] != "-V" {
		amid = func() { k.spoil(d.Number()) }
	}
	err = k.do(program, func() (err error) {
		r, err = k.Kernel.Run(d, program, args...)
		return err
	}, amid)
	return r, err
}

// life is everything that a CO does with a volume on a node, with the paths for one.
type life struct {
	t       *testing.T
	node    *nodeServer
	stage   *csi.NodeStageVolumeRequest
	publish *csi.NodePublishVolumeRequest
}

func (l *life) calls() []func(context.Context) error {
	return []func(context.Context) error{
		func(ctx context.Context) error { _, err := l.node.NodeStageVolume(ctx, l.stage); return err },
		func(ctx context.Context) error { _, err := l.node.NodePublishVolume(ctx, l.publish); return err },
		func(ctx context.Context) error {
			_, err := l.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: l.publish.VolumeId, TargetPath: l.publish.TargetPath})
			return err
		},
		func(ctx context.Context) error {
			_, err := l.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: l.stage.VolumeId, StagingTargetPath: l.stage.StagingTargetPath})
			return err
		},
	}
}

const (
	callStage = iota
	callPublish
	callUnpublish
	callUnstage
)

// run makes calls in turn until one fails, and returns which.
func (l *life) run(calls ...int) (failed int, err error) {
	for _, call := range calls {
		ctx, cancel := context.WithTimeout(l.t.Context(), 20*time.Second)
		err := l.calls()[call](ctx)
		cancel()
		if err != nil {
			return call, fmt.Errorf("call %d: %w", call, err)
		}
	}
	return -1, nil
}

// crashBench is a machine on which a process may die repeatedly.
type crashBench struct {
	kernel  mount.Kernel
	records *records
	stage   *csi.NodeStageVolumeRequest
	target  string
	spoil   func(device block.DeviceNumber)
	write   func(t *testing.T, target, data string)
	read    func(t *testing.T, target string) string
	clean   func(t *testing.T) // checks that nothing is left behind
}

// dieAt makes a process die at a moment of a volume's life, and lets the next one finish: with the
// same calls, or by giving up the pod. It reports whether the first process reached the moment.
func (b crashBench) dieAt(t *testing.T, at moment, giveUp bool) (reached bool) {
	m := &mortal{at: at}
	first := newNodeOn(Config{Manager: b.records, Node: thisNode}, mortalKernel{b.kernel, m, b.spoil})
	b.records.fail = func(call string) error {
		if call != "UpdateVolume" {
			return nil
		}
		return m.do("record", func() error { return nil }, nil)
	}
	l := &life{t: t, node: first, stage: b.stage, publish: publishOf(b.stage, b.target)}
	wrote := ""
	failed, err := l.run(callStage, callPublish)
	if err == nil {
		wrote = fmt.Sprintf("%v", at)
		b.write(t, b.target, wrote)
		failed, err = l.run(callUnpublish, callUnstage)
	}
	b.records.fail = nil
	if err == nil {
		return m.dead
	}
	if !m.dead {
		t.Fatalf("without a crash: %v", err)
	}

	l.node = newNodeOn(Config{Manager: b.records, Node: thisNode}, b.kernel)
	rest := map[int][]int{
		callStage: {callStage, callPublish}, callPublish: {callPublish},
		callUnpublish: {callUnpublish, callUnstage}, callUnstage: {callUnstage},
	}[failed]
	if giveUp || failed >= callUnpublish {
		rest = []int{callUnpublish, callUnstage, callStage, callPublish}
	}
	if _, err := l.run(rest...); err != nil {
		t.Fatalf("died %s; the next process: %v", m.died, err)
	}
	if got := b.read(t, b.target); got != wrote {
		t.Errorf("died %s; the data is %q, want %q", m.died, got, wrote)
	}
	if _, err := l.run(callUnpublish, callUnstage); err != nil {
		t.Fatalf("died %s; at the end: %v", m.died, err)
	}
	b.clean(t)
	return true
}

// everyMoment runs a fresh bench through each moment of its life.
func everyMoment(t *testing.T, whens []string, newBench func(t *testing.T) crashBench) {
	for _, when := range whens {
		for _, giveUp := range []bool{false, true} {
			step := 1
			for ; ; step++ {
				if !newBench(t).dieAt(t, moment{step, when}, giveUp) {
					break
				}
			}
			if step < 8 {
				t.Errorf("a life has %d steps: the deaths are not where they are thought to be", step-1)
			}
		}
	}
}

func TestAProcessMayDieAtAnyStep(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{
		"ext4":       mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, "ext4", "noatime"),
		"xfs":        mountCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, "xfs"),
		"raw device": blockCapability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER),
	} {
		t.Run(name, func(t *testing.T) {
			whens := whens
			if capability.GetBlock() != nil {
				whens = whens[:0]
			}
			everyMoment(t, whens, func(t *testing.T) crashBench { return fakeBench(t, capability) })
			if capability.GetBlock() != nil { // has fewer steps
				for step := 1; fakeBench(t, capability).dieAt(t, moment{step, "after"}, step%2 == 0); step++ {
				}
			}
		})
	}
}

func fakeBench(t *testing.T, capability *csi.VolumeCapability) crashBench {
	w := newNodeWorld(t)
	w.stage.VolumeCapability = capability
	return crashBench{
		kernel: w.kernel, records: w.records, stage: w.stage, target: "/pods/p1",
		spoil: func(n block.DeviceNumber) { w.kernel.disks[n].start[3000] = 1 },
		write: func(_ *testing.T, _, data string) { w.disk.data = data },
		read:  func(*testing.T, string) string { return w.disk.data },
		clean: func(t *testing.T) { t.Helper(); w.kernel.nothingMounted(t) },
	}
}

// TestAProcessMayDieOnARealKernel does the same with real file systems, for some of the moments.
func TestAProcessMayDieOnARealKernel(t *testing.T) {
	needsRoot(t)
	m := realMachine(t)
	for _, fsType := range fileSystems {
		node, _ := loopDevice(t, m.dir, 320*mib)
		d := m.open(t, node)
		for step := 1; ; step++ {
			b := realBench(t, m, node, d, fsType)
			if !b.dieAt(t, moment{step, "amid"}, step%2 == 0) {
				break
			}
		}
	}
}

// realBench is a bench over a device, which it empties.
func realBench(t *testing.T, m machine, node string, d mount.Disk, fsType string) crashBench {
	t.Helper()
	wipe(t, node)
	dir, err := os.MkdirTemp(m.dir, "life")
	if err != nil {
		t.Fatal(err)
	}
	stage := stageOf(fsType)
	stage.StagingTargetPath = filepath.Join(dir, "staging")
	records := newRecords(node, d.Number(), 320*mib)
	records.volumes[volumeID].Layout = &pb.Layout{Stripes: 1, Copies: 2, ChunkBytes: 128 << 10}
	return crashBench{
		kernel: m.Kernel, records: records, stage: stage, target: filepath.Join(dir, "target"),
		spoil: func(block.DeviceNumber) {
			f, err := os.OpenFile(node, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteAt([]byte("half an mkfs"), 9000)
				err = errors.Join(err, f.Sync(), f.Close())
			}
			if err != nil {
				t.Error(err)
			}
		},
		write: func(t *testing.T, target, data string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(target, "data"), []byte(data), 0o600); err != nil {
				t.Error(err)
			}
		},
		read: func(t *testing.T, target string) string {
			t.Helper()
			text, err := os.ReadFile(filepath.Join(target, "data"))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
			return string(text)
		},
		clean: func(t *testing.T) {
			t.Helper()
			all, err := m.Mounts()
			if others := all.FileSystemOn(d.Number()); err != nil || len(others) > 0 {
				t.Errorf("still mounted: %s, %v", others.Points(), err)
			}
			if busy, err := d.Busy(); busy || err != nil {
				t.Errorf("the device is busy: %v, %v", busy, err)
			}
			if _, err := os.Lstat(filepath.Join(dir, "target")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the target is still there: %v", err)
			}
		},
	}
}

// wipe makes a loop device read like a new one.
func wipe(t *testing.T, node string) {
	t.Helper()
	f, err := os.OpenFile(node, os.O_WRONLY, 0)
	if err == nil {
		defer f.Close()
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 320*mib)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file touches the machine for the agent: device nodes, the run directory, and sequences
// of device-mapper calls. It decides nothing.

// host is what the agent uses of fabrics.Tree.
type host interface {
	Controllers(of func(block.NQN) bool) ([]fabrics.Controller, error)
	FindNamespace(nqn block.NQN, nsid uint32, uuid block.UUID) (fabrics.Namespace, error)
	Connect(ctx context.Context, o fabrics.Options) (fabrics.Controller, error)
	Disconnect(ctx context.Context, c fabrics.Controller) error
	SetFailFast(c fabrics.Controller, on bool) (late bool, err error)
	SetReconnectDelay(c fabrics.Controller, d time.Duration) error
	DestroySockets(ctx context.Context, p block.Portal) (int, error)
	DestroyUnanswered(ctx context.Context, p block.Portal) (int, error)
	SetWriteThrough(h fabrics.Head, through bool) error
	SetIOTimeout(p fabrics.Path, d time.Duration) error
	SpreadPaths(n block.NQN) error
	RetryMost() error
	Probe(h fabrics.Head, limit time.Duration) error
	Read(h fabrics.Head, p []byte, off int64, limit time.Duration) error
	Overwrite(h fabrics.Head, p []byte, off int64, limit time.Duration) error
	Flush(h fabrics.Head, limit time.Duration) error
	MakeEqual(ctx context.Context, heads []fabrics.Head, ranges [][2]int64) (fabrics.Compared, error)
	Admin(ctx context.Context, c fabrics.Controller, cmd nvmetcp.Command, data []byte) error
	Allocated(ctx context.Context, c fabrics.Controller, h fabrics.Head, off int64) (found []block.Range, next int64, err error)
}

// mapper is what the agent uses of dm.Client.
type mapper interface {
	Devices(prefix string) ([]dm.State, error)
	MirrorStatus(name string) (dm.MirrorStatus, error)
	Do(s dm.Step) error
	DoWith(s dm.Step, between func() error) error
	Load(name string, t dm.Table) error
	Suspend(name string, noflush, skipLockFS bool) error
	Resume(name string, u dm.Udev) error
	Remove(name string, deferred bool) error
	Write(name string, p []byte, off int64) error
	Wait(ctx context.Context, name string, eventNr uint32) (dm.Info, error)
	Counted(name string) (f figures.Figures, ok bool, err error)
}

// loops is what the agent uses of dm.Loops.
type loops interface {
	Find(file string) (dm.Loop, bool, error)
	Attach(file string) (dm.Loop, error)
	Detach(l dm.Loop) error
}

// kernel is everything that the data path touches; tests have their own.
type kernel struct {
	host   host
	dm     mapper
	loops  loops
	runDir string
	devDir string
	sysDir string
	book   *keeper.Names

	names sync.Map // block.DeviceNumber → the name in <dev>/weft that nameOf has found last
}

// logFiles are the files under the log of a column: the first one, and another one that is written while the first is in
// use, and the other way round.
func (k *kernel) logFiles(v block.VolumeID, column int) [2]string {
	first := filepath.Join(k.runDir, fmt.Sprintf("%s-c%d.log", v, column))
	return [2]string{first, first + "2"}
}

func (k *kernel) notesFile(v block.VolumeID) string {
	return filepath.Join(k.runDir, v.String()+".json")
}

// makeLog makes the RAM disk of a log. An existing one is kept: if a table uses it, it is the
// valid one.
func (k *kernel) makeLog(file string) (dm.Loop, error) {
	if err := os.MkdirAll(k.runDir, 0o700); err != nil {
		return dm.Loop{}, fmt.Errorf("make log: %w", err)
	}
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return dm.Loop{}, fmt.Errorf("make log: %w", err)
	}
	if err := errors.Join(f.Truncate(int64(mirror.LogDeviceSize)), f.Close()); err != nil {
		return dm.Loop{}, fmt.Errorf("make log: %w", err)
	}
	return k.loops.Attach(file)
}

// writeLog writes an image into the file under a log device. The file is neither truncated nor
// replaced, because the loop device uses it.
func (k *kernel) writeLog(file string, image mirror.LogImage) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	_, err = f.WriteAt(image.Bytes(), 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	return nil
}

// growLog extends a log for a table that is not live yet. It leaves alone a file that holds no
// log: the table treats all regions as dirty then.
func (k *kernel) growLog(file string, regions uint64) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("grow log: %w", err)
	}
	image, err := mirror.ParseLog(b)
	if errors.Is(err, mirror.ErrLog) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("grow log: %w", err)
	}
	return k.writeLog(file, image.Grow(regions))
}

// mergeLog writes what a log has, and what is lacked, as the log of a table that is not live yet. It
// returns how many regions are dirty then.
func (k *kernel) mergeLog(to, from string, lacked mirror.LogImage) (dirty uint64, err error) {
	image, err := k.readLog(from, lacked.Regions())
	if err == nil {
		image, err = image.Merge(lacked)
	}
	if err != nil {
		return 0, fmt.Errorf("merge log: %w", err)
	}
	return image.CountDirty(), k.writeLog(to, image)
}

func (k *kernel) dropLog(file string) error {
	loop, ok, err := k.loops.Find(file)
	if err == nil && ok {
		err = k.loops.Detach(loop)
	}
	if err != nil {
		return err
	}
	return remove(file)
}

// remove removes a file, which may be gone already.
func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// notes reads what was remembered of a volume. If ok is false there is nothing usable, and
// every resync will be a full one.
func (k *kernel) notes(v block.VolumeID) (mem memory, ok bool, err error) {
	b, err := os.ReadFile(k.notesFile(v))
	if errors.Is(err, fs.ErrNotExist) {
		return memory{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &mem)
	}
	if err != nil {
		return memory{}, false, fmt.Errorf("read notes on volume %s: %w", v, err)
	}
	return mem, true, nil
}

// note remembers mem. A tmpfs needs no fsync; the rename keeps readers from seeing a partial
// file.
func (k *kernel) note(v block.VolumeID, mem *memory) error {
	b, err := json.MarshalIndent(mem, "", "\t")
	if err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	if err := os.MkdirAll(k.runDir, 0o700); err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	file := k.notesFile(v)
	if err := os.WriteFile(file+".new", append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	return nil
}

// noted lists the volumes with a note.
func (k *kernel) noted() []block.VolumeID {
	files, _ := filepath.Glob(filepath.Join(k.runDir, "*.json"))
	var all []block.VolumeID
	for _, f := range files {
		if v, err := block.ParseVolumeID(strings.TrimSuffix(filepath.Base(f), ".json")); err == nil {
			all = append(all, v)
		}
	}
	return all
}

// ---- the volume's name ----

func linkTo(n block.DeviceNumber) string { return fmt.Sprintf("../dm-%d", n.Minor) }

func (k *kernel) exposed(n block.DeviceNumber) bool {
	_, found := k.nameOf(n)
	return found
}

// nameOf finds the name of a device in <dev>/weft.
func (k *kernel) nameOf(n block.DeviceNumber) (path string, found bool) {
	leads := func(l string) bool { to, err := os.Readlink(l); return err == nil && to == linkTo(n) }
	if last, ok := k.names.Load(n); ok && leads(last.(string)) { // there may be hundreds
		return last.(string), true
	}
	links, _ := filepath.Glob(filepath.Join(k.devDir, "weft", "*"))
	for _, l := range links {
		if !strings.HasSuffix(l, newSuffix) && leads(l) {
			k.names.Store(n, l)
			return l, true
		}
	}
	k.names.Delete(n)
	return "", false
}

const newSuffix = "~new" // of package blockdev, for a name that is being made

// expose gives a volume's device its name, or another one if the name is another volume's, perhaps of
// another cluster.
func (k *kernel) expose(v block.VolumeID, name block.VolumeName, n block.DeviceNumber) error {
	chosen := func(chosen block.VolumeName) error { return k.book.Chosen(v, name, chosen) }
	if err := blockdev.Expose(k.devDir, k.sysDir, filepath.Base(linkTo(n)), k.book.Of(v, name), chosen); err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	return nil
}

// hide removes a device's name; a name that belongs to another device stays.
func (k *kernel) hide(n block.DeviceNumber) error {
	path, found := k.nameOf(n)
	if !found {
		return nil
	}
	return errors.Join(blockdev.Withdraw(k.devDir, k.sysDir, filepath.Base(linkTo(n))), remove(path))
}

// ---- the device ----

// makeTop makes a volume's device. Over mirrors, discards are disabled, unless and until the keeper enables them: see
// kerneldiscard.go.
func (k *kernel) makeTop(d dm.Device, mirrored bool) error {
	if err := k.dm.Do(dm.Step{Op: dm.OpCreate, Device: d}); err != nil {
		return err
	}
	if !mirrored {
		return nil
	}
	top, err := k.device(d.UUID)
	if err != nil {
		return err
	}
	return k.setDiscards(top, 0)
}

// growTop makes a volume's device longer, while it is in use. With the new table the device takes over the limits of the
// columns. So where it may take no discards, they are disabled on the mirrors first, and there is no moment in which the
// device accepts some.
func (k *kernel) growTop(top dm.State, want dm.Device, mirrors []dm.State) error {
	for _, c := range mirrors {
		if err := k.setDiscards(c, 0); err != nil {
			return err
		}
	}
	for _, step := range dm.Diff([]dm.State{top}, []dm.Device{want}) {
		if err := k.dm.Do(step); err != nil {
			return err
		}
	}
	if len(mirrors) == 0 {
		return nil
	}
	return k.setDiscards(top, 0)
}

func (k *kernel) device(uuid string) (dm.State, error) {
	all, err := k.dm.Devices(uuid)
	if err != nil {
		return dm.State{}, err
	}
	for _, d := range all {
		if d.UUID == uuid {
			return d, nil
		}
	}
	return dm.State{}, fmt.Errorf("device %s: %w", uuid, fs.ErrNotExist)
}

// flush makes the drives write out their caches.
func (k *kernel) flush(n block.DeviceNumber) error {
	f, err := os.OpenFile(filepath.Join(k.devDir, fmt.Sprintf("dm-%d", n.Minor)), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	return nil
}

// fail makes all present and future I/O on devices fail. The lowest device goes first, because
// a device can be switched only after the I/O that it waits for below has ended.
func (k *kernel) fail(devices ...dm.State) error {
	for _, d := range devices {
		if len(d.Table) == 0 {
			continue
		}
		if err := k.dm.Load(d.Name, dm.Whole(d.Table.Size(), dm.ErrorTarget{})); err != nil {
			return err
		}
		// Suspend with a flush, so that mirrors fail the writes they hold. Do not freeze a file
		// system first, since that would not succeed.
		if err := k.dm.Suspend(d.Name, false, true); err != nil {
			return err
		}
		if err := k.dm.Resume(d.Name, dm.UdevInner); err != nil {
			return err
		}
	}
	return nil
}

// users names the processes that have a device open, for people.
func (k *kernel) users(n block.DeviceNumber) string {
	var all []string
	holders, _ := os.ReadDir(filepath.Join(k.sysDir, "block", fmt.Sprintf("dm-%d", n.Minor), "holders"))
	for _, h := range holders {
		all = append(all, h.Name())
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if fields := strings.Fields(lines.Text()); len(fields) > 4 && fields[2] == n.String() {
				all = append(all, "the file system on "+fields[4])
			}
		}
	}
	if len(all) == 0 {
		return "a process"
	}
	return strings.Join(all, ", ")
}

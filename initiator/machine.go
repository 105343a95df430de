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
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// This file is the agent's hands: device nodes, the run directory, and what of
// device-mapper is more than one call. It decides nothing.

// host is what the agent uses of fabrics.Tree.
type host interface {
	Controllers() ([]fabrics.Controller, error)
	FindNamespace(nqn block.NQN, nsid uint32, uuid block.UUID) (fabrics.Namespace, error)
	Connect(ctx context.Context, o fabrics.Options) (fabrics.Controller, error)
	Disconnect(ctx context.Context, c fabrics.Controller) error
	DestroySockets(ctx context.Context, p block.Portal) (int, error)
	SetWriteThrough(h fabrics.Head, through bool) error
	SetIOTimeout(p fabrics.Path, d time.Duration) error
	Probe(h fabrics.Head) error
	Flush(h fabrics.Head) error
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
	Wait(ctx context.Context, name string, eventNr uint32) (dm.Info, error)
}

// loops is what the agent uses of dm.Loops.
type loops interface {
	Find(file string) (dm.Loop, bool, error)
	Attach(file string) (dm.Loop, error)
	Detach(l dm.Loop) error
}

// machine is all that an attachment touches.
type machine struct {
	host   host
	dm     mapper
	loops  loops
	runDir string
	devDir string
	sysDir string
}

func (m *machine) logFile(v block.VolumeID, column int) string {
	return filepath.Join(m.runDir, fmt.Sprintf("%s-c%d.log", v, column))
}

func (m *machine) notesFile(v block.VolumeID) string {
	return filepath.Join(m.runDir, v.String()+".json")
}

// makeLog makes the RAM disk of a column's log. What an earlier one may hold
// stays: if a table uses it, it is the truth.
func (m *machine) makeLog(v block.VolumeID, column int) error {
	if err := os.MkdirAll(m.runDir, 0o700); err != nil {
		return fmt.Errorf("make log: %w", err)
	}
	f, err := os.OpenFile(m.logFile(v, column), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("make log: %w", err)
	}
	if err := errors.Join(f.Truncate(int64(raid.LogDeviceSize)), f.Close()); err != nil {
		return fmt.Errorf("make log: %w", err)
	}
	_, err = m.loops.Attach(m.logFile(v, column))
	return err
}

// writeLog writes an image into the file under a column's log device. The file
// is neither truncated nor replaced: the loop device is over this one.
func (m *machine) writeLog(v block.VolumeID, column int, image raid.LogImage) error {
	f, err := os.OpenFile(m.logFile(v, column), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	_, err = f.WriteAt(image.Bytes(), 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	return nil
}

// growLog makes what a column's log says longer, for a table that is not live yet.
// Bytes that are no log are left to that table, which takes all regions for dirty.
func (m *machine) growLog(v block.VolumeID, column int, regions uint64) error {
	b, err := os.ReadFile(m.logFile(v, column))
	if err != nil {
		return fmt.Errorf("grow log: %w", err)
	}
	image, err := raid.ParseLog(b)
	if errors.Is(err, raid.ErrLog) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("grow log: %w", err)
	}
	return m.writeLog(v, column, image.Grow(regions))
}

func (m *machine) dropLog(v block.VolumeID, column int) error {
	file := m.logFile(v, column)
	loop, ok, err := m.loops.Find(file)
	if err == nil && ok {
		err = m.loops.Detach(loop)
	}
	if err != nil {
		return err
	}
	return remove(file)
}

// remove removes a file that may be gone already.
func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// notes reads what was remembered of a volume; ok is false if there is nothing
// of use, and the caller then remembers nothing: every resync will be a full one.
func (m *machine) notes(v block.VolumeID) (mem memory, ok bool, err error) {
	b, err := os.ReadFile(m.notesFile(v))
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

// note remembers mem. A tmpfs needs no fsync; the rename keeps readers from
// seeing half of it.
func (m *machine) note(v block.VolumeID, mem *memory) error {
	b, err := json.MarshalIndent(mem, "", "\t")
	if err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	if err := os.MkdirAll(m.runDir, 0o700); err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	file := m.notesFile(v)
	if err := os.WriteFile(file+".new", append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("write notes on volume %s: %w", v, err)
	}
	return nil
}

// noted lists the volumes of which something is remembered.
func (m *machine) noted() []block.VolumeID {
	files, _ := filepath.Glob(filepath.Join(m.runDir, "*.json"))
	var all []block.VolumeID
	for _, f := range files {
		if v, err := block.ParseVolumeID(strings.TrimSuffix(filepath.Base(f), ".json")); err == nil {
			all = append(all, v)
		}
	}
	return all
}

// ---- the volume's name ----

func (m *machine) namePath(name block.VolumeName) string {
	return filepath.Join(m.devDir, "weft", string(name))
}

func linkTo(n block.DeviceNumber) string { return fmt.Sprintf("../dm-%d", n.Minor) }

func (m *machine) exposed(n block.DeviceNumber) bool {
	_, found := m.nameOf(n)
	return found
}

// nameOf finds the name under which a device is exposed.
func (m *machine) nameOf(n block.DeviceNumber) (path string, found bool) {
	links, _ := filepath.Glob(filepath.Join(m.devDir, "weft", "*"))
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && to == linkTo(n) && !strings.HasSuffix(l, newSuffix) {
			return l, true
		}
	}
	return "", false
}

const newSuffix = "~new" // not a character of volume names

func (m *machine) expose(name block.VolumeName, n block.DeviceNumber) error {
	path := m.namePath(name)
	// A process that serves a volume in user space, of another cluster's maybe.
	if err := blockdev.Held(m.devDir, name); err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	if err := remove(path + newSuffix); err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	if err := os.Symlink(linkTo(n), path+newSuffix); err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	if err := os.Rename(path+newSuffix, path); err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	return nil
}

// hide takes a device's name away; another device's name stays.
func (m *machine) hide(n block.DeviceNumber) error {
	path, found := m.nameOf(n)
	if !found {
		return nil
	}
	return remove(path)
}

// ---- the device ----

// makeTop makes a volume's device. Discards are switched off on mirrors: one
// that a leg misses is neither held nor logged.
func (m *machine) makeTop(d dm.Device, mirrored bool) error {
	if err := m.dm.Do(dm.Step{Op: dm.OpCreate, Device: d}); err != nil {
		return err
	}
	if !mirrored {
		return nil
	}
	top, err := m.device(d.UUID)
	if err != nil {
		return err
	}
	return m.discardsOff(top)
}

func (m *machine) discardsOff(d dm.State) error {
	file := filepath.Join(m.sysDir, "block", fmt.Sprintf("dm-%d", d.Number.Minor), "queue/discard_max_bytes")
	if err := os.WriteFile(file, []byte("0"), 0); err != nil {
		return fmt.Errorf("switch discards of %s off: %w", d.Name, err)
	}
	return nil
}

// growTop makes a volume's device longer; what uses it goes on. With its new table
// the kernel takes the limits of the columns for the device's own. So discards are
// switched off on these first: there is no moment in which the device has some.
func (m *machine) growTop(top dm.State, want dm.Device, mirrors []dm.State) error {
	for _, c := range mirrors {
		if err := m.discardsOff(c); err != nil {
			return err
		}
	}
	for _, step := range dm.Diff([]dm.State{top}, []dm.Device{want}) {
		if err := m.dm.Do(step); err != nil {
			return err
		}
	}
	if len(mirrors) == 0 {
		return nil
	}
	return m.discardsOff(top)
}

func (m *machine) device(uuid string) (dm.State, error) {
	all, err := m.dm.Devices(uuid)
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

// flush has the drives' caches written out.
func (m *machine) flush(n block.DeviceNumber) error {
	f, err := os.OpenFile(filepath.Join(m.devDir, fmt.Sprintf("dm-%d", n.Minor)), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	return nil
}

// fail makes all I/O on devices fail, from now on and what waits in them, the
// lowest first: a device can be switched when what it waits for below has ended.
func (m *machine) fail(devices ...dm.State) error {
	for _, d := range devices {
		if len(d.Table) == 0 {
			continue
		}
		if err := m.dm.Load(d.Name, dm.Whole(d.Table.Size(), dm.ErrorTarget{})); err != nil {
			return err
		}
		// With a flush, so that mirrors fail what they hold; no file system is
		// frozen first, since it could not be.
		if !d.Suspended {
			if err := m.dm.Suspend(d.Name, false, true); err != nil {
				return err
			}
		}
		if err := m.dm.Resume(d.Name, dm.UdevInner); err != nil {
			return err
		}
	}
	return nil
}

// users says who has a device open, for people.
func (m *machine) users(n block.DeviceNumber) string {
	var all []string
	holders, _ := os.ReadDir(filepath.Join(m.sysDir, "block", fmt.Sprintf("dm-%d", n.Minor), "holders"))
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

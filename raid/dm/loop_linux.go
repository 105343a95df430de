// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// Loops makes block devices from files: a mirror's dirty log is a loop device over a file
// on a tmpfs. The kernel knows the file of each loop device, so a restarted agent finds
// them again. The zero value uses the machine's /dev and /sys. Several goroutines may use it.
type Loops struct {
	Dev string // "/dev" if empty
	Sys string // "/sys" if empty

	at sync.Map // file → the backing_file of its device, as Find has found it
}

// Loop is a loop device and the file under it.
type Loop struct {
	Number block.DeviceNumber
	Path   string // /dev/loop0
	File   string // absolute; see List
}

// List returns the attached loop devices, sorted by number. If the file of one was
// removed, its File ends in " (deleted)", as the kernel reports it.
func (l *Loops) List() ([]Loop, error) {
	files, err := filepath.Glob(l.backing("loop*"))
	if err != nil {
		return nil, err
	}
	var all []Loop
	for _, f := range files {
		loop, err := l.read(f)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
			continue // detached since the directory was read
		}
		if err != nil {
			return nil, fmt.Errorf("list loop devices: %w", err)
		}
		all = append(all, loop)
	}
	slices.SortFunc(all, func(a, b Loop) int { return cmp.Compare(a.Number.Minor, b.Number.Minor) })
	return all, nil
}

func (l *Loops) read(backingFile string) (Loop, error) {
	file, err := os.ReadFile(backingFile)
	if err != nil {
		return Loop{}, err
	}
	disk := filepath.Dir(filepath.Dir(backingFile))
	dev, err := os.ReadFile(filepath.Join(disk, "dev"))
	if err != nil {
		return Loop{}, err
	}
	n, err := block.ParseDeviceNumber(strings.TrimSpace(string(dev)))
	return Loop{n, l.node(filepath.Base(disk)), strings.TrimSuffix(string(file), "\n")}, err
}

// backing is the file in sysfs that says which file a loop device has.
func (l *Loops) backing(disk string) string {
	return filepath.Join(cmp.Or(l.Sys, "/sys"), "block", disk, "loop/backing_file")
}

func (l *Loops) node(name string) string { return filepath.Join(cmp.Or(l.Dev, "/dev"), name) }

// Find returns the loop device over a file. A file that was removed and created again is
// a different file.
func (l *Loops) Find(file string) (Loop, bool, error) {
	file, err := filepath.Abs(file)
	if err != nil {
		return Loop{}, false, err
	}
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		l.at.Delete(file)
		return Loop{}, false, nil
	}
	if at, known := l.at.Load(file); known { // a machine may have hundreds
		if loop, err := l.read(at.(string)); err == nil && loop.File == file {
			return loop, true, nil
		}
	}
	all, err := l.List()
	i := slices.IndexFunc(all, func(d Loop) bool { return d.File == file })
	if err != nil || i < 0 {
		return Loop{}, false, err
	}
	l.at.Store(file, l.backing(filepath.Base(all[i].Path)))
	return all[i], true, nil
}

// Attach returns the loop device over a file, and makes one if there is none. The file
// must exist and have the size that the device should have.
func (l *Loops) Attach(file string) (Loop, error) {
	if loop, ok, err := l.Find(file); ok || err != nil {
		return loop, err
	}
	f, err := os.OpenFile(file, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return Loop{}, fmt.Errorf("attach loop device: %w", err)
	}
	defer f.Close()
	// Another process may take the free device first; then ask for another.
	for range 32 {
		path, err := l.configure(f)
		if errors.Is(err, unix.EBUSY) {
			continue
		}
		if err != nil {
			return Loop{}, fmt.Errorf("attach loop device to %s: %w", file, err)
		}
		n, err := MajorMinor(path)
		if err != nil {
			return Loop{}, err
		}
		abs, err := filepath.Abs(file)
		return Loop{n, path, abs}, err
	}
	return Loop{}, fmt.Errorf("attach loop device to %s: %w", file, unix.EBUSY)
}

func (l *Loops) configure(f *os.File) (path string, err error) {
	control, err := os.OpenFile(l.node("loop-control"), os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer control.Close()
	free, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return "", err
	}
	path = l.node("loop" + strconv.Itoa(free))
	device, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer device.Close()
	config := unix.LoopConfig{Fd: uint32(f.Fd()), Size: uint32(block.SectorSize)}
	// The name that LOOP_GET_STATUS64 returns; the full path is in sysfs.
	copy(config.Info.File_name[:len(config.Info.File_name)-1], f.Name())
	return path, unix.IoctlLoopConfigure(int(device.Fd()), &config)
}

// Detach detaches the loop device from its file. If the device is open, by a table for
// example, the kernel detaches it when it is closed. It is no error if the device is not
// attached.
func (l *Loops) Detach(loop Loop) error {
	l.at.Delete(loop.File)
	device, err := os.OpenFile(loop.Path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("detach loop device: %w", err)
	}
	defer device.Close()
	err = unix.IoctlSetInt(int(device.Fd()), unix.LOOP_CLR_FD, 0)
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach loop device %s: %w", loop.Path, err)
	}
	return nil
}

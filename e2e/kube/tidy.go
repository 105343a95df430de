// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/blockdev"
)

// tidy removes the kernel objects of a lab whose processes have ended, and reports those
// that it could not remove.
func tidy(p place) error {
	return errors.Join(detachLoops(p), removeGroups(p))
}

// removeGroups removes the control groups of the lab's nodes. They become empty once the
// kernel has cleaned up the processes.
func removeGroups(p place) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return poll(ctx, 20*time.Millisecond, func() error { return removeEmptyGroups(p) })
}

func removeEmptyGroups(p place) error {
	roots, err := filepath.Glob("/sys/fs/cgroup/*/" + p.ID + "-*")
	if err != nil {
		return err
	}
	var errs []error
	for _, root := range roots {
		var dirs []string
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for i := len(dirs) - 1; i >= 0; i-- { // the inner ones first
			if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// detachLoops detaches the block devices of initiator agents that were killed.
func detachLoops(p place) error {
	runDirs, err := filepath.Glob(filepath.Join(p.Dir, "*", "*", runDirName))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var errs []error
	for _, dir := range runDirs {
		disks, err := disksOf(dir)
		errs = append(errs, err)
		for _, disk := range disks {
			errs = append(errs, detachOver(disk))
		}
		errs = append(errs, blockdev.RemoveAll(ctx, blockdev.Options{Kind: blockdev.Auto, RunDir: dir}))
		for _, disk := range disks {
			// A device that was in use is detached when the kernel has ended its mount.
			errs = append(errs, poll(ctx, 20*time.Millisecond, func() error {
				if left := backing(disk); left != "" {
					return fmt.Errorf("%s is still attached to %s", disk, left)
				}
				return nil
			}))
		}
	}
	return errors.Join(errs...)
}

// disksOf reads the agent's records of its devices.
func disksOf(runDir string) ([]string, error) {
	records, err := filepath.Glob(filepath.Join(runDir, "*.json"))
	if err != nil {
		return nil, err
	}
	var all []string
	for _, file := range records {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var record struct{ Disk string }
		if err := json.Unmarshal(text, &record); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, record.Disk)
	}
	return all, nil
}

// detachOver detaches the loop devices that kubelets make for raw block volumes. Their
// backing file was a bind mount of the disk's node; once that is unmounted, the kernel
// reports only the node's name.
func detachOver(disk string) error {
	loops, err := filepath.Glob("/sys/block/loop*")
	if err != nil {
		return err
	}
	for _, l := range loops {
		if name := filepath.Base(l); filepath.Base(backing(name)) == disk {
			if err := detach(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// backing is the file behind a loop device, or "".
func backing(disk string) string {
	text, _ := os.ReadFile(filepath.Join("/sys/block", disk, "loop/backing_file"))
	return strings.TrimSpace(string(text))
}

func detach(disk string) error {
	f, err := os.Open(filepath.Join("/dev", disk))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", disk, err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
)

// fuseURing is the parameter that lets FUSE use io_uring. A mount keeps the way that it began
// with.
const fuseURing = "/sys/module/fuse/parameters/enable_uring"

// withFUSE calls f while FUSE works over io_uring, or does not, and puts the machine's setting
// back. It takes turns with the tests of initiator/blockdev.
func withFUSE(uring bool, f func() error) error {
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "weft-fuse-uring.lock"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	before, err := os.ReadFile(fuseURing)
	if err != nil && !uring {
		return f() // this kernel has only the one way
	}
	if err != nil {
		return err
	}
	set := func(to string) error { return os.WriteFile(fuseURing, []byte(to), 0) }
	want := map[bool]string{true: "Y", false: "N"}[uring]
	if strings.TrimSpace(string(before)) == want {
		return f()
	}
	if err := set(want); err != nil {
		return err
	}
	return errors.Join(f(), set(string(before)))
}

// deviceServers are block devices over memory: the upper bound first, then Weft's own over the
// memory of its process, over one leg and over two.
func deviceServers(ctx context.Context, _ Options, cpu int) (all []*server, missing []string, clean func(), err error) {
	a := bestAbility()
	if !a.Usable {
		return nil, []string{"block devices: " + a.Reason}, func() {}, nil
	}
	controller, err := ours("weft", job{}, cpu, "memory")
	if err != nil {
		return nil, nil, nil, err
	}
	dir, err := os.MkdirTemp("", "weft-bench-*")
	if err != nil {
		controller.stop()
		return nil, nil, nil, err
	}
	clean = func() { controller.stop(); os.RemoveAll(dir) }
	ways := []bool{false}
	if a.Kind == blockdev.FUSE {
		ways = []bool{false, true}
	}
	for _, uring := range ways {
		err := withFUSE(uring, func() error {
			got, absent, err := devicesNow(dir, controller.job.Address, uring)
			all, missing = append(all, got...), append(missing, absent...)
			return err
		})
		if err != nil && !uring {
			return nil, nil, nil, err
		}
		if err != nil {
			missing = append(missing, fmt.Sprintf("FUSE over io_uring: %v", err))
		}
	}
	return all, missing, clean, nil
}

// devicesNow makes the block devices in the way that the machine supports now.
func devicesNow(dir, controller string, uring bool) (all []*server, missing []string, err error) {
	a := bestAbility()
	way := string(a.Kind)
	if a.Ring {
		way += " over io_uring"
	}
	if a.Kind == blockdev.FUSE {
		s, err := bareFUSE(dir, uring)
		if err != nil {
			missing = append(missing, fmt.Sprintf("bare FUSE and loop: %v", err))
		} else {
			all = append(all, s)
		}
	}
	for _, d := range []struct {
		name string
		role []string
	}{
		{"memory", []string{"memory-device"}},
		{"1 leg", []string{"device", controller, "1", "1"}},
		{"RAID1", []string{"device", controller, "1", "2"}},
	} {
		s, err := ours(fmt.Sprintf("Weft, %s (%s)", d.name, way), job{Kind: "device"}, -1, d.role...)
		if err != nil {
			return all, missing, err
		}
		all = append(all, s)
	}
	return all, missing, nil
}

//go:embed barefuse/bare.c
var bareSource []byte

// bareFUSE compiles and starts the C program that is the upper bound, and puts a loop device
// over its file.
func bareFUSE(dir string, uring bool) (_ *server, err error) {
	mode := map[bool]string{true: "uring", false: "plain"}[uring]
	name := map[bool]string{true: "bare FUSE over io_uring and loop (C)", false: "bare FUSE and loop (C)"}[uring]
	program, source, place := filepath.Join(dir, "bare"), filepath.Join(dir, "bare.c"), filepath.Join(dir, mode)
	if err := errors.Join(os.WriteFile(source, bareSource, 0o600), os.MkdirAll(place, 0o700)); err != nil {
		return nil, err
	}
	if out, err := exec.Command("gcc", "-O2", "-pthread", "-o", program, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile it: %w: %s", err, out)
	}
	cmd := exec.Command(program, place, strconv.Itoa(int(deviceSize/block.MiB)), mode)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	wait, err := pinned(cmd, -1)
	if err != nil {
		return nil, err
	}
	end := func() { in.Close(); _ = wait() }
	if said, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		end()
		return nil, fmt.Errorf("it said %q: %w", said, err)
	}
	loop, detach, err := attachLoop(filepath.Join(place, "f"))
	if err != nil {
		end()
		return nil, err
	}
	return &server{name: name, job: job{Kind: "device", Address: loop}, pid: cmd.Process.Pid, stop: func() { detach(); end() }}, nil
}

// attachLoop makes a loop device of a file, with direct I/O.
func attachLoop(file string) (path string, detach func(), err error) {
	f, err := os.OpenFile(file, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return "", nil, err
	}
	defer f.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", nil, err
	}
	defer control.Close()
	for range 64 { // others race for the free device
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", nil, err
		}
		path = fmt.Sprintf("/dev/loop%d", n)
		loop, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return "", nil, err
		}
		config := unix.LoopConfig{Fd: uint32(f.Fd()), Size: 4096}
		config.Info.Flags = unix.LO_FLAGS_DIRECT_IO
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if err == nil {
			return path, func() {
				_ = unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_CLR_FD, 0)
				loop.Close()
			}, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return "", nil, fmt.Errorf("attach %s: %w", path, err)
		}
	}
	return "", nil, fmt.Errorf("attach a loop device: %w", unix.EBUSY)
}

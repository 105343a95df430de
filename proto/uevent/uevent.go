// SPDX-License-Identifier: Apache-2.0

// Package uevent listens to what the kernel says of its devices: the messages of
// NETLINK_KOBJECT_UEVENT, group 1, which come before udev has looked at them.
//
//	err := uevent.Watch(ctx, func(e uevent.Event) {
//		fmt.Println(e.Action, e.Vars["DEVNAME"]) // add nvme1n1
//	})
//
// Events can be lost when they come faster than they are read: whoever listens
// takes them as a hint to look again.
package uevent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Event is one message.
type Event struct {
	Action string // add, remove, change, ...
	Path   string // below /sys
	Vars   map[string]string
}

// Parse reads a message as the kernel sends it: "add@/devices/..." and variables,
// each ended by a zero byte. What udev sends on other groups is no such message.
func Parse(message []byte) (Event, bool) {
	fields := strings.Split(strings.TrimSuffix(string(message), "\x00"), "\x00")
	action, path, ok := strings.Cut(fields[0], "@")
	if !ok || action == "" || !strings.HasPrefix(path, "/") {
		return Event{}, false
	}
	e := Event{Action: action, Path: path, Vars: map[string]string{}}
	for _, f := range fields[1:] {
		if k, v, ok := strings.Cut(f, "="); ok {
			e.Vars[k] = v
		}
	}
	return e, true
}

// Watch calls each for every event until ctx ends, and returns ctx's cause. An
// overrun is told as an event without an action.
func Watch(ctx context.Context, each func(Event)) error {
	f, err := open()
	if err != nil {
		return fmt.Errorf("watch kernel events: %w", err)
	}
	defer f.Close()                                      //nolint:errcheck // closing a socket that was only read
	stop := context.AfterFunc(ctx, func() { f.Close() }) //nolint:errcheck // ends the Read below
	defer stop()
	buffer := make([]byte, 64<<10)
	for {
		n, err := f.Read(buffer)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, unix.ENOBUFS):
			each(Event{Vars: map[string]string{}})
			continue
		case err != nil:
			return fmt.Errorf("watch kernel events: %w", err)
		}
		if e, ok := Parse(buffer[:n]); ok {
			each(e)
		}
	}
}

// open gives a file that the runtime polls, so that a Read ends when it is closed.
func open() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	const kernelGroup = 1
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		return nil, errors.Join(os.NewSyscallError("bind", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "uevents"), nil
}

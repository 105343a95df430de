// SPDX-License-Identifier: Apache-2.0

// Package uevent receives the kernel's device events: the messages of
// NETLINK_KOBJECT_UEVENT, group 1, which the kernel sends before udev has handled them.
//
//	err := uevent.Watch(ctx, func(e uevent.Event) {
//		fmt.Println(e.Action, e.Vars["DEVNAME"]) // add nvme1n1
//	})
//
// Events are lost when they come faster than they are read. Treat an event as a hint to
// look at the devices again.
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

// Parse reads a message in the kernel's form: "add@/devices/..." and variables, each ended
// by a zero byte. The messages of udev, sent on other groups, are not of this form.
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

// Watch calls each for every event until ctx ends, and returns ctx's cause. If the socket
// overruns, it passes an event without an action.
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

// open returns a file that the runtime polls, so that closing it ends a Read.
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

// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Watch calls changed after each kernel event that concerns NVMe or
// device-mapper: namespaces and controllers that come and go, sizes, tables. It
// returns nil when ctx ends. Events can be lost and none tells of a controller's
// state, so whoever watches also looks from time to time.
func Watch(ctx context.Context, changed func()) error {
	f, err := openUevents()
	if err != nil {
		return &Error{Op: "open", Path: "netlink kobject_uevent", Err: err}
	}
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { f.Close() })
	defer stop()
	buf := make([]byte, 16<<10)
	for {
		n, err := f.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS): // events were lost: something changed
			changed()
		case err != nil:
			return &Error{Op: "read", Path: "netlink kobject_uevent", Err: errno(err)}
		case concerns(buf[:n]):
			changed()
		}
	}
}

func openUevents() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "uevents"), nil
}

// concerns reads "add@/devices/virtual/…/nvme0n1\0ACTION=add\0SUBSYSTEM=block\0…".
func concerns(event []byte) bool {
	header, _, _ := bytes.Cut(event, []byte{0})
	_, device, ok := strings.Cut(string(header), "@")
	return ok && (strings.Contains(device, "/nvme") || strings.Contains(device, "/block/dm-"))
}

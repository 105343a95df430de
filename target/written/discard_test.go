// SPDX-License-Identifier: Apache-2.0

package written

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// blkdiscard discards a range of a block device.
func blkdiscard(fd uintptr, off, n uint64) error {
	r := [2]uint64{off, n}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.BLKDISCARD, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return errno
	}
	return nil
}

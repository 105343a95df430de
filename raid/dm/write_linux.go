// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Write writes to a device, past the page cache and the caches of drives. It returns when the device has answered,
// which no signal makes it do earlier: a process that is killed meanwhile does not end before that.
func (c *Client) Write(name string, p []byte, off int64) error {
	info, err := c.Info(name)
	if err != nil {
		return err
	}
	node := NodePath(info.Number)
	if is, err := MajorMinor(node); err != nil || is != info.Number {
		return opError("write", name, errors.Join(fmt.Errorf("%s is not its node", node), err))
	}
	f, err := os.OpenFile(node, os.O_WRONLY|unix.O_DIRECT|unix.O_DSYNC, 0)
	if err != nil {
		return opError("write", name, err)
	}
	data := aligned(len(p))
	copy(data, p)
	_, err = f.WriteAt(data, off)
	return opError("write", name, errors.Join(err, f.Close()))
}

// aligned returns memory that is aligned for O_DIRECT.
func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := page - int(uintptr(unsafe.Pointer(&b[0]))%page)
	return b[skip : skip+n]
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// Write writes to a device, past the page cache and the caches of drives. It returns when the device has answered,
// which no signal makes it do earlier: a process that is killed meanwhile does not end before that.
func (c *Client) Write(name string, p []byte, off int64) error {
	info, err := c.Info(name)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(NodePath(info.Number), os.O_WRONLY|unix.O_DIRECT|unix.O_DSYNC, 0)
	if err != nil {
		return opError("write", name, err)
	}
	data := aligned(len(p))
	copy(data, p)
	if err = c.opened(f, info); err == nil {
		_, err = f.WriteAt(data, off)
	}
	return opError("write", name, errors.Join(err, f.Close()))
}

// opened checks that a file is a device's: its number could have been another one's when it was opened, and from then on
// the device keeps it.
func (c *Client) opened(f *os.File, want Info) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	is := block.DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
	now, err := c.Info(want.Name)
	if err != nil || is != now.Number || is != want.Number {
		return errors.Join(fmt.Errorf("%s is device %v, and not its node", f.Name(), is), err)
	}
	return nil
}

// aligned returns memory that is aligned for O_DIRECT.
func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := page - int(uintptr(unsafe.Pointer(&b[0]))%page)
	return b[skip : skip+n]
}

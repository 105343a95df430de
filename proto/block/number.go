// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"strconv"
	"strings"
)

// DeviceNumber is a block device's major and minor number. While the device is held open
// the number keeps its meaning; a path may come to name another device.
type DeviceNumber struct{ Major, Minor uint32 }

// ParseDeviceNumber is the inverse of DeviceNumber.String.
func ParseDeviceNumber(s string) (DeviceNumber, error) {
	major, minor, _ := strings.Cut(s, ":")
	x, err1 := strconv.ParseUint(major, 10, 32)
	y, err2 := strconv.ParseUint(minor, 10, 32)
	if n := (DeviceNumber{uint32(x), uint32(y)}); err1 == nil && err2 == nil && n.String() == s {
		return n, nil
	}
	return DeviceNumber{}, fmt.Errorf("device number %q: not MAJOR:MINOR", s)
}

// String prints "253:4", as sysfs, mountinfo and device-mapper tables do.
func (n DeviceNumber) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

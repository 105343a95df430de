// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"time"

	"golang.org/x/sys/unix"
)

// leaseClock is the lease clock. The monotonic clock behind time.Now continues while a process
// is stopped or frozen, but stands still while the machine is suspended, and the manager does
// not wait for that. So the lease clock adds the time that the machine has been suspended
// since its boot.
func leaseClock() time.Time {
	now := time.Now()
	return now.Add(suspended())
}

// suspended is how long the machine has been suspended. A delay of this process between
// reading the two clocks makes the result larger, and a lease end sooner.
func suspended() time.Duration {
	var monotonic, boot unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic) != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil {
		return 0 // Linux has had both since 2.6.39
	}
	return time.Duration(boot.Nano() - monotonic.Nano())
}

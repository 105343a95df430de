// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"time"

	"golang.org/x/sys/unix"
)

// leaseClock is the time that leases go by. The monotonic clock behind time.Now goes
// on while a process is stopped or frozen, but stands still while the machine is
// suspended, and the manager does not wait for that. So this one is ahead of it by
// what the machine was suspended since its boot.
func leaseClock() time.Time {
	now := time.Now()
	return now.Add(suspended())
}

// suspended is how long the machine was. What delays this process between the two
// clocks makes it more, and a lease end sooner.
func suspended() time.Duration {
	var monotonic, boot unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic) != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil {
		return 0 // Linux has had both since 2.6.39
	}
	return time.Duration(boot.Nano() - monotonic.Nano())
}

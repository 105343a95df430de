// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// resident reads all of this program into memory, and maps it. Otherwise each page waits, when it is first
// used, for the drive that the program is on, or at least for the kernel. It does what it can: Linux before
// 5.14 does not know how.
func resident() {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		var from, to uintptr
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x", &from, &to); err != nil || !strings.HasSuffix(lines.Text(), " "+program) {
			continue
		}
		unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_POPULATE_READ) //nolint:errcheck // it is only faster
	}
}

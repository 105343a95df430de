// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"strconv"
	"strings"
	"time"
)

// ParseStat reads what the kernel counts of a block device (Linux, Documentation/block/stat.rst).
// It counts no latencies, only their sum. What cannot be read is zero.
func ParseStat(text string) (f Figures) {
	fields := strings.Fields(text)
	at := func(i int) (n uint64) {
		if i >= 0 && i < len(fields) {
			n, _ = strconv.ParseUint(fields[i], 10, 53) // longer than a machine can run, and 4 EiB
		}
		return n
	}
	const sector, longest = 512, uint64(1<<63-1) / uint64(time.Millisecond)
	// The indices of I/Os, sectors and milliseconds. Kernels before 5.5 do not count flushes.
	for op, i := range [Ops][3]int{Read: {0, 2, 3}, Write: {4, 6, 7}, Discard: {11, 13, 14}, Flush: {15, -1, 16}, Any: {-1, -1, -1}} {
		f[op] = Count{IOs: at(i[0]), Bytes: at(i[1]) * sector, Took: time.Duration(min(at(i[2]), longest)) * time.Millisecond}
	}
	return f
}

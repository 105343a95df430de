// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

// statsProgram marks the counts that this package asked for.
const statsProgram = "weft"

// statsCreate asks the kernel to count a device's I/O (Linux,
// Documentation/admin-guide/device-mapper/statistics.rst): in one area, which is longer than the
// device may become, with times in nanoseconds and a histogram of package figures' buckets.
var statsCreate = func() string {
	var bounds []string
	for i := range figures.Buckets - 1 {
		bounds = append(bounds, strconv.FormatInt(int64(figures.Bound(i)), 10))
	}
	return fmt.Sprintf("@stats_create 0+%d /1 2 precise_timestamps histogram:%s %s", int64(math.MaxInt64)/int64(block.SectorSize), strings.Join(bounds, ","), statsProgram)
}()

// count makes the kernel count a device's I/O. For a moment the kernel suspends the device and
// waits for the I/O under way, so this is done before the device is live.
func (c *Client) count(name string) error {
	_, err := c.Message(name, 0, statsCreate)
	return err
}

// Counted returns what the kernel has counted of a device that was made with Device.Count. Ok is
// false if it does not count: an earlier version made the device, or the kernel has refused.
func (c *Client) Counted(name string) (f figures.Figures, ok bool, err error) {
	list, err := c.Message(name, 0, "@stats_list "+statsProgram)
	if err != nil {
		return f, false, err
	}
	region, _, ok := strings.Cut(list, ":")
	if !ok {
		return f, false, nil
	}
	text, err := c.Message(name, 0, "@stats_print "+region)
	if err != nil {
		return f, false, err
	}
	f, err = parseStats(text)
	return f, err == nil, opError("read the counts of", name, err)
}

// parseStats reads one area's counters. Of the 13 numbers after the area's range, 1 and 5 count reads
// and writes, 3 and 7 their sectors, 4 and 8 the nanoseconds that they took. The histogram is of reads
// and writes together.
func parseStats(text string) (f figures.Figures, err error) {
	fields := strings.Fields(text)
	const numbers = 13
	if len(fields) != 1+numbers+1 {
		return f, fmt.Errorf("%d fields, want %d", len(fields), 1+numbers+1)
	}
	var n [1 + numbers]uint64
	for i := 1; i <= numbers; i++ {
		if n[i], err = strconv.ParseUint(fields[i], 10, 63); err != nil {
			return f, err
		}
	}
	counts := strings.Split(fields[numbers+1], ":")
	if len(counts) != figures.Buckets {
		return f, fmt.Errorf("%d buckets, want %d", len(counts), figures.Buckets)
	}
	f[figures.Read] = figures.Count{IOs: n[1], Bytes: n[3] * uint64(block.SectorSize), Took: time.Duration(n[4])}
	f[figures.Write] = figures.Count{IOs: n[5], Bytes: n[7] * uint64(block.SectorSize), Took: time.Duration(n[8])}
	latency := make(figures.Histogram, figures.Buckets)
	for i, count := range counts {
		if latency[i], err = strconv.ParseUint(count, 10, 63); err != nil {
			return f, err
		}
	}
	f[figures.Any].Latency = latency
	return f, nil
}

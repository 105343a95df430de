// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"math"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// RateHeadings are the headings of Rates.
const RateHeadings = "READ/s WRITE/s READ-BW WRITE-BW P50 P99"

// Rates are the cells that show what an object does: I/Os and bytes in a second, and latencies.
// They are empty if nothing is known.
func Rates(f *pb.Figures) []string {
	if f.GetNanoseconds() == 0 {
		return make([]string, 6)
	}
	seconds := float64(f.GetNanoseconds()) / 1e9
	return []string{
		perSecond(f.GetRead().GetIos(), seconds), perSecond(f.GetWrite().GetIos(), seconds),
		bandwidth(f.GetRead().GetBytes(), seconds), bandwidth(f.GetWrite().GetBytes(), seconds),
		Latency(f.GetAll().GetP50Nanoseconds()), Latency(f.GetAll().GetP99Nanoseconds()),
	}
}

func perSecond(n uint64, seconds float64) string {
	rate := float64(n) / seconds
	if n > 0 && rate < 10 {
		return fmt.Sprintf("%.1f", rate)
	}
	return fmt.Sprintf("%.0f", rate)
}

func bandwidth(bytes uint64, seconds float64) string {
	return block.Size(math.Round(float64(bytes)/seconds)).Short() + "/s"
}

// Latency prints a time with two digits or a little more; nothing if it is not known.
func Latency(nanoseconds uint64) string {
	d := time.Duration(nanoseconds)
	switch {
	case d == 0:
		return ""
	case d < 100*time.Microsecond:
		return d.Round(time.Microsecond).String()
	case d < 10*time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

// Held is the part of the time in which I/O was held.
func Held(f *pb.Figures) string {
	switch {
	case f.GetNanoseconds() == 0, f.GetAll().GetIos() > 0 && f.GetRead().GetP50Nanoseconds()+f.GetWrite().GetP50Nanoseconds() == 0:
		return "" // a source that does not count the latencies of each kind does not count this either
	case f.GetHeldNanoseconds() == 0:
		return "0%"
	}
	return fmt.Sprintf("%.0f%%", max(1, 100*min(1, float64(f.GetHeldNanoseconds())/float64(f.GetNanoseconds()))))
}

// Load is what an object does in three cells: the I/Os and the bytes in a second, reads, writes and
// the rest together, and the latency that 1 in 100 I/Os exceeds. They are empty if nothing is known.
func Load(f *pb.Figures) (ios, bytes, p99 string) {
	if f.GetNanoseconds() == 0 {
		return "", "", ""
	}
	seconds := float64(f.GetNanoseconds()) / 1e9
	return perSecond(f.GetAll().GetIos(), seconds), bandwidth(f.GetRead().GetBytes()+f.GetWrite().GetBytes(), seconds), Latency(f.GetAll().GetP99Nanoseconds())
}

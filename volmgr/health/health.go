// SPDX-License-Identifier: Apache-2.0

// Package health decides which drives are suspect: in use and good so far, but with signs that
// they may fail. A drive is suspect
//
//   - while its own health log has a critical warning, or its spare capacity is below the
//     threshold that the log names;
//   - for 24 hours after its media and data integrity errors last grew; how many it had when
//     it was first read does not count;
//   - for 10 minutes after it was last an outlier: in a minute, its reads and writes took more
//     than 5 times as long on average as those of its peers, and more than 20 ms. Its peers are
//     the other drives of its model on its node, at least two. Drives that did fewer than 100
//     reads and writes in that minute are not compared, nor those whose reads and writes had
//     more than 256 KiB on average: a drive that is being zeroed takes its time.
//
// The percentage of its life that a drive has used is no sign: by the specification a drive at
// 100 % may go on for long, and one that fails says so with a warning or with its spare. Nor is
// a log that cannot be read: a drive that answers nothing at all fails in other ways.
//
// What counts is durable, in [Record], so a restart of the manager ends no suspicion. The times
// are wall-clock times: a jump of the clock makes a suspicion longer or shorter, and no more
// depends on it.
package health

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// The limits of the rule.
const (
	mediaFor   = 24 * time.Hour
	slowFor    = 10 * time.Minute
	slowAgain  = time.Minute // how often a drive that stays slow is noted: as often as it is read
	slowTimes  = 5
	slowLeast  = 20 * time.Millisecond
	fewestIOs  = 100
	largestIO  = 256 << 10 // bytes, on average
	leastPeers = 2
)

// Reading is what a target last read of a drive. Zero: nothing.
type Reading struct {
	Time    time.Time // by the node's clock
	Unread  string    // why Smart could not be read
	Smart   *Smart    // nil if it was not read, or if the drive has no such log
	IOs     uint64    // reads and writes in about a minute
	Bytes   uint64    // of all of them
	Latency time.Duration
}

// Smart is the SMART / Health Information log of an NVMe drive.
type Smart struct {
	Warning         uint8 // critical warning bits
	Celsius         int
	Spare           int // per cent
	SpareThreshold  int
	Used            int // per cent of the expected life
	Read            uint64
	Written         uint64 // bytes
	PowerOnHours    uint64
	UnsafeShutdowns uint64
	MediaErrors     uint64
	ErrorEntries    uint64
}

// Record is what has to be remembered of a drive's readings. It is comparable.
type Record struct {
	Warnings string `json:"warnings,omitempty"` // of the last log that was read
	// MediaErrors is the newest count, once Counted. Grew is when it last grew, and Before what
	// it was before it did.
	Counted     bool      `json:"counted,omitempty"`
	MediaErrors uint64    `json:"media_errors,omitempty"`
	Before      uint64    `json:"media_errors_before,omitempty"`
	Grew        time.Time `json:"grew,omitzero"`
	// Slow says how slow the drive was when it became an outlier; SlowAt is when it last was one.
	Slow   string    `json:"slow,omitempty"`
	SlowAt time.Time `json:"slow_at,omitzero"`
}

// Why says why the drive is suspect; empty if it is not.
func (r Record) Why() string {
	signs := []string{r.Warnings}
	if !r.Grew.IsZero() {
		signs = append(signs, fmt.Sprintf("its media and data integrity errors grew from %d to %d", r.Before, r.MediaErrors))
	}
	signs = append(signs, r.Slow)
	return strings.Join(slices.DeleteFunc(signs, func(s string) bool { return s == "" }), "; ")
}

// Next returns the record after a reading. slow is what [Outliers] says of the drive. The same
// reading may come again.
func (r Record) Next(reading Reading, slow string, now time.Time) Record {
	now = now.UTC().Round(0)
	if s := reading.Smart; s != nil {
		r.Warnings = s.warnings()
		r = r.count(s.MediaErrors, now)
	}
	if slow != "" && now.Sub(r.SlowAt).Abs() >= slowAgain {
		r.SlowAt = now
		if r.Slow == "" {
			r.Slow = slow
		}
	}
	if now.Sub(r.Grew) >= mediaFor {
		r.Grew, r.Before = time.Time{}, 0
	}
	if now.Sub(r.SlowAt) >= slowFor {
		r.Slow, r.SlowAt = "", time.Time{}
	}
	return r
}

// count notes the number of media errors. The first one, or a lower one, begins anew.
func (r Record) count(errors uint64, now time.Time) Record {
	if r.Counted && errors > r.MediaErrors {
		if r.Grew.IsZero() {
			r.Before = r.MediaErrors
		}
		r.Grew = now
	}
	r.Counted, r.MediaErrors = true, errors
	return r
}

// The bits of a critical warning (NVM Express Base Specification 2.0, figure 207). Bit 0, the
// spare capacity, has a sentence of its own.
var warnings = []string{
	1: "its temperature is outside its limits",
	2: "its reliability is degraded",
	3: "its medium is read-only",
	4: "the backup of its volatile memory has failed",
	5: "its persistent memory region is read-only or unreliable",
	6: "critical warning bit 6",
	7: "critical warning bit 7",
}

// warnings lists what a log warns of; empty if nothing.
func (s *Smart) warnings() string {
	var all []string
	if s.Warning&1 != 0 || s.Spare < s.SpareThreshold {
		all = append(all, fmt.Sprintf("its spare capacity is %d%%, with a threshold of %d%%", s.Spare, s.SpareThreshold))
	}
	for bit, text := range warnings {
		if bit > 0 && s.Warning>>bit&1 != 0 {
			all = append(all, text)
		}
	}
	return strings.Join(all, "; ")
}

// Timing is how fast a drive of a node was in about a minute.
type Timing struct {
	Model   string // empty: unknown
	IOs     uint64
	Bytes   uint64
	Latency time.Duration
}

// Outliers says for each drive of a node how much slower it is than its peers; empty if it is not.
func Outliers(all []Timing) []string {
	out := make([]string, len(all))
	for i, t := range all {
		if t.Latency <= slowLeast || !t.comparable() {
			continue
		}
		peers := t.peers(slices.Concat(all[:i], all[i+1:]))
		if len(peers) < leastPeers {
			continue
		}
		if median := peers[len(peers)/2]; t.Latency > slowTimes*median {
			out[i] = fmt.Sprintf("its reads and writes took %v in a minute's mean, and the median of its %d peers was %v",
				t.Latency.Round(100*time.Microsecond), len(peers), median.Round(100*time.Microsecond))
		}
	}
	return out
}

// comparable reports whether a drive did enough reads and writes, of usual sizes.
func (t Timing) comparable() bool { return t.IOs >= fewestIOs && t.Bytes/t.IOs <= largestIO }

// peers returns the times of those among others that a drive can be compared with, sorted.
func (t Timing) peers(others []Timing) (times []time.Duration) {
	for _, o := range others {
		if t.Model != "" && o.Model == t.Model && o.comparable() {
			times = append(times, o.Latency)
		}
	}
	slices.Sort(times)
	return times
}

// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Off is the word for no limit, or for never.
const Off = "off"

// Bounds of what a volume's schedule may say; 0 is never, or no limit. A host compares 512 KiB at a time,
// and copies as much, to up to 16 places at once.
const (
	MinScrubEvery  = time.Hour
	MaxScrubEvery  = 10 * 366 * 24 * time.Hour
	MinScrubRate   = 64 * KiB
	MinRebuildRate = MiB
)

// ParseRate reads the bytes of a second, as ParseSize does; "off" is 0, no limit.
func ParseRate(text string) (Size, error) {
	if text == Off {
		return 0, nil
	}
	return ParseSize(text)
}

// ParseInterval reads how often something is done: "12h", or whole days, "7d"; "off" is 0, never.
// Less than a second is refused.
func ParseInterval(text string) (time.Duration, error) {
	if text == Off {
		return 0, nil
	}
	if n, ok := strings.CutSuffix(text, "d"); ok {
		if days, err := strconv.ParseUint(n, 10, 16); err == nil {
			return time.Duration(days) * 24 * time.Hour, nil
		}
	}
	if d, err := time.ParseDuration(text); err == nil && d >= time.Second {
		return d, nil
	}
	return 0, fmt.Errorf("interval %q: not a time such as 7d or 12h, of at least 1s, or off", text)
}

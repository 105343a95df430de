// SPDX-License-Identifier: Apache-2.0

package block

import (
	"testing"
	"time"
)

func TestIntervalsAreInDaysToo(t *testing.T) {
	for text, want := range map[string]time.Duration{"7d": 7 * 24 * time.Hour, "12h": 12 * time.Hour, "1h30m": 90 * time.Minute, "off": 0} {
		if got, err := ParseInterval(text); err != nil || got != want {
			t.Errorf("ParseInterval(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "d", "-1d", "7 d", "999999d", "0s", "-1h", "often"} {
		if got, err := ParseInterval(text); err == nil {
			t.Errorf("ParseInterval(%q) = %v", text, got)
		}
	}
}

func TestARateMayBeOff(t *testing.T) {
	for text, want := range map[string]Size{"off": 0, "100MiB": 100 * MiB} {
		if got, err := ParseRate(text); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	if got, err := ParseRate("never"); err == nil {
		t.Errorf("ParseRate(never) = %v", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package labelset

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

func TestALabelSetIsRefusedForWhatExceedsABound(t *testing.T) {
	many := map[string]string{}
	for i := range Most + 1 {
		many[fmt.Sprintf("k%02d", i)] = "v"
	}
	large := map[string]string{}
	for i := range 40 {
		large[fmt.Sprintf("k%02d", i)] = strings.Repeat("v", MostValue)
	}
	for _, c := range []struct {
		labels map[string]string
		why    string
	}{
		{map[string]string{"rack": "r1"}, ""},
		{map[string]string{"": "v"}, `key "" cannot be set`},
		{map[string]string{strings.Repeat("k", MostKey+1): "v"}, "has 318 bytes; at most 317 are allowed"},
		{map[string]string{"note": strings.Repeat("v", MostValue+1)}, `the value of "note" has 257 bytes`},
		{many, "65 labels; at most 64 are allowed"},
		{large, "bytes together; at most 8192 are allowed"},
	} {
		if why := Check(c.labels); !strings.Contains(why, c.why) || (why == "") != (c.why == "") {
			t.Errorf("Check(%d labels) = %q, want %q", len(c.labels), why, c.why)
		}
	}
	for key, want := range map[string]bool{"rack": true, Every: false, Own + "formatted": false} {
		if why := CheckVolume(map[string]string{key: "v"}); (why == "") != want {
			t.Errorf("CheckVolume(%q) = %q, want it allowed: %v", key, why, want)
		}
	}
	kept, left := Trim(many)
	if len(kept) != Most || Check(kept) != "" || !strings.Contains(left, "k64") {
		t.Errorf("Trim keeps %d labels and says %q, want the first %d and the name of the other", len(kept), left, Most)
	}
	if kept, left := Trim(map[string]string{"a": "b"}); !maps.Equal(kept, map[string]string{"a": "b"}) || left != "" {
		t.Errorf("Trim of a small set = %v, %q", kept, left)
	}
	if shown := Shown(large); len(shown) >= len(large) || !strings.Contains(shown[oversizeKey], "these are the first") {
		t.Errorf("of %d labels %d are shown, with %q", len(large), len(shown), shown[oversizeKey])
	}
}

func TestShortenCutsBetweenLetters(t *testing.T) {
	for text, want := range map[string]string{"short": "short", "exactly ten": "exactly te…", "aaaaaaaaaéé": "aaaaaaaaa…"} {
		if got := Shorten(text, 10); got != want {
			t.Errorf("Shorten(%q, 10) = %q, want %q", text, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"reflect"
	"testing"
	"time"
)

func TestTheKernelsCountersAreReadByKind(t *testing.T) {
	for text, want := range map[string]Figures{
		"  100 1 800 50  200 2 1600 70  0 90 120  5 0 4096 3  7 11\n": {
			Read: {IOs: 100, Bytes: 800 * 512, Took: 50 * time.Millisecond}, Write: {IOs: 200, Bytes: 1600 * 512, Took: 70 * time.Millisecond},
			Discard: {IOs: 5, Bytes: 4096 * 512, Took: 3 * time.Millisecond}, Flush: {IOs: 7, Took: 11 * time.Millisecond},
		},
		"1 0 8 2 0 0 0 0 0 0 0": {Read: {IOs: 1, Bytes: 4096, Took: 2 * time.Millisecond}}, // Linux 4.17
		"":                      {},
		"x y":                   {},
	} {
		if got := ParseStat(text); !reflect.DeepEqual(got, want) {
			t.Errorf("ParseStat(%q) = %+v, want %+v", text, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// How long a create is decided among 10 000 drives and 100 000 volumes, without the store
// and the API. Part of `make bench PART=manager`.
func BenchmarkDecisionAmongManyVolumes(b *testing.B) {
	volumes := 100_000
	if text := os.Getenv("VOLUMES"); text != "" {
		volumes, _ = strconv.Atoi(text)
	}
	s := grid(100, 10, 10, fixed(16384))
	made := 0
	create := func() time.Duration {
		made++
		in := CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%06d", made)), Size: block.GiB, Copies: 2, Stripes: 1, Spread: "node", Seed: testSeed(made)}
		begin := time.Now()
		if _, err := s.Step(t0, in); err != nil {
			b.Fatal(err)
		}
		return time.Since(begin)
	}
	const most = 2000
	decide := func(what string) time.Duration {
		took := make([]time.Duration, most)
		for i := range took {
			took[i] = create()
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[most/2].Nanoseconds())/1e3, what+"-p50-µs")
		b.ReportMetric(float64(took[most*99/100].Nanoseconds())/1e3, what+"-p99-µs")
		return took[most/2]
	}
	empty := decide("empty")
	for made < volumes {
		create()
	}
	full := decide("full")
	s.Fork()
	forked := decide("forked") // while a reader holds the state of before
	b.ReportMetric(float64(full)/float64(empty), "full/empty")
	b.ReportMetric(float64(forked)/float64(full), "forked/full")
	begin := time.Now()
	const forks = 100
	for range forks {
		s.Fork()
	}
	b.ReportMetric(float64(time.Since(begin).Microseconds())/forks, "fork-µs")
	b.ReportMetric(0, "ns/op")
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// BenchmarkCounting measures what counting costs. One iteration does as many IOs without counts as
// with them, on the same volume. A turn is so short that few turns are interrupted, and the median of
// the ratios of two that follow one another is reported.
func BenchmarkCounting(b *testing.B) {
	for _, l := range []block.Layout{layout(1, 1, block.DefaultChunk), layout(1, 2, block.DefaultChunk), layout(2, 2, block.DefaultChunk)} {
		for _, op := range []block.Op{block.OpRead, block.OpWrite} {
			name := fmt.Sprintf("%v/%dx%d/4k", op, l.Stripes, l.Copies)
			cfg := Config{Layout: l, Size: 64 * block.MiB}
			b.Run(name, func(b *testing.B) {
				v := volume(b, cfg, memories(cfg)...)
				io := &block.IO{Op: op, Len: 4096, Data: make([]byte, 4096)}
				done := make(chan struct{}, 1)
				io.Done = func(*block.IO) { done <- struct{}{} }
				counting(b, v, 512, func(r *rand.Rand) {
					io.Off = r.Int64N(int64(cfg.Size)/4096) * 4096
					v.Submit(io)
					<-done
				})
			})
		}
	}
	for _, op := range []block.Op{block.OpRead, block.OpWrite} {
		b.Run(fmt.Sprintf("%v/queue of 64", op), func(b *testing.B) {
			cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * block.MiB}
			legs := []*slow{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
			v := volume(b, cfg, legs[0], legs[1])
			ios := make([]*block.IO, 64)
			for i := range ios {
				ios[i] = &block.IO{Op: op, Len: 4096, Data: make([]byte, 4096), Done: func(*block.IO) {}}
			}
			counting(b, v, 512/len(ios), func(r *rand.Rand) {
				for _, io := range ios {
					io.Off = r.Int64N(int64(cfg.Size)/4096) * 4096
					v.Submit(io)
				}
				for legs[0].holds()+legs[1].holds() > 0 {
					answerAll(legs)
				}
			})
		})
	}
}

// counting reports what n calls of do take with and without counts.
func counting(b *testing.B, v *Volume, n int, do func(*rand.Rand)) {
	r := rand.New(rand.NewPCG(1, 2))
	turn := func(off bool) float64 {
		v.figures.off = off
		began := time.Now()
		for range n {
			do(r)
		}
		return float64(time.Since(began)) / 512
	}
	var without, with, ratios []float64
	for i := 0; b.Loop(); i++ {
		first := i%2 == 0
		x, y := turn(first), turn(!first)
		if !first {
			x, y = y, x
		}
		without, with, ratios = append(without, x), append(with, y), append(ratios, y/x)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(without), "ns/IO-without")
	b.ReportMetric(median(with), "ns/IO-with")
	b.ReportMetric(median(ratios), "with/without")
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

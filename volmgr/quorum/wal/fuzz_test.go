// SPDX-License-Identifier: Apache-2.0

package wal

import (
	"reflect"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

var fuzzed = header{number: 1, owner: Owner{Cluster: block.ClusterID{UUID: block.UUID{9}}, Member: 3}}

// withFrames is a file that holds payloads in good frames.
func withFrames(payloads ...[]byte) []byte {
	file := fuzzed.encode()
	seed := sum(0, file)
	for i, p := range payloads {
		text, _ := frame{}.encode(seed, uint64(i))
		head := text[:frameHead]
		head[0], head[1], head[2], head[3] = byte(len(p)), byte(len(p)>>8), byte(len(p)>>16), byte(len(p)>>24)
		crc := sum(seed, head[:12], p)
		head[12], head[13], head[14], head[15] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
		file = append(append(file, head...), p...)
	}
	return file
}

func payloadOf(f frame) []byte {
	text, err := f.encode(0, 0)
	if err != nil {
		panic(err)
	}
	return text[frameHead:]
}

// Any file is refused, or read and written again the same.
func FuzzOpen(f *testing.F) {
	first := payloadOf(frame{hard: &HardState{1, 2, 3}, base: &Base{4, 1, []byte("m")}, entries: []Entry{{5, 1, 0, []byte("a")}}})
	second := payloadOf(frame{entries: []Entry{{5, 2, 1, []byte("b")}, {6, 2, 0, nil}}})
	whole := withFrames(first, second)
	f.Add(whole, false)
	f.Add(whole[:len(whole)-1], false)
	f.Add(append(slices.Clone(whole), 0, 0, 0), false)
	f.Add(second, true)
	f.Add(payloadOf(frame{hard: &HardState{9, 9, 9}}), true)
	f.Add(payloadOf(frame{entries: []Entry{{9, 9, 9, nil}}}), true)
	f.Fuzz(func(t *testing.T, data []byte, framed bool) {
		if framed { // gets behind the checksums
			data = withFrames(first, data, second)
		}
		c, err := parse(data, 1)
		if err != nil {
			return
		}
		if c.end > int64(len(data)) {
			t.Fatalf("the end is at %d of %d bytes", c.end, len(data))
		}
		again, err := parse(data[:c.end], 1)
		if err != nil || !reflect.DeepEqual(again, c) {
			t.Fatalf("without its torn end: %+v, %v; want %+v", again, err, c)
		}
		if len(c.state.Entries) == 0 {
			return
		}
		s := c.state
		rewritten := withFrames(payloadOf(frame{hard: &s.Hard, base: &s.Base, entries: s.Entries}))
		if r, err := parse(rewritten, 1); err != nil || !reflect.DeepEqual(r.state, s) {
			t.Fatalf("rewritten: %+v, %v; want %+v", r.state, err, s)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// benchmark measures IOs of 4 KiB one after another, with checksums and without.
func benchmark(b *testing.B, op block.Op) {
	disk := ramdisk.New(testSize, 4096)
	l, err := Open(testPlace(disk))
	if err != nil {
		b.Fatal(err)
	}
	for name, d := range map[string]block.Device{"plain": disk, "checked": l} {
		b.Run(name, func(b *testing.B) {
			data := make([]byte, 4096)
			for at := int64(0); at < 1<<20; at += 4096 {
				data[0]++
				if err := block.WriteAt(d, data, at+16<<20); err != nil {
					b.Fatal(err)
				}
			}
			done := make(chan error, 1)
			io := &block.IO{Op: op, Len: 4096, Data: data, Done: func(io *block.IO) { done <- io.Err }}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if op == block.OpWrite {
					data[1]++
				}
				io.Off = int64(i%256)*4096 + 16<<20
				d.Submit(io)
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkWrite(b *testing.B) { benchmark(b, block.OpWrite) }
func BenchmarkRead(b *testing.B)  { benchmark(b, block.OpRead) }

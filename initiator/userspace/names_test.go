// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"slices"
	"testing"
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// The name goes with the attachment, not with the process.
func TestADeviceKeepsItsOtherNameUntilItIsDetached(t *testing.T) {
	for _, c := range []struct {
		when  string
		end   func(w *world)
		keeps bool
	}{
		{"after a detach", func(w *world) {
			w.want(func(x *volume.Wanted) { x.Detach = true })
			w.until(clean)
		}, false},
		{"when the process has ended", func(w *world) {
			w.stop()
			<-w.ended
		}, true},
		{"when the epoch is over", func(w *world) {
			w.want(func(x *volume.Wanted) {
				x.Epoch = 2
				w.wanted = x
				x.Links = []volume.Link{w.link(0, 0), w.link(0, 1)}
			})
			time.Sleep(2 * time.Second)
			w.until(serving)
		}, true},
	} {
		t.Run(c.when, func(t *testing.T) {
			served(t, 1, 2, func(w *world) {
				either := []block.VolumeName{"db1", block.VolumeName("db1").Beside(w.volume)}
				device := Of{Volume: w.volume, Name: "db1"}
				if got := device.options(blockdev.Options{}, w.names); got.Name != "db1" || !slices.Equal(got.Names, either) {
					t.Errorf("before: the device of %s has one of the names %v, want %v", got.Name, got.Names, either)
				}
				if err := device.options(blockdev.Options{}, w.names).Chosen(either[1]); err != nil {
					t.Fatal(err)
				}
				c.end(w)
				want := either
				if c.keeps {
					want = either[1:]
				}
				if got := device.options(blockdev.Options{}, w.names).Names; !slices.Equal(got, want) {
					t.Errorf("the device has one of the names %v, want %v", got, want)
				}
			})
		})
	}
}

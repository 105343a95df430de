// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"testing"

	"weft.dev/weft/proto/block"
)

func TestManagerChoosesStripes(t *testing.T) {
	for _, c := range []struct {
		size           block.Size
		copies, drives int
		want           int
	}{
		{512 * block.MiB, 2, 100, 1}, {block.GiB, 2, 4, 2}, {block.GiB, 2, 3, 1}, {block.GiB, 1, 1, 1},
		{300 * block.GiB, 2, 100, 2}, {1000 * block.GiB, 2, 100, 4}, {100 * block.TiB, 2, 100, 8}, {100 * block.TiB, 3, 9, 3},
	} {
		if got := autoStripes(c.size, c.copies, c.drives); got != c.want {
			t.Errorf("autoStripes(%v, %d, %d) = %d, want %d", c.size, c.copies, c.drives, got, c.want)
		}
	}
}

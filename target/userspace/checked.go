// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/integrity"
)

// checked is a leg with checksums, as the device of its tables. When a leg grows, the tables before
// and after share it; the last one closes it.
type checked struct {
	*integrity.Leg
	below Device // of the first table
	users atomic.Int64
}

// openChecked opens the leg of a table whose rows are all dm.Checked, or lets the one of an earlier
// table grow. It takes over below.
func openChecked(rows dm.Table, below Device, before *checked) (*checked, error) {
	place := integrity.Place{Device: below, Size: rows.Size(), Losses: below.Losses}
	for _, row := range rows {
		target := row.Target.(dm.Checked)
		place.Leg = target.Leg
		for at := block.Size(0); at < row.Length; at += block.CheckedData {
			place.Extents = append(place.Extents, int64(target.Offset))
			target.Offset += block.ExtentSize
		}
	}
	if before == nil {
		leg, err := integrity.Open(place)
		if err != nil {
			return nil, err
		}
		c := &checked{Leg: leg, below: below}
		c.users.Store(1)
		return c, nil
	}
	place.Device = before.below
	if err := before.Grow(place); err != nil {
		return nil, err
	}
	before.users.Add(1)
	return before, below.Close()
}

// Losses are the drive's.
func (c *checked) Losses() uint64 { return c.below.Losses() }

// Close ends one table's use.
func (c *checked) Close() error { return c.closeUntil(context.Background()) }

// closeUntil is Close, and writes checksums until ctx ends.
func (c *checked) closeUntil(ctx context.Context) error {
	if c.users.Add(-1) > 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeWithin)
	defer cancel()
	done := make(chan struct{})
	go func() {
		c.Leg.Close(ctx)
		close(done)
	}()
	select {
	case <-done:
		return c.below.Close()
	case <-ctx.Done():
		go func() {
			<-done
			c.below.Close() //nolint:errcheck // nobody waits for it
		}()
		return errSilent
	}
}

// closeWithin bounds how long the end of a leg waits for its drive, to which it writes the last
// checksums. It needs not: the leg's next opening finds what is missing.
const closeWithin = 5 * time.Second

var errSilent = errors.New("the drive does not take the leg's checksums; it is released when it does")

// Geometry has blocks of which each has its own checksum, so that no write is of a part of one.
func (c *checked) Geometry() block.Geometry {
	g := c.Leg.Geometry()
	g.BlockSize = integrity.BlockSize
	return g
}

// isChecked reports whether the rows of a table are those of a leg with checksums.
func isChecked(t dm.Table) (bool, error) {
	n := 0
	for _, row := range t {
		if _, ok := row.Target.(dm.Checked); ok {
			n++
		}
	}
	if n > 0 && n < len(t) {
		return false, fmt.Errorf("a leg has checksums in all extents or in none")
	}
	return n > 0, nil
}

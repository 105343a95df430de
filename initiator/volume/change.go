// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
)

// Change is one record to make about a leg, in sync or stale.
type Change struct {
	Leg      block.LegID
	Revision uint64
	Column   int
	Copied   block.Size // in sync: bytes its rebuild copied
	Why      string     // stale: the reason
	Since    time.Time  // stale: when its silence or error began
}

func (c Change) String() string { return fmt.Sprintf("%s@%d", c.Leg, c.Revision) }

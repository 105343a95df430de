// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"

	"weft.dev/weft/proto/block"
)

// Volume is a volume's block device. All methods may be called concurrently.
type Volume struct{ cfg Config }

var errEarly = errors.New("raid/engine is being written")

// New makes a volume without legs. IO to a column that has no leg in sync waits.
func New(cfg Config) (*Volume, error) { return &Volume{cfg: cfg}, nil }

// Geometry is what the volume is like. It says that there is a volatile cache,
// whatever the legs have, because legs come and go.
func (v *Volume) Geometry() block.Geometry { return block.Geometry{} }

// Submit is block.Device's. IOs are held while they can not be answered; they
// fail only with block.ErrRange, block.ErrUnsupported, with block.ErrMedium (see
// Config.FailMedium), and with block.ErrGone after Close or Abort.
func (v *Volume) Submit(io *block.IO) { io.Complete(errEarly) }

// Add gives a leg its device. As InSync: the caller's record says that it is in
// sync; of a leg that is InSync already it replaces the device, and what the old
// one failed is sent to the new one. As Rebuilding: the leg is recorded stale,
// and is copied to; full if it may miss more than this volume has tracked since
// New. Before, nothing that an earlier device of the leg was given may be able to
// reach the medium any more.
func (v *Volume) Add(column, copy int, dev block.Device, state State, full bool) error {
	return errEarly
}

// Drop goes on without a leg. The caller has durably recorded it as stale. The
// last leg in sync of a column is not dropped: that is an error. IOs that the
// leg's device still has go on when it gives them back; see the package comment.
func (v *Volume) Drop(column, copy int) error { return errEarly }

// Promote begins to read from a leg that is CaughtUp. The caller has durably
// recorded it as in sync. An error if it is not CaughtUp any more.
func (v *Volume) Promote(column, copy int) error { return errEarly }

// Retry sends again to a leg what it failed. Of the last leg in sync the volume
// does so by itself.
func (v *Volume) Retry(column, copy int) error { return errEarly }

// Equalize makes all copies in sync equal; to be called, before the volume is
// exposed, when it may have been written by a client that crashed. Until it has
// succeeded, IO waits. After an error, or when ctx has ended, it can be called
// again, also after a Drop, and goes on where it was.
func (v *Volume) Equalize(ctx context.Context) error { return errEarly }

// Suspend lets nothing more go to the legs, reads and rebuilds included; IO is
// held. What is under way is answered as ever. Suspended twice is suspended once.
func (v *Volume) Suspend() {}

// Resume ends Suspend.
func (v *Volume) Resume() {}

// SetSize makes the volume larger; its legs must have grown before, and what is
// new must read the same on all legs in sync. It never shrinks.
func (v *Volume) SetSize(size block.Size) error { return errEarly }

// Status looks at the volume. It is cheap enough to be called ten times a second.
func (v *Volume) Status() Status { return Status{} }

// Close takes no more IO, waits until all that it took is answered, and stops
// rebuilds. When ctx ends first it is an error, and can be called again.
func (v *Volume) Close(ctx context.Context) error { return errEarly }

// Abort is for a volume that is given up: it sends nothing more to the legs, and
// answers all IO with block.ErrGone, held IO at once, the rest when the legs give
// it back. Writes that fail so may or may not be on each of the legs: equalize.
func (v *Volume) Abort() {}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// exported is a leg as the hosts of one export use it.
type exported struct {
	*linear
	losses uint64 // of the drive, when the export was made
}

var errLost = fmt.Errorf("the drive has lost acknowledged writes: %w", block.ErrMedium)

// Submit passes an IO on to the leg, except a flush after a loss: the kernel reports lost writes
// once, whoever wrote them, and answers the next flush with success.
func (e *exported) Submit(io *block.IO) {
	if io.Op != block.OpFlush {
		e.linear.Submit(io)
		return
	}
	e.linear.Submit(&block.IO{Op: block.OpFlush, Done: func(own *block.IO) {
		err := own.Err
		if err == nil && e.linear.losses() != e.losses {
			err = errLost
		}
		io.Complete(err)
	}})
}

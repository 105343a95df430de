// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
)

// keeper keeps one volume on one data path.
type keeper interface {
	// Run keeps the volume until ctx ends. What it leaves then is up to the data
	// path: the kernel's serves on, that of this process cannot.
	Run(ctx context.Context)

	// Want tells what is wanted, nil if the volume is not; problem says that what
	// is wanted cannot be acted on. It may be called at any time, as may Poke and
	// State.
	Want(w *attachment.Wanted, problem string, generation uint64)

	// Poke has the keeper look soon.
	Poke()

	// State is how it was when it was last looked at.
	State() attachment.State
}

// dataPath is a way to give volumes out.
type dataPath interface {
	// found lists the volumes that this machine has anything of.
	found() []block.VolumeID

	// held lists the volumes of which devices are here that no keeper has made.
	held() ([]block.VolumeID, error)

	// keeper makes the keeper of a volume.
	keeper(v block.VolumeID) keeper

	// watch calls poke when it may be worth while to look, until ctx ends.
	watch(ctx context.Context, poke func()) error

	// close is called when no keeper runs any more.
	close() error
}

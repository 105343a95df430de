// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/support"
)

// volumeKeeper keeps one volume on one data path.
type volumeKeeper interface {
	// Run keeps the volume until ctx ends. What remains then depends on the data path: the
	// kernel's serves on, the one in this process cannot.
	Run(ctx context.Context)

	// Want tells the keeper what is wanted, nil if the volume is not; problem says why the
	// wanted state cannot be acted on. Want, Poke and State may be called at any time.
	Want(w *volume.Wanted, problem string, generation uint64)

	// Poke makes the keeper look soon.
	Poke()

	// State is the volume as the keeper last saw it.
	State() keeper.State

	// Figures is the I/O of the volume since it was built; nil if it is not here or not counted.
	Figures() *keeper.Figures
}

// dataPath is a way to provide volumes.
type dataPath interface {
	// found lists the volumes that have left something on this machine.
	found() []block.VolumeID

	// held lists the volumes whose devices are here but were made by no keeper.
	held() ([]block.VolumeID, error)

	// authenticates reports whether it can prove this host's identity to targets.
	authenticates() bool

	// severalPaths reports whether it can use several paths to a leg at a time.
	severalPaths() bool

	// told is what it tells of this machine for support bundles; nothing secret.
	told() []support.File

	// keeper makes the keeper of a volume.
	keeper(v block.VolumeID) volumeKeeper

	// watch calls poke when another look may be worthwhile, until ctx ends.
	watch(ctx context.Context, poke func()) error

	// close is called when all keepers have ended.
	close() error
}

// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/fsfreeze"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// Freezer freezes the file systems on a device: see fsfreeze.Freezer.
type Freezer interface {
	Begin(device block.DeviceNumber, changed func()) *fsfreeze.Freeze
}

// freezeStates are the planner's words for how far a freeze has come.
var freezeStates = map[fsfreeze.State]volume.FreezeState{
	fsfreeze.Syncing: volume.FreezeSyncing, fsfreeze.Synced: volume.FreezeSynced, fsfreeze.Freezing: volume.FreezeBegins,
	fsfreeze.Frozen: volume.FreezeFrozen, fsfreeze.Thawing: volume.FreezeEnds, fsfreeze.Thawed: volume.FreezeEnded, fsfreeze.Failed: volume.FreezeEnded,
}

// freezesSeen are the freezes of the volume's file systems. They are looked at after the volume: if its I/O
// is held and they are frozen now, they were frozen when the hold began.
func (k *Keeper) freezesSeen() map[string]volume.FreezeSeen {
	all := map[string]volume.FreezeSeen{}
	for hold, z := range k.freezes {
		state, err := z.State()
		f := volume.FreezeSeen{State: freezeStates[state]}
		if err != nil && !errors.Is(err, fsfreeze.ErrThaws) { // that passes: another attempt may succeed
			f.Error = err.Error()
		}
		all[hold] = f
	}
	return all
}

// keepFreezes ends the freezes for holds that are not wanted any more.
func (k *Keeper) keepFreezes(w *volume.Wanted) {
	for hold, z := range k.freezes {
		if w != nil && slices.ContainsFunc(w.Holds, func(h volume.Hold) bool { return h.ID == hold && h.Freeze }) {
			continue
		}
		z.End()
		if state, _ := z.State(); state == fsfreeze.Thawed || state == fsfreeze.Failed {
			delete(k.freezes, hold)
		}
	}
}

// syncFileSystems begins to write out what the device's file systems have in memory.
func (k *Keeper) syncFileSystems(hold string) error {
	_, number, _ := k.path.Device()
	device, err := block.ParseDeviceNumber(number)
	switch {
	case k.cfg.Freezer == nil:
		return errors.New("this agent cannot freeze file systems")
	case err != nil:
		return fmt.Errorf("its device: %w", err)
	}
	k.freezes[hold] = k.cfg.Freezer.Begin(device, k.Poke)
	return nil
}

func (k *Keeper) freezeFileSystems(hold string, limit time.Duration) error {
	z := k.freezes[hold]
	if z == nil {
		return volume.ErrLater
	}
	k.Log.Warn("freezing the file systems on the device", "for", hold, "at_most", limit)
	z.Freeze(limit)
	return nil
}

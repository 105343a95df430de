// SPDX-License-Identifier: Apache-2.0

package main

import (
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/initiator/blockdev"
)

// initiator is the part that makes block devices of volumes, where this machine
// can have any.
func (d *dev) initiator() []daemon.Part { return nil }

// devices says how volumes are reached.
func (d *dev) devices() string {
	all := blockdev.Probe()
	if kind, ok := blockdev.Choose(all); ok {
		return "block devices through " + string(kind)
	}
	return "no block devices here (" + all[len(all)-1].Reason + "); volumes are reached as NVMe/TCP namespaces, or through the library"
}

// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"sync"

	"weft.dev/weft/proto/pb"
)

// Inventory finds the block devices of a node that could be given to Weft.
type Inventory struct {
	root string // holds sys, proc and dev

	mu   sync.Mutex
	busy map[string]bool // devices that have not answered yet
}

// NewInventory looks below root, which is "/" on a real machine.
func NewInventory(root string) *Inventory {
	return &Inventory{root: root, busy: map[string]bool{}}
}

// Scan lists all devices, sorted by path, with drive_id set on those that carry
// a usable label and refused saying why each of the others can not be added. It
// reads about 2 MiB of each device, so not every second. A device that does not
// answer before ctx ends is listed as refused.
func (inv *Inventory) Scan(ctx context.Context) ([]*pb.Device, error) { return nil, nil }

// CheckAdd says why a device can not be added, given what the operator has
// agreed to erase: nil if it is blank, or if forceErase is exactly its
// signatures joined by ", " and nothing else stands against it.
func CheckAdd(device *pb.Device, forceErase string) error { return nil }

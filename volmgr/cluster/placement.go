// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto/sha256"
	"encoding/binary"

	"weft.dev/weft/proto/block"
)

// id draws the n-th identifier from a seed.
func (s Seed) id(n uint32) block.UUID {
	sum := sha256.Sum256(binary.BigEndian.AppendUint32(s[:], n))
	return block.UUIDFromRandom([16]byte(sum[:16]))
}

func (s *State) place(pool *Pool, in CreateVolume) (block.Layout, []Leg, error) {
	return block.Layout{}, nil, nil
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"testing"

	"weft.dev/weft/proto/block"
)

// Such a host would write to one leg of two.
func TestAStockHostGetsNoVolumeOfTwoLegsInSync(t *testing.T) {
	layout := block.Layout{Stripes: 1, Copies: 1, Chunk: block.DefaultChunk}
	v := &Volume{Name: "db1", Layout: layout, Legs: []Leg{{State: LegInSync}, {State: LegStale}}}
	n := &Node{Name: "h1", Stock: true}
	if err := new(State).mayUse(v, n, AttachExclusive); err != nil {
		t.Errorf("a volume of one leg and a stale one is refused: %v", err)
	}
	v.Legs[1].State = LegInSync
	if err := new(State).mayUse(v, n, AttachExclusive); err == nil {
		t.Error("a volume of two legs in sync is attached")
	}
	v.Legs[1].State, v.Thin = LegStale, true
	if err := new(State).mayUse(v, n, AttachExclusive); err == nil {
		t.Error("a thin volume is attached: the host would fail writes that wait for space")
	}
	if err := new(State).mayUse(v, &Node{Name: "c1"}, AttachExclusive); err != nil {
		t.Errorf("a host with an agent is refused: %v", err)
	}
}

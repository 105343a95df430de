// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/pb"
)

// Every phase, state and reason of the planner has a value on the wire, and the wire has no other.
func TestThePlannersWordsAreThoseOfTheWire(t *testing.T) {
	check(t, pb.Value[pb.AttachmentPhase], volume.Connecting, volume.Equalizing, volume.Serving, volume.Stalled,
		volume.Detaching, volume.DetachedClean, volume.DetachedUnclean)
	check(t, pb.Value[pb.LinkState], volume.LinkLive, volume.LinkConnecting, volume.LinkLost, volume.LinkAbsent)
	check(t, pb.Value[pb.HoldState], volume.HoldPending, volume.HoldPrepared, volume.HoldHeld, volume.HoldEnded)
	check(t, pb.Value[pb.StaleReason], volume.NoAnswer, volume.IOError, volume.IOStuck, volume.RebuildFailed,
		volume.DeviceGone, volume.SharedPath, volume.NotConnected, volume.NotInUse, volume.LeftOut)
	check(t, pb.Value[pb.GiveUpReason], volume.LostCache, volume.Removed, volume.Unclean)
}

func check[E protoreflect.Enum, W ~string](t *testing.T, value func(string) E, words ...W) {
	t.Helper()
	var zero E
	for _, w := range words {
		if got := pb.Word(value(string(w))); got != string(w) {
			t.Errorf("%T: %q becomes %q", zero, w, got)
		}
	}
	if n := zero.Descriptor().Values().Len() - 1; n != len(words) {
		t.Errorf("%T has %d values, the planner %d", zero, n, len(words))
	}
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/proto/pb"
)

// hold makes the manager want the device's I/O held; no id releases it.
func (w *world) hold(id string, limit time.Duration) {
	w.change(func(all *pb.InitiatorWanted) {
		all.Attachments[0].Holds = nil
		if id != "" {
			all.Attachments[0].Holds = []*pb.Hold{{Id: id, Limit: durationpb.New(limit)}}
		}
	})
}

// holdIs checks the report on the only hold.
func (w *world) holdIs(when string, want pb.HoldState) {
	w.t.Helper()
	if holds := w.attachment().GetHolds(); len(holds) != 1 || holds[0].GetState() != want {
		w.t.Errorf("%s: holds %v, want one that is %v", when, holds, want)
	}
}

func TestTheDeviceIsSuspendedForAHoldUntilItsLimit(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.hold("s1", 5*time.Second)
		time.Sleep(4 * time.Second)
		w.expect("within the limit", "suspend top")
		w.holdIs("within the limit", pb.HoldState_HOLD_STATE_HELD)
		if phase := w.attachment().GetPhase(); phase != stalled {
			t.Errorf("within the limit the volume is %v, want STALLED", phase)
		}
		time.Sleep(2 * time.Second)
		w.expect("after it", "resume top")
		w.holdIs("after it", pb.HoldState_HOLD_STATE_ENDED)
		w.until(serving)
		time.Sleep(time.Minute)
		w.expect("a hold that has ended is still wanted")
		w.hold("s2", 5*time.Second)
		time.Sleep(time.Second)
		w.hold("", 0)
		time.Sleep(time.Second)
		w.expect("another hold, released", "suspend top", "resume top")
	})
}

func TestANewAgentEndsTheHoldOfAnEarlierOne(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.hold("s1", 30*time.Second)
		time.Sleep(2 * time.Second)
		w.expect("held", "suspend top")
		w.stop()
		w.start()
		time.Sleep(3 * time.Second)
		w.expect("a new agent, which cannot know for how long I/O was held", "resume top")
		w.holdIs("after a restart", pb.HoldState_HOLD_STATE_ENDED)
		w.until(serving)
	})
}

func TestAHoldWithoutALimitIsRefused(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.hold("s1", 0)
		time.Sleep(2 * time.Second)
		w.expect("a hold without a limit")
		if waits := w.attachment().GetWaitingFor(); waits != `wanted state cannot be applied: hold "s1": limit 0s: must be positive and at most 1m0s` {
			t.Errorf("waiting for %q, want the reason", waits)
		}
	})
}

// A healthy leg leaves while the device is suspended, after the copy that stays was flushed.
func TestALegIsLeftOutWhileTheDeviceIsSuspended(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Legs[1].LeaveOut = "its node is under maintenance" })
		time.Sleep(2 * time.Second)
		w.expect("asked to leave out a leg", "suspend top", "flush t0", "record-stale c0.1",
			"create c0-lost1: error", "reload c0: mirror keep_log t0 c0-lost1", "resume top", "disconnect t1")
		w.until(serving)
	})
}

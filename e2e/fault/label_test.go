// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"weft.dev/weft/proto/pb"
)

// A drive has its label at one end only, because the other end was overwritten. The power is
// cut during the next write of the label: the drive must still be known, by the new label or
// by the old one.
func TestALabelWithOneEndSurvivesACutWrite(t *testing.T) {
	for seed := range uint64(4) { // varies which part of the write is on the drive
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			single(t, func(m *mirror) {
				m.put("c1", 1, 0)
				m.detach(m.clients[0], false)
				h := m.first
				h.platter.set(func() { h.platter.random = rand.New(rand.NewPCG(seed, 40)) })
				h.kill()
				h.buried()
				if err := h.platter.overwriteEnd(); err != nil {
					t.Fatal(err)
				}
				h.start()
				m.eventually("the target has opened its drive", func(ctx context.Context) error {
					d, err := m.operator.ListDrives(ctx, &pb.ListDrivesRequest{})
					if err == nil && d.GetDrives()[0].GetState() != pb.DriveState_DRIVE_STATE_READY {
						err = errors.New(d.GetDrives()[0].GetReason())
					}
					return err
				})
				h.platter.hangWrites()
				m.eventually("ask for the volume", func(ctx context.Context) error {
					_, err := m.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: "c1"})
					return err
				})
				time.Sleep(2 * time.Second) // the target has to admit the host's epoch by now
				h.loseAll(rand.New(rand.NewPCG(seed, 41)))
				h.start()
				m.attachAs(m.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
				m.holds("c1", 1, 0)
			})
		})
	}
}

// A volume is ready, and then all targets lose power and the manager its store: the volume must
// be found on the drives.
func TestAVolumeThatIsReadyIsOnItsDrives(t *testing.T) {
	for seed := range uint64(4) { // varies what of the caches is lost
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			mirrored(t, asItIs, func(m *mirror) {
				m.detach(m.clients[0], false)
				m.clients[0].kill()
				random := rand.New(rand.NewPCG(seed, 42))
				for _, h := range m.targets {
					h.loseAll(random)
				}
				m.loseStore()
				for _, h := range m.targets {
					h.start()
				}
				m.rebuildStore()
				m.startManager()
				for _, l := range m.volume().GetLegs() {
					if l.GetState() != pb.LegState_LEG_STATE_IN_SYNC {
						t.Errorf("leg %d.%d is %v: %s", l.GetColumn(), l.GetCopy(), l.GetState(), l.GetReason())
					}
				}
			})
		})
	}
}

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

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// onlyRead checks that the volume is sealed, that no host gets it for writing, and that those who have it
// cannot write it.
func (m *mirror) onlyRead() {
	m.t.Helper()
	if m.volume().GetSealed() == nil {
		m.t.Error("it is not sealed")
	}
	for _, h := range m.clients {
		_, err := m.operator.Attach(context.Background(), &pb.AttachRequest{Volume: volumeName, Node: h.name, Mode: pb.AttachMode_ATTACH_MODE_EXCLUSIVE})
		if status.Code(err) != codes.FailedPrecondition {
			m.t.Errorf("%s asks for it alone: %v", h.name, err)
		}
		if err := block.WriteAt(m.users.device(h.name).volume, edition(9), 0); !errors.Is(err, block.ErrReadOnly) {
			m.t.Errorf("%s writes: %v", h.name, err)
		}
	}
}

// A volume that lacks a copy is sealed. A host heals it while nobody has it. Then the store is lost, and the one
// that is rebuilt from the drives gives it to nobody for writing. All hosts read it at once, also without the
// copy that it was healed from.
func TestASealedVolumeIsHealedAndRead(t *testing.T) {
	spared(t, func(m *mirror, spare *targetHost) {
		m.put("c1", 1, everyUnit...)
		m.second.kill()
		m.put("c1", 2, 0, 7)
		m.detach(m.clients[0], false)
		m.eventually("seal it", func(ctx context.Context) error {
			_, err := m.operator.SealVolume(ctx, &pb.SealVolumeRequest{Volume: volumeName})
			return err
		})
		time.Sleep(16 * time.Minute)
		m.detachedAndHealthy()
		m.second.start()
		time.Sleep(10 * time.Second)
		m.loseStore()
		m.t.Log(m.rebuildStore())
		m.startManager()
		for _, h := range m.clients {
			m.attachAs(h, pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY)
		}
		m.onlyRead()
		m.first.kill()
		for _, h := range m.clients {
			m.holds(h.name, 2, 0, 7)
			m.holds(h.name, 1, 1, 2, 3)
		}
		m.first.start()
		m.sameCopies()
	})
}

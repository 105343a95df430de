// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi"
)

// Many volumes are used at once through two independent drivers. The callers' deadlines may
// expire at any moment, and they then retry. Each life must complete, no call on the way
// may return a final error, and nothing may be left behind.
func TestManyLivesUnderImpatientCallers(t *testing.T) {
	needDevices(t)
	t.Parallel()
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
	drivers := []spec.ControllerClient{c.controller(csi.Config{}), c.controller(csi.Config{})}
	var s stress
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(worker)))
			for range 3 {
				if err := s.life(t.Context(), drivers, random); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	c.nothingLeft()
	t.Logf("%d calls, %d of them interrupted; publish took %v (median)", s.calls, s.short, s.median())
	if s.short == 0 {
		t.Error("no call was interrupted")
	}
}

// stress counts what happened.
type stress struct {
	mu          sync.Mutex
	calls       int
	short       int
	publishTook []time.Duration
}

func (s *stress) median() time.Duration {
	slices.Sort(s.publishTook)
	return s.publishTook[len(s.publishTook)/2]
}

// life is a volume's whole life; each call is repeated until it succeeds.
func (s *stress) life(ctx context.Context, drivers []spec.ControllerClient, random *rand.Rand) error {
	name, id, node := unique("pvc"), "", []string{"n1", "n2"}[random.IntN(2)]
	for _, call := range []struct {
		name string
		do   func(context.Context, spec.ControllerClient) error
	}{
		{"create", func(ctx context.Context, d spec.ControllerClient) error {
			v, err := d.CreateVolume(ctx, create(name))
			id = v.GetVolume().GetVolumeId()
			return err
		}},
		{"publish", func(ctx context.Context, d spec.ControllerClient) error {
			_, err := d.ControllerPublishVolume(ctx, &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: raw})
			return err
		}},
		{"unpublish", func(ctx context.Context, d spec.ControllerClient) error {
			_, err := d.ControllerUnpublishVolume(ctx, &spec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
			return err
		}},
		{"delete", func(ctx context.Context, d spec.ControllerClient) error {
			_, err := d.DeleteVolume(ctx, &spec.DeleteVolumeRequest{VolumeId: id})
			return err
		}},
	} {
		if err := s.insist(ctx, call.name, call.do, drivers, random); err != nil {
			return fmt.Errorf("%s %s: %w", call.name, name, err)
		}
	}
	return nil
}

// insist calls one driver or the other until a call succeeds. Its first deadlines are
// shorter than the call takes.
func (s *stress) insist(ctx context.Context, name string, do func(context.Context, spec.ControllerClient) error, drivers []spec.ControllerClient, random *rand.Rand) error {
	deadline := time.Now().Add(time.Minute)
	for patience := time.Duration(1+random.IntN(20)) * time.Millisecond; ; patience *= 2 {
		once, cancel := context.WithTimeout(ctx, patience)
		start := time.Now()
		err := do(once, drivers[random.IntN(len(drivers))])
		cancel()
		s.mu.Lock()
		s.calls++
		if err != nil {
			s.short++
		} else if name == "publish" {
			s.publishTook = append(s.publishTook, time.Since(start))
		}
		s.mu.Unlock()
		switch status.Code(err) {
		case codes.OK:
			return nil
		case codes.DeadlineExceeded, codes.Aborted, codes.Unavailable, codes.Canceled:
		default:
			return err
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

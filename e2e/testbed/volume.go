// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"strings"
	"time"

	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// Create creates a volume, with more flags such as "--thin", and waits until it is ready.
func (b *Bed) Create(name, size string, stripes, copies int, flags ...string) *pb.Volume {
	b.T.Helper()
	create := []string{"volume", "create", name, "--size", size, "--stripes", fmt.Sprint(stripes), "--copies", fmt.Sprint(copies), "--chunk-size", "64KiB", "--wait"}
	b.Weft(append(create, flags...)...)
	return b.Volume(name)
}

// Volume returns the manager's current view of a volume.
func (b *Bed) Volume(name string) *pb.Volume {
	b.T.Helper()
	v, err := b.API.GetVolume(b.T.Context(), &pb.GetVolumeRequest{Volume: name})
	if err != nil {
		b.T.Fatalf("get volume %s: %v", name, err)
	}
	return v
}

// Attach attaches a volume to a client and returns its device.
func (b *Bed) Attach(volume string, client *vm.Machine) string {
	b.T.Helper()
	return strings.TrimSpace(b.Weft("attach", volume, "--node", client.Name(), "--timeout", "4m"))
}

// Detach detaches a volume cleanly and waits until it is detached.
func (b *Bed) Detach(volume string) {
	b.T.Helper()
	b.Weft("detach", volume)
	b.Eventually(time.Minute, volume+" is detached", func(ctx context.Context) error {
		v, err := b.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
		if err == nil && v.Attachment != nil {
			err = fmt.Errorf("it is %v", v.Attachment.State)
		}
		return err
	})
}

// WaitHealth waits until a volume has the given health.
func (b *Bed) WaitHealth(volume string, want pb.Health, atMost time.Duration) {
	b.T.Helper()
	b.Eventually(atMost, fmt.Sprintf("%s is %v", volume, want), func(ctx context.Context) error {
		v, err := b.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
		if err == nil && v.Health != want {
			err = fmt.Errorf("it is %v", v.Health)
		}
		return err
	})
}

// Holder is the target with a copy of a column of a volume.
func (b *Bed) Holder(volume string, column, copy uint32) *vm.Machine {
	b.T.Helper()
	for _, leg := range b.Volume(volume).Legs {
		if leg.Column == column && leg.Copy == copy {
			for _, t := range b.Targets {
				if t.Name() == leg.Node {
					return t
				}
			}
		}
	}
	b.T.Fatalf("no target holds copy %d of column %d of %s", copy, column, volume)
	return nil
}

// Events returns the events of an object such as "volume db1", oldest first; "" means all.
func (b *Bed) Events(object string) []*pb.Event {
	b.T.Helper()
	list, err := b.API.ListEvents(b.T.Context(), &pb.ListEventsRequest{Object: object})
	if err != nil {
		b.T.Fatalf("list events: %v", err)
	}
	return list.Events
}

// LastEvent returns an object's newest event of a kind, or nil.
func (b *Bed) LastEvent(object, kind string) *pb.Event {
	var last *pb.Event
	for _, e := range b.Events(object) {
		if e.Kind == kind {
			last = e
		}
	}
	return last
}

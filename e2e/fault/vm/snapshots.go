// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/proto/pb"
)

const (
	takenIn  = 15 * time.Second // a snapshot; while faults last, it may take longer or be given up
	decideIn = 2 * time.Minute  // whether it is taken, once all has healed
)

// snapshot is one that was asked for.
type snapshot struct {
	name   string
	before testbed.Acks // acknowledged before it was asked for
	newest uint64       // the last write that can have begun before it was known to be taken; 0: it is not known to be
}

// ask asks for a snapshot, and waits some time until it is taken.
func (l *life) ask() {
	ctx, cancel := context.WithTimeout(l.T.Context(), takenIn)
	defer cancel()
	l.asked++
	name := fmt.Sprintf("s%d", l.asked)
	s := &snapshot{name: volume + "@" + name, before: maps.Clone(l.acks).Add(l.writer)}
	l.snapshots = append(l.snapshots, s)
	_, err := l.API.CreateSnapshots(ctx, &pb.CreateSnapshotsRequest{Snapshots: []*pb.NewSnapshot{{Volume: volume, Name: name}}})
	if err != nil {
		l.say("snapshot %s is not answered: %v", s.name, err)
		return // it may be taken nevertheless
	}
	if taken, err := l.decided(ctx, s); !taken {
		l.say("snapshot %s is not taken yet: %v", s.name, err)
	}
}

// decided waits until a snapshot is taken, or there is none (codes.NotFound).
func (l *life) decided(ctx context.Context, s *snapshot) (taken bool, err error) {
	var state pb.VolumeState
	for ; ; time.Sleep(200 * time.Millisecond) {
		v, err := l.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: s.name})
		if err == nil {
			state = v.State
		}
		switch {
		case state == pb.VolumeState_VOLUME_STATE_READY:
			// What the writer says may come a second late.
			s.newest = l.writer.Next() + rate
			return true, nil
		case status.Code(err) == codes.NotFound:
			return false, err
		case ctx.Err() != nil:
			return false, fmt.Errorf("it is %v: %w", state, ctx.Err())
		}
	}
}

// checkSnapshots compares the snapshots that were taken with what was acknowledged, on the client that does not
// write, and deletes them. All has healed.
func (l *life) checkSnapshots() {
	for _, s := range l.snapshots {
		if s.newest == 0 {
			ctx, cancel := context.WithTimeout(l.T.Context(), decideIn)
			taken, err := l.decided(ctx, s)
			cancel()
			if status.Code(err) == codes.NotFound {
				l.refused++
				continue
			}
			if !taken {
				l.T.Fatalf("%v after all has healed, snapshot %s is neither taken nor given up: %v\n%s", decideIn, s.name, err, l.State())
			}
		}
		l.VerifyDiscarded(l.other(), l.Attach(s.name, l.other()), span, s.before, s.newest, testbed.Discardable(span))
		l.Weft("detach", s.name)
		l.Weft("snapshot", "delete", s.name)
		l.taken++
	}
	l.snapshots = nil
}

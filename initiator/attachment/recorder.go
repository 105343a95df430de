// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Meter counts what people watch. Its methods may be called from any goroutine.
type Meter interface {
	LegLost()
	Resynced(n block.Size)
	// Stalled tells how long writes to a lost leg waited: until it was noticed,
	// until the manager had it recorded, and until they went on without it.
	Stalled(detect, record, release time.Duration)
}

// Recorder has the manager record what became of a volume's legs: when to ask
// again, what it answered, and how long the writes to a lost leg waited meanwhile.
// It belongs to its keeper's goroutine.
type Recorder struct {
	node    block.NodeName
	volume  block.VolumeID
	manager pb.AgentsClient
	meter   Meter
	log     *slog.Logger

	retry   time.Time // no request before
	refusal string
	losses  map[block.LegID]*loss
}

// loss is a leg's way out, for the breakdown of the stall.
type loss struct {
	column                    int
	since, detected, recorded time.Time
}

// NewRecorder is a Recorder of a node's volume.
func NewRecorder(node block.NodeName, volume block.VolumeID, manager pb.AgentsClient, meter Meter, log *slog.Logger) *Recorder {
	return &Recorder{node: node, volume: volume, manager: manager, meter: meter, log: log, losses: map[block.LegID]*loss{}}
}

// Change is what a leg's record is to say.
type Change struct {
	Leg      block.LegID
	Revision uint64
	Column   int
	Copied   block.Size // in sync: by its rebuild
	Why      string     // stale
	Since    time.Time  // stale: of its silence or error
}

// Request is one to the manager. Send sends it, from any goroutine; Done takes its
// outcome on the keeper's, and returns the error in the words that the manager has
// given for it.
type Request struct {
	Send func(context.Context) error
	Done func(error) error
}

// Due reports whether a request may be made now.
func (r *Recorder) Due() bool { return !time.Now().Before(r.retry) }

// Refusal is what the manager last answered; empty if it did as it was asked.
func (r *Recorder) Refusal() string { return r.refusal }

// Stale has lost legs recorded. Until its answer nothing may be acknowledged that
// they miss. Its answer goes into the records of the epoch.
func (r *Recorder) Stale(epoch block.Epoch, records Records, legs []Change) Request {
	now := time.Now()
	request := &pb.RecordStaleRequest{Node: string(r.node), VolumeId: r.volume.String(), Epoch: uint64(epoch), Reason: legs[0].Why}
	for _, l := range legs {
		request.LegIds = append(request.LegIds, l.Leg.String())
		if r.losses[l.Leg] == nil {
			r.losses[l.Leg] = &loss{column: l.Column, since: l.Since, detected: now}
			r.log.Warn("leg lost", "leg", l.Leg.String(), "column", l.Column, "why", l.Why, "detect", now.Sub(l.Since))
			r.meter.LegLost()
		}
	}
	return r.request(func(ctx context.Context) error {
		_, err := r.manager.RecordStale(ctx, request)
		return err
	}, func() {
		for _, l := range legs {
			records.NoteStale(l.Leg, l.Revision)
			if loss := r.losses[l.Leg]; loss != nil && loss.recorded.IsZero() {
				loss.recorded = time.Now()
				r.log.Info("leg recorded stale", "leg", l.Leg.String(), "record", loss.recorded.Sub(loss.detected))
			}
		}
	})
}

// InSync has legs recorded that have caught up. Until its answer they count as
// stale. Its answer goes into the records of the epoch.
func (r *Recorder) InSync(epoch block.Epoch, records Records, legs []Change) Request {
	request := &pb.RecordInSyncRequest{Node: string(r.node), VolumeId: r.volume.String(), Epoch: uint64(epoch)}
	for _, l := range legs {
		request.Legs = append(request.Legs, &pb.RebuiltLeg{LegId: l.Leg.String(), Revision: l.Revision, BytesCopied: uint64(l.Copied)})
	}
	return r.request(func(ctx context.Context) error {
		_, err := r.manager.RecordInSync(ctx, request)
		return err
	}, func() {
		for _, l := range legs {
			records.NoteInSync(l.Leg, l.Revision)
			r.meter.Resynced(l.Copied)
			r.log.Info("leg in sync", "leg", l.Leg.String(), "copied", l.Copied.String())
		}
	})
}

// request is one whose answer is remembered, and when to ask again if it was no.
func (r *Recorder) request(send func(context.Context) error, recorded func()) Request {
	return Request{Send: send, Done: func(err error) error {
		if err != nil {
			r.retry = time.Now().Add(RetryInterval)
			r.refusal = Refusal(err)
			return fmt.Errorf("volume manager: %s", r.refusal)
		}
		r.refusal = ""
		recorded()
		return nil
	}}
}

// Released notes that the writes which waited for a leg go on, if it was recorded
// stale.
func (r *Recorder) Released(leg block.LegID) {
	l := r.losses[leg]
	if l == nil || l.recorded.IsZero() {
		return
	}
	now := time.Now()
	detect, record, release := l.detected.Sub(l.since), l.recorded.Sub(l.detected), now.Sub(l.recorded)
	r.log.Info("leg released", "leg", leg.String(), "column", l.column, "release", release,
		"detect", detect, "record", record, "total", now.Sub(l.since))
	r.meter.Stalled(detect, record, release)
	delete(r.losses, leg)
}

// ReleasedColumn notes the same of all legs of a column.
func (r *Recorder) ReleasedColumn(column int) {
	for leg, l := range r.losses {
		if l.column == column {
			r.Released(leg)
		}
	}
}

// Forget ends an epoch: none of its losses is of interest any more.
func (r *Recorder) Forget() { clear(r.losses) }

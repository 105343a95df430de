// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Meter collects metrics. Its methods may be called from any goroutine.
type Meter interface {
	LegLost()
	Resynced(n block.Size)
	// Stalled reports how long writes to a lost leg waited: until the loss was noticed, until
	// the manager had recorded it, and until the writes continued without the leg.
	Stalled(detect, record, release time.Duration)
}

// Recorder asks the manager to record the loss and recovery of a volume's legs. It knows when
// to ask again, what the manager answered, and how long writes to a lost leg waited. It
// belongs to its keeper's goroutine.
type Recorder struct {
	node    block.NodeName
	volume  block.VolumeID
	manager pb.AgentsClient
	meter   Meter
	log     *slog.Logger

	retry   time.Time // when the next request may be made
	refusal string
	losses  map[block.LegID]*loss
}

// loss times the steps by which a leg leaves.
type loss struct {
	column                    int
	since, detected, recorded time.Time
}

// NewRecorder makes the Recorder of a node's volume.
func NewRecorder(node block.NodeName, v block.VolumeID, manager pb.AgentsClient, meter Meter, log *slog.Logger) *Recorder {
	return &Recorder{node: node, volume: v, manager: manager, meter: meter, log: log, losses: map[block.LegID]*loss{}}
}

// Request is one request to the manager. Send sends it, from any goroutine; Done takes the
// outcome on the keeper's goroutine, and returns the error in the manager's words.
type Request struct {
	Send func(context.Context) error
	Done func(error) error
}

// unless calls refused if the manager has certainly not done what it was asked. After any other error
// it may have, or may do it later.
func (r Request) unless(refused func()) Request {
	return Request{Send: r.Send, Done: func(err error) error {
		switch status.Code(err) {
		case codes.FailedPrecondition, codes.InvalidArgument, codes.NotFound:
			refused()
		}
		return r.Done(err)
	}}
}

// Due reports whether a request may be made now.
func (r *Recorder) Due() bool { return !time.Now().Before(r.retry) }

// Refusal is the manager's last refusal; empty if it did what it was asked.
func (r *Recorder) Refusal() string { return r.refusal }

// Stale asks the manager to record lost legs. Until it answers, no write that they miss may be
// acknowledged. The answer goes into the records of the epoch.
func (r *Recorder) Stale(epoch block.Epoch, records volume.Records, legs []volume.Change) Request {
	now := time.Now()
	request := &pb.RecordStaleRequest{Node: string(r.node), VolumeId: r.volume.String(), Epoch: uint64(epoch), Reason: legs[0].Why.Text}
	for _, l := range legs {
		request.LegIds = append(request.LegIds, l.Leg.String())
		request.Legs = append(request.Legs, &pb.StaleLeg{
			LegId: l.Leg.String(), Reason: pb.Value[pb.StaleReason](string(l.Why.Reason)), Text: l.Why.Text, Revision: l.Revision,
		})
		if r.losses[l.Leg] == nil && l.Why.Reason != volume.LeftOut {
			r.losses[l.Leg] = &loss{column: l.Column, since: l.Since, detected: now}
			r.log.Warn("leg lost", "leg", l.Leg.String(), "column", l.Column, "why", l.Why.Text, "detect", now.Sub(l.Since))
			r.meter.LegLost()
		}
	}
	for _, l := range legs {
		records.NoteAsked(l.Leg, l.Revision)
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
	}).unless(func() {
		for _, l := range legs {
			records.NoteRefused(l.Leg)
		}
	})
}

// InSync asks the manager to record legs that have caught up. Until it answers they count as
// stale. The answer goes into the records of the epoch.
func (r *Recorder) InSync(epoch block.Epoch, records volume.Records, legs []volume.Change) Request {
	request := &pb.RecordInSyncRequest{Node: string(r.node), VolumeId: r.volume.String(), Epoch: uint64(epoch)}
	for _, l := range legs {
		request.Legs = append(request.Legs, &pb.RebuiltLeg{LegId: l.Leg.String(), Revision: l.Revision, BytesCopied: uint64(l.Copied), What: l.What})
	}
	return r.request(func(ctx context.Context) error {
		_, err := r.manager.RecordInSync(ctx, request)
		return err
	}, func() {
		for _, l := range legs {
			records.NoteInSync(l.Leg, l.Revision)
			r.meter.Resynced(l.Copied)
			r.log.Info("leg in sync", "leg", l.Leg.String(), "copied", l.Copied.String(), "what", l.What)
		}
	})
}

// request returns a Request that remembers the answer and, after a refusal, when to ask again.
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

// Released notes that the writes which waited for a leg continue, if the leg was recorded
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

// ReleasedColumn does so for all legs of a column.
func (r *Recorder) ReleasedColumn(column int) {
	for leg, l := range r.losses {
		if l.column == column {
			r.Released(leg)
		}
	}
}

// Forget forgets the losses of an epoch that has ended.
func (r *Recorder) Forget() { clear(r.losses) }

// Refusal says why the manager refused a request: its reason, then its message.
func Refusal(err error) string {
	s := status.Convert(err)
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() != "" {
			return info.GetReason() + ": " + s.Message()
		}
	}
	return s.Message()
}

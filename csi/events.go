// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"weft.dev/weft/proto/pb"
)

// ClaimEvent is an event of a volume, shown on the PersistentVolumeClaim for which it was created.
type ClaimEvent struct {
	Namespace, Claim, UID string // of the claim
	// Name identifies the event, no matter which driver posts it and how often.
	Name    string
	Time    time.Time
	Warning bool
	Reason  string // in CamelCase
	Message string
}

// ClaimEvents posts events to Kubernetes. Posting an existing event is no error.
type ClaimEvents interface {
	PostClaimEvent(ctx context.Context, e ClaimEvent) error
}

// claimReasons are the kinds of manager events that are posted. The sidecars post events about
// their own calls, such as creating and expanding.
var claimReasons = map[string]string{
	"leg.stale":       "CopyLost",
	"leg.evicted":     "CopyLost",
	"leg.suspect":     "CopySuspect",
	"leg.believed":    "CopyBelieved",
	"leg.rebuilding":  "CopyRebuilding",
	"leg.in-sync":     "CopyRebuilt",
	"leg.promoted":    "CopyPromoted",
	"volume.detached": "Fenced", // the kinds that are warnings
}

// eventsSince is how far back a starting driver looks, for events while no driver ran. Kubernetes
// keeps events for an hour.
const eventsSince = 10 * time.Minute

// Pauses between attempts, the first and the longest.
const eventsPause, eventsPauseMost = time.Second, 30 * time.Second

// ServeClaimEvents posts the events of volumes until ctx ends. Several drivers may do so at once,
// since each event has its name. An event that cannot be posted is logged and skipped; if the
// manager does not answer, the driver waits.
func (d *Driver) ServeClaimEvents(ctx context.Context, to ClaimEvents) error {
	t := &teller{manager: d.cfg.Manager, to: to, warn: func(what string, err error) { d.cfg.Log.Warn(what, "err", err) }}
	pause := eventsPause
	for {
		progress, err := t.watch(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if progress {
			pause = eventsPause
		}
		t.warn("no events from the volume manager; asking again", err)
		select {
		case <-time.After(pause):
			pause = min(2*pause, eventsPauseMost)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// teller has posted all events up to a sequence number.
type teller struct {
	manager pb.ManagerClient
	to      ClaimEvents
	warn    func(what string, err error)
	begun   bool
	last    uint64
}

// watch follows the manager's events until the stream ends.
func (t *teller) watch(ctx context.Context) (progress bool, err error) {
	if !t.begun {
		recent, err := t.manager.ListEvents(ctx, &pb.ListEventsRequest{})
		if err != nil {
			return false, err
		}
		for _, e := range recent.Events {
			if time.Since(e.GetTime().AsTime()) > eventsSince {
				t.last = e.Seq
			}
		}
		t.begun = true
	}
	stream, err := t.manager.WatchEvents(ctx, &pb.WatchEventsRequest{AfterSeq: t.last})
	if err != nil {
		return false, err
	}
	for {
		e, err := stream.Recv()
		if first, gone := pb.EventsGone(err); gone {
			t.last = first - 1
		}
		if err != nil {
			return progress, err
		}
		t.tell(ctx, e)
		t.last, progress = e.Seq, true
	}
}

func (t *teller) tell(ctx context.Context, e *pb.Event) {
	name, isVolume := strings.CutPrefix(e.GetObject(), "volume ")
	if !isVolume || claimReasons[e.Kind] == "" {
		return
	}
	v, err := t.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name})
	if err != nil { // it may be gone by now
		return
	}
	claim, ok := claimEvent(e, v)
	if !ok {
		return
	}
	if err := t.to.PostClaimEvent(ctx, claim); err != nil {
		t.warn(fmt.Sprintf("cannot post an event to claim %s/%s: %s", claim.Namespace, claim.Claim, claim.Message), err)
	}
}

// claimUID finds the claim's UID in the name that the provisioner gives to a PersistentVolume.
var claimUID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// claimEvent is the event as the claim's user sees it. ok is false if there is nothing to post; it
// also requires a claim that the provisioner named in the volume's labels.
func claimEvent(e *pb.Event, v *pb.Volume) (claim ClaimEvent, ok bool) {
	warning := e.Severity >= pb.Severity_SEVERITY_WARNING
	if claimReasons[e.Kind] == "" || e.Kind == "volume.detached" && !warning {
		return claim, false
	}
	claim = ClaimEvent{
		Namespace: v.Labels[provisionerPrefix+"pvc/namespace"], Claim: v.Labels[provisionerPrefix+"pvc/name"],
		UID:  claimUID.FindString(v.Labels[provisionerPrefix+"pv/name"]),
		Time: e.GetTime().AsTime(), Warning: warning, Reason: claimReasons[e.Kind],
		Message: fmt.Sprintf("%s (weft explain volume %s)", e.Text, v.Name),
	}
	// As Kubernetes does: the object's name, and a unique suffix.
	claim.Name = fmt.Sprintf("%.200s.weft-%x", claim.Claim, e.Seq)
	return claim, claim.Namespace != "" && claim.Claim != ""
}

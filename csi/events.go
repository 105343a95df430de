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

// ClaimEvent is something that happened to a volume, for those who look at the
// PersistentVolumeClaim that it was made for.
type ClaimEvent struct {
	Namespace, Claim, UID string // of the claim
	// Name is the same for the same event, whoever tells of it and how often.
	Name    string
	Time    time.Time
	Warning bool
	Reason  string // in CamelCase
	Message string
}

// ClaimEvents takes events to Kubernetes. One that is there already is no error.
type ClaimEvents interface {
	PostClaimEvent(ctx context.Context, e ClaimEvent) error
}

// claimReasons are the kinds of the manager's events that are told of. The sidecars tell
// of the calls that they make, such as creating and expanding.
var claimReasons = map[string]string{
	"leg.stale":       "CopyLost",
	"leg.evicted":     "CopyLost",
	"leg.suspect":     "CopySuspect",
	"leg.believed":    "CopyBelieved",
	"leg.rebuilding":  "CopyRebuilding",
	"leg.in-sync":     "CopyRebuilt",
	"leg.promoted":    "CopyPromoted",
	"volume.detached": "Fenced", // those that are warnings
}

// eventsSince is how far back a driver that starts looks, for what happened while
// none ran. Kubernetes keeps events for an hour.
const eventsSince = 10 * time.Minute

// Pauses between attempts, the first and the longest.
const eventsPause, eventsPauseMost = time.Second, 30 * time.Second

// ServeClaimEvents tells of what happens to volumes until ctx ends. Several drivers
// may do so at once: each event has its name. What cannot be posted is logged and
// left out; a manager that does not answer is waited for.
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

// teller has told of all events up to a sequence number.
type teller struct {
	manager pb.ManagerClient
	to      ClaimEvents
	warn    func(what string, err error)
	begun   bool
	last    uint64
}

// watch follows the manager's events until that ends.
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
	if err != nil { // it may be gone since
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

// claimUID is in the name that the provisioner gives to a PersistentVolume.
var claimUID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// claimEvent is what a claim's user is told of an event; ok if anything is, which
// needs a claim that the provisioner named in the volume's labels.
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
	// As Kubernetes' own: the object's name, and something that makes it the only one.
	claim.Name = fmt.Sprintf("%.200s.weft-%x", claim.Claim, e.Seq)
	return claim, claim.Namespace != "" && claim.Claim != ""
}

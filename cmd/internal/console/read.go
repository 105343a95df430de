// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// Clients are what the console calls. They carry the credential of the person who uses it: what they
// may not do, the managers refuse.
type Clients struct {
	Manager    pb.ManagerClient // its lists are complete
	Identities pb.IdentitiesClient
}

// Bounds on how long an answer is shown to other tabs, too.
const (
	keepLeast = 200 * time.Millisecond
	keepMost  = 30 * time.Second
	// Each refusal is an event of the cluster: a page that is open does not cause one after the other.
	keepRefused = 10 * time.Minute
	keepTimes   = 10 // as long as the call took: the console never keeps a manager busy for more than a tenth of the time
)

// reader asks the managers, and keeps each answer for a moment: many tabs cost no more than one.
type reader struct {
	Clients
	now func() time.Time

	mu   sync.Mutex
	kept map[string]*answer
}

// answer is what a call returned, or will return.
type answer struct {
	done  chan struct{}
	until time.Time // it is shown; zero while the call is under way
	value any
	err   error
}

func newReader(c Clients, now func() time.Time) *reader {
	return &reader{Clients: c, now: now, kept: map[string]*answer{}}
}

// forget drops all answers: something was changed through the console.
func (r *reader) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept = map[string]*answer{}
}

// begin returns the answer for a key, and whether the caller has to get it.
func (r *reader) begin(key string) (a *answer, mine bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	for k, old := range r.kept {
		if !old.until.IsZero() && now.After(old.until) {
			delete(r.kept, k)
		}
	}
	if a := r.kept[key]; a != nil {
		return a, false
	}
	a = &answer{done: make(chan struct{})}
	r.kept[key] = a
	return a, true
}

// end records an answer.
func (r *reader) end(a *answer, began time.Time) {
	r.mu.Lock()
	now := r.now()
	a.until = now.Add(min(keepMost, max(keepLeast, keepTimes*now.Sub(began))))
	if status.Code(a.err) == codes.PermissionDenied {
		a.until = now.Add(keepRefused)
	}
	r.mu.Unlock()
	close(a.done)
}

// ask returns what call returns, or what it returned a moment ago. The key names the call and what
// it asks for. The answer is shared: nobody may change it.
func ask[T any](ctx context.Context, r *reader, key string, call func(context.Context) (T, error)) (value T, err error) {
	a, mine := r.begin(key)
	if mine {
		began := r.now()
		// Others wait for the answer, too: it does not end with this request.
		a.value, a.err = call(context.WithoutCancel(ctx))
		r.end(a, began)
	}
	select {
	case <-a.done:
	case <-ctx.Done():
		return value, ctx.Err()
	}
	if a.err != nil {
		return value, a.err
	}
	return a.value.(T), nil
}

func (r *reader) status(ctx context.Context) (*pb.Status, error) {
	return ask(ctx, r, "status", func(ctx context.Context) (*pb.Status, error) {
		return r.Manager.GetStatus(ctx, &pb.GetStatusRequest{})
	})
}

func (r *reader) volumes(ctx context.Context) ([]*pb.Volume, error) {
	list, err := ask(ctx, r, "volumes", func(ctx context.Context) (*pb.ListVolumesResponse, error) {
		return r.Manager.ListVolumes(ctx, &pb.ListVolumesRequest{})
	})
	return list.GetVolumes(), err
}

func (r *reader) snapshots(ctx context.Context, of string) ([]*pb.Volume, error) {
	list, err := ask(ctx, r, "snapshots "+of, func(ctx context.Context) (*pb.ListVolumesResponse, error) {
		return r.Manager.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true, Of: of})
	})
	return list.GetVolumes(), err
}

func (r *reader) volume(ctx context.Context, name string) (*pb.Volume, error) {
	return ask(ctx, r, "volume "+name, func(ctx context.Context) (*pb.Volume, error) {
		return r.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name})
	})
}

func (r *reader) explain(ctx context.Context, volume string) (*pb.Explanation, error) {
	return ask(ctx, r, "explain "+volume, func(ctx context.Context) (*pb.Explanation, error) {
		return r.Manager.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: volume})
	})
}

func (r *reader) nodes(ctx context.Context) ([]*pb.Node, error) {
	list, err := ask(ctx, r, "nodes", func(ctx context.Context) (*pb.ListNodesResponse, error) {
		return r.Manager.ListNodes(ctx, &pb.ListNodesRequest{})
	})
	return list.GetNodes(), err
}

func (r *reader) drives(ctx context.Context) ([]*pb.Drive, error) {
	list, err := ask(ctx, r, "drives", func(ctx context.Context) (*pb.ListDrivesResponse, error) {
		return r.Manager.ListDrives(ctx, &pb.ListDrivesRequest{})
	})
	return list.GetDrives(), err
}

func (r *reader) devices(ctx context.Context, node string) ([]*pb.Device, error) {
	list, err := ask(ctx, r, "devices "+node, func(ctx context.Context) (*pb.ListDevicesResponse, error) {
		return r.Manager.ListDevices(ctx, &pb.ListDevicesRequest{Node: node})
	})
	return list.GetDevices(), err
}

func (r *reader) pools(ctx context.Context) ([]*pb.Pool, error) {
	list, err := ask(ctx, r, "pools", func(ctx context.Context) (*pb.ListPoolsResponse, error) {
		return r.Manager.ListPools(ctx, &pb.ListPoolsRequest{})
	})
	return list.GetPools(), err
}

func (r *reader) attachments(ctx context.Context, node string) ([]*pb.Attachment, error) {
	list, err := ask(ctx, r, "attachments "+node, func(ctx context.Context) (*pb.ListAttachmentsResponse, error) {
		return r.Manager.ListAttachments(ctx, &pb.ListAttachmentsRequest{Node: node})
	})
	return list.GetAttachments(), err
}

// events returns the newest events of an object, newest first; of all, if it is empty.
func (r *reader) events(ctx context.Context, object string, limit uint32) ([]*pb.Event, error) {
	return ask(ctx, r, fmt.Sprintf("events %d %s", limit, object), func(ctx context.Context) ([]*pb.Event, error) {
		list, err := r.Manager.ListEvents(ctx, &pb.ListEventsRequest{Object: object, Limit: limit})
		if err != nil {
			return nil, err
		}
		newest := make([]*pb.Event, 0, len(list.GetEvents()))
		for i := len(list.GetEvents()) - 1; i >= 0; i-- {
			newest = append(newest, list.GetEvents()[i])
		}
		return newest, nil
	})
}

func (r *reader) managers(ctx context.Context) ([]*pb.ManagerMember, error) {
	list, err := ask(ctx, r, "managers", func(ctx context.Context) (*pb.ListManagersResponse, error) {
		return r.Manager.ListManagers(ctx, &pb.ListManagersRequest{})
	})
	return list.GetManagers(), err
}

// upgrade returns nil from a manager that is older than levels.
func (r *reader) upgrade(ctx context.Context) (*pb.Upgrade, error) {
	return ask(ctx, r, "upgrade", func(ctx context.Context) (*pb.Upgrade, error) {
		now, err := r.Manager.GetUpgrade(ctx, &pb.GetUpgradeRequest{})
		if status.Code(err) == codes.Unimplemented {
			return nil, nil
		}
		return now, err
	})
}

func (r *reader) audit(ctx context.Context) ([]*pb.AuditEntry, error) {
	return ask(ctx, r, "audit", func(ctx context.Context) ([]*pb.AuditEntry, error) {
		list, err := r.Identities.ListAudit(ctx, &pb.ListAuditRequest{Newest: true, Limit: 200})
		return list.GetEntries(), err
	})
}

func (r *reader) tokens(ctx context.Context) ([]*pb.Token, error) {
	list, err := ask(ctx, r, "tokens", func(ctx context.Context) (*pb.ListTokensResponse, error) {
		return r.Identities.ListTokens(ctx, &pb.ListTokensRequest{})
	})
	return list.GetTokens(), err
}

func (r *reader) authorities(ctx context.Context) ([]*pb.Authority, error) {
	list, err := ask(ctx, r, "authorities", func(ctx context.Context) (*pb.ListAuthoritiesResponse, error) {
		return r.Identities.ListAuthorities(ctx, &pb.ListAuthoritiesRequest{})
	})
	return list.GetAuthorities(), err
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/bundle"
	"weft.dev/weft/volmgr/cluster"
)

// Kept answers from a support bundle what a manager that leads would have answered when it made the
// bundle, by the same code. Nothing can be changed, and no time passes.
type Kept struct {
	*Manager
	says managerSays
	list *pb.ListManagersResponse // nil: the bundle has none
}

// keptMethods are the methods that a bundle can answer.
var keptMethods = []string{
	pb.Manager_GetStatus_FullMethodName, pb.Manager_ListManagers_FullMethodName, pb.Manager_GetUpgrade_FullMethodName,
	pb.Manager_ListNodes_FullMethodName, pb.Manager_ListDevices_FullMethodName, pb.Manager_ListDrives_FullMethodName, pb.Manager_ListPools_FullMethodName,
	pb.Manager_GetVolume_FullMethodName, pb.Manager_ListVolumes_FullMethodName, pb.Manager_GetCapacity_FullMethodName, pb.Manager_ExplainVolume_FullMethodName,
	pb.Manager_ListAttachments_FullMethodName, pb.Manager_ListEvents_FullMethodName, pb.Manager_WhatIf_FullMethodName,
}

// errKept refuses what a bundle cannot do.
func errKept(what string) error {
	return toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Reason: cluster.ReasonKept, Text: what + ": a support bundle cannot do that: it is read, and nothing in it changes",
		Hint: "leave out --bundle to ask the cluster itself"})
}

// Keep reads the state in a bundle. The bundle may come from anywhere.
func Keep(b *bundle.Bundle) (k *Kept, err error) {
	defer func() {
		if x := recover(); x != nil {
			k, err = nil, fmt.Errorf("%w: its records contradict one another: %v", bundle.ErrDamaged, x)
		}
	}()
	k = &Kept{}
	state, err := keptState(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", bundle.ErrDamaged, err)
	}
	if err := json.Unmarshal(b.State(bundle.Manager), &k.says); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", bundle.ErrDamaged, bundle.Manager, err)
	}
	if k.says.List != nil {
		k.list = &pb.ListManagersResponse{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(k.says.List, k.list); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", bundle.ErrDamaged, bundle.Manager, err)
		}
	}
	k.Manager = newManager(Config{Version: k.says.Version, Level: k.says.Newest, Now: func() time.Time { return b.Made }}.withDefaults(), nil, nil)
	k.Manager.state, k.Manager.fork, k.Manager.cluster, k.Manager.kept = state, state, state.ClusterID(), true
	return k, nil
}

// keptState loads the state of a bundle.
func keptState(b *bundle.Bundle) (*cluster.State, error) {
	var records []cluster.Record
	for line := range bytes.Lines(b.State(bundle.Records)) {
		var r toldRecord
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", bundle.Records, len(records)+1, err)
		}
		records = append(records, cluster.Record{Key: r.Key, Value: r.Value})
	}
	state, err := cluster.LoadObserved(records, b.State(bundle.Observed))
	if errors.Is(err, cluster.ErrLevel) {
		return nil, fmt.Errorf("%w (the bundle is of version %s)", err, b.Version)
	}
	return state, err
}

// Register adds what a bundle can answer to a server; see Guard.
func (k *Kept) Register(r grpc.ServiceRegistrar) {
	r.RegisterService(bounded(pb.Manager_ServiceDesc), k)
	r.RegisterService(bounded(pb.Identities_ServiceDesc), identities{m: k.Manager})
}

// Guard returns the options of a server for Register: it refuses what a bundle cannot answer, and
// survives a state that contradicts itself.
func (k *Kept) Guard() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (answer any, err error) {
			if !slices.Contains(keptMethods, info.FullMethod) {
				return nil, errKept(path.Base(info.FullMethod))
			}
			defer func() {
				if x := recover(); x != nil {
					answer, err = nil, status.Errorf(codes.DataLoss, "%v: its records contradict one another: %v", bundle.ErrDamaged, x)
				}
			}()
			return handle(ctx, request)
		}),
		grpc.StreamInterceptor(func(_ any, _ grpc.ServerStream, info *grpc.StreamServerInfo, _ grpc.StreamHandler) error {
			return errKept(path.Base(info.FullMethod))
		}),
	}
}

// askKept is ask for a manager whose state is kept. Only looks at the state are answered.
func (m *Manager) askKept(a ask) error {
	if a.look == nil {
		return errKept(fmt.Sprintf("%T", a.input))
	}
	a.look() // it only reads: what it would start, Guard refuses
	return nil
}

// GetStatus returns the cluster's status.
func (k *Kept) GetStatus(ctx context.Context, r *pb.GetStatusRequest) (*pb.Status, error) {
	s, err := k.Manager.GetStatus(ctx, r)
	if err == nil {
		s.Wrong = append(slices.Clone(k.says.Wrong), s.Wrong...)
	}
	return s, err
}

// ListManagers returns the managers as the one that led saw them.
func (k *Kept) ListManagers(ctx context.Context, r *pb.ListManagersRequest) (*pb.ListManagersResponse, error) {
	if k.list == nil {
		return k.Manager.ListManagers(ctx, r)
	}
	return k.list, nil
}

// GetUpgrade says which level each manager and each agent knew.
func (k *Kept) GetUpgrade(ctx context.Context, r *pb.GetUpgradeRequest) (*pb.Upgrade, error) {
	u, err := k.Manager.GetUpgrade(ctx, r)
	if err != nil || k.says.Levels == nil {
		return u, err
	}
	managers := &pb.Upgrade{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(k.says.Levels, managers); err != nil {
		return nil, status.Errorf(codes.DataLoss, "%v: %s: %v", bundle.ErrDamaged, bundle.Manager, err)
	}
	agents := slices.DeleteFunc(u.Parts, func(p *pb.UpgradePart) bool { return p.Kind == "manager" })
	u.Parts = append(managers.Parts, agents...)
	return u, nil
}

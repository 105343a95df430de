// SPDX-License-Identifier: Apache-2.0

// Package pages follows the page tokens of the volume manager's lists, so that callers get
// each list as a whole.
package pages

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/pb"
)

// size is the page size. Small pages keep each request short for the manager.
const size = 500

// Client returns a client of the volume manager whose List calls return every page, unless
// the request sets a page size or token itself.
func Client(conn grpc.ClientConnInterface) pb.ManagerClient {
	return client{pb.NewManagerClient(conn)}
}

type client struct{ pb.ManagerClient }

func (c client) ListNodes(ctx context.Context, r *pb.ListNodesRequest, o ...grpc.CallOption) (*pb.ListNodesResponse, error) {
	return all(ctx, r, c.ManagerClient.ListNodes, o)
}

func (c client) ListDevices(ctx context.Context, r *pb.ListDevicesRequest, o ...grpc.CallOption) (*pb.ListDevicesResponse, error) {
	return all(ctx, r, c.ManagerClient.ListDevices, o)
}

func (c client) ListDrives(ctx context.Context, r *pb.ListDrivesRequest, o ...grpc.CallOption) (*pb.ListDrivesResponse, error) {
	return all(ctx, r, c.ManagerClient.ListDrives, o)
}

func (c client) ListPools(ctx context.Context, r *pb.ListPoolsRequest, o ...grpc.CallOption) (*pb.ListPoolsResponse, error) {
	return all(ctx, r, c.ManagerClient.ListPools, o)
}

func (c client) ListVolumes(ctx context.Context, r *pb.ListVolumesRequest, o ...grpc.CallOption) (*pb.ListVolumesResponse, error) {
	return all(ctx, r, c.ManagerClient.ListVolumes, o)
}

func (c client) ListAttachments(ctx context.Context, r *pb.ListAttachmentsRequest, o ...grpc.CallOption) (*pb.ListAttachmentsResponse, error) {
	return all(ctx, r, c.ManagerClient.ListAttachments, o)
}

func (c client) ListEvents(ctx context.Context, r *pb.ListEventsRequest, o ...grpc.CallOption) (*pb.ListEventsResponse, error) {
	return all(ctx, r, c.ManagerClient.ListEvents, o)
}

func (c client) GetFigures(ctx context.Context, r *pb.GetFiguresRequest, o ...grpc.CallOption) (*pb.GetFiguresResponse, error) {
	return all(ctx, r, c.ManagerClient.GetFigures, o)
}

type request interface {
	proto.Message
	GetPageSize() uint32
	GetPageToken() string
}

type answer interface {
	proto.Message
	GetNextPageToken() string
}

// all requests pages until the last one and joins them.
func all[Q request, A answer](ctx context.Context, q Q, list func(context.Context, Q, ...grpc.CallOption) (A, error), o []grpc.CallOption) (A, error) {
	if q.GetPageSize() != 0 || q.GetPageToken() != "" {
		return list(ctx, q, o...)
	}
	q = proto.CloneOf(q)
	set(q, "page_size", protoreflect.ValueOfUint32(size))
	whole, err := list(ctx, q, o...)
	if err != nil {
		return whole, err
	}
	for next := whole.GetNextPageToken(); next != ""; {
		set(q, "page_token", protoreflect.ValueOfString(next))
		page, err := list(ctx, q, o...)
		if err != nil {
			return page, err
		}
		next = page.GetNextPageToken()
		proto.Merge(whole, page)
	}
	set(whole, "next_page_token", protoreflect.ValueOfString(""))
	return whole, nil
}

func set(m proto.Message, field protoreflect.Name, value protoreflect.Value) {
	r := m.ProtoReflect()
	r.Set(r.Descriptor().Fields().ByName(field), value)
}

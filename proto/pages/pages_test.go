// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

// paged answers each request for volumes with one of them, and notes the requests.
type paged struct {
	pb.ManagerClient
	all   []string
	asked []*pb.ListVolumesRequest
}

func (p *paged) ListVolumes(_ context.Context, r *pb.ListVolumesRequest, _ ...grpc.CallOption) (*pb.ListVolumesResponse, error) {
	p.asked = append(p.asked, proto.CloneOf(r))
	at := len(p.asked) - 1
	answer := &pb.ListVolumesResponse{Volumes: []*pb.Volume{{Name: p.all[at]}}}
	if at+1 < len(p.all) {
		answer.NextPageToken = fmt.Sprint("page ", at+1)
	}
	return answer, nil
}

// Each page is asked for with all fields of the request: else a list of snapshots would go on as one of
// volumes.
func TestEveryPageIsAskedForWithTheWholeRequest(t *testing.T) {
	p := &paged{all: []string{"db1@a", "db1@b", "db1@c"}}
	r := &pb.ListVolumesRequest{Snapshots: true, Of: "db1"}
	got, err := client{p}.ListVolumes(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, v := range got.GetVolumes() {
		names = append(names, v.GetName())
	}
	if !slices.Equal(names, p.all) || got.GetNextPageToken() != "" {
		t.Errorf("ListVolumes = %v, next page %q, want %v", names, got.GetNextPageToken(), p.all)
	}
	for i, asked := range p.asked {
		want := &pb.ListVolumesRequest{Snapshots: true, Of: "db1", PageSize: size}
		if i > 0 {
			want.PageToken = fmt.Sprint("page ", i)
		}
		if !proto.Equal(asked, want) {
			t.Errorf("page %d is asked for with %v, want %v", i, asked, want)
		}
	}
	if !proto.Equal(r, &pb.ListVolumesRequest{Snapshots: true, Of: "db1"}) {
		t.Errorf("the caller's request became %v", r)
	}
}

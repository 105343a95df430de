// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
)

func TestListsOfAnyLengthAreWhole(t *testing.T) {
	r := newRig(t)
	r.drives = 4
	ctx := t.Context()
	r.withAgents(ctx, "t1")
	const volumes, pools = 3000, 700
	r.createMany(ctx, volumes, 1)
	selector := map[string]string{}
	for i := range 30 {
		selector[fmt.Sprintf("key%d", i)] = strings.Repeat("v", 250)
	}
	for i := range pools {
		if _, err := r.CreatePool(ctx, &pb.CreatePoolRequest{Name: fmt.Sprintf("p%04d", i), Selector: selector}); err != nil {
			t.Fatal(err)
		}
	}
	all, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil || len(all.Volumes) != volumes || all.NextPageToken != "" {
		t.Fatalf("there are %d volumes, %v; want %d", len(all.GetVolumes()), err, volumes)
	}
	if !slices.IsSortedFunc(all.Volumes, func(a, b *pb.Volume) int { return strings.Compare(a.Name, b.Name) }) {
		t.Error("volumes are not listed by name")
	}
	ps, err := r.ListPools(ctx, &pb.ListPoolsRequest{})
	if err != nil || len(ps.Pools) != pools+1 || proto.Size(ps) < 5<<20 {
		t.Errorf("there are %d pools in %d bytes, %v; want %d", len(ps.GetPools()), proto.Size(ps), err, pools+1)
	}
	if drives, err := r.ListDrives(ctx, &pb.ListDrivesRequest{PageSize: 3}); err != nil || len(drives.Drives) != 3 || drives.NextPageToken == "" {
		t.Errorf("a page of 3 drives = %v, %v", drives, err)
	}

	// Volumes that are created or deleted between two pages do not affect the others.
	page, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{PageSize: 10})
	if err != nil || len(page.Volumes) != 10 {
		t.Fatal(page, err)
	}
	if _, err := r.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: page.Volumes[9].Name}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is gone", func() bool {
		_, err := r.GetVolume(ctx, &pb.GetVolumeRequest{Volume: page.Volumes[9].Name})
		return status.Code(err) == codes.NotFound
	})
	next, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{PageSize: 10, PageToken: page.NextPageToken})
	if err != nil || next.Volumes[0].Name != "v00010" {
		t.Errorf("after the first ten comes %v, %v; want v00010", next.GetVolumes(), err)
	}
	for what, call := range map[string]func() error{
		"no token": func() error { _, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{PageToken: "no token"}); return err },
		"one of another list": func() error {
			_, err := r.ListPools(ctx, &pb.ListPoolsRequest{PageToken: page.NextPageToken})
			return err
		},
		"one that is cut short": func() error {
			_, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{PageToken: page.NextPageToken[:5]})
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.InvalidArgument || !carries(err, "page_token") {
			t.Errorf("%s = %v, want INVALID_ARGUMENT that names page_token", what, err)
		}
	}
}

// All pages of the newest events hold those that were newest at the first page.
func TestPagesOfEventsGoOnToWhereTheyEnded(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	add := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := r.CreatePool(ctx, &pb.CreatePoolRequest{Name: fmt.Sprintf("p%d", i)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	add(0, 20)
	page, err := r.ListEvents(ctx, &pb.ListEventsRequest{Limit: 10, PageSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	events := page.Events
	for page.NextPageToken != "" {
		add(20+len(events), 24+len(events))
		if page, err = r.ListEvents(ctx, &pb.ListEventsRequest{Limit: 10, PageSize: 4, PageToken: page.NextPageToken}); err != nil {
			t.Fatal(err)
		}
		events = append(events, page.Events...)
	}
	var objects []string
	for _, e := range events {
		objects = append(objects, e.Object)
	}
	if len(events) != 10 || objects[0] != "pool p10" || objects[9] != "pool p19" {
		t.Errorf("the newest 10 events of 20, by fours = %v, want those of p10 to p19", objects)
	}
}

func TestAReadSaysHowFreshItHasToBe(t *testing.T) {
	r := newRig(t)
	for how, want := range map[string]codes.Code{pb.ReadLinearizable: codes.OK, pb.ReadStale: codes.OK, "yesterday": codes.InvalidArgument} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), pb.ReadKey, how)
		if _, err := r.GetStatus(ctx, &pb.GetStatusRequest{}); status.Code(err) != want {
			t.Errorf("GetStatus, %s: %v, want %v", how, err, want)
		}
		if _, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{}); status.Code(err) != want {
			t.Errorf("ListVolumes, %s: %v, want %v", how, err, want)
		}
	}
}

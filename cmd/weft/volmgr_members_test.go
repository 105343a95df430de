// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

// quorumOf is a cluster's managers. The outcome of the first changes, lost of them, is not told.
type quorumOf struct {
	pb.ManagerClient
	cluster block.ClusterID
	members []*pb.ManagerMember
	lost    int
	asked   []string // managers to remove
}

var errNotKnown = status.Error(codes.Unavailable, "it is not known whether this was recorded")

func (q *quorumOf) GetStatus(context.Context, *pb.GetStatusRequest, ...grpc.CallOption) (*pb.Status, error) {
	return &pb.Status{ClusterId: q.cluster.String()}, nil
}

func (q *quorumOf) ListManagers(context.Context, *pb.ListManagersRequest, ...grpc.CallOption) (*pb.ListManagersResponse, error) {
	return &pb.ListManagersResponse{Managers: slices.Clone(q.members)}, nil
}

// answer is the error that the caller of a change gets.
func (q *quorumOf) answer() error {
	if q.lost--; q.lost >= 0 {
		return errNotKnown
	}
	return nil
}

func (q *quorumOf) AddManager(_ context.Context, r *pb.AddManagerRequest, _ ...grpc.CallOption) (*pb.AddManagerResponse, error) {
	if len(managersNamed(q.members, r.GetId())) == 0 {
		q.members = append(q.members, &pb.ManagerMember{Id: r.GetId(), Address: r.GetAddress()})
	}
	return &pb.AddManagerResponse{}, q.answer()
}

func (q *quorumOf) RemoveManager(_ context.Context, r *pb.RemoveManagerRequest, _ ...grpc.CallOption) (*pb.RemoveManagerResponse, error) {
	q.asked = append(q.asked, r.GetManager())
	for i, m := range q.members {
		if m.GetId() == r.GetManager() || m.GetAddress() == r.GetManager() {
			q.members = slices.Delete(q.members, i, i+1)
			return &pb.RemoveManagerResponse{Removed: m}, q.answer()
		}
	}
	return nil, status.Error(codes.NotFound, "there is none")
}

// repeating asks again while the outcome is not known, as package daemon does.
type repeating struct{ *quorumOf }

func (q repeating) RemoveManager(ctx context.Context, r *pb.RemoveManagerRequest, o ...grpc.CallOption) (*pb.RemoveManagerResponse, error) {
	for {
		if answer, err := q.quorumOf.RemoveManager(ctx, r, o...); err != errNotKnown {
			return answer, err
		}
	}
}

// A removal whose outcome was not known can be repeated, by the command itself or by who has given
// it. It never removes a manager that has come to the same address meanwhile.
func TestAManagersRemovalIsRepeated(t *testing.T) {
	three := func() []*pb.ManagerMember {
		return []*pb.ManagerMember{{Id: "aa01", Address: "m1:1"}, {Id: "aa02", Address: "m2:1"}, {Id: "bb03", Address: "m3:1"}}
	}
	for _, c := range []struct {
		name, says, asks string
		lost             int
	}{
		{"m3:1", "manager bb03 at m3:1 is removed", "bb03", 0},
		{"bb", "manager bb03 at m3:1 is removed", "bb03", 0},
		{"m3:1", "manager bb03 at m3:1 is removed", "bb03 bb03", 1},
		{"m9:1", "manager m9:1 is no member: nothing to remove", "m9:1", 0},
	} {
		q := &quorumOf{members: three(), lost: c.lost}
		var stderr bytes.Buffer
		out := &cli.Output{Stdout: &bytes.Buffer{}, Stderr: &stderr, Now: time.Now}
		err := runVolmgrRemove(t.Context(), repeating{q}, c.name, out)
		if err != nil || !strings.Contains(stderr.String(), c.says) || strings.Join(q.asked, " ") != c.asks {
			t.Errorf("remove %s with %d answers lost = %v, says %q, asks for %v; want %q, %s", c.name, c.lost, err, &stderr, q.asked, c.says, c.asks)
		}
	}
	q := &quorumOf{members: three(), lost: 1}
	var stderr bytes.Buffer
	out := &cli.Output{Stdout: &bytes.Buffer{}, Stderr: &stderr, Now: time.Now}
	if err := runVolmgrRemove(t.Context(), q, "m3:1", out); err == nil {
		t.Error("remove succeeds although its outcome is not known")
	}
	if err := runVolmgrRemove(t.Context(), q, "m3:1", out); err != nil || !strings.Contains(stderr.String(), "manager m3:1 is no member: nothing to remove") {
		t.Errorf("remove again = %v, says %q", err, &stderr)
	}
}

// A join can be repeated when its outcome was not known.
func TestAManagersJoinIsRepeated(t *testing.T) {
	first := filepath.Join(t.TempDir(), "first")
	id, err := volmgr.Init(volmgr.Config{Dir: first})
	if err != nil {
		t.Fatal(err)
	}
	q := &quorumOf{cluster: id, lost: 1}
	o := volmgrOptions{dataDir: filepath.Join(t.TempDir(), "second"), listen: "127.0.0.1:4480"}
	join := func(o volmgrOptions) (stdout, stderr string, err error) {
		var a, b bytes.Buffer
		err = runVolmgrJoin(t.Context(), q, o, &cli.Output{Stdout: &a, Stderr: &b, Now: time.Now})
		return a.String(), b.String(), err
	}
	if _, _, err := join(o); err == nil {
		t.Error("join succeeds although its outcome is not known")
	}
	_, says, err := join(o)
	if err != nil || !strings.Contains(says, "is added") || len(q.members) != 1 {
		t.Fatalf("join again = %v, says %q; the members are %v", err, says, q.members)
	}
	o.dataDir = first
	if _, _, err := join(o); err == nil || !strings.Contains(err.Error(), "another manager") {
		t.Errorf("join with the directory of a cluster = %v", err)
	}
}

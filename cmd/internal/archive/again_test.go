// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// renaming is a manager at which db1@mon is deleted and taken again once an export has begun: from then
// on, the name stands for another snapshot, from which db1@tue does not differ.
type renaming struct {
	pb.ManagerClient
	again bool
}

func (m *renaming) GetVolume(_ context.Context, r *pb.GetVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	id, taken := "id-of-tue", time.Unix(2000, 0)
	if r.Volume == "db1@mon" {
		id, taken = "id-of-first-mon", time.Unix(1000, 0)
	}
	return &pb.Volume{Id: id, Name: r.Volume, SizeBytes: 1 << 20, State: pb.VolumeState_VOLUME_STATE_READY,
		Snapshot: &pb.SnapshotOf{VolumeName: "db1", Taken: timestamppb.New(taken)}}, nil
}

func (m *renaming) GetSnapshotRanges(_ context.Context, r *pb.GetSnapshotRangesRequest, _ ...grpc.CallOption) (*pb.GetSnapshotRangesResponse, error) {
	answer := &pb.GetSnapshotRangesResponse{SizeBytes: 1 << 20, NextOffset: 1 << 20}
	if r.Since == "id-of-first-mon" || r.Since == "db1@mon" && !m.again {
		answer.Ranges = []*pb.ByteRange{{Offset: 4096, Bytes: 4096}}
	}
	return answer, nil
}

func TestAnExportSinceASnapshotThatIsTakenAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tue")
	content := make([]byte, 1<<20)
	content[5000] = 1 // since the first mon
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	m := &renaming{}
	tools := Tools{Attach: func(context.Context, pb.ManagerClient, string, *cli.Output) (string, func(context.Context) error, error) {
		m.again = true
		return path, func(context.Context) error { return nil }, nil
	}}
	var out bytes.Buffer
	quiet := &cli.Output{Format: cli.FormatTable, Stdout: io.Discard, Stderr: io.Discard, Now: time.Now}
	if err := tools.export(t.Context(), m, "db1@tue", "db1@mon", &out, quiet); err != nil {
		t.Fatal(err)
	}
	all, err := readAll(out.Bytes())
	if err != nil || len(all) != 1 {
		t.Errorf("a stream that says it is since id-of-first-mon has %d ranges (%v), want 1", len(all), err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// shelf is a manager with the volume db1 and its snapshot db1@mon. It notes what it is asked to change.
type shelf struct {
	pb.ManagerClient
	created  *pb.CreateVolumeRequest
	attached *pb.AttachRequest
	deleted  string
}

func (s *shelf) GetVolume(_ context.Context, r *pb.GetVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	switch name := r.GetVolume(); name {
	case "db1":
		return &pb.Volume{Name: name}, nil
	case "db1@mon", "id of db1@mon":
		return &pb.Volume{Name: "db1@mon", SizeBytes: 10 << 30, Snapshot: &pb.SnapshotOf{VolumeName: "db1"}}, nil
	default:
		return nil, status.Errorf(codes.NotFound, "volume %s: not found", name)
	}
}

func (s *shelf) CreateVolume(_ context.Context, r *pb.CreateVolumeRequest, _ ...grpc.CallOption) (*pb.Volume, error) {
	s.created = r
	return &pb.Volume{Name: r.GetName(), SizeBytes: max(r.GetSizeBytes(), 10<<30), CloneOf: "db1@mon"}, nil
}

func (s *shelf) DeleteVolume(_ context.Context, r *pb.DeleteVolumeRequest, _ ...grpc.CallOption) (*pb.DeleteVolumeResponse, error) {
	s.deleted = r.GetVolume()
	return &pb.DeleteVolumeResponse{}, nil
}

func (s *shelf) Attach(_ context.Context, r *pb.AttachRequest, _ ...grpc.CallOption) (*pb.Attachment, error) {
	s.attached = r
	return &pb.Attachment{VolumeName: r.GetVolume(), Node: r.GetNode()}, nil
}

// A clone is asked for without the defaults of new volumes, and with nothing that it has of its snapshot.
func TestACloneIsAskedForByItsSnapshot(t *testing.T) {
	for line, want := range map[string]*pb.CreateVolumeRequest{
		"--from db1@mon":                       {Name: "c1", From: "db1@mon", Thin: true, Authentication: "prefer"},
		"--from db1@mon --size 20GiB --thin":   {Name: "c1", From: "db1@mon", Thin: true, Authentication: "prefer", SizeBytes: 20 << 30},
		"--from db1@mon --label a=b":           {Name: "c1", From: "db1@mon", Thin: true, Authentication: "prefer", Labels: map[string]string{"a": "b"}},
		"--from db1@mon --authentication=off":  {Name: "c1", From: "db1@mon", Thin: true, Authentication: "off"},
		"--size 1GiB --thin --pool fast":       {Name: "c1", SizeBytes: 1 << 30, Copies: 2, Pool: "fast", Spread: "node", Thin: true, Authentication: "prefer"},
		"--from db1@mon --wait=false --size=1": {Name: "c1", From: "db1@mon", Thin: true, Authentication: "prefer", SizeBytes: 1},
	} {
		api := &shelf{}
		if _, err := api.run(t, line); err != nil {
			t.Errorf("create c1 %s: %v", line, err)
		}
		if diff := cmp.Diff(want, api.created, protocmp.Transform()); diff != "" {
			t.Errorf("create c1 %s: request (-want +got):\n%s", line, diff)
		}
	}
	if said, _ := (&shelf{}).run(t, "--from db1@mon"); said != "weft: volume c1 is created: 10GiB, a clone of db1@mon\n" {
		t.Errorf("create says %q", said)
	}
}

// run creates the volume c1 with flags as they are typed.
func (s *shelf) run(t *testing.T, line string) (said string, err error) {
	t.Helper()
	o := volumeCreateOptions{name: "c1"}
	flags, cmd := o.flags(), &cobra.Command{}
	cmd.Flags().AddFlagSet(flags)
	if err := cmd.ParseFlags(strings.Fields(line)); err != nil {
		t.Fatal(err)
	}
	o.note(flags)
	var stderr bytes.Buffer
	out := &cli.Output{Stdout: io.Discard, Stderr: &stderr, Now: time.Now}
	err = runVolumeCreate(t.Context(), s, o, out)
	return stderr.String(), err
}

func TestACloneHasTheLayoutOfItsSnapshot(t *testing.T) {
	for line, want := range map[string]string{
		"--from db1@mon --copies 2":        "--copies: cannot be combined with --from",
		"--from db1@mon --stripes 4":       "--stripes: cannot be combined with --from",
		"--from db1@mon --chunk-size 1MiB": "--chunk-size: cannot be combined with --from",
		"--from db1@mon --pool default":    "--pool: cannot be combined with --from",
		"--from db1@mon --spread rack":     "--spread: cannot be combined with --from",
		"--from db1@mon --integrity":       "--integrity: cannot be combined with --from",
		"--from db1@mon --thin=false":      "--thin=false: cannot be combined with --from",
		"--from db1@mon --size 0":          "--size 0: must not be 0",
		"--from db1":                       "--from db1: is a volume, not a snapshot",
		"--from db1@tue":                   "volume db1@tue: not found",
		"--thin":                           "--size: missing or 0",
	} {
		api := &shelf{}
		if _, err := api.run(t, line); err == nil || !strings.Contains(err.Error(), want) || api.created != nil {
			t.Errorf("create c1 %s = %v (asked for %v), want %s", line, err, api.created, want)
		}
	}
}

func TestSnapshotsAreAttachedToBeRead(t *testing.T) {
	for words, want := range map[string]pb.AttachMode{
		"db1":                      pb.AttachMode_ATTACH_MODE_UNSPECIFIED,
		"db1 shared-block":         pb.AttachMode_ATTACH_MODE_SHARED_BLOCK,
		"db1@mon":                  pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY,
		"db1@mon exclusive":        pb.AttachMode_ATTACH_MODE_EXCLUSIVE, // the manager refuses it
		"db1@mon shared-block":     pb.AttachMode_ATTACH_MODE_SHARED_BLOCK,
		"db1@mon shared-read-only": pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY,
	} {
		api := &shelf{}
		volume, mode, _ := strings.Cut(words, " ")
		out := &cli.Output{Stdout: io.Discard, Stderr: io.Discard, Now: time.Now}
		if err := runAttach(t.Context(), api, attachOptions{volume: volume, node: "g1", mode: mode}, out); err != nil || api.attached.GetMode() != want {
			t.Errorf("attach %s: %v, asked for %v, want %v", words, err, api.attached, want)
		}
	}
}

func TestVolumeDeleteDeletesNoSnapshot(t *testing.T) {
	for _, name := range []string{"db1@mon", "db1@tue", "id of db1@mon"} {
		api := &shelf{}
		r := cli.NewReport(runVolumeDelete(t.Context(), api, name, &cli.Output{Stdout: io.Discard, Stderr: io.Discard}))
		if r.Code != cli.ExitUsage || len(r.Hints) != 1 || !strings.Contains(r.Hints[0], "weft snapshot delete "+name) || api.deleted != "" {
			t.Errorf("volume delete %s = %+v, and deletes %q", name, r, api.deleted)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// The next process refuses to take over what it could not serve, while the previous one still does.
func TestTheNextProcessRefusesADriveOfALaterVersion(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "drive")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, int64(drive.MinSize))); err != nil {
		t.Fatal(err)
	}
	id := block.DriveID{UUID: block.UUIDFromRandom([16]byte{1})}
	if err := drive.FormatPath(path, block.ClusterID{UUID: block.UUIDFromRandom([16]byte{2})}, id, ""); err != nil {
		t.Fatal(err)
	}
	previous := &Agent{wanted: &pb.TargetWanted{Generation: 1}, report: &pb.TargetReport{Devices: []*pb.Device{
		{Path: "/drive", DriveId: id.String()},
		{Path: "/missing", DriveId: block.DriveID{UUID: block.UUIDFromRandom([16]byte{3})}.String()}, // the previous process has it no more, either
		{Path: "/blank"},
	}}}
	draft, err := previous.Draft()
	if err != nil {
		t.Fatal(err)
	}
	next := &Agent{config: Config{Root: root}, log: slog.New(slog.DiscardHandler)}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Prepare(t.Context(), draft); err != nil {
		t.Fatalf("it can serve all that can be served: %v", err)
	}
	now, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(now, before) {
		t.Errorf("the drive is not as it was (%v)", err)
	}
	header := now[:512] // target/drive/codec.go: the version at 16, a checksum at 20
	binary.LittleEndian.PutUint32(header[16:], 1000)
	clear(header[20:24])
	binary.LittleEndian.PutUint32(header[20:], crc32.Checksum(header, crc32.MakeTable(crc32.Castagnoli)))
	if err := os.WriteFile(path, now, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := next.Prepare(t.Context(), draft); !errors.Is(err, drive.ErrNewer) {
		t.Errorf("it prepares to serve a drive of a later version: %v", err)
	}
	if err := next.Prepare(t.Context(), nil); err != nil {
		t.Errorf("a previous process of an earlier version sends no draft: %v", err)
	}
}

func TestHostsWaitForAProcessThatServesThem(t *testing.T) {
	in := func(process bool) []byte {
		w := want().drive(1).volume(1, 1, 1).volume(2, 1, 1)
		w.Exports[1].Process = process
		draft, err := proto.Marshal(&pb.TargetHandover{Wanted: w.TargetWanted})
		if err != nil {
			t.Fatal(err)
		}
		return draft
	}
	for _, c := range []struct {
		beside, process, want bool
	}{{false, false, true}, {true, false, false}, {true, true, true}} {
		a := &Agent{}
		if c.beside {
			a.kernel.process = func() (exporter, error) { return nil, nil } //nolint:nilnil // it is not called
		}
		if got := a.Serves(in(c.process)); got != c.want {
			t.Errorf("beside the kernel %v, with an export of its own %v: hosts wait %v", c.beside, c.process, got)
		}
	}
}

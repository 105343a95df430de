// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// A copy of a snapshot takes what its tree has, and waits for more before that is short. Whether the tree gets
// more is not for the copy to say.
func TestACopyLeavesTheReserveToHosts(t *testing.T) {
	p := newPlanted(t)
	free := int64(p.seen().Free / mapped.ChunkSize)
	var some []int64
	for c := range free - 20 {
		some = append(some, c)
	}
	p.write(t, leg, 'a', some...) // the host's tree has 20 chunks free
	must(t, p.disk.Update(func(l *drive.Label) error {
		return l.PutLeg(&pb.LegLabel{LegId: monday.String(), TreeId: monday.String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1, Volume: &pb.VolumeLabel{VolumeId: monday.String()}})
	}))
	at := int64(0)
	var seen TreeSeen
	waited := func() bool { return p.disk.Trees()[monday.String()].CopyWaits }
	err := p.disk.Copy(monday, 1, block.GiB, block.LegID{}, func(to block.Device, room func() block.Size) error {
		for ; at < int64(block.GiB) && room() >= FlattenSpare; at += 1 << 20 {
			if waited() {
				t.Fatalf("after %d MiB the copy is said to wait", at>>20)
			}
			if err := block.WriteAt(to, bytes.Repeat([]byte{'b'}, 1<<20), at); err != nil {
				return err
			}
		}
		if !waited() {
			t.Error("nobody sees that the copy waits")
		}
		seen = p.disk.Trees()[monday.String()]
		return nil
	})
	must(t, err)
	if waited() {
		t.Error("a copy that has ended still waits")
	}
	if at < 100<<20 || seen.Free < FlattenSpare-block.MiB || seen.Free > FlattenSpare || drive.CountExtents(p.disk.Label().Reserve) == 0 {
		t.Errorf("copied %d MiB; its tree has %v free, the drive's reserve %d extents", at>>20, seen.Free, drive.CountExtents(p.disk.Label().Reserve))
	}
}

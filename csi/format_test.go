// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/pb"
)

// contents are all kinds of device content, as Inspect reports them.
var contents = map[string]mount.Contents{
	"nothing":             {Zero: true},
	"new own ext4":        {Super: &mount.Superblock{FSType: "ext4", UUID: volumeID}, Names: []string{"ext4"}},
	"used own ext4":       {Super: &mount.Superblock{FSType: "ext4", UUID: volumeID, Mounted: true}, Names: []string{"ext4"}},
	"new other ext4":      {Super: &mount.Superblock{FSType: "ext4", UUID: otherID}, Names: []string{"ext4"}},
	"used other ext4":     {Super: &mount.Superblock{FSType: "ext4", UUID: otherID, Mounted: true}, Names: []string{"ext4"}},
	"own xfs":             {Super: &mount.Superblock{FSType: "xfs", UUID: volumeID, Mounted: true}, Names: []string{"xfs"}},
	"other xfs":           {Super: &mount.Superblock{FSType: "xfs", UUID: otherID, Mounted: true}, Names: []string{"xfs"}},
	"xfs cut off":         {Names: []string{"xfs"}},
	"stray bytes":         {},
	"a signature in zero": {Zero: true, Names: []string{"zfs_member"}},
	"a volume group":      {Names: []string{"LVM2_member"}},
	"ext4 and partitions": {Super: &mount.Superblock{FSType: "ext4", UUID: volumeID, Mounted: true}, Names: []string{"ext4", "gpt"}},
	"contradictions":      {Names: []string{"several contradicting signatures"}},
}

// TestWhatIsDoneWithADevice is the table of format.go, written out: for each record, the action for
// each content if ext4 is asked for. Anything not listed is refused.
func TestWhatIsDoneWithADevice(t *testing.T) {
	table := map[string]map[string]string{
		"": {
			"nothing":      "format",
			"new own ext4": "mount", "used own ext4": "mount", "new other ext4": "mount", "used other ext4": "mount",
		},
		"formatting ext4": {
			"nothing": "format", "new own ext4": "format", "xfs cut off": "format", "stray bytes": "format",
			"used own ext4": "mount", "new other ext4": "mount", "used other ext4": "mount",
		},
		"ext4": {
			"new own ext4": "mount", "used own ext4": "mount", "new other ext4": "mount", "used other ext4": "mount",
		},
		"raw": {
			"new own ext4": "mount", "used own ext4": "mount", "new other ext4": "mount", "used other ext4": "mount",
		},
		"formatting xfs": {},
		"xfs":            {},
		"btrfs":          {},
	}
	for recorded, row := range table {
		for name, e := range contents {
			p, err := decide(&pb.Volume{Id: volumeID, Name: "db1", Formatted: recorded}, "ext4", e)
			got := "mount"
			switch {
			case err != nil:
				got = "refuse"
				if status.Code(err) != codes.FailedPrecondition {
					t.Errorf("recorded %q, %s: %v, want FailedPrecondition", recorded, name, err)
				}
			case p.format:
				got = "format"
			}
			want := row[name]
			if want == "" {
				want = "refuse"
			}
			if got != want || err == nil && p.fsType != "ext4" {
				t.Errorf("recorded %q, and the device holds %s: %s (%+v, %v), want %s", recorded, name, got, p, err, want)
			}
		}
	}
}

func TestWhatIsThereIsTakenWhereNothingIsAskedFor(t *testing.T) {
	for _, c := range []struct {
		recorded, content, want string
		format                  bool
	}{
		{"", "nothing", "ext4", true},
		{"", "other xfs", "xfs", false},
		{"formatting xfs", "nothing", "xfs", true},
		{"formatting xfs", "xfs cut off", "xfs", true},
		{"xfs", "own xfs", "xfs", false},
		{"raw", "other xfs", "xfs", false},
	} {
		p, err := decide(&pb.Volume{Id: volumeID, Formatted: c.recorded}, "", contents[c.content])
		if err != nil || p.fsType != c.want || p.format != c.format {
			t.Errorf("recorded %q, %s: %+v, %v, want %s, format %v", c.recorded, c.content, p, err, c.want, c.format)
		}
	}
}

func TestOnlyANewVolumeCountsAsNeverWritten(t *testing.T) {
	for _, c := range []struct {
		epoch    uint64
		recorded string
		want     bool
	}{{1, "", true}, {2, "", false}, {1, "formatting ext4", false}} {
		p, err := decide(&pb.Volume{Id: volumeID, Epoch: c.epoch, Formatted: c.recorded}, "ext4", contents["nothing"])
		if err != nil || p.fresh != c.want {
			t.Errorf("epoch %d, recorded %q: fresh is %v, %v, want %v", c.epoch, c.recorded, p.fresh, err, c.want)
		}
	}
}

func TestTheCodesOfE2fsck(t *testing.T) {
	for code := range 256 {
		want := codes.Internal
		switch {
		case code <= 3:
			want = codes.OK
		case code&4 != 0:
			want = codes.FailedPrecondition
		case code&(8|32) != 0:
			want = codes.Unavailable
		}
		if got := status.Code(checked(mount.Result{Code: code})); got != want {
			t.Errorf("code %d is %v, want %v", code, got, want)
		}
	}
}

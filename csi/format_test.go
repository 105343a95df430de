// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// contents are all kinds of what a device may hold, as look sees it.
var contents = map[string]evidence{
	"nothing":             {zero: true},
	"new own ext4":        {super: &superblock{fsType: "ext4", uuid: volumeID}, names: []string{"ext4"}},
	"used own ext4":       {super: &superblock{fsType: "ext4", uuid: volumeID, mounted: true}, names: []string{"ext4"}},
	"new other ext4":      {super: &superblock{fsType: "ext4", uuid: otherID}, names: []string{"ext4"}},
	"used other ext4":     {super: &superblock{fsType: "ext4", uuid: otherID, mounted: true}, names: []string{"ext4"}},
	"own xfs":             {super: &superblock{fsType: "xfs", uuid: volumeID, mounted: true}, names: []string{"xfs"}},
	"other xfs":           {super: &superblock{fsType: "xfs", uuid: otherID, mounted: true}, names: []string{"xfs"}},
	"xfs cut off":         {names: []string{"xfs"}},
	"stray bytes":         {},
	"a signature in zero": {zero: true, names: []string{"zfs_member"}},
	"a volume group":      {names: []string{"LVM2_member"}},
	"ext4 and partitions": {super: &superblock{fsType: "ext4", uuid: volumeID, mounted: true}, names: []string{"ext4", "gpt"}},
	"contradictions":      {names: []string{"several contradicting signatures"}},
}

// TestWhatIsDoneWithADevice is the table of format.go, written out: for each record,
// what is done with each content if ext4 is asked for. What is not here is refused.
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
		if got := status.Code(checked(result{code: code})); got != want {
			t.Errorf("code %d is %v, want %v", code, got, want)
		}
	}
}

func TestTheCodesOfBlkid(t *testing.T) {
	for _, c := range []struct {
		result result
		want   string
	}{
		{result{0, "DEVNAME=/proc/self/fd/3\nUUID=x\nTYPE=ext4\nUSAGE=filesystem\n"}, "[ext4] <nil>"},
		{result{0, "PTUUID=x\nPTTYPE=gpt\n"}, "[gpt] <nil>"},
		{result{2, ""}, "[] <nil>"},
		{result{8, ""}, "[several contradicting signatures] <nil>"},
		{result{4, "usage"}, "[] blkid ended with code 4: usage"},
	} {
		names, err := parseBlkid(c.result)
		if got := fmt.Sprintf("%v %v", names, err); got != c.want {
			t.Errorf("parseBlkid(%v) = %s, want %s", c.result, got, c.want)
		}
	}
}

func TestAnXFSThatIsNotFinishedIsNone(t *testing.T) {
	half := encodeXFS(volumeID, 512*mib, true)
	if s, ok := parseSuperblock(half[:]); ok {
		t.Errorf("it is %+v", s)
	}
	whole := encodeXFS(volumeID, 512*mib, false)
	if s, ok := parseSuperblock(whole[:]); !ok || s.fsType != "xfs" || s.uuid != volumeID || s.bytes != 512*mib {
		t.Errorf("a whole one is %+v, %v", s, ok)
	}
}

func FuzzSuperblock(f *testing.F) {
	ext4, xfs := encodeExt4(volumeID, 512*mib, true), encodeXFS(volumeID, 512*mib, false)
	f.Add(ext4[:])
	f.Add(xfs[:])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, p []byte) {
		s, ok := parseSuperblock(p)
		if ok != (s.fsType != "") {
			t.Errorf("%+v, %v", s, ok)
		}
	})
}

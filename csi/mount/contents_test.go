// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"fmt"
	"testing"

	"weft.dev/weft/csi/mount/mounttest"
)

const volumeUUID = "0b5e2f7e-1c1d-4a3e-9a52-6f7c1a2b3c4d"

func TestTheCodesOfBlkid(t *testing.T) {
	for _, c := range []struct {
		result Result
		want   string
	}{
		{Result{0, "DEVNAME=/proc/self/fd/3\nUUID=x\nTYPE=ext4\nUSAGE=filesystem\n"}, "[ext4] <nil>"},
		{Result{0, "PTUUID=x\nPTTYPE=gpt\n"}, "[gpt] <nil>"},
		{Result{2, ""}, "[] <nil>"},
		{Result{8, ""}, "[several contradicting signatures] <nil>"},
		{Result{4, "usage"}, "[] blkid ended with code 4: usage"},
	} {
		names, err := parseBlkid(c.result)
		if got := fmt.Sprintf("%v %v", names, err); got != c.want {
			t.Errorf("parseBlkid(%v) = %s, want %s", c.result, got, c.want)
		}
	}
}

func TestAnXFSThatIsNotFinishedIsNone(t *testing.T) {
	half := mounttest.XFS(volumeUUID, 512<<20, true)
	if s, ok := ParseSuperblock(half[:]); ok {
		t.Errorf("it is %+v", s)
	}
	whole := mounttest.XFS(volumeUUID, 512<<20, false)
	if s, ok := ParseSuperblock(whole[:]); !ok || s.FSType != "xfs" || s.UUID != volumeUUID || s.Bytes != 512<<20 {
		t.Errorf("a whole one is %+v, %v", s, ok)
	}
}

func FuzzSuperblock(f *testing.F) {
	ext4, xfs := mounttest.Ext4(volumeUUID, 512<<20, true), mounttest.XFS(volumeUUID, 512<<20, false)
	f.Add(ext4[:])
	f.Add(xfs[:])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, p []byte) {
		s, ok := ParseSuperblock(p)
		if ok != (s.FSType != "") {
			t.Errorf("%+v, %v", s, ok)
		}
	})
}

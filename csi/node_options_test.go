// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"strings"
	"testing"
)

func TestMountOptions(t *testing.T) {
	for _, c := range []struct {
		fsType   string
		flags    []string
		readOnly bool
		want     string
	}{
		{"ext4", nil, false, ""},
		{"xfs", nil, false, "nouuid"},
		{"xfs", []string{"noatime", "nouuid", "noatime"}, false, "noatime nouuid"},
		{"ext4", []string{"noatime,commit=30"}, true, "commit=30 noatime ro"},
		{"ext4", nil, true, "ro"},
		{"xfs", []string{"ro", "logbsize=256k"}, true, "logbsize=256k nouuid ro"},
		{"ext4", []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}, false, `context="system_u:object_r:container_file_t:s0:c1,c2"`},
		{"ext4", []string{"rw"}, true, "InvalidArgument"},
		{"ext4", []string{"noload", "ro"}, true, "InvalidArgument"},
		{"xfs", []string{"norecovery", "ro"}, true, "InvalidArgument"},
		{"ext4", []string{"errors=panic"}, false, "InvalidArgument"},
		{"ext4", []string{"journal_dev=0x801"}, false, "InvalidArgument"},
		{"xfs", []string{"logdev=/dev/sda"}, false, "InvalidArgument"},
		{"xfs", []string{"data=ordered"}, false, "InvalidArgument"},
		{"ext4", []string{"context=x,rootcontext=y"}, false, "InvalidArgument"},
		{"ext4", []string{`context="a\"b"`}, false, "InvalidArgument"},
		{"ext4", []string{"commit=-1"}, false, "InvalidArgument"},
		{"ext4", []string{"bind"}, false, "InvalidArgument"},
	} {
		options, err := mountOptions(c.fsType, c.flags, c.readOnly)
		got := strings.Join(options, " ")
		if err != nil {
			got = "InvalidArgument"
			refused(t, "options", err, 3, "mount_flags")
		}
		if got != c.want {
			t.Errorf("mountOptions(%s, %q, ro %v) = %q (%v), want %q", c.fsType, c.flags, c.readOnly, got, err, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"testing"

	"golang.org/x/sys/unix"
)

// allocated is how many bytes of the disk a file takes.
func allocated(t *testing.T, f *File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

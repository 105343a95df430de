// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"
	"runtime/debug"
	"testing"
)

// Opening a drive takes 2 MiB of buffers, and the power-cut tests open thousands. With the small
// heap of a test, most of the time went to garbage collection.
func TestMain(m *testing.M) {
	debug.SetGCPercent(1000)
	os.Exit(m.Run())
}

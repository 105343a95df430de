// SPDX-License-Identifier: Apache-2.0

package target

import (
	"os"
	"runtime/debug"
	"testing"
)

// Reading a drive's label takes 2 MiB of buffers, and the crash tests do it thousands of times.
// With the small heap of a test, much of the time went to garbage collection.
func TestMain(m *testing.M) {
	debug.SetGCPercent(1000)
	os.Exit(m.Run())
}

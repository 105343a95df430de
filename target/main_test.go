// SPDX-License-Identifier: Apache-2.0

package target

import (
	"os"
	"runtime/debug"
	"testing"
)

// To look at a drive takes 2 MiB for its ends, and the tests with crashes look at
// thousands: with a heap that is small else, much of the time went to its collection.
func TestMain(m *testing.M) {
	debug.SetGCPercent(1000)
	os.Exit(m.Run())
}

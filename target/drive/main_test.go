// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"
	"runtime/debug"
	"testing"
)

// To open a drive takes 2 MiB for its ends, and the tests that cut the power open
// thousands: with a heap that is small else, most of the time went to its collection.
func TestMain(m *testing.M) {
	debug.SetGCPercent(1000)
	os.Exit(m.Run())
}

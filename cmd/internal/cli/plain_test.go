// SPDX-License-Identifier: Apache-2.0

package cli

import "testing"

// A variable that says no does not open the cluster.
func TestOnlyAClearYesAsksForPlainTCP(t *testing.T) {
	for text, want := range map[string]bool{"1": true, "true": true, "0": false, "false": false, "": false, "no": false} {
		if got := asksForPlain(text); got != want {
			t.Errorf("WEFT_INSECURE_PLAIN_TCP=%s: %v, want %v", text, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"io"
	"testing"
	"testing/synctest"

	"weft.dev/weft/proto/nvmetcp"
)

// TestARestThatNobodySendsDoesNotHoldUpTheEnd: the socket is full as a connection ends, and whoever was
// sending gives the rest to the writer, which has ended already.
func TestARestThatNobodySendsDoesNotHoldUpTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &queue{sending: true, closed: true, wake: make(chan struct{}, 1), writer: nvmetcp.NewWriter(io.Discard, nvmetcp.WriterConfig{})}
		q.quiet.L = &q.mu
		over := false
		go func() { q.awaitSender(); over = true }()
		synctest.Wait()
		if over {
			t.Fatal("it does not wait for the one that sends")
		}
		q.handOver()
		synctest.Wait()
		if !over {
			q.giveBack() // so that the test ends
			t.Error("it waits for the rest, which nobody sends")
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// single runs f over a volume with one copy, attached to c1.
func single(t *testing.T, f func(*mirror)) { copied(t, 1, 1, withoutCaches, f) }

// A target has received a write, but the connection breaks before the target processes it. The
// host reconnects and sends the write again, then a newer one to the same place. The write of
// the first connection must have no effect.
func TestAWriteOfABrokenConnectionDoesNotLandAfterItWasSentAgain(t *testing.T) {
	single(t, func(m *mirror) {
		m.put("c1", 1, 0)
		m.network.delay("c1", "t1", time.Millisecond) // so that it arrives whole
		goOn := m.network.stall("t1", "c1")
		again := make(chan error, 1)
		go func() { again <- block.WriteAt(m.users.device("c1").volume, edition(2), 0) }()
		time.Sleep(100 * time.Millisecond)
		m.network.reset("c1", "t1")
		if err := <-again; err != nil {
			t.Fatal(err)
		}
		m.put("c1", 3, 0)
		goOn()
		time.Sleep(time.Second)
		m.holds("c1", 3, 0)
	})
}

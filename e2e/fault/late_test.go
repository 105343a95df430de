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

// A host and the target of one copy are cut off from all others. The volume is taken from the
// host by force, and the next host writes to the other copy. The first host must not read what
// the copy beside it holds.
func TestAHostThatIsCutOffWithACopyReadsNothingFromIt(t *testing.T) {
	mirrored(t, withoutCaches, func(m *mirror) {
		m.put("c1", 1, 0)
		old := m.users.device("c1").volume
		for _, beside := range []string{"c1", m.first.name} {
			for _, other := range []string{"m1", "c2", m.second.name} {
				m.network.part(beside, other, true)
			}
		}
		m.takenTo(m.clients[1], m.clients[0])
		m.put("c2", 2, 0)
		got, read := make([]byte, unit), make(chan error, 1)
		go func() { read <- block.ReadAt(old, got, 0) }()
		select {
		case err := <-read:
			if err == nil {
				t.Errorf("edition 2 was acknowledged to c2, and then c1 read %s", numbers(got))
			}
		case <-time.After(time.Minute): // held: nothing false was read
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// mirror is a volume of two copies that is attached to c1 and has no other users. Its content
// are editions, written to some of its units.
type mirror struct {
	*cluster
	t      *testing.T
	users  *sharers
	first  *targetHost // has the copy that others are made equal to when all are in sync
	second *targetHost // the same as first if there is one copy
}

// mirrored runs f over a mirror; set may change the cluster before it starts.
func mirrored(t *testing.T, set func(*cluster), f func(*mirror)) { copied(t, 2, 2, set, f) }

// copied runs f over a volume with a copy on each target, attached to c1.
func copied(t *testing.T, copies, clients int, set func(*cluster), f func(*mirror)) {
	synctest.Test(t, func(t *testing.T) {
		m := &mirror{t: t}
		m.cluster = newCluster(t, copies, clients, func(c *cluster) {
			m.users = share(c)
			set(c)
		})
		defer m.close()
		m.createVolume(block.Layout{Stripes: 1, Copies: copies})
		m.attachAs(m.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
		m.first, m.second = m.targets[0], m.targets[copies-1]
		if m.volume().GetLegs()[0].GetNode() != m.first.name {
			m.first, m.second = m.second, m.first
		}
		defer func() {
			if t.Failed() {
				t.Log(strings.Join(m.history, "\n"))
			}
		}()
		f(m)
	})
}

func (m *mirror) volume() *pb.Volume {
	m.t.Helper()
	v, err := m.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: volumeName})
	if err != nil {
		m.t.Fatal(err)
	}
	return v
}

// put makes a client write an edition to some units, and waits until all copies have it.
func (m *mirror) put(client string, number uint64, units ...int64) {
	m.t.Helper()
	m.did("%s writes edition %d", client, number)
	for _, at := range units {
		if err := block.WriteAt(m.users.device(client).volume, edition(number), at*unit); err != nil {
			m.t.Fatalf("%s writes edition %d: %v", client, number, err)
		}
	}
}

func (m *mirror) flush(client string) {
	m.t.Helper()
	if err := block.Flush(m.users.device(client).volume); err != nil {
		m.t.Fatal(err)
	}
}

// holds checks that a client reads an edition.
func (m *mirror) holds(client string, number uint64, units ...int64) {
	m.t.Helper()
	got, wrong := make([]byte, unit), 0
	for _, at := range units {
		if err := block.ReadAt(m.users.device(client).volume, got, at*unit); err != nil {
			m.t.Fatalf("%s reads: %v", client, err)
		}
		if bytes.Equal(got, edition(number)) {
			continue
		}
		if wrong++; wrong == 1 {
			m.t.Errorf("unit %d: edition %d was acknowledged last, and %s reads %s", at, number, client, numbers(got))
		}
	}
	if wrong > 0 {
		m.t.Errorf("%d of %d units are wrong", wrong, len(units))
	}
}

// leg returns the copy on a target.
func (m *mirror) leg(on *targetHost) *pb.Leg {
	m.t.Helper()
	for _, l := range m.volume().GetLegs() {
		if l.GetNode() == on.name {
			return l
		}
	}
	m.t.Fatalf("%s has no copy", on.name)
	return nil
}

// holdsWithout checks what c1 reads without one target, once all copies are in sync.
func (m *mirror) holdsWithout(lost *targetHost, number uint64, units ...int64) {
	m.t.Helper()
	m.attachedAndHealthy()
	lost.kill()
	m.holds("c1", number, units...)
}

// powerCut cuts a target's power for a moment.
func (m *mirror) powerCut(h *targetHost) {
	h.powerOff(rand.New(rand.NewPCG(1, 1)))
	h.start()
}

// takenTo takes the volume by force from one client, and gives it to another.
func (m *mirror) takenTo(to *clientHost, from *clientHost) {
	m.t.Helper()
	m.detach(from, true)
	m.attachAs(to, pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
}

// everyUnit lists the units of a volume that does not grow.
var everyUnit = func() (all []int64) {
	for at := range sharedUnits {
		all = append(all, at)
	}
	return all
}()

func asItIs(*cluster) {}

func withoutCaches(c *cluster) {
	for _, h := range c.targets {
		h.platter.volatile = false
	}
}

// A volume has regions larger than the pieces that a rebuild copies: each region must be
// copied to its end.
func TestARebuildCopiesRegionsToTheirEnds(t *testing.T) {
	const region = int64(block.MiB) / unit
	mirrored(t, hundreds, func(m *mirror) {
		units := []int64{0, region/2 - 1, region / 2, region - 1, 3*region - 1}
		m.put("c1", 1, units...)
		m.network.part("c1", m.second.name, true)
		m.put("c1", 2, units...) // waits until the loss of the second copy is recorded
		m.network.heal()
		m.holdsWithout(m.first, 2, units...)
	})
}

// A change of settings gives a drive a volatile cache, and the host does not hear of it. A
// power cut then loses data that the host believes durable: it must be copied again, although
// the host's log does not list it.
func TestACopyThatLostMoreThanItsHostKnowsIsCopiedInFull(t *testing.T) {
	mirrored(t, withoutCaches, func(m *mirror) {
		m.put("c1", 1, 0, 1000)
		m.network.part("c1", "m1", true)
		m.second.platter.set(func() { m.second.platter.volatile = true })
		m.second.kill()
		m.second.start() // it reports to the manager
		m.put("c1", 2, everyUnit...)
		m.flush("c1")
		m.powerCut(m.second)
		time.Sleep(5 * time.Second)
		m.network.heal()
		time.Sleep(time.Second)
		m.holdsWithout(m.first, 2, everyUnit...)
	})
}

// The drive of the only copy in sync becomes read-only. A write waits, in a region that the
// other copy misses: the region must be copied although the write waits.
func TestAWriteThatWaitsDoesNotHoldUpTheRebuild(t *testing.T) {
	mirrored(t, withoutCaches, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		m.network.part("c1", m.second.name, true)
		m.put("c1", 2, 0, 1) // waits until the loss of the second copy is recorded
		drive := m.first.platter
		drive.set(func() { drive.refusal = errReadOnly })
		written := make(chan error, 1)
		go func() { written <- block.WriteAt(m.users.device("c1").volume, edition(3), 0) }()
		time.Sleep(time.Second)
		m.network.heal()
		select {
		case err := <-written:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(patience):
			t.Fatalf("the write still waits\n%s", m.explain())
		}
		m.holds("c1", 3, 0)
		m.holds("c1", 2, 1)
	})
}

// A drive fails all I/O but that of its label, so that rebuilds of its copy fail and wait ever longer. Then the
// manager's clock is set back by a day, and the drive is repaired: the copy must be rebuilt
// soon, and not a day later.
func TestTheWaitForARebuildEndsAlthoughTheClockWasSetBack(t *testing.T) {
	mirrored(t, withoutCaches, func(m *mirror) {
		drive := m.second.platter
		drive.set(func() { drive.badData = errMedium })
		m.put("c1", 1, everyUnit...)
		time.Sleep(20 * time.Second)
		m.clock.Store(int64(-24 * time.Hour))
		drive.well()
		m.holdsWithout(m.first, 1, everyUnit...)
	})
}

// The power of a target goes while its drive is being flushed: the data of that flush must be
// copied again.
func TestWhatAFlushUnderWayWasToKeepIsMissed(t *testing.T) {
	mirrored(t, asItIs, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		m.flush("c1")
		m.put("c1", 2, everyUnit...)
		m.second.platter.hang()
		flushed := make(chan error, 1)
		go func() { flushed <- block.Flush(m.users.device("c1").volume) }()
		time.Sleep(200 * time.Millisecond)
		m.second.powerOff(rand.New(rand.NewPCG(1, 1)))
		if err := <-flushed; err != nil {
			t.Fatal(err)
		}
		m.second.start()
		m.holdsWithout(m.first, 2, everyUnit...)
	})
}

// A copy has caught up, and its host reports it. Before the report reaches the manager, the
// copy loses its drive's cache and is being rebuilt again: the report must not count for the
// new rebuild.
func TestALateReportOfARebuildIsNotTakenForANewerOnes(t *testing.T) {
	var called chan struct{}
	mirrored(t, reportLate(&called), func(m *mirror) {
		m.rebuildFirst(called)
		m.put("c1", 2, everyUnit...)
		m.powerCut(m.first)
		m.clients[0].process.at.freeze()
		time.Sleep(travels + time.Second)
		m.clients[0].kill()
		m.takenTo(m.clients[1], m.clients[0])
		m.holds("c2", 2, everyUnit...)
	})
}

// travels is how long a late report is under way: as long as keepalives permit.
const travels = 3500 * time.Millisecond

// reportLate delays c1's first report of a rebuild, and everything that c1 sends to the
// manager after it. The channel is closed when the report is sent.
func reportLate(sent *chan struct{}) func(*cluster) {
	return func(c *cluster) {
		called := make(chan struct{})
		*sent = called
		c.lie = func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
			if method == pb.Agents_RecordInSync_FullMethodName {
				select {
				case <-called:
				default:
					c.network.delay("c1", "m1", travels)
					close(called)
				}
			}
			return next(ctx, method, request, reply, conn, o...)
		}
	}
}

// rebuildFirst makes the first copy miss writes, and returns when it has been copied and the
// report to the manager is under way.
func (m *mirror) rebuildFirst(called chan struct{}) {
	m.t.Helper()
	m.put("c1", 1, 0)
	m.flush("c1")
	m.network.part("c1", m.first.name, true)
	m.put("c1", 1, 1)
	m.network.part("c1", m.first.name, false)
	select {
	case <-called:
	case <-time.After(patience):
		m.t.Fatalf("no rebuild\n%s", m.explain())
	}
}

// A host reports that a copy has caught up, and loses the volume. Before the report reaches
// the manager, the copy loses its drive's cache, and the next host is rebuilding it.
func TestALateReportOfAHostThatHasLostTheVolumeIsNotBelieved(t *testing.T) {
	var called chan struct{}
	mirrored(t, reportLate(&called), func(m *mirror) {
		m.rebuildFirst(called)
		m.put("c1", 2, everyUnit...)
		m.powerCut(m.first)
		m.network.part("c2", m.first.name, true) // its rebuild must not progress
		m.takenTo(m.clients[1], m.clients[0])
		m.eventually("c2 is to rebuild the first copy", func(context.Context) error {
			if state := m.leg(m.first).GetState(); state != pb.LegState_LEG_STATE_REBUILDING {
				return fmt.Errorf("it is %v", state)
			}
			return nil
		})
		m.clients[1].process.at.freeze() // otherwise it would see that the copy is not in use
		time.Sleep(travels)
		m.clients[1].kill()
		m.network.heal()
		m.takenTo(m.clients[0], m.clients[1])
		m.holds("c1", 2, everyUnit...)
	})
}

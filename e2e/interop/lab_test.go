// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// lab is the pair of ends that a case runs on.
type lab struct {
	target target
	host   host
}

// target serves subsystems on ports of 127.0.0.1.
type target interface {
	serve(t *testing.T, s spec) served
	ours() bool
}

// spec describes a subsystem to serve. All of its namespaces are in ANA group 1.
type spec struct {
	namespaces map[uint32]int64 // nsid to bytes
	ports      int              // 0 means 1
	queues     int              // limit of a host's I/O queues; 0: the target's default
	allow      *access          // nil: any host, without authentication
	more       int              // number of additional, empty subsystems on the same ports
}

// access is the one host that may connect, and how it must authenticate.
type access struct {
	host          block.Host
	hostKey       dhchap.Key
	controllerKey dhchap.Key
	hash          dhchap.Hash  // the target's choice; 0: its default
	group         dhchap.Group // likewise
}

// served is a subsystem and its ports. Its methods end the test on an error.
type served interface {
	nqn() block.NQN
	portal(port int) string // address:port
	uuid(nsid uint32) block.UUID
	others() []block.NQN

	add(nsid uint32, size int64)
	remove(nsid uint32)
	resize(nsid uint32, size int64)
	ana(port int, state anaState)
	unlink(port int) // hosts can no longer reach the subsystem through the port
	link(port int)
	allow(a access)

	// stop takes the whole target down, like a crash. start brings it back with the same
	// content and the given number of queues (0: as before).
	stop()
	start(queues int)
}

// identity is what identifies a subsystem, independent of the target that serves it.
type identity struct {
	t     *testing.T
	name  block.NQN
	dir   string // of the images
	spec  spec
	sizes map[uint32]int64
	uuids map[uint32]block.UUID
	tcp   []int
	more  []block.NQN
}

func newIdentity(t *testing.T, s spec) identity {
	t.Helper()
	i := identity{t: t, name: newNQN(), dir: t.TempDir(), spec: s, sizes: map[uint32]int64{}, uuids: map[uint32]block.UUID{}}
	for range max(s.ports, 1) {
		i.tcp = append(i.tcp, freePort(t))
	}
	for nsid, size := range s.namespaces {
		i.sizes[nsid], i.uuids[nsid] = size, block.UUIDFromRandom(newID(nsid))
	}
	for range s.more {
		i.more = append(i.more, newNQN())
	}
	return i
}

func (i *identity) nqn() block.NQN              { return i.name }
func (i *identity) portal(port int) string      { return fmt.Sprintf("127.0.0.1:%d", i.tcp[port]) }
func (i *identity) uuid(nsid uint32) block.UUID { return i.uuids[nsid] }
func (i *identity) others() []block.NQN         { return i.more }

// anaState is a state as nvmet's configfs and the host's sysfs name it.
type anaState string

const (
	optimized    anaState = "optimized"
	nonOptimized anaState = "non-optimized"
	inaccessible anaState = "inaccessible"
)

// host connects to subsystems.
type host interface {
	connect(t *testing.T, s served, o options) (session, error)
	discover(t *testing.T, portal string, id block.Host) map[entry]int // how many times each is listed
	ours() bool
}

// entry is an entry that discovery lists.
type entry struct {
	nqn    block.NQN
	portal string
}

const discoveryNQN = "nqn.2014-08.org.nvmexpress.discovery"

// options say how a host connects.
type options struct {
	host          block.Host // zero: testHost
	portals       []string   // empty: the first port of the subsystem
	queues        int        // 0: 2
	keepAlive     time.Duration
	once          bool // our host: it does not reconnect
	headerDigest  bool
	dataDigest    bool
	hostKey       dhchap.Key
	controllerKey dhchap.Key
}

func (o options) withDefaults(s served) options {
	if o.host.ID.IsZero() {
		o.host = testHost
	}
	if len(o.portals) == 0 {
		o.portals = []string{s.portal(0)}
	}
	if o.queues == 0 {
		o.queues = 2
	}
	if o.keepAlive == 0 {
		o.keepAlive = 5 * time.Second
	}
	return o
}

// session is a connected host. It has one controller per portal, in the order of the
// options, and one device per namespace over all controllers.
type session interface {
	namespaces() map[uint32]int64 // the host's current view, with sizes
	device(nsid uint32) block.Device
	path(nsid uint32) string // of the block device; empty if there is none
	live(i int) bool         // reports whether controller i is connected and serving
	ana(i int, nsid uint32) anaState
	queues(i int) int // I/O queues of controller i
	reset(i int)      // drops the controller's connections and reconnects
	disconnect()
}

var (
	testHost  = block.HostFromID(block.UUIDFromRandom([16]byte{1, 2, 3}))
	otherHost = block.HostFromID(block.UUIDFromRandom([16]byte{4, 5, 6}))
)

// limit is the time limit of every step; it is long because machines are emulated.
const limit = 60 * time.Second

// eventually waits for something that the other end does in its own time.
func eventually(t *testing.T, what string, is func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !is() {
		if time.Since(began) > limit {
			t.Fatalf("%s: not within %v", what, limit)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return time.Since(began)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// connect connects; the host must get in.
func (l *lab) connect(t *testing.T, s served, o options) session {
	t.Helper()
	c, err := l.host.connect(t, s, o)
	if err != nil {
		t.Fatalf("connecting to %s: %v", s.nqn(), err)
	}
	return c
}

// refused tries to connect; the host must not get in.
func (l *lab) refused(t *testing.T, s served, o options, who string) {
	t.Helper()
	o.once = true
	if _, err := l.host.connect(t, s, o); err == nil {
		t.Errorf("%s is connected", who)
	} else {
		t.Logf("%s is refused: %v", who, err)
	}
}

// up serves one namespace of the size, connects to it, and returns its device.
func (l *lab) up(t *testing.T, size int64, o options) (served, session, block.Device) {
	t.Helper()
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: size}})
	c := l.connect(t, s, o)
	return s, c, c.device(1)
}

var serial atomic.Int64

// newNQN returns a name that no other test uses.
func newNQN() block.NQN {
	return block.NQN(fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%s", block.UUIDFromRandom(newID(0))))
}

func newID(nsid uint32) (id [16]byte) {
	binary.BigEndian.PutUint32(id[0:], uint32(os.Getpid()))
	binary.BigEndian.PutUint32(id[9:], nsid) // bytes 6 and 8 hold a UUID's version and variant
	binary.BigEndian.PutUint16(id[4:], uint16(serial.Add(1)))
	return id
}

// freePort is a TCP port that is not in use.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// image is a file for a namespace.
func image(t *testing.T, dir string, nsid uint32, size int64) string {
	t.Helper()
	path := filepath.Join(dir, fmt.Sprintf("%d.img", nsid))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	must(t, errors.Join(f.Truncate(size), f.Close()))
	return path
}

func removeImage(t *testing.T, dir string, nsid uint32) {
	t.Helper()
	must(t, os.Remove(filepath.Join(dir, fmt.Sprintf("%d.img", nsid))))
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// text reads a file of sysfs or configfs.
func text(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Config says what to connect to, as whom, and how. Zero values mean the default
// that is named.
type Config struct {
	// Portals are addresses of the controller, "address:port"; without a port 4420.
	// They are tried in turn; all queues of a connection go to the same one.
	Portals   []string
	Subsystem block.NQN
	Host      block.Host

	IOQueues   int // connections for IO; the controller may allow fewer; half of GOMAXPROCS, 1 to 4
	QueueDepth int // commands under way on each of them; 128
	BufferSize int // bytes that one read of an IO queue takes at most; 128 KiB

	// KATO is the keep alive timeout that the controller is told: it cuts off a host
	// that it does not hear for so long. A keep alive is sent at half of it, and one
	// that is not answered within KATO loses the connection. Default 5 s; less than
	// 0 means none.
	KATO time.Duration
	// CommandTimeout loses the connection when a command is under way for longer.
	// 0: never; keep alives tell whether the controller lives.
	CommandTimeout time.Duration
	// ConnectTimeout bounds one attempt to connect, with all queues, and each admin
	// command after; 5 s.
	ConnectTimeout time.Duration
	// ReconnectMin and ReconnectMax bound the pause between attempts, which doubles
	// each time; 50 ms and 5 s.
	ReconnectMin, ReconnectMax time.Duration

	HeaderDigest, DataDigest bool // CRC32C of headers, of data; Connect fails if the controller will not

	// HostKey is what the host proves to know if the controller asks for it;
	// ControllerKey what the controller must prove: without the proof nothing is sent.
	HostKey, ControllerKey dhchap.Key
	// AuthHashes and AuthGroups are what the proofs may be made with: a controller
	// that chooses others is refused. Empty: all (see dhchap.Config).
	AuthHashes []dhchap.Hash
	AuthGroups []dhchap.Group

	Log *slog.Logger // nil: nowhere
	// OnState is told every change of State, and OnNamespaces that Namespaces may
	// have changed. They are called one at a time and must not block.
	OnState      func(State)
	OnNamespaces func()

	// Dial replaces the dialer; tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	discovery bool
}

// withDefaults checks c and fills in what was left out.
func (c Config) withDefaults() (Config, error) {
	switch {
	case len(c.Portals) == 0:
		return c, errors.New("config: no portal")
	case c.Subsystem == "" || len(c.Subsystem) > 223:
		return c, fmt.Errorf("config: subsystem %q: 1 to 223 bytes are needed", c.Subsystem)
	case c.Host.NQN == "" || len(c.Host.NQN) > 223 || c.Host.ID.IsZero():
		return c, fmt.Errorf("config: host %q with id %v: both are needed", c.Host.NQN, c.Host.ID)
	case c.IOQueues < 0 || c.QueueDepth < 0 || c.QueueDepth == 1 || c.BufferSize < 0:
		return c, fmt.Errorf("config: %d queues of depth %d with a buffer of %d", c.IOQueues, c.QueueDepth, c.BufferSize)
	}
	portals := make([]string, len(c.Portals))
	for i, p := range c.Portals {
		portals[i] = p
		if _, _, err := net.SplitHostPort(p); err != nil {
			portals[i] = net.JoinHostPort(p, fmt.Sprint(block.DefaultPort))
		}
	}
	c.Portals = portals
	setDefault(&c.IOQueues, min(max(runtime.GOMAXPROCS(0)/2, 1), 4))
	setDefault(&c.QueueDepth, 128)
	setDefault(&c.BufferSize, 128<<10)
	setDefault(&c.KATO, 5*time.Second)
	setDefault(&c.ConnectTimeout, 5*time.Second)
	setDefault(&c.ReconnectMin, 50*time.Millisecond)
	setDefault(&c.ReconnectMax, 5*time.Second)
	c.QueueDepth = min(c.QueueDepth, maxDepth)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Dial == nil {
		c.Dial = new(net.Dialer).DialContext
	}
	return c, nil
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Phase is where a Controller is.
//
//	(Connect) ──▶ Live ◀──▶ Connecting
//	               └────▶ Closed ◀──┘
type Phase uint8

// The phases.
const (
	Connecting Phase = iota // IOs are held
	Live
	Closed // by Cut or Close; IOs fail
)

func (p Phase) String() string {
	switch p {
	case Live:
		return "live"
	case Closed:
		return "closed"
	}
	return "connecting"
}

// State is how a Controller is.
type State struct {
	Phase   Phase
	Since   time.Time
	Portal  string // that it is, or was last, connected to
	Session uint64 // counts the connections
	Err     error  // why the last connection was lost, or the last attempt failed
}

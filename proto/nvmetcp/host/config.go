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

// Config describes the connection: to which controller, as which host, and with which
// limits. A zero value means the default given with the field.
type Config struct {
	// Portals are the addresses of the controller as "address:port"; the port defaults to
	// 4420. They are tried in turn. All queues of a connection use the same one.
	Portals   []string
	Subsystem block.NQN
	Host      block.Host

	IOQueues   int // connections for IO; the controller may allow fewer; default half of GOMAXPROCS, 1 to 4
	QueueDepth int // commands in flight on each of them; default 128
	BufferSize int // largest single read of an IO queue, in bytes; default 128 KiB

	// KATO is the keep alive timeout that the host requests: the controller disconnects a
	// host that is silent for longer. If a keep alive is not answered within KATO, the host
	// drops the connection. Default 5 s; negative means none.
	KATO time.Duration
	// KeepAliveEvery is the interval of keep alives, half of KATO at most and by default. A
	// shorter one lets Answered notice a silent controller sooner.
	KeepAliveEvery time.Duration
	// AskEvery is the interval of keep alives while IOs are outstanding, KeepAliveEvery at most
	// and by default: Unanswered then knows sooner that nobody will answer them.
	AskEvery time.Duration
	// CommandTimeout is the time after which an unanswered command drops the connection. 0
	// means never; keep alives then show whether the controller is alive.
	CommandTimeout time.Duration
	// ConnectTimeout limits each attempt to connect, with all queues, and each later admin
	// command; default 5 s.
	ConnectTimeout time.Duration
	// ReconnectMin and ReconnectMax limit the pause between attempts, which doubles each
	// time; defaults 50 ms and 5 s.
	ReconnectMin, ReconnectMax time.Duration

	HeaderDigest, DataDigest bool // CRC32C of headers, of data; Connect fails if the controller does not agree

	// HostKey proves the host's identity if the controller asks for it. If ControllerKey is
	// set the controller must prove its own before the host sends anything.
	HostKey, ControllerKey dhchap.Key
	// AuthHashes and AuthGroups are the hashes and groups that authentication may use; a
	// controller that chooses others is refused. Empty: all (see dhchap.Config).
	AuthHashes []dhchap.Hash
	AuthGroups []dhchap.Group

	// Replace is called after Controller.Move, before the first attempt to connect through the new
	// portals, if the target did not promise to end the host's older controller by itself
	// (Controller.Replaces): it has that done by other means, and is called again until it succeeds. Nil:
	// there are none, and Move relies on the caller.
	Replace func(ctx context.Context) error

	Log *slog.Logger // nil: no log
	// OnState is called for every change of State and every attempt that failed, and OnNamespaces
	// when Namespaces may have changed. They are called one at a time and must not block.
	OnState      func(State)
	OnNamespaces func()

	// Dial replaces the dialer in tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	discovery bool
}

// withDefaults checks c and fills in the defaults.
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
		portals[i] = withPort(p)
	}
	c.Portals = portals
	setDefault(&c.IOQueues, min(max(runtime.GOMAXPROCS(0)/2, 1), 4))
	setDefault(&c.QueueDepth, 128)
	setDefault(&c.BufferSize, 128<<10)
	setDefault(&c.KATO, 5*time.Second)
	setDefault(&c.KeepAliveEvery, c.KATO/2)
	c.KeepAliveEvery = min(c.KeepAliveEvery, c.KATO/2)
	setDefault(&c.AskEvery, c.KeepAliveEvery)
	c.AskEvery = min(c.AskEvery, c.KeepAliveEvery)
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

// withPort adds the default port to an address that has none.
func withPort(portal string) string {
	if _, _, err := net.SplitHostPort(portal); err != nil {
		return net.JoinHostPort(portal, fmt.Sprint(block.DefaultPort))
	}
	return portal
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Phase is the state of a Controller's connection.
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

// State describes a Controller's connection.
type State struct {
	Phase   Phase
	Since   time.Time
	Portal  string    // the portal it is, or was last, connected to
	Session uint64    // the number of the connection, which only grows
	Err     error     // why the last connection was lost, or the last attempt failed
	Failed  time.Time // while it is not connected: when the last attempt failed; zero: none has
}

// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// Config holds the limits of a Target. Zero values mean the default that is named.
type Config struct {
	Log *slog.Logger // nil: nowhere

	// HandshakeTimeout is how long a connection may take from its first byte
	// to the end of its Connect command, authentication included; 10 s.
	HandshakeTimeout time.Duration
	// StallTimeout is how long a PDU that has begun may take to arrive, and how
	// long a peer may take nothing of what is sent to it; 60 s.
	StallTimeout time.Duration

	MaxConnections           int // of the target; 4096
	MaxConnectionsPerAddress int // of one remote address; 1024
	MaxHandshakes            int // that have not introduced themselves yet; 256
	MaxControllersPerHost    int // over all subsystems; 512

	// MemoryPerConnection bounds the data of commands that one connection has
	// under way; further commands wait. 16 MiB, and at least twice MDTS.
	MemoryPerConnection block.Size
	MDTS                block.Size // largest transfer of one command, a power of two of at least 4 KiB; 1 MiB
	InCapsule           block.Size // data inside of a command capsule on I/O queues; 16 KiB
	MaxIOQueues         int        // of one controller; 64
	QueueDepth          int        // largest submission queue; 1024
}

func (c Config) withDefaults() (Config, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.MaxConnections, 4096)
	def(&c.MaxConnectionsPerAddress, 1024)
	def(&c.MaxHandshakes, 256)
	def(&c.MaxControllersPerHost, 512)
	def(&c.MaxIOQueues, 64)
	def(&c.QueueDepth, 1024)
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = 10 * time.Second
	}
	if c.StallTimeout == 0 {
		c.StallTimeout = time.Minute
	}
	if c.MDTS == 0 {
		c.MDTS = block.MiB
	}
	if c.InCapsule == 0 {
		c.InCapsule = 16 * block.KiB
	}
	if c.MemoryPerConnection == 0 {
		c.MemoryPerConnection = 16 * block.MiB
	}
	c.MemoryPerConnection = max(c.MemoryPerConnection, 2*c.MDTS)
	return c, c.check()
}

func (c Config) check() error {
	switch {
	case c.MDTS < 4*block.KiB || c.MDTS > 64*block.MiB || c.MDTS&(c.MDTS-1) != 0:
		return fmt.Errorf("MDTS %v: must be a power of two from 4KiB to 64MiB", c.MDTS)
	case c.InCapsule%16 != 0 || c.InCapsule < 4*block.KiB || c.InCapsule > block.MiB:
		return fmt.Errorf("InCapsule %v: must be a multiple of 16 from 4KiB to 1MiB", c.InCapsule)
	case c.MaxIOQueues < 1 || c.MaxIOQueues > 1024:
		return fmt.Errorf("MaxIOQueues %d: must be 1 to 1024", c.MaxIOQueues)
	case c.QueueDepth < 2 || c.QueueDepth > 4096:
		return fmt.Errorf("QueueDepth %d: must be 2 to 4096", c.QueueDepth)
	}
	return nil
}

// ErrClosed is what calls on a closed Target, Subsystem or Port answer.
var ErrClosed = errors.New("closed")

// Target is a set of subsystems and the ports through which hosts reach them.
// All methods may be called from any goroutine.
type Target struct {
	cfg Config
	log *slog.Logger

	mu         sync.Mutex
	closed     bool
	subsystems map[block.NQN]*Subsystem
	ports      map[*Port]struct{}
	discovery  *Subsystem // reached through every port
	door       door
}

// New makes a Target that serves nothing yet. The error names the field of c
// that can not be.
func New(c Config) (*Target, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("controller config: %w", err)
	}
	t := &Target{cfg: c, log: c.Log, subsystems: map[block.NQN]*Subsystem{}, ports: map[*Port]struct{}{}}
	return t, nil
}

// AddSubsystem adds a subsystem that no port is linked to yet.
func (t *Target) AddSubsystem(c SubsystemConfig) (*Subsystem, error) { panic("soon") }

// Subsystem finds a subsystem by its name; nil if there is none.
func (t *Target) Subsystem(nqn block.NQN) *Subsystem { panic("soon") }

// Serve accepts connections from l until the Port or the Target is closed; l is
// then closed too. Every port answers for the discovery subsystem; others have to
// be linked.
func (t *Target) Serve(l net.Listener, c PortConfig) (*Port, error) { panic("soon") }

// Close closes the ports and the subsystems, as Subsystem.Close does.
func (t *Target) Close(ctx context.Context) error { panic("soon") }

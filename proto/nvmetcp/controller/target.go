// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// Config holds the limits of a Target. A zero value means the default given with the field.
type Config struct {
	Log *slog.Logger // nil: no log
	// Unproven is told of each connection that ends before its host has proven its identity, though
	// it had to. It must not block. Nil: nobody is told.
	Unproven func(Unproven)

	// HandshakeTimeout is the time from a connection's first byte to the end of its Connect
	// command, authentication included; default 10 s.
	HandshakeTimeout time.Duration
	// StallTimeout is the longest that a PDU may take to arrive once it has begun, and that
	// a peer may accept none of the data sent to it; default 60 s.
	StallTimeout time.Duration

	MaxConnections           int // of the target; default 4096
	MaxConnectionsPerAddress int // of one remote address; default 1024
	MaxHandshakes            int // connections without a completed handshake, or for discovery; default 256
	MaxControllersPerHost    int // over all subsystems; default 512

	MaxConnectionsPerHost int // over all subsystems and addresses; default half of MaxConnections

	// Memory limits the data of the commands in flight of all connections together; further
	// commands wait. A quarter of it is for data in capsules. Each host may hold half, and whatever
	// the others hold, it has MemoryPerConnection. Default 1 GiB, and at least four times
	// MemoryPerConnection. A connection's first 128 KiB, and its buffer of 256 KiB, are not counted.
	Memory block.Size
	// MemoryPerConnection limits the data of a connection's commands in flight; further
	// commands wait. Default 16 MiB, and at least twice MDTS. Admin queues have MDTS.
	MemoryPerConnection block.Size
	MDTS                block.Size // largest transfer of one command, a power of two of at least 4 KiB; default 1 MiB
	InCapsule           block.Size // data in a command capsule on I/O queues; default 16 KiB
	MaxIOQueues         int        // of one controller; default 64
	QueueDepth          int        // largest submission queue; default 1024
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
	def(&c.MaxConnectionsPerHost, max(1, c.MaxConnections/2))
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
	if c.Memory == 0 {
		c.Memory = block.GiB
	}
	c.Memory = max(c.Memory, 4*c.MemoryPerConnection)
	return c, c.check()
}

func (c Config) check() error {
	switch {
	case c.MDTS < 4*block.KiB || c.MDTS > 64*block.MiB || c.MDTS&(c.MDTS-1) != 0:
		return fmt.Errorf("MDTS %v: must be a power of two from 4KiB to 64MiB", c.MDTS)
	case c.InCapsule%16 != 0 || c.InCapsule < 4*block.KiB || c.InCapsule > 64*block.KiB:
		return fmt.Errorf("InCapsule %v: must be a multiple of 16 from 4KiB to 64KiB", c.InCapsule)
	case c.MaxIOQueues < 1 || c.MaxIOQueues > 1024:
		return fmt.Errorf("MaxIOQueues %d: must be 1 to 1024", c.MaxIOQueues)
	case c.QueueDepth < 2 || c.QueueDepth > 4096:
		return fmt.Errorf("QueueDepth %d: must be 2 to 4096", c.QueueDepth)
	}
	return nil
}

// adminMemory limits the data in flight on an admin queue. It is enough for any of its commands.
func (t *Target) adminMemory() int { return max(int(t.cfg.MDTS), maxAuthMessage) }

// ErrClosed is the error of calls on a closed Target, Subsystem or Port.
var ErrClosed = errors.New("closed")

// Target is a set of subsystems and the ports through which hosts reach them.
// All methods may be called from any goroutine.
type Target struct {
	cfg         Config
	log         *slog.Logger
	buffers     bufferPool
	memoryLimit int
	data        *budget // of what commands have asked for
	capsules    *budget // of data in capsules
	limiter     *connLimiter
	mapping     chan struct{} // held while a Mapper is asked
	anaChanges  atomic.Uint64 // CHGCNT of the ANA log

	// mu guards the links between subsystems, ports and associations. I/O does not take it.
	// association.mu and conn.mu come after it.
	mu         sync.Mutex
	closed     bool
	subsystems map[block.NQN]*Subsystem
	ports      map[*Port]struct{}
	discovery  *Subsystem // reachable through every port
	generation uint64     // of the discovery log
	told       map[block.NQN]told
	perHost    map[block.NQN]int
	burials    sync.WaitGroup // dead associations whose commands have not left the Devices yet
}

// New makes a Target that serves nothing yet. An error names the invalid field of c.
func New(c Config) (*Target, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("controller config: %w", err)
	}
	t := &Target{
		cfg: c, log: c.Log, memoryLimit: int(c.MemoryPerConnection), generation: uint64(time.Now().Unix()), // so that the next process does not go through the same numbers

		subsystems: map[block.NQN]*Subsystem{}, ports: map[*Port]struct{}{}, perHost: map[block.NQN]int{},
		told: map[block.NQN]told{},
	}
	t.limiter, t.mapping = newConnLimiter(&t.cfg), make(chan struct{}, mapsAtOnce)
	inCapsules := int(c.Memory / 4)
	t.data, t.capsules = newBudget(int(c.Memory)-inCapsules, t.memoryLimit), newBudget(inCapsules, int(max(c.MDTS, 4*c.InCapsule)))
	t.discovery, err = newSubsystem(t, SubsystemConfig{NQN: nvmetcp.DiscoveryNQN, Serial: "discovery"})
	if err != nil {
		return nil, err
	}
	t.discovery.discovery = true
	return t, nil
}

// AddSubsystem adds a subsystem that is not linked to any port yet. The error is ErrExists
// if its name is taken, which includes a closed subsystem that is not drained.
func (t *Target) AddSubsystem(c SubsystemConfig) (*Subsystem, error) {
	s, err := newSubsystem(t, c)
	if err != nil {
		return nil, fmt.Errorf("add subsystem %s: %w", c.NQN, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return nil, fmt.Errorf("add subsystem %s: %w", c.NQN, ErrClosed)
	case t.subsystems[c.NQN] != nil || c.NQN == nvmetcp.DiscoveryNQN:
		return nil, fmt.Errorf("add subsystem %s: %w", c.NQN, ErrExists)
	}
	t.subsystems[c.NQN] = s
	return s, nil
}

// Subsystem returns the subsystem with a name, or nil.
func (t *Target) Subsystem(nqn block.NQN) *Subsystem {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.subsystems[nqn]; s != nil && !s.closed {
		return s
	}
	return nil
}

// Serve accepts connections from l until the Port or the Target is closed, which also
// closes l. Every port serves the discovery subsystem; others have to be linked. The error
// is ErrExists if the port's id is taken; l then stays open.
func (t *Target) Serve(l net.Listener, c PortConfig) (*Port, error) {
	p := &Port{t: t, cfg: c, l: l, linked: map[*Subsystem]struct{}{}}
	p.ana.Store(&map[uint32]nvmetcp.ANAState{})
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, fmt.Errorf("serve port %d: %w", c.ID, ErrClosed)
	}
	for other := range t.ports {
		if other.cfg.ID == c.ID {
			return nil, fmt.Errorf("serve port %d: %w", c.ID, ErrExists)
		}
	}
	for _, s := range c.Link {
		if s.closed || s.t != t {
			return nil, fmt.Errorf("serve port %d: link %s: %w", c.ID, s.cfg.NQN, ErrClosed)
		}
		p.linked[s] = struct{}{}
	}
	t.ports[p] = struct{}{}
	t.discoveryChangedLocked()
	p.accepting.Add(1)
	go p.accept()
	return p, nil
}

// Close closes the ports and the subsystems, as Subsystem.Close does, and waits until the
// target's goroutines have ended.
func (t *Target) Close(ctx context.Context) error {
	t.mu.Lock()
	t.closed = true
	ports, subsystems := slices.Collect(maps.Keys(t.ports)), slices.Collect(maps.Values(t.subsystems))
	t.mu.Unlock()
	var errs []error
	for _, s := range subsystems {
		s.shut()
	}
	for _, p := range ports {
		errs = append(errs, p.Close())
	}
	for _, s := range subsystems {
		errs = append(errs, s.Close(ctx))
	}
	t.limiter.close()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	buried := make(chan struct{})
	go func() {
		t.burials.Wait()
		close(buried)
	}()
	select {
	case <-buried:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close target: %w", ctx.Err())
	}
}

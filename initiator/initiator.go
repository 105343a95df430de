// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Config is what an agent is made with. Node, Manager, Version and BootID have
// no default; all else does.
type Config struct {
	Node    block.NodeName
	Labels  map[string]string // failure domains of this machine
	Version string
	Kernel  string // uname -r, for people
	BootID  string // /proc/sys/kernel/random/boot_id

	Manager pb.AgentsClient

	StateDir string // keeps the host id; /var/lib/weft/initiator
	RunDir   string // logs of degraded columns; on a tmpfs; /run/weft/initiator
	DevDir   string // device nodes are here, and weft/<volume>; /dev
	SysDir   string // /sys

	Window    time.Duration // how long a leg may be silent before it is lost; 2 s
	Lease     time.Duration // how long a lost leg may stay unrecorded before reads stop too; 8 s
	Probe     time.Duration // interval of probe reads; 500 ms
	KeepAlive time.Duration // keep_alive_tmo of connections; 2 s
	IOTimeout time.Duration // io_timeout of paths; 5 s
	IOQueues  int           // per connection; min(4, CPUs)

	Log *slog.Logger // nil discards
}

func (c Config) withDefaults() Config {
	c.StateDir = cmp.Or(c.StateDir, "/var/lib/weft/initiator")
	c.RunDir = cmp.Or(c.RunDir, "/run/weft/initiator")
	c.DevDir = cmp.Or(c.DevDir, "/dev")
	c.SysDir = cmp.Or(c.SysDir, "/sys")
	c.Window = cmp.Or(c.Window, 2*time.Second)
	c.Lease = cmp.Or(c.Lease, 8*time.Second)
	c.Probe = cmp.Or(c.Probe, 500*time.Millisecond)
	c.KeepAlive = cmp.Or(c.KeepAlive, 2*time.Second)
	c.IOTimeout = cmp.Or(c.IOTimeout, 5*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) check() error {
	if _, err := block.ParseNodeName(string(c.Node)); err != nil {
		return err
	}
	switch {
	case c.Manager == nil:
		return errors.New("manager: missing")
	case c.BootID == "":
		return errors.New("boot id: missing")
	case c.Lease < c.Window:
		return fmt.Errorf("lease %v: shorter than the window of %v", c.Lease, c.Window)
	}
	return nil
}

// Agent keeps the attachments of one machine. It is also a prometheus.Collector.
type Agent struct {
	cfg Config
}

// New checks cfg and makes an agent; it touches nothing. Run does the work.
func New(cfg Config) (*Agent, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("initiator config: %w", err)
	}
	return &Agent{cfg: cfg.withDefaults()}, nil
}

// Run keeps what the manager wants until ctx is done. It leaves all attachments
// as they are: I/O goes on without the agent, and the next one takes over.
func (a *Agent) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// SPDX-License-Identifier: Apache-2.0

// Package target is the agent of a machine that has drives. It takes drives in,
// carves legs of volumes out of them, and exports legs over NVMe-oF through the
// kernel, as the volume manager wants it.
package target

import (
	"context"
	"errors"
	"log/slog"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Config is what an agent is told at its start; all else it learns from the
// volume manager, from the labels on the drives and from the kernel.
type Config struct {
	Node    block.NodeName
	Labels  map[string]string // failure domains
	Portals []block.Portal    // where the node's legs are offered
	Manager pb.AgentsClient
	Version string
	Log     *slog.Logger // nil discards

	ConfigFS string // default /sys/kernel/config
	SysFS    string // default /sys
	ProcFS   string // default /proc
	DevFS    string // default /dev
}

// Agent reconciles one node with what the volume manager wants of it.
type Agent struct {
	config Config
}

// New checks the configuration. It touches nothing.
func New(c Config) (*Agent, error) {
	if _, err := block.ParseNodeName(string(c.Node)); err != nil {
		return nil, err
	}
	if c.Manager == nil {
		return nil, errors.New("target agent: Manager: missing")
	}
	return &Agent{config: c}, nil
}

// Run works until ctx ends. What the kernel exports stays as it is.
func (a *Agent) Run(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

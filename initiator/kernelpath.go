// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// kernelPath is the kernel's data path: its NVMe host and device-mapper.
type kernelPath struct {
	agent   *Agent
	kernel  *kernel
	uevents func(context.Context, func()) error // nil: none
	done    func() error                        // nil: nothing to close
	proves  bool                                // the kernel can prove this host's identity

	mu       sync.Mutex
	answered map[string]time.Time // by address of a portal: when a probe through it last succeeded
}

func newKernelPath(a *Agent, k *kernel) *kernelPath {
	return &kernelPath{agent: a, kernel: k, answered: map[string]time.Time{}}
}

// openKernelPath opens the kernel's interfaces, and refuses a kernel that cannot keep Weft's
// promises.
func openKernelPath(a *Agent) (*kernelPath, error) {
	cfg := a.cfg
	tree := fabrics.New(cfg.SysDir, cfg.DevDir)
	if err := tree.Check(); err != nil {
		return nil, err
	}
	client, err := dm.Open()
	if err != nil {
		return nil, err
	}
	lock, err := lockState(cfg.StateDir, unix.LOCK_SH)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	p := newKernelPath(a, &kernel{
		host: tree, dm: client, loops: &dm.Loops{Dev: cfg.DevDir, Sys: cfg.SysDir},
		runDir: cfg.RunDir, devDir: cfg.DevDir, sysDir: cfg.SysDir, book: a.names,
	})
	if p.proves, err = proves(tree); err != nil {
		a.log.Warn("cannot tell whether the kernel authenticates; it is not asked to", "err", err)
	}
	p.uevents, p.done = fabrics.Watch, func() error { return errors.Join(client.Close(), lock.Close()) }
	return p, nil
}

// proves reports whether the kernel can prove this host's identity to targets.
func proves(tree *fabrics.Tree) (bool, error) {
	features, err := tree.Supported()
	if err != nil {
		return false, err
	}
	symbols, err := os.Open("/proc/kallsyms")
	if err != nil {
		return false, err
	}
	defer symbols.Close()
	return features.Authenticate(symbols), nil
}

func (p *kernelPath) authenticates() bool { return p.proves }

func (p *kernelPath) severalPaths() bool { return capabilities.Multipath }

func (p *kernelPath) held() ([]block.VolumeID, error) { return mapped(p.kernel.dm.Devices) }

func (p *kernelPath) keeper(v block.VolumeID) volumeKeeper { return newKernelKeeper(p.agent, p, v) }

func (p *kernelPath) watch(ctx context.Context, poke func()) error {
	if p.uevents == nil {
		return nil
	}
	return p.uevents(ctx, poke)
}

func (p *kernelPath) close() error {
	if p.done == nil {
		return nil
	}
	return p.done()
}

// answers notes that a target answers at an address.
func (p *kernelPath) answers(at fabrics.Address) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answered[at.Traddr+" "+at.Trsvcid] = time.Now()
}

func (p *kernelPath) answeredSince(at fabrics.Address, t time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !t.IsZero() && p.answered[at.Traddr+" "+at.Trsvcid].After(t)
}

// found lists the volumes that have left something on this machine.
func (p *kernelPath) found() []block.VolumeID {
	all := map[block.VolumeID]bool{}
	for _, v := range p.kernel.noted() {
		all[v] = true
	}
	held, err := p.held()
	if err != nil {
		p.agent.log.Warn("look for attached volumes", "err", err)
	}
	for _, v := range held {
		all[v] = true
	}
	controllers, err := p.kernel.host.Controllers(nil)
	if err != nil {
		p.agent.log.Warn("look for connected legs", "err", err)
	}
	for _, c := range controllers {
		if v, _, _, _, err := block.ParseSubsystemNQN(c.NQN); err == nil && p.agent.host().Connects(c.NQN, c.HostNQN) {
			all[v] = true
		}
	}
	return slices.Collect(maps.Keys(all))
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"crypto/rand"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
)

// userPath is the user-space data path. It knows only what it was told since it started.
type userPath struct {
	*userspace.Path
	lock *os.File
}

// openUserPath takes the machine's identity for this process: two processes that connect as
// the same host would cut each other's connections.
func openUserPath(a *Agent) (*userPath, error) {
	c := a.cfg
	lock, err := lockState(c.StateDir, unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	export := c.Export
	if export == nil {
		o := blockdev.Options{Kind: c.BlockDevice, DevDir: c.DevDir, RunDir: c.RunDir, ResumeWithin: c.ResumeWithin, Holder: c.Holder, Log: c.Log}
		removeLeft(o, c.ResumeWithin > 0, a.log)
		export = userspace.Devices(o)
	}
	path := userspace.New(userspace.Config{
		Node: c.Node, Manager: c.Manager, Linked: a.linked.Load, Host: a.host, Export: export, Dial: c.Dial, Rail: c.Labels[railLabel], Near: c.Near,
		Window: c.Window, Lease: c.Lease, TargetPatience: c.TargetPatience, FailOver: c.FailOver, Probe: c.Probe, KeepAlive: c.KeepAlive, IOQueues: c.IOQueues, Clock: c.Clock,
		Evidence: a.evidence, Changed: a.changed, Meter: meter{a}, Log: c.Log,
	})
	return &userPath{Path: path, lock: lock}, nil
}

// removeLeft removes the devices of a killed process: they serve nothing, and their volumes
// may no longer be wanted here. With resume, those stay that wait for this process; what it does not
// take over, the holder removes.
func removeLeft(o blockdev.Options, resume bool, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	remove := blockdev.RemoveAll
	if resume {
		remove = blockdev.RemoveDead
	}
	if err := remove(ctx, o); err != nil {
		log.Warn("could not remove leftovers of an earlier process", "err", err)
	}
}

// authenticates is true: the protocol is in this process.
func (p *userPath) authenticates() bool { return true }

// found is empty: the volumes of an earlier process ended with it, also where their devices wait.
func (p *userPath) found() []block.VolumeID { return nil }

func (p *userPath) keeper(v block.VolumeID) volumeKeeper { return p.Path.Keeper(v) }

// held is empty for the same reason.
func (p *userPath) held() ([]block.VolumeID, error) { return nil, nil }

// watch has nothing to watch: connections notify their keepers themselves.
func (p *userPath) watch(context.Context, func()) error { return nil }

func (p *userPath) close() error { return p.lock.Close() }

// bootOfProcess is the boot id of a data path that ends with its process. The manager thus
// treats each run as a boot of the machine: it fences the writes under way of the previous
// run, and has the copies made equal.
func bootOfProcess() string {
	var random [16]byte
	rand.Read(random[:])
	return block.UUIDFromRandom(random).String()
}

// meter counts what the keepers of this process report.
type meter struct{ a *Agent }

func (m meter) LegLost()              { m.a.lostLeg() }
func (m meter) Resynced(n block.Size) { m.a.resynced(n) }
func (m meter) Stalled(detect, record, release time.Duration) {
	m.a.stalled(stall{detect: detect, record: record, release: release})
}

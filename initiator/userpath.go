// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"crypto/rand"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/initiator/volume"
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
		export = userspace.Devices(o, a.names)
	}
	config := a.userspace()
	config.Export, config.Evidence, config.Names = export, a.evidence, a.names
	return &userPath{Path: userspace.New(config), lock: lock}, nil
}

// userspace is the configuration of volumes in this process, without devices or notes.
func (a *Agent) userspace() userspace.Config {
	c := a.cfg
	return userspace.Config{
		Node: c.Node, Manager: c.Manager, Linked: a.linked.Load, Host: a.host, Dial: c.Dial, Rail: c.Labels[railLabel], Near: c.Near,
		Window: c.Window, Lease: c.Lease, TargetPatience: c.TargetPatience, FailOver: c.FailOver, Probe: c.Probe, IOQueues: c.IOQueues, Clock: c.Clock,
		Freezer: a.freezer, Changed: a.changed, Meter: meter{a}, Log: c.Log,
	}
}

// heals reports whether this process can copy to a volume's legs without a device.
func (a *Agent) heals() bool { return a.healing != nil || a.cfg.Datapath == User }

// keeper makes the keeper of a volume.
func (a *Agent) keeper(v block.VolumeID) volumeKeeper {
	if a.healing == nil {
		return a.path.keeper(v)
	}
	return newHealedKeeper(a.path.keeper(v), a.healing.Keeper(v))
}

// healedKeeper keeps a volume on the kernel's path, and in this process while it heals the volume: that
// makes no device, so it needs nothing of the kernel. Both are told what is wanted, one of them that nothing
// is. So what one of them has of an earlier epoch ends while the other begins.
type healedKeeper struct {
	attached, healing volumeKeeper
	once              sync.Once
	begun             chan struct{} // closed when the volume is first healed; before, healing does not run
}

func newHealedKeeper(attached, healing volumeKeeper) *healedKeeper {
	return &healedKeeper{attached: attached, healing: healing, begun: make(chan struct{})}
}

func (k *healedKeeper) Run(ctx context.Context) {
	var both sync.WaitGroup
	both.Go(func() { k.attached.Run(ctx) })
	both.Go(func() {
		select {
		case <-k.begun:
			k.healing.Run(ctx)
		case <-ctx.Done():
		}
	})
	both.Wait()
}

func (k *healedKeeper) Want(w *volume.Wanted, problem string, generation uint64) {
	if w != nil && w.Heal {
		k.once.Do(func() { close(k.begun) })
		k.attached.Want(nil, "", generation)
		k.healing.Want(w, problem, generation)
		return
	}
	k.attached.Want(w, problem, generation)
	if k.heals() {
		k.healing.Want(nil, "", generation)
	}
}

// heals reports whether the volume was healed since the keeper began.
func (k *healedKeeper) heals() bool {
	select {
	case <-k.begun:
		return true
	default:
		return false
	}
}

func (k *healedKeeper) Poke() {
	k.attached.Poke()
	if k.heals() {
		k.healing.Poke()
	}
}

// State has the report on the later of two epochs: the manager asks for no other.
func (k *healedKeeper) State() keeper.State {
	s := k.attached.State()
	if !k.heals() {
		return s
	}
	h := k.healing.State()
	s.Acted, s.Idle = min(s.Acted, h.Acted), s.Idle && h.Idle
	s.Notes, s.Paths = slices.Concat(s.Notes, h.Notes), slices.Concat(s.Paths, h.Paths)
	if h.Report.GetEpoch() > s.Report.GetEpoch() {
		s.Report, s.Left = h.Report, h.Left
	}
	return s
}

func (k *healedKeeper) Figures() *keeper.Figures {
	if f := k.attached.Figures(); f != nil {
		return f
	}
	if !k.heals() {
		return nil
	}
	return k.healing.Figures()
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

func (p *userPath) severalPaths() bool { return false }

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

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// TargetPatience is how long a target may answer nothing and accept no connection before its legs are
// lost, by default.
const TargetPatience = 700 * time.Millisecond

// FailOver is how long a path may be silent before it moves to another portal.
const FailOver = 250 * time.Millisecond

// Config configures a Path. Node, Manager and Host have no default.
type Config struct {
	Node    block.NodeName
	Manager pb.AgentsClient
	Linked  func() bool       // whether the manager has answered on the agent's stream; nil: always
	Host    func() block.Host // this machine's identity

	Window         time.Duration // how long a leg may be silent before it is lost; 2 s
	Lease          time.Duration // how long a lost leg may stay unrecorded before all I/O stops; 8 s
	TargetPatience time.Duration // how long a whole target may be silent before its legs are lost; at most Window
	FailOver       time.Duration // how long a path may be silent before it moves to another portal; 250 ms
	Probe          time.Duration // interval of probe reads; 500 ms
	KeepAlive      time.Duration // keep-alive timeout of connections; 2 s
	IOQueues       int           // per connection; 1

	Clock func() time.Time // the lease clock; time.Now

	Export Export         // makes the volumes' devices; Devices(blockdev.Options{}, Names)
	Dial   Dial           // connects to targets; net.Dialer
	Rail   string         // the rail that this host prefers; empty: none
	Near   []netip.Prefix // networks that it prefers where the rail decides nothing

	Evidence *evidence.Book // notes which legs are in sync; nil: no notes
	Names    *keeper.Names  // the names of devices; nil: no notes

	Freezer keeper.Freezer // freezes file systems; nil: it cannot be done

	Changed func()       // called when a keeper's State has changed; may be nil
	Meter   keeper.Meter // may be nil
	Log     *slog.Logger
}

// Export makes a volume available as a block device. It returns when the device can be used, or with
// an error, also when ctx ends.
type Export func(ctx context.Context, volume block.Device, of Of) (Exported, error)

// Of says whose device is made.
type Of struct {
	Volume block.VolumeID
	Name   block.VolumeName // the volume's

	// Resume: a device that an earlier process made with the same one may go on, with its users; empty:
	// none may.
	Resume string
}

// Dial connects to a target's address.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// Devices makes kernel block devices as o says, with the volume's name or, if that is another volume's
// here, another one. They outlive this process if o.ResumeWithin is not 0.
func Devices(o blockdev.Options, names *keeper.Names) Export {
	return func(ctx context.Context, volume block.Device, of Of) (Exported, error) {
		e, err := blockdev.Export(ctx, volume, of.options(o, names))
		if err != nil {
			return nil, err
		}
		return blockDevice{e}, nil
	}
}

func (of Of) options(o blockdev.Options, names *keeper.Names) blockdev.Options {
	o.Name, o.Names = of.Name, names.Of(of.Volume, of.Name)
	o.Chosen = func(chosen block.VolumeName) error { return names.Chosen(of.Volume, of.Name, chosen) }
	if o.ResumeWithin != 0 {
		o.Resume = of.Resume
	}
	return o
}

type blockDevice struct{ *blockdev.Exported }

func (d blockDevice) Number() string { return d.Exported.Number().String() }

// Exported is a block device.
type Exported interface {
	// Path is what users open.
	Path() string

	// Number is the kernel's number of the device, "7:4"; empty if it is not a kernel device.
	Number() string

	// Resize makes the device as large as the volume is now; its users notice no interruption.
	Resize(ctx context.Context) error

	// Close removes the device. If somebody has it open, it returns a blockdev.ErrBusy that
	// names them, and the device continues to serve; with force, its users get errors instead.
	// After nil the volume gets no more I/O. It can be called again.
	Close(ctx context.Context, force bool) error

	// Done is closed when the device is no longer served, whoever ended it.
	Done() <-chan struct{}
}

// noDevice stands for the device of a volume that a host only copies to: nobody can open it.
type noDevice struct{}

func (noDevice) Path() string                      { return "" }
func (noDevice) Number() string                    { return "" }
func (noDevice) Resize(context.Context) error      { return nil }
func (noDevice) Close(context.Context, bool) error { return nil }
func (noDevice) Done() <-chan struct{}             { return nil }

// survivor is an Exported that can wait for the next process with its users.
type survivor interface {
	// Survives reports whether it would.
	Survives() bool

	// Leave ends this process's part in it. What the volume completes from then on is not told to
	// users, and nothing else may be called afterwards.
	Leave()
}

type noMeter struct{}

func (noMeter) LegLost()                      {}
func (noMeter) Resynced(block.Size)           {}
func (noMeter) Stalled(_, _, _ time.Duration) {}

// Path makes keepers.
type Path struct {
	cfg       Config
	dial      dial
	reachable func(ctx context.Context, portal string) error // whether a portal can be reached

	mu      sync.Mutex
	givenUp map[block.VolumeID]epochOver // it outlives a volume's keeper
}

// epochOver is the last epoch of a volume that was given up.
type epochOver struct {
	epoch block.Epoch
	why   *volume.Over
}

func (p *Path) gaveUp(v block.VolumeID, e block.Epoch, why *volume.Over) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.givenUp[v] = epochOver{e, why}
}

// over is why an epoch of a volume is not taken up again; nil if it may be. Older epochs are
// forgotten.
func (p *Path) over(v block.VolumeID, e block.Epoch) *volume.Over {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, ok := p.givenUp[v]
	switch {
	case !ok || last.epoch > e:
		return nil
	case last.epoch < e:
		delete(p.givenUp, v)
		return nil
	}
	return last.why
}

// New makes a Path; it touches nothing.
func New(cfg Config) *Path {
	cfg.Window = cmp.Or(cfg.Window, 2*time.Second)
	cfg.Lease = cmp.Or(cfg.Lease, 8*time.Second)
	cfg.TargetPatience = min(cmp.Or(cfg.TargetPatience, TargetPatience), cfg.Window)
	cfg.FailOver = cmp.Or(cfg.FailOver, FailOver)
	cfg.Probe = cmp.Or(cfg.Probe, 500*time.Millisecond)
	cfg.KeepAlive = cmp.Or(cfg.KeepAlive, 2*time.Second)
	cfg.IOQueues = cmp.Or(cfg.IOQueues, 1)
	if cfg.Export == nil {
		cfg.Export = Devices(blockdev.Options{Log: cfg.Log}, cfg.Names)
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Changed == nil {
		cfg.Changed = func() {}
	}
	if cfg.Meter == nil {
		cfg.Meter = noMeter{}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Path{cfg: cfg, dial: dialHost(cfg.Dial), reachable: keeper.Reach(cfg.Dial), givenUp: map[block.VolumeID]epochOver{}}
}

// Keeper makes the keeper of a volume; Run does the work.
func (p *Path) Keeper(v block.VolumeID) *Keeper { return newKeeper(p, v) }

var _ interface {
	Run(context.Context)
	Want(*volume.Wanted, string, uint64)
	Poke()
	State() keeper.State
	Figures() *keeper.Figures
} = (*Keeper)(nil)

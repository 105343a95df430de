// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/evidence"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Config is what a Path is made with. Node, Manager and Host have no default.
type Config struct {
	Node    block.NodeName
	Manager pb.AgentsClient
	Host    func() block.Host // this machine's identity

	Window    time.Duration // how long a leg may be silent before it is lost; 2 s
	Lease     time.Duration // how long a lost leg may stay unrecorded before all I/O stops; 8 s
	Probe     time.Duration // interval of probe reads; 500 ms
	KeepAlive time.Duration // keep-alive timeout of connections; 2 s
	IOQueues  int           // per connection; 1

	Clock func() time.Time // what leases go by; time.Now

	Export Export // makes the devices of volumes; Devices(blockdev.Options{})
	Dial   Dial   // the way to targets; net.Dialer

	Evidence *evidence.Book // where it is noted which legs are in sync; nil: nowhere

	Changed func()           // called when a keeper's State has changed; may be nil
	Meter   attachment.Meter // may be nil
	Log     *slog.Logger
}

// Export gives a volume out as the block device of a name. It returns when the
// device can be used, or with an error, also when ctx ends.
type Export func(ctx context.Context, volume block.Device, name block.VolumeName) (Exported, error)

// Dial connects to a target's address.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// Devices makes devices of the kernel's as o says, but for the name.
func Devices(o blockdev.Options) Export {
	return func(ctx context.Context, volume block.Device, name block.VolumeName) (Exported, error) {
		own := o
		own.Name = name
		e, err := blockdev.Export(ctx, volume, own)
		if err != nil {
			return nil, err
		}
		return blockDevice{e}, nil
	}
}

type blockDevice struct{ *blockdev.Exported }

func (d blockDevice) Number() string { return d.Exported.Number().String() }

// Exported is a block device.
type Exported interface {
	// Path is what users open.
	Path() string

	// Number is the kernel's number of the device, "7:4"; empty if it is none of the
	// kernel's.
	Number() string

	// Resize makes the device as large as the volume is now; whoever has it open
	// goes on.
	Resize(ctx context.Context) error

	// Close takes the device away; if somebody has it open it is a blockdev.ErrBusy
	// that says who, and the device serves on. With force, whoever has it open
	// gets errors. After nil the volume gets no more I/O. It can be called again.
	Close(ctx context.Context, force bool) error

	// Done is closed when the device is served no more, whoever ended it.
	Done() <-chan struct{}
}

type noMeter struct{}

func (noMeter) LegLost()                      {}
func (noMeter) Resynced(block.Size)           {}
func (noMeter) Stalled(_, _, _ time.Duration) {}

// Path makes keepers.
type Path struct {
	cfg  Config
	dial dial

	mu      sync.Mutex
	givenUp map[block.VolumeID]epochOver // what outlives a volume's keeper
}

// epochOver is the last epoch of a volume that was given up.
type epochOver struct {
	epoch block.Epoch
	why   *pb.GaveUp
}

func (p *Path) gaveUp(v block.VolumeID, e block.Epoch, why *pb.GaveUp) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.givenUp[v] = epochOver{e, why}
}

// over is why an epoch of a volume is not taken up again; nil if it may be. That an
// older one was is forgotten.
func (p *Path) over(v block.VolumeID, e block.Epoch) *pb.GaveUp {
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
	cfg.Probe = cmp.Or(cfg.Probe, 500*time.Millisecond)
	cfg.KeepAlive = cmp.Or(cfg.KeepAlive, 2*time.Second)
	cfg.IOQueues = cmp.Or(cfg.IOQueues, 1)
	if cfg.Export == nil {
		cfg.Export = Devices(blockdev.Options{Log: cfg.Log})
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
	return &Path{cfg: cfg, dial: dialHost(cfg.Dial), givenUp: map[block.VolumeID]epochOver{}}
}

// Keeper makes the keeper of a volume; Run does the work.
func (p *Path) Keeper(v block.VolumeID) *Keeper { return newKeeper(p, v) }

var _ interface {
	Run(context.Context)
	Want(*attachment.Wanted, string, uint64)
	Poke()
	State() attachment.State
} = (*Keeper)(nil)

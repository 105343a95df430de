// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
)

// reportInterval is how often the whole state is reported when nothing changes:
// the manager calls an agent offline after 5 s without.
const reportInterval = time.Second

// Run keeps what the manager wants until ctx is done. It leaves all attachments
// as they are: I/O goes on without the agent, and the next one takes over.
func (a *Agent) Run(ctx context.Context) error {
	if a.machine == nil {
		m, closeDM, err := openMachine(a.cfg)
		if err != nil {
			return fmt.Errorf("initiator: %w", err)
		}
		defer closeDM()
		a.machine = m
	}
	var random [16]byte
	rand.Read(random[:])
	identity, err := fabrics.HostIdentity(a.cfg.StateDir, random)
	if err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	a.mu.Lock()
	a.identity = identity
	a.mu.Unlock()

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.keep(ctx) })
	g.Go(func() error { return a.talk(ctx) })
	if a.uevents != nil {
		g.Go(func() error { return a.uevents(ctx, a.pokeAll) })
	}
	err = g.Wait()
	if ctx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
		return nil
	}
	return err
}

// keep owns the keepers: one per volume that is wanted or has anything here.
func (a *Agent) keep(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	running := map[block.VolumeID]chan struct{}{} // closed when its keeper has ended
	stop := map[block.VolumeID]context.CancelFunc{}
	start := func(v block.VolumeID) *keeper {
		a.mu.Lock()
		k := a.keepers[v]
		if k == nil {
			k = newKeeper(a, v)
			a.keepers[v] = k
		}
		a.mu.Unlock()
		if running[v] == nil {
			ended := make(chan struct{})
			own, cancel := context.WithCancel(ctx)
			running[v], stop[v] = ended, cancel
			go func() { defer close(ended); k.run(own) }()
		}
		return k
	}
	defer func() {
		cancel()
		for _, ended := range running {
			<-ended
		}
	}()
	for _, v := range a.found() {
		start(v)
	}
	ticker := time.NewTicker(reportInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case w := <-a.wanted:
			a.share(w, start)
		case <-ticker.C:
			for _, v := range a.idle() {
				stop[v]()
				<-running[v]
				delete(running, v)
				delete(stop, v)
				a.mu.Lock()
				delete(a.keepers, v)
				a.mu.Unlock()
			}
		}
	}
}

// share tells each keeper its part of the wanted state.
func (a *Agent) share(all *pb.InitiatorWanted, start func(block.VolumeID) *keeper) {
	wants, problems := map[block.VolumeID]*attachment.Wanted{}, map[block.VolumeID]string{}
	for _, p := range all.GetAttachments() {
		v, err := block.ParseVolumeID(p.GetVolumeId())
		if err != nil {
			a.log.Error("wanted attachment can not be read", "err", err)
			continue
		}
		if p.GetBootId() != a.cfg.BootID {
			continue // granted to a boot that is over; the manager will grant anew
		}
		w, err := attachment.Parse(p)
		wants[v] = w
		if err != nil {
			problems[v] = fmt.Sprintf("wanted state can not be acted on: %v", err)
		}
		start(v)
	}
	a.mu.Lock()
	a.latest = all.GetGeneration()
	keepers := maps.Clone(a.keepers)
	a.mu.Unlock()
	for v, k := range keepers {
		k.want(wants[v], problems[v], all.GetGeneration())
	}
}

// found lists the volumes that this machine has anything of.
func (a *Agent) found() []block.VolumeID {
	all := map[block.VolumeID]bool{}
	for _, v := range a.machine.noted() {
		all[v] = true
	}
	devices, err := a.machine.dm.Devices(raid.UUIDPrefix)
	if err != nil {
		a.log.Warn("look for attached volumes", "err", err)
	}
	for _, d := range devices {
		if id := d.UUID[len(raid.UUIDPrefix):]; len(id) >= 36 {
			if v, err := block.ParseVolumeID(id[:36]); err == nil {
				all[v] = true
			}
		}
	}
	controllers, err := a.machine.host.Controllers()
	if err != nil {
		a.log.Warn("look for connected legs", "err", err)
	}
	for _, c := range controllers {
		if v, _, _, _, err := block.ParseSubsystemNQN(c.NQN); err == nil && c.HostNQN == a.host().NQN {
			all[v] = true
		}
	}
	return slices.Collect(maps.Keys(all))
}

func (a *Agent) idle() []block.VolumeID {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []block.VolumeID
	for v, k := range a.keepers {
		k.mu.Lock()
		if k.idle && k.wanted == nil && k.known {
			all = append(all, v)
		}
		k.mu.Unlock()
	}
	return all
}

func (a *Agent) pokeAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range a.keepers {
		k.poke()
	}
}

// ---- the stream ----

// talk keeps a stream to the manager, for ever.
func (a *Agent) talk(ctx context.Context) error {
	const shortest, longest = 200 * time.Millisecond, 2 * time.Second
	pause := shortest
	for {
		began := time.Now()
		err := a.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > longest {
			pause = shortest
		}
		a.log.Warn("no stream to the volume manager", "err", err, "again_in", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, longest)
	}
}

// session is one stream: reports go out on change and once a second, wanted
// states come in.
func (a *Agent) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := a.cfg.Manager.Initiator(ctx)
	if err != nil {
		return err
	}
	received := make(chan error, 1)
	go func() {
		for {
			w, err := stream.Recv()
			if err != nil {
				received <- err
				return
			}
			select {
			case a.wanted <- w:
			case <-ctx.Done():
				received <- ctx.Err()
				return
			}
		}
	}()
	defer func() { cancel(); <-received }()
	ticker := time.NewTicker(reportInterval)
	defer ticker.Stop()
	for {
		if err := stream.Send(a.report()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-received:
			received <- err // for the deferred wait
			return err
		case <-ticker.C:
		case <-a.news:
		}
	}
}

// changed has the state reported soon.
func (a *Agent) changed() {
	select {
	case a.news <- struct{}{}:
	default:
	}
}

func (a *Agent) report() *pb.InitiatorReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := &pb.InitiatorReport{
		Node: string(a.cfg.Node), Labels: a.cfg.Labels, BootId: a.cfg.BootID, Version: a.cfg.Version, Kernel: a.cfg.Kernel,
		Host: &pb.Host{Nqn: string(a.identity.NQN), Id: a.identity.ID.String()}, Generation: a.latest,
	}
	for _, v := range slices.SortedFunc(maps.Keys(a.keepers), func(x, y block.VolumeID) int { return slices.Compare(x.UUID[:], y.UUID[:]) }) {
		k := a.keepers[v]
		k.mu.Lock()
		r.Generation = min(r.Generation, k.acted)
		if k.report != nil && !k.idle && k.report.GetEpoch() != 0 {
			r.Attachments = append(r.Attachments, k.report)
		}
		r.Problems = append(r.Problems, k.problems...)
		k.mu.Unlock()
	}
	return r
}

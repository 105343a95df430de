// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
)

// reportInterval is how often the whole state is reported when nothing changes: the manager
// calls an agent offline after 5 s without a report.
const reportInterval = time.Second

// farewell is how long an agent that shuts down waits until the manager has taken note of the
// detached volumes.
const farewell = 2 * time.Second

// Run keeps what the manager wants until ctx is done. What remains then depends on the data
// path. The kernel's serves on without the agent, and the next agent takes over. The
// user-space path ends with this process: volumes that nobody has open are detached first, so
// that their copies need not be made equal again.
func (a *Agent) Run(ctx context.Context) error {
	held, err := a.cfg.lock(ctx)
	if err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	defer held.Release()
	a.evidence.Open()
	if a.path == nil {
		path, err := a.open()
		if err != nil {
			return fmt.Errorf("initiator: %w", err)
		}
		a.path = path
	}
	defer a.path.close()
	a.freezer.Recover() // now that no other process of this agent is left
	var random [16]byte
	rand.Read(random[:])
	identity, err := fabrics.HostIdentity(a.cfg.StateDir, random)
	if err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	cluster, err := readCluster(a.cfg.StateDir)
	if err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	if err := a.newest.Load(a.cfg.newestFile()); err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	a.mu.Lock()
	a.identity, a.cluster.own = identity, cluster
	a.mu.Unlock()

	// The stream outlives the keepers, because it reports what they have detached.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	g, life := errgroup.WithContext(life)
	keeping, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(life, stop)
	g.Go(func() error { defer end(); return a.keep(keeping) })
	g.Go(func() error { return a.talk(life) })
	g.Go(func() error { a.sendFigures(life); return nil })
	g.Go(func() error { a.answerSupport(life); return nil })
	g.Go(func() error { return a.path.watch(life, a.pokeAll) })
	err = g.Wait()
	if ctx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
		return nil
	}
	return err
}

// keep owns the keepers: one for each volume that is wanted or has left something here.
func (a *Agent) keep(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	running := map[block.VolumeID]chan struct{}{} // closed when its keeper has ended
	stop := map[block.VolumeID]context.CancelFunc{}
	start := func(v block.VolumeID) {
		a.mu.Lock()
		k := a.keepers[v]
		if k == nil {
			k = a.keeper(v)
			a.keepers[v] = k
		}
		a.mu.Unlock()
		if running[v] == nil {
			ended := make(chan struct{})
			own, cancel := context.WithCancel(ctx)
			running[v], stop[v] = ended, cancel
			go func() { defer close(ended); k.Run(own) }()
		}
	}
	defer func() {
		cancel()
		for _, ended := range running {
			<-ended
		}
	}()
	for _, v := range a.path.found() {
		start(v)
	}
	ticker := beat.NewTicker(reportInterval)
	defer ticker.Stop()
	var last *pb.InitiatorWanted
	for {
		select {
		case <-ctx.Done():
			a.leave(running)
			return nil
		case last = <-a.wanted:
			a.share(last, start)
		case <-a.near.changed:
			a.share(last, start)
		case <-ticker.C:
			a.lookNear(last)
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

// leave waits until the keepers have ended, and then briefly until the manager has taken note
// of the volumes that they detached.
func (a *Agent) leave(running map[block.VolumeID]chan struct{}) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for _, one := range running {
			<-one
		}
	}()
	var patience <-chan time.Time
	for {
		select {
		case <-ended:
			ended, patience = nil, time.After(farewell)
		case w := <-a.wanted:
			a.share(w, func(block.VolumeID) {})
		case <-patience:
			return
		}
		if ended == nil && !a.unheard() {
			return
		}
	}
}

// unheard reports whether the manager still lists an attachment that has been detached.
func (a *Agent) unheard() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for v, k := range a.keepers {
		if s := k.State(); s.Left && a.listed[v] == block.Epoch(s.Report.GetEpoch()) {
			return true
		}
	}
	return false
}

// share gives each keeper its part of the wanted state, if that comes from this cluster.
func (a *Agent) share(all *pb.InitiatorWanted, start func(block.VolumeID)) {
	if !a.obeys(all) {
		return
	}
	wants, problems := map[block.VolumeID]*volume.Wanted{}, map[block.VolumeID]string{}
	listed := map[block.VolumeID]block.Epoch{}
	for _, p := range all.GetAttachments() {
		v, err := block.ParseVolumeID(p.GetVolumeId())
		if err != nil {
			a.log.Error("wanted attachment is malformed", "err", err)
			continue
		}
		if p.GetBootId() != a.cfg.BootID || p.GetHealerId() != "" && p.GetHealerId() != a.healer {
			continue // granted to an earlier boot or process; the manager will grant it again
		}
		listed[v] = block.Epoch(p.GetEpoch())
		w, err := keeper.Parse(p)
		wants[v] = w
		if err != nil {
			problems[v] = fmt.Sprintf("wanted state cannot be applied: %v", err)
		} else {
			a.prefer(w)
		}
		start(v)
	}
	a.mu.Lock()
	a.latest, a.listed = all.GetGeneration(), listed
	keepers := maps.Clone(a.keepers)
	a.mu.Unlock()
	for v, k := range keepers {
		k.Want(wants[v], problems[v], all.GetGeneration())
	}
}

func (a *Agent) idle() []block.VolumeID {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []block.VolumeID
	for v, k := range a.keepers {
		if k.State().Idle {
			all = append(all, v)
		}
	}
	return all
}

func (a *Agent) pokeAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range a.keepers {
		k.Poke()
	}
}

// ---- the stream ----

// talk keeps a stream to the manager, reconnecting forever.
func (a *Agent) talk(ctx context.Context) error {
	var pauses managers.Pauses
	for {
		began := time.Now()
		err := a.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		pause := pauses.After(began, time.Now(), mathrand.Float64())
		if errors.Is(err, authority.ErrReplaced) {
			a.refuse(a.newest.Newest().Cluster.String(), err.Error())
			if a.cfg.Next != nil {
				a.cfg.Next()
			}
		} else if !a.refusedBy(err) {
			a.log.Warn("no stream to the volume manager", "err", err, "again_in", pause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// session is one stream. It sends a report on each change and at least once a second, and
// receives wanted states.
func (a *Agent) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	open, err := a.cfg.Manager.Initiator(ctx)
	if err != nil {
		return err
	}
	stream := parts.Reporting(open)
	received := make(chan error, 1)
	go func() {
		for {
			w, err := stream.Recv()
			if err == nil {
				err = a.newest.Check(authority.OrderOf(w)) // after an error the previous wanted state stays in force
			}
			if err != nil {
				received <- err
				return
			}
			a.linked.Store(true)
			select {
			case a.wanted <- w:
			case <-ctx.Done():
				received <- ctx.Err()
				return
			}
		}
	}()
	defer func() { cancel(); <-received; a.linked.Store(false) }()
	ticker := beat.NewTicker(reportInterval)
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

// changed makes the state be reported soon.
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
		Node: string(a.cfg.Node), Labels: a.cfg.Labels, BootId: a.cfg.BootID, Version: a.cfg.Version, Level: uint32(block.KnownLevel), Kernel: a.cfg.Kernel,
		Host: &pb.Host{Nqn: string(a.identity.NQN), Id: a.identity.ID.String()}, Generation: a.latest,
		Scale:    parts.Understood(),
		Evidence: a.evidence.Report(), Freezes: true,
	}
	if a.heals() {
		r.HealerId = a.healer
	}
	if a.path != nil {
		r.Authenticates, r.SeveralPaths = a.path.authenticates(), a.path.severalPaths()
	}
	if o := a.newest.Newest(); o.Term > 0 {
		r.Term, r.TermClusterId = o.Term, o.Cluster.String()
	}
	if !a.cluster.own.IsZero() {
		r.ClusterId = a.cluster.own.String()
	}
	if a.cluster.why != "" {
		r.Problems = append(r.Problems, a.problemLocked("cluster "+a.cluster.other, "follow its volume manager", a.cluster.why))
	}
	for _, v := range slices.SortedFunc(maps.Keys(a.keepers), func(x, y block.VolumeID) int { return slices.Compare(x.UUID[:], y.UUID[:]) }) {
		s := a.keepers[v].State()
		r.Generation = min(r.Generation, s.Acted)
		if s.Report != nil {
			r.Attachments = append(r.Attachments, s.Report)
		}
		for _, n := range s.Notes {
			r.Problems = append(r.Problems, a.problemLocked("attachment "+v.String(), "keep the volume", n))
		}
		for _, p := range s.Paths {
			r.Problems = append(r.Problems, a.problemLocked("paths "+v.String(), "choose among portals", p))
		}
	}
	return r
}

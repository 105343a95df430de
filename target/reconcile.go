// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/discovery"
	"weft.dev/weft/target/nvmet"
)

// reconciler observes, plans, applies and reports, in one goroutine.
type reconciler struct {
	agent  *Agent
	base   *pb.TargetReport
	drives *openDrives
	health *monitor
	names  naming
	jobs   *jobs
	legDir string

	discovery *discovery.Controller

	mapper  lazy[mapper]
	exports lazy[exporter]
	process *lazy[exporter] // beside the kernel's; nil: there are none
	lists   *lists          // nil: none are kept apart from the exports

	openLists func() *lists // is called once; nil: it was, or there are none
	replace   *nvmet.Replacements
	changing  map[block.NQN]changing

	left     bool             // the data path of an earlier agent is empty
	cluster  block.ClusterID  // of what is exported
	judged   *pb.TargetWanted // the last wanted state that was judged and, if refused, logged
	failures []nvmet.Failure  // of the last Apply
	sizes    sizes
	reached  uint64 // generation
	since    map[problem]time.Time
	last     *pb.TargetReport
}

func newReconciler(a *Agent, base *pb.TargetReport, drives *openDrives, health *monitor) *reconciler {
	legDir := a.config.legDir()
	r := &reconciler{
		agent: a, base: base, drives: drives, health: health, names: a.kernel.names, legDir: legDir,
		mapper: lazy[mapper]{open: a.kernel.mapper}, exports: lazy[exporter]{open: a.kernel.exports},
		since: map[problem]time.Time{}, sizes: sizes{},
	}
	if a.kernel.process != nil {
		r.process = &lazy[exporter]{open: a.kernel.process}
	}
	r.openLists = a.kernel.lists
	wake := func() { poke(a.wake) }
	r.replace = nvmet.NewReplacements(wake)
	t := tools{hardware: a.kernel.hardware, mapper: r.mapper.get, drives: drives, names: r.names, progress: a.setProgress, dial: a.config.Dial, boot: base.GetBootId()}
	do := func(ctx context.Context, o order) error {
		err := t.do(ctx, o)
		switch o.(type) {
		case formatDrive, eraseDrive:
			poke(a.rescan)
		}
		return err
	}
	putLegs := func(_ context.Context, all []order) error { return t.putLegs(all) }
	r.jobs = newJobs(do, putLegs, wake, a.log)
	return r
}

// round runs the loop once, and reports whether it changed something that deserves another look at
// once. Jobs trigger a round when they end.
func (r *reconciler) round(ctx context.Context) bool {
	quiet, under := r.jobs.settled(), r.jobs.keys() // before observing: a job that ends meanwhile may not be observed
	devices, drives, scanned := r.drives.list()
	if !scanned {
		return false // a report now would list the drives as gone
	}
	message := r.agent.currentWanted()
	r.beginLists()
	s, problems := r.observe(ctx, r.health.with(devices), drives, under)
	if ctx.Err() != nil {
		return false // the observation was interrupted and says nothing
	}
	r.cluster = s.clusterOfExports(r.legDir)
	want, why := parseWanted(message).ofCluster(r.cluster)
	if message != nil && message != r.judged {
		r.judged = message
		r.agent.obeyed(message.GetClusterId(), why)
	}
	want = want.noted(r.agent.newest, message)
	r.beginReplacing(&s, want)
	p := makePlan(s, want, r.legDir, r.agent.config.Portals)
	p.problems = append(p.problems, problems...)
	if want.cluster.IsZero() {
		r.publish(s, p)
		return false
	}
	r.discovery.Tell(message)
	if r.left = r.agent.leaving.Load() && r.nothingLeft(s); r.left {
		return false
	}
	started := r.jobs.start(ctx, p.orders)
	r.publish(s, p)
	if r.export(ctx, s, p) {
		return true
	}
	// Reached means that the report shows the outcome of that wanted state.
	if quiet && !started && s.exports != nil && s.mapped != nil {
		r.reached = message.GetGeneration()
		r.agent.settleIf(p)
	}
	r.publish(s, p)
	return false
}

func (r *reconciler) closeLists() {
	if r.lists == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeFor)
	defer cancel()
	if err := r.lists.close(ctx); err != nil {
		r.agent.log.Warn("lists of writes not closed", "err", err)
	}
}

// beginLists opens the lists of writes. That takes a while, so hosts whose exports are taken over from another
// process do not wait for it.
func (r *reconciler) beginLists() {
	if r.openLists == nil || !r.agent.isSettled() {
		return
	}
	r.lists, r.openLists = r.openLists(), nil
	r.lists.offer(r.replace.Ask)
}

// asks reports whether hosts can ask that their exports change hands, now or as soon as the lists are opened.
func (r *reconciler) asks() bool { return r.lists != nil || r.openLists != nil }

// nothingLeft reports whether the data path is empty, for good: an export that is being replaced comes back.
func (r *reconciler) nothingLeft(s seen) bool {
	return s.exportsNothing() && r.replace.None() && r.jobs.none()
}

// exportsNothing reports whether none of our exports is left, nor still draining.
func (s seen) exportsNothing() bool {
	return s.exports != nil && !slices.ContainsFunc(s.exports.Subsystems, func(x nvmet.Subsystem) bool { return x.NQN.Ours() })
}

// export does the missing steps in nvmet, and reports whether there were any.
func (r *reconciler) export(ctx context.Context, s seen, p plan) bool {
	r.failures = nil
	if s.exports == nil || ctx.Err() != nil {
		return false
	}
	r.lists.serve(ctx, p.exports, p.asked) // before hosts can write, and withdrawn before they cannot
	steps, own := nvmet.Diff(*s.kernel, p.exports), []nvmet.Step(nil)
	if s.process != nil {
		own = nvmet.Diff(*s.process, p.process)
	}
	if len(s.replacing) > 0 {
		r.replace.Settle(*s.exports, merged(p.exports, p.process), slices.Concat(steps, own), p.undecided())
	}
	if set := r.agent.kernel.paths; set != nil {
		set(p.paths)
	}
	done := r.change(ctx, &r.exports, steps)
	if s.process != nil {
		done += r.change(ctx, r.process, own)
	}
	if done > 0 {
		r.agent.log.Info("exports changed", "steps", done, "failed", len(r.failures))
		return true // a namespace to revalidate may be gone now
	}
	return r.revalidate(ctx, s, p.resizes)
}

// beginReplacing begins the replacements that hosts have asked for, as far as the wanted state lets them.
func (r *reconciler) beginReplacing(s *seen, want wanted) {
	if s.exports == nil {
		return
	}
	s.replacing = r.replace.Begin(*s.exports, func(n block.NQN) (has, to block.ServedBy) {
		if i := slices.IndexFunc(want.exports, func(e wantedExport) bool { return e.GetNqn() == string(n) }); i >= 0 && s.beside {
			return s.partOf(n), want.exports[i].wantedPart()
		}
		return
	})
	now, all := time.Now(), map[block.NQN]changing{}
	for _, e := range want.exports {
		n := block.NQN(e.GetNqn())
		was, changes := r.changing[n]
		_, replaced := s.replacing[n]
		if ended := s.partOf(n) == block.SamePart; s.changes(e) || changes && replaced && ended {
			if !changes || was.ended != ended {
				was = changing{now, ended}
				time.AfterFunc(changeAfter, func() { poke(r.agent.wake) })
			}
			all[n] = was
		}
	}
	r.changing = all
	s.patient = func(n block.NQN) bool { c, changes := all[n]; return changes && now.Sub(c.since) < changeAfter }
}

// changing is an export that changes hands: it waits for its host, or has ended in one part and is not there in the
// other one yet.
type changing struct {
	since time.Time
	ended bool
}

// undecided are the exports that change hands, and have neither done so nor failed.
func (p *plan) undecided() map[block.NQN]bool {
	names := namesOf(p.between)
	for _, n := range p.awaiting {
		names[n] = true
	}
	return names
}

func namesOf(all []nvmet.Subsystem) map[block.NQN]bool {
	names := map[block.NQN]bool{}
	for _, s := range all {
		names[s.NQN] = true
	}
	return names
}

// change does steps in one of the two trees, and returns how many were done.
func (r *reconciler) change(ctx context.Context, exports *lazy[exporter], steps []nvmet.Step) (done int) {
	e, err := exports.get()
	if len(steps) == 0 || err != nil {
		return 0
	}
	done, failures := e.Apply(ctx, steps, patience)
	r.failures = append(r.failures, failures...)
	return done
}

// observe reads the state of the node; the problems tell what could not be read. under are the keys of the
// jobs that were running before the drives were looked at.
func (r *reconciler) observe(ctx context.Context, devices []*pb.Device, drives map[block.DriveID]driveSeen, under map[string]bool) (seen, []problem) {
	s := seen{devices: devices, drives: drives}
	var problems []problem
	note := func(object string, err error) {
		if err != nil {
			problems = append(problems, problem{object, "look at", err.Error()})
		}
	}
	for id, d := range s.drives {
		if o, since, hung := r.jobs.hung(driveKey(id), deadAfter); hung && d.err == "" {
			d.err = fmt.Sprintf("it does not answer, since %s: %v", since.UTC().Format(time.RFC3339), o)
			s.drives[id] = d
		}
	}
	s.zeroing = func(id block.LegID) bool { return r.jobs.under(zeroLeg{leg: id}.key()) }
	s.mapping = func(id block.LegID) bool { return r.jobs.under(legKey(id)) }
	s.writing = func(id block.DriveID) bool { return under[driveKey(id)] || r.jobs.under(driveKey(id)) }
	var err error
	s.mapped, err = r.observeLegs()
	note("device mapper", err)
	s.names, err = r.names.List()
	note(r.legDir, err)
	note("nvmet", r.readExports(ctx, &s))
	r.lists.track(kernelLegsOf(s.mapped))
	s.listed = r.lists.served()
	s.authenticates = r.authenticates(r.agent.currentWanted() != nil)
	s.beside = r.process != nil
	if rows := r.agent.kernel.rows; rows != nil && r.agent.currentWanted() != nil { // finding out makes devices for a moment
		s.kernelMaps, s.refused = pb.Ability_ABILITY_NO, rows.Refused
		if rows.Able() == nil {
			s.kernelMaps = pb.Ability_ABILITY_YES
		}
	}
	s.integrity, s.readOnly = r.agent.kernel.integrity, r.agent.kernel.readOnly
	if r.agent.kernel.refusals != nil {
		s.refusals = r.agent.kernel.refusals()
	}
	if s.exports != nil {
		r.sizes.forget(*s.exports)
	}
	s.asks = r.asks()
	s.knownSize = func(x exportedNamespace) block.Size { return r.sizes[x] }
	return s, problems
}

func (r *reconciler) observeLegs() (map[block.LegID]dm.State, error) {
	m, err := r.mapper.get()
	if err != nil {
		return nil, err
	}
	states, err := m.Devices(dmPrefix)
	if err != nil {
		return nil, err
	}
	out := map[block.LegID]dm.State{}
	for _, s := range states {
		if id, err := block.ParseLegID(strings.TrimPrefix(s.Name, dmPrefix)); err == nil {
			out[id] = s
		}
	}
	return out, nil
}

func observeExports(ctx context.Context, exports *lazy[exporter]) (*nvmet.Config, func(block.NQN) bool, error) {
	e, err := exports.get()
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("no answer in %v", patience))
	defer cancel()
	c, err := e.Read(ctx)
	if err != nil {
		return nil, nil, err
	}
	return &c, e.Busy, nil
}

// authenticates is not known as long as nvmet is not there: the manager must not take that for a
// change. Finding out makes a directory in nvmet for a moment, and nothing is changed there before
// the manager has spoken.
func (r *reconciler) authenticates(spoken bool) pb.Ability {
	e, err := r.exports.get()
	if err != nil || !spoken {
		return pb.Ability_ABILITY_UNKNOWN
	}
	switch can, err := e.Authenticates(); {
	case err != nil:
		return pb.Ability_ABILITY_UNKNOWN
	case can:
		return pb.Ability_ABILITY_YES
	}
	return pb.Ability_ABILITY_NO
}

func (r *reconciler) publish(s seen, p plan) {
	if !r.agent.isSettled() {
		return // it would lack exports, nobody would be sent it, and hosts would wait for it
	}
	problems := append(p.problems, r.jobs.problems()...)
	for _, p := range r.discovery.Problems() {
		problems = append(problems, problem{p.Where, "listen", p.Cause})
	}
	problems = append(problems, r.agent.replacedProblem()...)
	if s.exports != nil {
		conflicts := nvmet.Conflicts(*s.kernel, p.exports)
		if s.process != nil {
			conflicts = append(conflicts, nvmet.Conflicts(*s.process, p.process)...)
		}
		for _, c := range conflicts {
			problems = append(problems, problem{c.Object, exporting, c.Cause})
		}
	}
	for _, f := range r.failures {
		problems = append(problems, problem{exportObject(f.Step.Object), f.Step.String(), f.Err.Error()})
	}
	report := proto.CloneOf(r.base)
	report.Generation = r.reached
	if s.beside { // managers of earlier versions would send hosts to the kernel if the rest were said
		report.ProcessPortals = pbPortals(processPortals(r.agent.config.Portals))
		report.PlainSnapshots = r.asks()
	} else {
		thin := r.agent.kernel.thin
		report.Thin, report.Snapshots, report.PlainSnapshots, report.Copies = thin, thin, thin, thin
	}
	r.agent.sayStopping(report, s.process != nil && len(s.process.Subsystems) > 0)
	if o := r.agent.newest.Newest(); o.Term > 0 {
		report.Term, report.TermClusterId = o.Term, o.Cluster.String()
	}
	fillReport(report, s, p, r.legDir, r.progress())
	if !r.cluster.IsZero() {
		report.ClusterId = r.cluster.String()
	}
	report.Problems = r.dated(problems)
	if !proto.Equal(report, r.last) {
		r.last = report
		r.agent.publish(report)
	}
}

func exportObject(object string) string {
	if nqn, ok := strings.CutPrefix(object, "subsystems/"); ok {
		return "export " + nqn
	}
	return "nvmet " + object
}

func (r *reconciler) progress() map[block.LegID]progress {
	r.agent.mu.Lock()
	defer r.agent.mu.Unlock()
	return maps.Clone(r.agent.zeroed)
}

// dated adds to each problem the time since which it has lasted without a break.
func (r *reconciler) dated(problems []problem) []*pb.Problem {
	var out []*pb.Problem
	since := map[problem]time.Time{}
	for _, p := range problems {
		key := problem{object: p.object, doing: p.doing} // the wording of the cause may change
		if _, twice := since[key]; twice {
			continue
		}
		first, known := r.since[key]
		if !known {
			first = time.Now()
			r.agent.log.Warn("problem", "object", p.object, "doing", p.doing, "cause", p.cause)
		}
		since[key] = first
		out = append(out, &pb.Problem{Object: p.object, Doing: p.doing, Cause: p.cause, Since: timestamppb.New(first)})
	}
	r.since = since
	return sortedBy(out, func(p *pb.Problem) string { return p.GetObject() + " " + p.GetDoing() })
}

// lazy opens something on first use, and retries after a failure.
type lazy[T any] struct {
	open func() (T, error)

	mu    sync.Mutex
	value T
	ok    bool
}

func (l *lazy[T]) get() (T, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ok {
		return l.value, nil
	}
	value, err := l.open()
	if err != nil {
		return value, err
	}
	l.value, l.ok = value, true
	return value, nil
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"sync"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
	"weft.dev/weft/target/written"
)

// tracker lists what is written to block devices; *written.Watcher.
type tracker interface {
	Track(n block.DeviceNumber, size block.Size) (*checkpoint.Tracker, error)
	Forget(n block.DeviceNumber) error
	Missed(n block.DeviceNumber) (uint64, error)
	Close() error
}

// lists serves the lists of writes to the legs that the kernel exports. The kernel's target has no such
// command, so this process offers the same subsystems, to the same hosts with the same keys, at the port
// after that of each portal (block.Portal.Lists), where they answer for the lists alone. A subsystem is
// offered there before it is offered in the kernel, and withdrawn before it is withdrawn there. Hosts can also
// have the subsystem in the kernel replaced there; see nvmet.Replacements.
type lists struct {
	tracker tracker
	exports *userspace.Exports
	tree    *nvmet.Tree
	dir     string // of the legs' stable names
	log     *slog.Logger
	replace func(context.Context, block.NQN, block.ServedBy) error // see offer

	mu      sync.Mutex
	legs    map[block.LegID]*listedLeg
	offered []block.NQN // by the last attempt to serve

	// Of the last attempt to serve.
	asked    nvmet.Config
	failures string // they are logged once
}

// listedLeg is a leg as it is mapped now.
type listedLeg struct {
	userspace.Elsewhere
	number block.DeviceNumber
	size   block.Size // 0: its writes are not listed
}

// openLists returns nil where the kernel cannot list writes; then copies are compared whole after the
// crash of a client.
func openLists(c Config) *lists {
	w, err := written.Open(filepath.Join(c.Root, "sys"))
	if err != nil {
		c.Log.Info("no lists of writes are kept; after the crash of a client the copies will be compared whole", "err", err)
		return nil
	}
	l, err := newLists(w, c.legDir(), nil, c.Log)
	if err != nil {
		c.Log.Warn("no lists of writes are kept", "err", errors.Join(err, w.Close()))
		return nil
	}
	return l
}

// newLists serves the lists that t keeps. listen opens a portal; nil means TCP.
func newLists(t tracker, dir string, listen func(block.Portal) (net.Listener, error), log *slog.Logger) (*lists, error) {
	l := &lists{tracker: t, dir: dir, log: log, legs: map[block.LegID]*listedLeg{}}
	var err error
	if l.exports, err = userspace.NewExports(log, listen, l.device); err != nil {
		return nil, err
	}
	l.tree, err = l.exports.OpenTree()
	return l, err
}

// offer has hosts' exports in the kernel replaced when they ask for it.
func (l *lists) offer(replace func(context.Context, block.NQN, block.ServedBy) error) {
	if l == nil {
		return
	}
	l.replace = replace
	l.exports.SetReplace(replace)
}

// device finds a leg by the path under which it is exported.
func (l *lists) device(path string) (block.Device, error) {
	id, ours := legOf(l.dir, path)
	l.mu.Lock()
	defer l.mu.Unlock()
	if leg := l.legs[id]; ours && leg != nil {
		return leg.Export(), nil
	}
	return nil, block.ErrGone
}

// track lists the writes to the legs that are mapped. A leg that is mapped anew, or has grown, begins a
// new list.
func (l *lists) track(mapped map[block.LegID]dm.State) {
	if l == nil || mapped == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, leg := range l.legs {
		if s, there := mapped[id]; !there || s.Number != leg.number || s.Table.Size() != leg.size {
			l.forgetLocked(id, leg)
			if !there {
				delete(l.legs, id)
			}
		}
	}
	for id, s := range mapped {
		if leg := l.legs[id]; s.Live && len(s.Table) > 0 && (leg == nil || leg.size == 0) {
			l.trackLocked(id, s)
		}
	}
}

func (l *lists) forgetLocked(id block.LegID, leg *listedLeg) {
	if leg.size == 0 {
		return
	}
	leg.End()
	if err := l.tracker.Forget(leg.number); err != nil {
		l.log.Warn("a list of writes stays", "leg", id, "err", err)
	}
	leg.size = 0
}

func (l *lists) trackLocked(id block.LegID, s dm.State) {
	size, number := s.Table.Size(), s.Number
	list, err := l.tracker.Track(number, size)
	if err != nil {
		l.log.Warn("the writes to a leg are not listed", "leg", id, "err", err)
		return
	}
	leg := l.legs[id]
	if leg == nil {
		leg = &listedLeg{}
		l.legs[id] = leg
	}
	leg.number, leg.size = number, size
	leg.Begin(size, list, func() (uint64, error) { return l.tracker.Missed(number) })
}

// serve offers the lists of what is to be exported, and no others; and asked, which has no lists, but of which hosts
// can have more done.
func (l *lists) serve(ctx context.Context, exports, asked nvmet.Config) {
	if l == nil {
		return
	}
	want := l.wanted(exports, asked)
	if l.failures == "" && reflect.DeepEqual(want, l.asked) {
		return
	}
	failures := ""
	for range 8 { // some steps are offered only after others
		got, err := l.tree.Read(ctx)
		if err != nil {
			failures = err.Error()
			break
		}
		var offered []block.NQN
		for _, s := range got.Subsystems {
			offered = append(offered, s.NQN)
		}
		l.mu.Lock()
		l.offered = offered
		l.mu.Unlock()
		done, failed := l.tree.Apply(ctx, nvmet.Diff(got, want), patience)
		failures = ""
		for _, f := range failed {
			failures += f.Err.Error() + "; "
		}
		if done == 0 {
			break
		}
	}
	if failures != "" && failures != l.failures {
		l.log.Warn("lists of writes are not served everywhere; after the crash of a client some copies will be compared whole", "err", failures)
	}
	l.asked, l.failures = want, failures
}

// wanted is the part of the exports whose lists are kept, and asked.
func (l *lists) wanted(exports, asked nvmet.Config) nvmet.Config {
	l.mu.Lock()
	defer l.mu.Unlock()
	exports, also := joined(exports, asked)
	want, kept := nvmet.Config{Keys: exports.Keys}, map[block.NQN]bool{}
	for _, s := range exports.Subsystems {
		s.Namespaces = slices.DeleteFunc(slices.Clone(s.Namespaces), func(ns nvmet.Namespace) bool {
			id, ours := legOf(l.dir, ns.Device)
			return !ours || l.legs[id] == nil
		})
		// That an export in the kernel is replaced must not end the connection on which that was asked for.
		s.CntlidMin, s.CntlidMax = nvmet.DefaultCntlidMin, nvmet.DefaultCntlidMax
		if kept[s.NQN] = len(s.Namespaces) > 0 || also[s.NQN]; kept[s.NQN] {
			want.Subsystems = append(want.Subsystems, s)
		}
	}
	taken := map[block.Portal]bool{}
	for _, p := range exports.Ports {
		taken[socketOf(p.Portal)] = true
	}
	for _, p := range exports.Ports {
		portal, ok := p.Portal.Lists()
		if !ok || taken[socketOf(portal)] {
			continue
		}
		taken[socketOf(portal)] = true
		links := slices.DeleteFunc(slices.Clone(p.Subsystems), func(s nvmet.Link) bool { return !kept[s.To] })
		want.Ports = append(want.Ports, nvmet.Port{Portal: portal, Subsystems: links})
	}
	return want
}

// joined is a configuration with those subsystems of another one, which has the same ports, that it lacks; also are
// all of the other one's.
func joined(c, other nvmet.Config) (all nvmet.Config, also map[block.NQN]bool) {
	has := namesOf(c.Subsystems)
	add := nvmet.Config{Keys: other.Keys}
	for _, s := range other.Subsystems {
		if !has[s.NQN] {
			add.Subsystems = append(add.Subsystems, s)
		}
	}
	all = merged(c, add)
	all.Ports = slices.Clone(all.Ports)
	for i, p := range other.Ports {
		for _, link := range p.Subsystems {
			if !has[link.To] {
				all.Ports[i].Subsystems = append(slices.Clone(all.Ports[i].Subsystems), link)
			}
		}
	}
	return all, namesOf(other.Subsystems)
}

// socketOf is where a portal is, whatever it is called.
func socketOf(p block.Portal) block.Portal { return block.Portal{Address: p.Address, Port: p.Port} }

// served lists the subsystems whose hosts can take checkpoints.
func (l *lists) served() []block.NQN {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.offered
}

// close ends the exports and the lists.
func (l *lists) close(ctx context.Context) error {
	err := l.exports.Close(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, leg := range l.legs {
		leg.End()
	}
	return errors.Join(err, l.tracker.Close())
}

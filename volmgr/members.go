// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

// This file keeps the members of the quorum as they should be, while this manager leads.

// tendEvery is how often the leader looks after the members.
const tendEvery = 500 * time.Millisecond

// startTending looks after the members until the returned function is called.
func (m *Manager) startTending(ctx context.Context) (stop func()) {
	if m.quorum == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var tending sync.WaitGroup
	tending.Go(func() { m.tend(ctx) })
	return func() {
		cancel()
		tending.Wait()
	}
}

func (m *Manager) tend(ctx context.Context) {
	tick := beat.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		if err := m.quorum.tendOnce(ctx, m.cfg.Quorum.Address); err != nil && ctx.Err() == nil && !errors.Is(err, quorum.ErrBusy) {
			m.cfg.Log.Warn("change of the managers", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// tendOnce records where managers answer and what they are called, and gives managers that have
// caught up a vote.
func (s *shared) tendOnce(ctx context.Context, address string) error {
	now := s.Status()
	for _, one := range now.Applied.Members {
		is, name := s.addressOf(now, one.ID), cmp.Or(one.Name, s.nameOf(one.ID))
		if one.ID == now.ID {
			is, name = address, cmp.Or(s.name, one.Name)
		}
		if is = cmp.Or(is, one.Address); is != one.Address || name != one.Name {
			if err := s.Move(ctx, one.ID, is, name); err != nil {
				return err
			}
		}
	}
	if len(now.Applied.Members.Voters()) == len(now.Applied.Members) {
		return nil
	}
	progress, err := s.Progress(ctx)
	for _, id := range promotable(now.Applied.Members, progress) {
		if err == nil {
			err = s.Promote(ctx, id)
		}
	}
	return err
}

// promotable returns the learners that get their vote now. An even number of voters survives no
// more losses than one voter less, and needs more of them to agree; so a single learner waits
// for a second one if the number of voters is odd.
func promotable(members quorum.Members, progress map[quorum.ID]quorum.Progress) (ids []quorum.ID) {
	for _, one := range members {
		if !one.Voter && progress[one.ID].Near {
			ids = append(ids, one.ID)
		}
	}
	even := len(members.Voters())%2 == 0
	switch {
	case even:
		return ids[:min(1, len(ids))]
	case len(ids) >= 2:
		return ids[:2]
	}
	return nil
}

// HandOver makes another manager lead, if this one does and another one that votes follows. Call
// it before the process ends, while it still answers the others. The streams of agents that end from
// then on end because of that: they are not noted as losses of agents.
func (m *Manager) HandOver(ctx context.Context) error {
	m.leaves.Store(true)
	if m.quorum == nil {
		return nil
	}
	progress, err := m.quorum.following(ctx)
	if err != nil {
		return err
	}
	now := m.quorum.Status()
	for _, id := range now.Applied.Members.Voters() {
		if id == now.ID || !progress[id].Near {
			continue
		}
		if err := m.quorum.Transfer(ctx, 0); !errors.Is(err, quorum.ErrNotLeading) {
			return err
		}
		return nil
	}
	return nil
}

// ListManagers returns the managers.
func (m *Manager) ListManagers(ctx context.Context, _ *pb.ListManagersRequest) (*pb.ListManagersResponse, error) {
	if m.quorum == nil {
		return nil, toStatus(errNoQuorum)
	}
	now, err := m.quorum.leaderOrNone(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	progress, err := m.quorum.Progress(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	list := &pb.ListManagersResponse{Term: now.Term}
	for _, one := range now.Applied.Members {
		list.Managers = append(list.Managers, m.quorum.describe(now, one, progress[one.ID]))
	}
	return list, nil
}

// silentAfter is how long a manager is not heard when a leader says so.
const silentAfter = 2 * time.Second

// silent reports whether a leader misses a manager, and why if it knows.
func (s *shared) silent(now replicated.Status, id quorum.ID) (problem string, silent bool) {
	if id == now.ID || s.transport == nil {
		return "", false
	}
	peer := s.transport.Peers()[id]
	return peer.Problem, peer.Problem != "" || !peer.Heard.IsZero() && time.Since(peer.Heard) > silentAfter
}

// wrong says what is wrong with the managers, as their leader sees it, one sentence each.
func (s *shared) wrong() (sentences []string) {
	now := s.Status()
	for _, one := range now.Applied.Members {
		problem, silent := s.silent(now, one.ID)
		if !silent {
			continue
		}
		sentence := fmt.Sprintf("manager %v at %s does not answer", one.ID, s.addressOf(now, one.ID))
		if problem != "" {
			sentence += ": " + problem
		}
		sentences = append(sentences, sentence)
	}
	if len(now.Applied.Members.Voters()) == 2 {
		sentences = append(sentences, "two managers vote: the loss of either stops all changes; let a third one join with `weft volmgr join`")
	}
	return sentences
}

var errNoQuorum = &cluster.Error{Kind: cluster.FailedPrecondition, Text: "this volume manager keeps its store alone"}

// leaderOrNone returns the status of the leader, or of any manager if no leader is found.
func (s *shared) leaderOrNone(ctx context.Context) (replicated.Status, error) {
	patience := time.After(electionPatience)
	for {
		changed, now := s.Changed(), s.Status()
		if now.Leader == now.ID {
			return now, nil
		}
		if leader := s.Leader(); leader != "" {
			return now, notLeading{leader}
		}
		select {
		case <-changed:
		case <-patience:
			return now, nil
		case <-ctx.Done():
			return now, context.Cause(ctx)
		}
	}
}

func (s *shared) describe(now replicated.Status, one quorum.Member, progress quorum.Progress) *pb.ManagerMember {
	d := &pb.ManagerMember{
		Id: one.ID.String(), Address: s.addressOf(now, one.ID), Voter: one.Voter, Leader: one.ID == now.Leader, Recorded: progress.Acknowledged,
	}
	if one.ID == now.ID {
		d.Recorded = now.Applied.Index
		return d
	}
	if s.transport == nil {
		return d
	}
	peer := s.transport.Peers()[one.ID]
	if d.Problem = peer.Problem; !peer.Heard.IsZero() {
		d.Heard = timestamppb.New(peer.Heard)
	}
	return d
}

// changePatience is how long a change of the managers is tried again while another one is under
// way.
const changePatience = 5 * time.Second

// changed carries out a change of the managers, and repeats it while the quorum is busy. What change
// gets is what this manager knows as leader, with all changes that were answered before: a refusal
// is as good as a commit.
func (m *Manager) changed(ctx context.Context, change func(context.Context, replicated.Status) error) error {
	if m.quorum == nil {
		return toStatus(errNoQuorum)
	}
	ctx, cancel := context.WithTimeout(ctx, changePatience)
	defer cancel()
	for {
		now, err := m.quorum.confirmed(ctx)
		if err == nil {
			err = change(ctx, now)
		}
		if !errors.Is(err, quorum.ErrBusy) {
			return toStatus(m.quorum.refusalOf(err))
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return toStatus(m.quorum.refusalOf(err))
		}
	}
}

// confirmed returns the status of this manager once a majority has confirmed that it leads.
func (s *shared) confirmed(ctx context.Context) (replicated.Status, error) {
	now, err := s.leaderOrNone(ctx)
	switch {
	case err != nil:
		return now, err
	case now.Leader != now.ID:
		return now, notLeading{}
	}
	return s.Status(), s.Store.Confirm(ctx, now.Term)
}

// refusalOf converts an error of the quorum.
func (s *shared) refusalOf(err error) error {
	var e *cluster.Error
	switch {
	case errors.As(err, &e):
		return err
	case errors.Is(err, quorum.ErrRefused), errors.Is(err, quorum.ErrBusy):
		return &cluster.Error{Kind: cluster.FailedPrecondition, Text: err.Error()}
	case errors.Is(err, quorum.ErrNotLeading):
		return notLeading{s.Leader()}
	case errors.Is(err, quorum.ErrUnknown):
		return ErrOutcomeUnknown
	}
	return err
}

// managerName is the name that the certificate of a manager proves; empty if the caller is none, or
// nobody is asked for a certificate.
func managerName(ctx context.Context) string {
	if who, ok := access.From(ctx); ok && who.Kind == access.Node && who.Role == access.Manager {
		return who.Name
	}
	return ""
}

// nameOf is the name that another manager has proved; empty if it has not.
func (s *shared) nameOf(id quorum.ID) string {
	if s.transport == nil {
		return ""
	}
	return s.transport.Peers()[id].Name
}

// hasNamed reports whether a manager of that name is a member, as far as this one knows.
func (s *shared) hasNamed(name string) bool {
	return slices.ContainsFunc(s.Status().Applied.Members, func(one quorum.Member) bool { return one.Name == name || one.Name == "" })
}

// AddManager adds a manager. One that adds itself is known by the name in its certificate from then
// on.
func (m *Manager) AddManager(ctx context.Context, r *pb.AddManagerRequest) (*pb.AddManagerResponse, error) {
	id, err := quorum.ParseID(r.GetId())
	if err != nil {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "id", Text: err.Error()})
	}
	if r.GetAddress() == "" {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "address", Text: "address: missing"})
	}
	name := managerName(ctx)
	var added cluster.Input
	err = m.changed(ctx, func(ctx context.Context, now replicated.Status) error {
		for _, one := range now.Applied.Members {
			if one.ID == id {
				if name != "" && one.Name != "" && name != one.Name {
					return &cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("manager %v is %s, and its address is not for %s to say", id, one.Name, name)}
				}
				return m.quorum.Move(ctx, id, r.GetAddress(), cmp.Or(one.Name, name))
			}
			if name != "" && one.Name == name {
				return &cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("manager %v is %s already: a certificate is for one manager", one.ID, name),
					Hint: fmt.Sprintf("if its disk was lost: `weft volmgr remove %v`, and then join again with a new token", one.ID)}
			}
			if one.Address == r.GetAddress() {
				return &cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("address %s: manager %v is there already", one.Address, one.ID),
					Hint: fmt.Sprintf("if its disk was lost: `weft volmgr remove %v`, and then join again with a new token", one.ID)}
			}
		}
		if err := m.letIn(ctx, name); err != nil {
			return err
		}
		added = cluster.ManagersChange{ID: id.String(), Address: r.GetAddress()}
		return m.quorum.AddLearner(ctx, quorum.Member{ID: id, Address: r.GetAddress(), Name: name})
	})
	return &pb.AddManagerResponse{}, m.toldOf(ctx, added, err)
}

// letIn returns an error if a manager that adds itself was not let in by a token. name is empty if
// somebody else adds it.
func (m *Manager) letIn(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	state, err := m.snapshot(ctx)
	if err != nil || state.LetIn(name) {
		return err
	}
	return &cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("manager %s: no token has let it in since it was removed, if it ever was one", name),
		Hint: fmt.Sprintf("an admin makes one: `weft token create --node %s --role manager`; to use it, remove the old credential", name)}
}

// toldOf records a change of the managers that was carried out, with who asked for it. change is nil
// if there was none.
func (m *Manager) toldOf(ctx context.Context, change cluster.Input, err error) error {
	if err != nil || change == nil {
		return err
	}
	if _, err := m.step(context.WithoutCancel(ctx), change); err != nil {
		return toStatus(fmt.Errorf("the managers are changed, and that is not in the audit: %w", err))
	}
	return nil
}

// memberNamed returns the manager that an operator means: by its id, the beginning of it, or its
// address.
func memberNamed(members quorum.Members, name string) (found quorum.Member, err error) {
	count := 0
	for _, one := range members {
		if one.Address == name || name != "" && strings.HasPrefix(one.ID.String(), name) {
			found, count = one, count+1
		}
	}
	switch count {
	case 0:
		return found, &cluster.Error{Kind: cluster.NotFound, Object: "manager " + name, Text: fmt.Sprintf("manager %q: there is none with this id or address", name), Hint: "`weft volmgr list` lists them"}
	case 1:
		return found, nil
	}
	return found, &cluster.Error{Kind: cluster.InvalidArgument, Field: "manager", Text: fmt.Sprintf("manager %q: %d managers have ids that begin so", name, count)}
}

// RemoveManager removes a manager.
func (m *Manager) RemoveManager(ctx context.Context, r *pb.RemoveManagerRequest) (*pb.RemoveManagerResponse, error) {
	removed := &pb.RemoveManagerResponse{}
	var gone cluster.Input
	err := m.changed(ctx, func(ctx context.Context, now replicated.Status) error {
		one, err := memberNamed(now.Applied.Members, r.GetManager())
		if err != nil {
			return err
		}
		progress, err := m.quorum.following(ctx)
		if err == nil {
			err = staysAble(now.Applied.Members, one, progress)
		}
		if err == nil && one.ID == now.ID && len(now.Applied.Members) > 1 {
			err = m.quorum.stepAside(ctx)
		}
		if err != nil {
			return err
		}
		removed.Removed = m.quorum.describe(now, one, progress[one.ID])
		gone = cluster.ManagersChange{ID: one.ID.String(), Address: one.Address, Name: one.Name, Removed: true}
		return m.quorum.Remove(context.WithoutCancel(ctx), one.ID) // it is shut out after it, whoever still waits
	})
	return removed, m.toldOf(ctx, gone, err)
}

// ReplaceManager gives a manager the place of another one. The new one gets its vote first, and then
// the old one is removed: at no time do fewer managers vote than before, nor must more than a
// majority of them follow that do follow.
func (m *Manager) ReplaceManager(ctx context.Context, r *pb.ReplaceManagerRequest) (*pb.ReplaceManagerResponse, error) {
	answer := &pb.ReplaceManagerResponse{}
	var gone cluster.Input
	err := m.changed(ctx, func(ctx context.Context, now replicated.Status) error {
		members := now.Applied.Members
		added, err := memberNamed(members, r.GetNew())
		if err != nil {
			return err
		}
		progress, err := m.quorum.following(ctx)
		if err != nil {
			return err
		}
		if !progress[added.ID].Near {
			answer.WaitsFor = fmt.Sprintf("manager %v at %s to catch up: it has %d of %d entries; is it started?", added.ID, added.Address, progress[added.ID].Acknowledged, now.Applied.Index)
			return nil
		}
		answer.WaitsFor = ""
		if !added.Voter {
			return m.quorum.admit(ctx, members, added, progress)
		}
		old, err := memberNamed(members, r.GetOld())
		var refused *cluster.Error
		switch {
		case errors.As(err, &refused) && refused.Kind == cluster.NotFound:
			return nil // an attempt before has removed it
		case err != nil:
			return err
		case old.ID == added.ID:
			return &cluster.Error{Kind: cluster.InvalidArgument, Field: "new", Text: fmt.Sprintf("manager %v cannot replace itself", old.ID)}
		}
		if err := staysAble(members, old, progress); err != nil {
			return err
		}
		if old.ID == now.ID {
			if err := m.quorum.Transfer(ctx, added.ID); err != nil {
				return err
			}
			return quorum.ErrBusy // the next one that leads does the rest
		}
		answer.Removed = m.quorum.describe(now, old, progress[old.ID])
		gone = cluster.ManagersChange{ID: old.ID.String(), Address: old.Address, Name: old.Name, Removed: true}
		return m.quorum.Remove(context.WithoutCancel(ctx), old.ID)
	})
	return answer, m.toldOf(ctx, gone, err)
}

// admit gives a manager its vote, and returns quorum.ErrBusy since more has to be done then.
func (s *shared) admit(ctx context.Context, members quorum.Members, added quorum.Member, progress map[quorum.ID]quorum.Progress) error {
	if err := ableWith(members, added, progress); err != nil {
		return err
	}
	if err := s.Promote(ctx, added.ID); err != nil {
		return err
	}
	return quorum.ErrBusy
}

// ableWith refuses to give a manager that follows a vote if those that follow were no majority then.
func ableWith(members quorum.Members, added quorum.Member, progress map[quorum.ID]quorum.Progress) error {
	votes, follow := 1, 1
	for _, id := range members.Voters() {
		if votes++; progress[id].Near {
			follow++
		}
	}
	if follow <= votes/2 {
		return &cluster.Error{Kind: cluster.FailedPrecondition, Object: "manager " + added.ID.String(),
			Text: fmt.Sprintf("manager %v: with its vote, %d of %d managers that vote would follow, which is no majority", added.ID, follow, votes),
			Hint: "start the others first"}
	}
	return nil
}

// stepAside makes another manager lead, which then removes this one: see quorum.Remove. It returns
// quorum.ErrBusy until the caller can be told which one that is.
func (s *shared) stepAside(ctx context.Context) error {
	if err := s.Transfer(ctx, 0); err != nil {
		return err
	}
	return quorum.ErrBusy
}

// following is Progress, in which a manager that does not answer is not near. Raft notices that
// more than a second later.
func (s *shared) following(ctx context.Context) (map[quorum.ID]quorum.Progress, error) {
	progress, err := s.Progress(ctx)
	if s.transport == nil || progress == nil {
		return progress, err
	}
	for id, peer := range s.transport.Peers() {
		if p := progress[id]; peer.Problem != "" || time.Since(peer.Heard) > heardWithin {
			p.Near = false
			progress[id] = p
		}
	}
	return progress, err
}

// heardWithin is how long a manager that follows is silent at most: heartbeats are answered.
const heardWithin = time.Second

// staysAble refuses to remove a voter if those that are left and follow are no majority.
func staysAble(members quorum.Members, removed quorum.Member, progress map[quorum.ID]quorum.Progress) error {
	left, follow := 0, 0
	for _, id := range members.Voters() {
		if id == removed.ID {
			continue
		}
		if left++; progress[id].Near {
			follow++
		}
	}
	if !removed.Voter || follow > left/2 {
		return nil
	}
	return &cluster.Error{Kind: cluster.FailedPrecondition, Object: "manager " + removed.ID.String(),
		Text: fmt.Sprintf("manager %v: without it, %d of %d managers that vote would follow, which is no majority", removed.ID, follow, left),
		Hint: "start the others, or remove one that is lost first"}
}

// TransferLeadership makes another manager lead.
func (m *Manager) TransferLeadership(ctx context.Context, r *pb.TransferLeadershipRequest) (*pb.TransferLeadershipResponse, error) {
	return &pb.TransferLeadershipResponse{}, m.changed(ctx, func(ctx context.Context, now replicated.Status) error {
		var to quorum.Member
		if r.GetManager() != "" {
			var err error
			if to, err = memberNamed(now.Applied.Members, r.GetManager()); err != nil {
				return err
			}
			if to.ID == now.ID {
				return nil
			}
			if !to.Voter {
				return &cluster.Error{Kind: cluster.FailedPrecondition, Object: "manager " + to.ID.String(), Text: fmt.Sprintf("manager %v: it does not vote yet", to.ID)}
			}
		}
		if len(now.Applied.Members.Voters()) < 2 {
			return &cluster.Error{Kind: cluster.FailedPrecondition, Text: "there is no other manager that votes"}
		}
		return m.quorum.Transfer(ctx, to.ID)
	})
}

// Join makes the directory of a manager that another one adds to a cluster. It returns the new
// member. A directory that Join has made, and whose manager has no records yet, is used again; of
// one that has records, Join returns the member with [replicated.ErrTaken]. The directory appears
// with store and log, or not at all: a store alone would be opened as that of a cluster of its own.
func Join(cfg Config, id block.ClusterID) (quorum.ID, error) {
	cfg = cfg.withDefaults()
	if err := store.Find(cfg.Dir); err == nil {
		return replicated.Joined(cfg.Dir, id)
	}
	if err := store.CheckEmpty(cfg.Dir); err != nil {
		return 0, err
	}
	dir := filepath.Clean(cfg.Dir)
	temporary := dir + ".joining"
	if err := os.RemoveAll(temporary); err != nil { // left by a crash
		return 0, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return 0, err
	}
	defer os.RemoveAll(temporary)
	if err := store.Create(temporary, nil, cfg.Log); err != nil {
		return 0, err
	}
	member, err := replicated.Join(temporary, id)
	if err != nil {
		return 0, err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	if err := os.Rename(temporary, dir); err != nil {
		return 0, err
	}
	return member, durable.SyncDir(filepath.Dir(dir))
}

// Recover creates a store in cfg.Dir, which must be empty, from that of a manager whose quorum
// has lost its majority. The manager must be stopped. Records may be missing that were
// committed, so what [cluster.Restored] says of a backup is so for them too.
func Recover(cfg Config, from string) (replicated.Survivor, error) {
	cfg = cfg.withDefaults()
	if !replicated.Exists(from) {
		return replicated.Survivor{}, fmt.Errorf("%s: no store of a quorum", from)
	}
	if err := store.CheckEmpty(cfg.Dir); err != nil {
		return replicated.Survivor{}, err
	}
	s, err := replicated.Salvage(from, cfg.Log)
	if err != nil {
		return s, err
	}
	if len(s.Records) == 0 {
		return s, fmt.Errorf("recover: %s has no records: its manager had just become a member, and had received none", from)
	}
	records, err := cluster.Restored(cfg.Now(), s.Records)
	if err != nil {
		return s, fmt.Errorf("recover: %w", err)
	}
	return s, store.Create(cfg.Dir, records, cfg.Log)
}

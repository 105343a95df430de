// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
)

// session is the newest stream of an agent. Only the newest wanted state has to be sent, as
// a whole or as its difference from the last one sent. It is built when the stream is ready
// for it: a slow agent neither blocks the loop nor makes it build states that are never sent.
type session struct {
	number uint64
	news   chan struct{} // of size 1: the wanted state may have changed
	cancel context.CancelCauseFunc

	// Owned by the loop.
	greeted bool // the first report was accepted
	// changed are the volumes of which the wanted state may have changed since it was last
	// sent; nil: anything of it may have, or nothing was sent.
	changed map[block.VolumeID]bool
}

var errSuperseded = status.Error(codes.Aborted, "a newer stream of the same node has taken over")

// kind holds what differs between target and initiator agents.
type kind[Report, Wanted parts.State] struct {
	role     access.Role // of the agent's certificate
	sessions func(*Manager) map[block.NodeName]*session
	node     func(Report) string
	boot     func(Report) string
	status   func(cluster.Node) cluster.AgentStatus
	input    func(number uint64, r Report, c parts.Change) (cluster.Input, error)
	repeated func(number uint64, node block.NodeName, generation uint64) cluster.Input
	lost     func(number uint64, node block.NodeName) cluster.Input
	// wanted is the whole wanted state of a node, part what it says of some volumes, and
	// perhaps of more.
	wanted func(*cluster.State, block.NodeName) Wanted
	part   func(*cluster.State, block.NodeName, []block.VolumeID) Wanted
	cut    func(Wanted) (head Wanted, pieces pieces[Wanted])
}

var targetKind = kind[*pb.TargetReport, *pb.TargetWanted]{
	role:     access.Target,
	sessions: func(m *Manager) map[block.NodeName]*session { return m.targets },
	node:     (*pb.TargetReport).GetNode,
	boot:     (*pb.TargetReport).GetBootId,
	status:   func(n cluster.Node) cluster.AgentStatus { return n.Target },
	input: func(number uint64, r *pb.TargetReport, c parts.Change) (cluster.Input, error) {
		in := cluster.TargetReported{Session: number}
		var err error
		if in.Report, err = targetReport(r); err != nil || !c.Partial {
			return in, err
		}
		in.Report.Drives, in.Change, err = fromChange(in.Report.Drives, c)
		return in, err
	},
	repeated: func(number uint64, node block.NodeName, generation uint64) cluster.Input {
		return cluster.TargetRepeated{Session: number, Node: node, Generation: generation}
	},
	lost: func(number uint64, node block.NodeName) cluster.Input {
		return cluster.TargetLost{Session: number, Node: node}
	},
	wanted: func(s *cluster.State, node block.NodeName) *pb.TargetWanted {
		return targetWanted(s.WantedTarget(node))
	},
	part: func(s *cluster.State, node block.NodeName, volumes []block.VolumeID) *pb.TargetWanted {
		return targetWanted(s.WantedTargetOf(node, volumes))
	},
	cut: cutTarget,
}

var initiatorKind = kind[*pb.InitiatorReport, *pb.InitiatorWanted]{
	role:     access.Initiator,
	sessions: func(m *Manager) map[block.NodeName]*session { return m.initiators },
	node:     (*pb.InitiatorReport).GetNode,
	boot:     (*pb.InitiatorReport).GetBootId,
	status:   func(n cluster.Node) cluster.AgentStatus { return n.Initiator },
	input: func(number uint64, r *pb.InitiatorReport, _ parts.Change) (cluster.Input, error) {
		report, err := initiatorReport(r)
		return cluster.InitiatorReported{Session: number, Report: report}, err
	},
	repeated: func(number uint64, node block.NodeName, generation uint64) cluster.Input {
		return cluster.InitiatorRepeated{Session: number, Node: node, Generation: generation}
	},
	lost: func(number uint64, node block.NodeName) cluster.Input {
		return cluster.InitiatorLost{Session: number, Node: node}
	},
	wanted: func(s *cluster.State, node block.NodeName) *pb.InitiatorWanted {
		return initiatorWanted(s.WantedInitiator(node))
	},
	part: func(s *cluster.State, node block.NodeName, volumes []block.VolumeID) *pb.InitiatorWanted {
		return initiatorWanted(s.WantedInitiatorOf(node, volumes))
	},
	cut: cutInitiator,
}

// Target serves the stream of a target agent.
func (m *Manager) Target(stream grpc.BidiStreamingServer[pb.TargetReport, pb.TargetWanted]) error {
	return serve(stream.Context(), m, parts.Wanting(stream), targetKind)
}

// Initiator serves the stream of an initiator agent.
func (m *Manager) Initiator(stream grpc.BidiStreamingServer[pb.InitiatorReport, pb.InitiatorWanted]) error {
	return serve(stream.Context(), m, parts.Wanting(stream), initiatorKind)
}

// serve takes reports until the stream ends. The first report names the node. From then on
// the stream is the node's session, and an older session is ended.
func serve[Report, Wanted parts.State](ctx context.Context, m *Manager, stream *parts.Stream[Wanted, Report], k kind[Report, Wanted]) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	node, err := block.ParseNodeName(k.node(first))
	if err != nil {
		return toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "node", Text: err.Error()})
	}
	if err := m.speaks(ctx, k.role, node); err != nil {
		return err
	}
	s := &session{news: make(chan struct{}, 1), cancel: cancel}
	var refused error
	if err := m.look(ctx, func() { refused = open(m, k, node, k.boot(first), s) }); err != nil {
		return toStatus(err)
	}
	if refused != nil {
		return toStatus(refused)
	}
	defer func() {
		cancel(nil) // so that no report of this session follows its end
		closeSession(m, k, node, s)
	}()

	failed := make(chan error, 2)
	go func() { failed <- sendNewest(ctx, m, stream, k, node, s) }()
	go func() { failed <- takeReports(ctx, m, stream, k, node, s, first) }()
	select {
	case err = <-failed:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-m.ended:
		err = ErrStopped
	}
	return toStatus(err)
}

// reasonNameTaken is the reason when two machines claim one node name.
const reasonNameTaken = "NODE_NAME_TAKEN"

// open makes s the session of a node; it runs in the loop. A newer stream replaces an older
// one of the same boot, whose end may not have been noticed yet. It replaces a stream of
// another boot only if that agent is offline: otherwise two machines with one name would
// replace each other for ever, and each time every attachment would be granted again.
func open[Report, Wanted parts.State](m *Manager, k kind[Report, Wanted], node block.NodeName, boot string, s *session) error {
	sessions := k.sessions(m)
	old := sessions[node]
	if n, err := m.state.Node(node); err == nil && old != nil {
		if was := k.status(n); was.Online && was.BootID != boot {
			m.cfg.Log.Warn("two machines claim one node name", "node", node, "boot_id", was.BootID, "refused", boot)
			return &cluster.Error{Kind: cluster.FailedPrecondition, Reason: reasonNameTaken, Object: "node " + string(node),
				Text: "node " + string(node) + ": another machine of that name is connected, with boot id " + was.BootID,
				Hint: "give each machine its own name; after a reboot, this ends within seconds"}
		}
	}
	m.sessions++
	s.number = m.sessions
	if old != nil {
		old.cancel(errSuperseded)
	}
	sessions[node] = s
	m.cfg.Log.Info("agent connected", "node", node, "session", s.number)
	return nil
}

func closeSession[Report, Wanted parts.State](m *Manager, k kind[Report, Wanted], node block.NodeName, s *session) {
	ctx := context.Background() // the stream's context has ended; these calls end when the loop ends
	_ = m.look(ctx, func() {
		if sessions := k.sessions(m); sessions[node] == s {
			delete(sessions, node)
		}
	})
	if !m.leaves.Load() {
		_, _ = m.step(ctx, k.lost(s.number, node))
	}
	m.cfg.Log.Info("agent gone", "node", node, "session", s.number)
}

func sendNewest[Report, Wanted parts.State](ctx context.Context, m *Manager, stream *parts.Stream[Wanted, Report],
	k kind[Report, Wanted], node block.NodeName, s *session) error {
	for {
		select {
		case <-s.news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		var state *cluster.State
		var changed map[block.VolumeID]bool
		if err := m.look(ctx, func() {
			state, changed = m.forked(), s.changed
			s.changed = map[block.VolumeID]bool{}
		}); err != nil {
			return err
		}
		if err := sendChanged(stream, k, node, state, changed); err != nil {
			return err
		}
	}
}

// sendChanged sends the wanted state of a node: to an agent that can take that, only what has
// changed of it. changed lists the volumes that may have; nil: anything may have.
func sendChanged[Report, Wanted parts.State](stream *parts.Stream[Wanted, Report], k kind[Report, Wanted],
	node block.NodeName, state *cluster.State, changed map[block.VolumeID]bool) error {
	if !stream.TakesDifferences() {
		return stream.Send(k.wanted(state, node))
	}
	if stream.Starts(state.Term()) || changed == nil {
		head, pieces := k.cut(k.wanted(state, node))
		return stream.SendPieces(head, true, pieces.list(nil))
	}
	head, pieces := k.cut(k.part(state, node, slices.Collect(maps.Keys(changed))))
	return stream.SendPieces(head, false, pieces.list(changed))
}

func takeReports[Report, Wanted parts.State](ctx context.Context, m *Manager, stream *parts.Stream[Wanted, Report],
	k kind[Report, Wanted], node block.NodeName, s *session, r Report) error {
	stream.Part = func() { // a refusal does not matter: the complete report gets its own answer
		_, _ = m.step(ctx, k.repeated(s.number, node, 0))
	}
	for greeted := false; ; greeted = true {
		in, err := k.said(s.number, node, r, stream.Change())
		if err != nil {
			return err
		}
		result, err := m.step(ctx, in)
		if refused, ok := result.(*cluster.Error); ok {
			return refused // an event has recorded it, once
		}
		if err != nil {
			m.cfg.Log.Warn("report refused", "node", node, "err", err)
			return err
		}
		if !greeted {
			if err := m.look(ctx, func() { s.greeted = true }); err != nil {
				return err
			}
			poke(s.news)
		}
		if r, err = stream.Recv(); err != nil {
			return err
		}
		if stream.Lost() {
			poke(s.news)
		}
	}
}

// said converts a message of an agent to an input.
func (k kind[Report, Wanted]) said(number uint64, node block.NodeName, r Report, c parts.Change) (cluster.Input, error) {
	if r.GetScale().GetUnchanged() {
		return k.repeated(number, node, r.GetGeneration()), nil
	}
	if name := k.node(r); name != string(node) {
		return nil, &cluster.Error{Kind: cluster.InvalidArgument, Field: "node", Text: "node: " + name + " on the stream of " + string(node)}
	}
	return k.input(number, r, c)
}

// wake tells a node's streams that its wanted state of these volumes may have changed, or with
// nil anything of it. It runs in the loop, after the commit.
func (m *Manager) wake(node block.NodeName, changed map[block.VolumeID]bool) {
	for _, sessions := range []map[block.NodeName]*session{m.targets, m.initiators} {
		s := sessions[node]
		if s == nil {
			continue
		}
		if changed == nil {
			s.changed = nil
		}
		if s.changed != nil {
			maps.Copy(s.changed, changed)
		}
		if s.greeted {
			poke(s.news)
		}
	}
}

// chunk is the size of a backup message, in bytes.
const chunk = 64 << 10

// Backup streams a consistent copy of the store.
func (m *Manager) Backup(_ *pb.BackupRequest, stream grpc.ServerStreamingServer[pb.BackupChunk]) error {
	if err := m.look(stream.Context(), func() {}); err != nil { // another manager may know more
		return toStatus(err)
	}
	c := chunks{stream: stream}
	if err := m.records.Backup(&c); err != nil {
		return toStatus(err)
	}
	_, err := m.step(stream.Context(), cluster.NoteBackup{Size: c.sent})
	return toStatus(err)
}

type chunks struct {
	stream grpc.ServerStreamingServer[pb.BackupChunk]
	sent   block.Size
}

func (c *chunks) Write(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		part := p[n:min(len(p), n+chunk)]
		err = c.stream.Send(&pb.BackupChunk{Data: part})
		n += len(part)
		c.sent += block.Size(len(part))
	}
	return n, err
}

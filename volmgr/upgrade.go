// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
)

// This file tells operators which level each part of the cluster knows, and finishes upgrades.

// GetUpgrade says which level each manager and each agent knows.
func (m *Manager) GetUpgrade(ctx context.Context, _ *pb.GetUpgradeRequest) (*pb.Upgrade, error) {
	state, err := m.snapshot(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	u := &pb.Upgrade{Level: uint32(state.Level()), Newest: uint32(m.cfg.Level), Parts: m.managerLevels()}
	for _, a := range state.AgentLevels() {
		u.Parts = append(u.Parts, &pb.UpgradePart{Kind: a.Kind, Name: string(a.Node), Version: a.Version, Level: uint32(a.Level), Blocks: a.Blocks(m.cfg.Level), HandsOver: a.HandsOver})
	}
	return u, nil
}

// FinishUpgrade raises the cluster's level to the newest that this manager knows. What managers know
// is asked of the one that leads, as everything is.
func (m *Manager) FinishUpgrade(ctx context.Context, _ *pb.FinishUpgradeRequest) (*pb.Upgrade, error) {
	if err := m.look(ctx, func() {}); err != nil {
		return nil, toStatus(err)
	}
	raise := cluster.RaiseLevel{To: m.cfg.Level, Seed: newSeed()}
	for _, one := range m.managerLevels() {
		if one.Level > uint32(m.cfg.Level) {
			return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Reason: cluster.ReasonOldParts, Text: fmt.Sprintf("manager %s %s", one.Name, one.Blocks),
				Hint: fmt.Sprintf("`weft volmgr transfer %s`, or upgrade the manager that leads", one.Name)})
		}
		if one.Blocks != "" {
			raise.Managers = append(raise.Managers, fmt.Sprintf("manager %s %s", one.Name, one.Blocks))
		}
	}
	if _, err := m.step(ctx, raise); err != nil {
		return nil, toStatus(err)
	}
	return m.GetUpgrade(ctx, &pb.GetUpgradeRequest{})
}

// managerLevels returns what this manager knows of the others and of itself.
func (m *Manager) managerLevels() (parts []*pb.UpgradePart) {
	if m.quorum == nil {
		return []*pb.UpgradePart{{Kind: "manager", Name: "alone", Version: m.cfg.Version, Level: uint32(m.cfg.Level)}}
	}
	now := m.quorum.Status()
	for _, one := range now.Applied.Members {
		part := &pb.UpgradePart{Kind: "manager", Name: one.ID.String()}
		if one.ID == now.ID {
			part.Version, part.Level = m.cfg.Version, uint32(m.cfg.Level)
		} else {
			part.Version, part.Level, part.Blocks = m.quorum.levelOf(one.ID, m.cfg.Level)
		}
		parts = append(parts, part)
	}
	return parts
}

// levelOf returns which level another manager says it knows, and why a level cannot be begun
// because of it.
func (s *shared) levelOf(id quorum.ID, to block.Level) (version string, knows uint32, blocks string) {
	if s.transport == nil {
		return "", 0, "has said nothing to this manager"
	}
	peer := s.transport.Peers()[id]
	switch {
	case peer.Level == 0:
		blocks = "has said nothing to this manager: start it, or remove it"
	case peer.Level > to:
		blocks = fmt.Sprintf("knows level %d, and the manager that leads knows none above %d", peer.Level, to)
	case peer.Level < to:
		blocks = fmt.Sprintf("knows level %d: upgrade it", peer.Level)
	case peer.Problem != "" || time.Since(peer.Heard) > silentAfter:
		blocks = "does not answer: start it, or remove it"
	}
	return peer.Version, uint32(peer.Level), blocks
}

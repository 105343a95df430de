// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
)

// AddHost adds a node without Weft's agent.
func (m *Manager) AddHost(ctx context.Context, r *pb.AddHostRequest) (*pb.AddHostResponse, error) {
	in := cluster.AddHost{Node: block.NodeName(r.Node), Authenticate: r.Authenticate}
	var err error
	if in.NQN, err = field("host_nqn", r.HostNqn, block.ParseNQN); err != nil {
		return nil, err
	}
	added, err := call(ctx, m, in, func(a cluster.AddedHost) cluster.AddedHost { return a })
	if err != nil {
		return nil, err
	}
	out := &pb.AddHostResponse{Node: pbNode(added.Node)}
	for text, secret := range map[*string]block.Secret{&out.HostSecret: added.Keys.Host, &out.ControllerSecret: added.Keys.Controller} {
		if *text, err = secretText(secret); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// secretText is a secret as nvme-cli takes it; empty for none.
func secretText(s block.Secret) (string, error) {
	if s.IsZero() {
		return "", nil
	}
	key, err := dhchap.NewKey(dhchap.SHA256, s.Reveal())
	if err != nil {
		return "", fmt.Errorf("write a host's secret: %w", err)
	}
	return key.Representation(), nil
}

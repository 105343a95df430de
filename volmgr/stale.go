// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
)

// staleFor is how long a manager that does not lead answers from a state once it has loaded that:
// loading takes a while if there are many volumes.
const staleFor = time.Second

// replicaState is what a manager that does not lead answers from, if the caller can do with that.
type replicaState struct {
	mu     sync.Mutex
	state  *cluster.State // never changed
	loaded time.Time
	heard  time.Time // when the manager that led was heard last, before that
	term   uint64    // of the last entry in it
	index  uint64
}

var errNothingYet = &cluster.Error{Kind: cluster.FailedPrecondition, Text: "this volume manager has no records yet"}

// readStale returns what this manager has in its store, and tells the caller how old that is.
func (m *Manager) readStale(ctx context.Context) (*cluster.State, error) {
	r := &m.replica
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == nil || time.Since(r.loaded) > staleFor {
		if err := m.loadReplica(r); err != nil {
			return nil, err
		}
	}
	header := metadata.Pairs(pb.ReadTermKey, strconv.FormatUint(r.term, 10), pb.ReadIndexKey, strconv.FormatUint(r.index, 10),
		pb.ReadAgeKey, time.Since(r.heard).Round(time.Millisecond).String())
	_ = grpc.SetHeader(ctx, header) // fails only if nobody called over gRPC
	return r.state, nil
}

// loadReplica loads what the store has. It may have more than r says.
func (m *Manager) loadReplica(r *replicaState) error {
	heard, now := m.quorum.Heard(), m.quorum.Status()
	if now.Applied.Index == 0 || heard.IsZero() {
		return errNothingYet
	}
	state, err := loadState(m.records, m.cfg.Level)
	if err != nil {
		return err
	}
	state.SetPolicy(m.cfg.policy())
	r.state, r.loaded, r.heard, r.term, r.index = state.Unheard(), time.Now(), heard, now.Applied.Term, now.Applied.Index
	return nil
}

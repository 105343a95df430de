// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"math/rand/v2"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
	"weft.dev/weft/volmgr/quorum"
)

// quorum prepares a run of a manager that shares its records with others.
func (h *managerHost) quorum(m *managing) *volmgr.Quorum {
	c := h.cluster
	c.t.Helper()
	c.historyMutex.Lock()
	random := rand.New(rand.NewPCG(c.random.Uint64(), 1))
	c.historyMutex.Unlock()
	var err error
	if m.medium, err = newMedium(m, h.store, random); err != nil {
		c.t.Fatalf("%s: %v", h.name, err)
	}
	return &volmgr.Quorum{Address: h.address(), Medium: m.medium.over(), Dial: func(address string) (*grpc.ClientConn, error) {
		return c.dialOne(m.at, address), nil
	}}
}

// leader returns the manager that leads; nil if there is none. Without a quorum it is the one that
// runs.
func (c *cluster) leader() (leads *managerHost) {
	most := uint64(0)
	for _, h := range c.managers {
		switch {
		case h.running == nil || h.running.isOff():
		case !c.quorum:
			return h
		default:
			if now := h.running.manager.Member().Status(); now.Role == quorum.Leader && now.Term > most {
				leads, most = h, now.Term
			}
		}
	}
	return leads
}

// join adds a manager with an empty store to the others. It gets its vote by itself.
func (c *cluster) join(h *managerHost) {
	c.t.Helper()
	if err := os.RemoveAll(h.store); err != nil {
		c.t.Fatalf("%v", err)
	}
	id, err := volmgr.Join(h.config(), c.id)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	h.start()
	c.eventually(h.name+" is added", func(ctx context.Context) error {
		_, err := c.operator.AddManager(ctx, &pb.AddManagerRequest{Id: id.String(), Address: h.address()})
		return err
	})
}

// tryRemove removes a member for good, or fails. Not to find it is as good: an attempt without an
// answer may have removed it.
func (c *cluster) tryRemove(id quorum.ID) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err := c.operator.RemoveManager(ctx, &pb.RemoveManagerRequest{Manager: id.String()})
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// allVote reports whether all managers run, and each knows that all of them vote.
func (c *cluster) allVote() bool {
	for _, h := range c.managers {
		if !c.quorum || h.running == nil || h.running.isOff() {
			return false
		}
		for _, other := range c.managers {
			if m, ok := h.running.manager.Member().Status().Applied.Members.Find(other.member); !ok || !m.Voter {
				return false
			}
		}
	}
	return true
}

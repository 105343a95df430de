// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/pb"
)

// This file decides which manager of a cluster the agent obeys: the one with the highest term.
// Which cluster it obeys is decided in cluster.go.

// newestFile is where a machine remembers the newest order, in Config.StateDir.
const newestFile = "newest-order"

func (c Config) newestFile() string { return filepath.Join(c.StateDir, newestFile) }

// checkedAgents refuses the answers of a manager that another one has replaced. What a
// replaced manager records is not in the store that counts, so continuing without a lost leg
// on its word would lose writes.
//
// It also numbers requests to record a loss, so that none takes effect after a later one was
// answered: see RecordStaleRequest.
type checkedAgents struct {
	pb.AgentsClient
	newest  *authority.Note
	numbers *numbers
}

// numbers gives the requests of a host numbers that grow, also from one process to the next. Its
// methods may be called side by side.
type numbers struct {
	mu   sync.Mutex
	last uint64 // begins with the time, in nanoseconds
	term uint64 // the newest that a manager has named in a refusal
}

func (n *numbers) next() (number, term uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = max(n.last+1, uint64(time.Now().UnixNano()))
	return n.last, n.term
}

// raise notes what a manager has named in a refusal.
func (n *numbers) raise(term, number uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.term, n.last = max(n.term, term), max(n.last, number)
}

// RecordStale implements [pb.AgentsClient].
func (c checkedAgents) RecordStale(ctx context.Context, r *pb.RecordStaleRequest, o ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	answer, err := c.recordStale(ctx, r, o...)
	if err == nil {
		err = c.newest.CheckAnswer(answer.GetTerm())
	}
	return answer, err
}

// recordStale sends a request with the next number. It is sent once more if it was refused only
// because this host knows too little: a manager leads of which it has not heard, or its clock was
// set back since an earlier process gave numbers.
func (c checkedAgents) recordStale(ctx context.Context, r *pb.RecordStaleRequest, o ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	answer, err := c.AgentsClient.RecordStale(ctx, c.numbered(r), o...)
	if term, number, late := pb.LateRecord(err); late {
		c.numbers.raise(term, number)
		answer, err = c.AgentsClient.RecordStale(ctx, c.numbered(r), o...)
	}
	return answer, err
}

func (c checkedAgents) numbered(r *pb.RecordStaleRequest) *pb.RecordStaleRequest {
	r = proto.CloneOf(r)
	number, term := c.numbers.next()
	r.Number, r.Term = number, max(term, c.newest.Newest().Term)
	return r
}

// RecordInSync implements [pb.AgentsClient].
func (c checkedAgents) RecordInSync(ctx context.Context, r *pb.RecordInSyncRequest, o ...grpc.CallOption) (*pb.RecordInSyncResponse, error) {
	answer, err := c.AgentsClient.RecordInSync(ctx, r, o...)
	if err == nil {
		err = c.newest.CheckAnswer(answer.GetTerm())
	}
	return answer, err
}

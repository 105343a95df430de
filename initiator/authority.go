// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"path/filepath"

	"google.golang.org/grpc"

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
type checkedAgents struct {
	pb.AgentsClient
	newest *authority.Note
}

// RecordStale implements [pb.AgentsClient].
func (c checkedAgents) RecordStale(ctx context.Context, r *pb.RecordStaleRequest, o ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	answer, err := c.AgentsClient.RecordStale(ctx, r, o...)
	if err == nil {
		err = c.newest.CheckAnswer(answer.GetTerm())
	}
	return answer, err
}

// RecordInSync implements [pb.AgentsClient].
func (c checkedAgents) RecordInSync(ctx context.Context, r *pb.RecordInSyncRequest, o ...grpc.CallOption) (*pb.RecordInSyncResponse, error) {
	answer, err := c.AgentsClient.RecordInSync(ctx, r, o...)
	if err == nil {
		err = c.newest.CheckAnswer(answer.GetTerm())
	}
	return answer, err
}

// SPDX-License-Identifier: Apache-2.0

package replicated

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/quorum/wal"
	"weft.dev/weft/volmgr/store"
)

// Survivor is what a stopped manager has, of a quorum whose majority is lost.
type Survivor struct {
	Cluster block.ClusterID
	ID      quorum.ID
	Members quorum.Members
	Records []cluster.Record // in key order
}

// Salvage reads what the manager whose store is in dir has. Its log may hold records that were
// not committed, and lack others that were. The former are taken: they may have been answered.
func Salvage(dir string, log *slog.Logger) (s Survivor, err error) {
	replica, err := store.OpenReplica(dir, log)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, replica.Close()) }()
	directory := wal.InDirectory(store.QuorumDir(dir))
	opened, err := member.Open(member.Config{Log: directory, Store: replica, Send: lose}) // adopts a snapshot that has arrived
	if err != nil {
		return s, err
	}
	s = Survivor{Cluster: opened.Cluster(), ID: opened.Node().ID(), Members: opened.Node().Applied().Members}
	if err := opened.Close(); err != nil {
		return s, err
	}
	_, state, err := wal.Look(directory)
	if err != nil {
		return s, err
	}
	s.Records, err = withLog(replica, state)
	return s, err
}

// withLog returns the records of a store with all of a log applied.
func withLog(replica *store.Replica, state wal.State) ([]cluster.Record, error) {
	have, err := replica.Load()
	if err != nil {
		return nil, err
	}
	records := map[string]cluster.Record{}
	for _, r := range have {
		records[r.Key] = r
	}
	for _, e := range quorum.Decided(state) {
		changed, err := store.DecodeRecords(e.Data)
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", e.Index, err)
		}
		for _, r := range changed {
			if records[r.Key] = r; r.Value == nil {
				delete(records, r.Key)
			}
		}
	}
	have = have[:0]
	for _, key := range slices.Sorted(maps.Keys(records)) {
		have = append(have, records[key])
	}
	return have, nil
}

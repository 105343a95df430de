// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/dgraph-io/badger/v4"

	"weft.dev/weft/volmgr/cluster"
)

// A commit that is too large for one Badger transaction (some 5 MiB, as when a target with
// thousands of legs boots) is first staged under keys of its own. A mark says that it is
// complete, and then it is carried out. After a crash before the mark the next Open drops
// the staged parts; after a crash behind the mark it carries them out.
const (
	stagePrefix = "~" // sorts after every key of package cluster
	stageMark   = stagePrefix + "whole"
	partPrefix  = stagePrefix + "part/"
	partBytes   = 512 << 10
)

func isStage(key string) bool { return strings.HasPrefix(key, stagePrefix) }

// commitStaged locks out readers, which could see the records of one part without the next.
func (s *Store) commitStaged(records []cluster.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.stage(records); err != nil {
		return err
	}
	return s.finish()
}

// stage writes the parts and then the mark.
func (s *Store) stage(records []cluster.Record) error {
	for i := 0; len(records) > 0; i++ {
		n := partLength(records)
		value, err := json.Marshal(records[:n])
		if err != nil {
			return err
		}
		if err := s.apply([]cluster.Record{{Key: fmt.Sprintf("%s%08d", partPrefix, i), Value: value}}); err != nil {
			return fmt.Errorf("stage: %w", err)
		}
		records = records[n:]
	}
	return s.apply([]cluster.Record{{Key: stageMark, Value: []byte{}}})
}

// partLength is how many of the records go into the next part.
func partLength(records []cluster.Record) int {
	size := 0
	for i, r := range records {
		size += len(r.Key) + len(r.Value)
		if size > partBytes && i > 0 {
			return i
		}
	}
	return len(records)
}

// finish carries out a complete staged commit and drops an incomplete one. It may be
// repeated.
func (s *Store) finish() error {
	staged, err := s.staged()
	if err != nil || len(staged) == 0 {
		return err
	}
	parts, forget := staged, []cluster.Record{}
	for _, p := range parts {
		forget = append(forget, cluster.Record{Key: p.Key})
	}
	if parts[len(parts)-1].Key != stageMark { // a crash cut the staging short
		parts = nil
	}
	for _, p := range parts {
		if p.Key == stageMark {
			continue
		}
		var records []cluster.Record
		if err := json.Unmarshal(p.Value, &records); err != nil {
			return fmt.Errorf("read %s: %w", p.Key, err)
		}
		if err := s.apply(records); err != nil {
			return fmt.Errorf("carry out %s: %w", p.Key, err)
		}
	}
	return s.apply(forget)
}

// staged returns the staged parts in order, then the mark if it is there.
func (s *Store) staged() (staged []cluster.Record, err error) {
	err = s.db.View(func(txn *badger.Txn) error {
		return each(txn, stagePrefix, func(r cluster.Record) error {
			staged = append(staged, r)
			return nil
		})
	})
	return staged, err
}

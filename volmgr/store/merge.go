// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"log/slog"
	"sync"
	"time"
)

const (
	// mergeAt is how many tables that Badger has moved from memory to disk (level 0) are merged:
	// Flatten merges no fewer than one more than Badger's NumLevelZeroTables if there are no
	// others. Beside 15 of them, Badger lets commits wait.
	mergeAt = 6
	// mergeRetry is the pause after a merge that failed.
	mergeRetry = 10 * time.Second
)

// errNotMerged is a merge that has changed nothing. To repeat it at once would be an endless loop.
var errNotMerged = errors.New("no table was merged")

// merger merges the tables of a store. Badger's own workers would look for work 40 times a second
// for ever, and each look wakes a processor. Only commits make tables, so here they cause the
// looks. A merge that failed is repeated without a commit too: commits may be waiting for it.
type merger struct {
	tables func() int   // how many there are in level 0
	merge  func() error // merges them, and all below them
	log    *slog.Logger

	mu      sync.Mutex
	running bool
	closed  bool
	again   *time.Timer // after a failure; nil: none is due
	ended   sync.WaitGroup
}

// look starts a merge if one is due and none is running. It does not wait for it.
func (m *merger) look() {
	due := m.tables() >= mergeAt
	m.mu.Lock()
	defer m.mu.Unlock()
	if due && !m.running && !m.closed && m.again == nil {
		m.running = true
		m.ended.Go(m.run)
	}
}

// run merges until no more merge is due, or one fails.
func (m *merger) run() {
	for {
		before := m.tables()
		err := m.merge()
		left := m.tables()
		if err == nil && left >= max(before, mergeAt) {
			err = errNotMerged
		}
		m.mu.Lock()
		switch {
		case err != nil && !m.closed:
			m.log.Warn("the store's tables are not merged", "retry_in", mergeRetry, "err", err)
			m.again = time.AfterFunc(mergeRetry, m.retry)
		case err == nil && left >= mergeAt && !m.closed:
			m.mu.Unlock()
			continue
		}
		m.running = false
		m.mu.Unlock()
		return
	}
}

// retry is called some time after a failure.
func (m *merger) retry() {
	m.mu.Lock()
	m.again = nil
	m.mu.Unlock()
	m.look()
}

// close waits for a merge that is running; none starts afterwards.
func (m *merger) close() {
	m.mu.Lock()
	m.closed = true
	if m.again != nil {
		m.again.Stop()
	}
	m.mu.Unlock()
	m.ended.Wait()
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
)

// committer makes the records of the state durable: in the store of this machine, or in a log
// that several managers share.
type committer interface {
	// Run does what goes on in the background until ctx ends. An error ends the manager.
	Run(context.Context) error
	// Lead waits until this manager may decide. It returns a channel that is closed when it may
	// not any more; nil means never. All that was committed before is durable here then.
	Lead(context.Context) (over <-chan struct{}, err error)
	// Confirm returns nil if this manager still leads: what it knows is what there is.
	Confirm() error
	// Leader is the address of the manager that leads; empty if that is not known.
	Leader() string
	// Changed returns a channel that is closed when another manager leads; nil means never.
	Changed() <-chan struct{}
	// Load returns all records that are durable, in key order.
	Load() ([]cluster.Record, error)
	// LoadPrefix is Load for the records whose keys begin with a prefix.
	LoadPrefix(prefix string) ([]cluster.Record, error)
	// Commit makes records durable, all or none. After ErrOutcomeUnknown they may be durable
	// or not, and Load tells which. After any other error nothing more can be made durable.
	Commit([]cluster.Record) error
	// Backup writes a consistent copy of all durable records.
	Backup(io.Writer) error
	Close() error
}

// ErrOutcomeUnknown is the error for an input whose commit failed, so that it may or may not
// have taken effect. Callers repeat it: every input can be repeated.
var ErrOutcomeUnknown = errors.New("it is not known whether this was recorded")

// errStateLoaded ends the streams of agents: the state knows nothing of their reports.
var errStateLoaded = status.Error(codes.Unavailable, "the volume manager has reloaded its state: report again in full")

// hooked is a committer that calls a test's hooks instead, which may commit or confirm; nil is none.
type hooked struct {
	committer
	commit  func(records []cluster.Record, commit func([]cluster.Record) error) error
	confirm func(confirm func() error) error
}

// Commit is part of committer.
func (h hooked) Commit(records []cluster.Record) error {
	if h.commit == nil {
		return h.committer.Commit(records)
	}
	return h.commit(records, h.committer.Commit)
}

// Confirm is part of committer.
func (h hooked) Confirm() error {
	if h.confirm == nil {
		return h.committer.Confirm()
	}
	return h.confirm(h.committer.Confirm)
}

// loadState returns the state of the durable records, for a manager that knows a level.
func loadState(c committer, known block.Level) (*cluster.State, error) {
	records, err := c.Load()
	if err != nil {
		return nil, err
	}
	return cluster.LoadKnowing(known, records)
}

// startOver recovers from a failed commit of a batch. The state is then ahead of the durable
// records, so it is replaced by one that is loaded from them. Every input of the batch gets
// ErrOutcomeUnknown, even if it was refused: the refusal may rest on records that never
// became durable. Looks see the loaded state, and agents report to it from the start. If
// nothing more can be made durable, startOver returns the cause. If another manager leads, nothing is
// loaded, which would keep callers waiting, and it returns errDeposed.
func (m *Manager) startOver(batch []ask, cause error) error {
	for _, a := range batch {
		if a.input != nil {
			a.reply <- answer{err: ErrOutcomeUnknown}
		}
	}
	if !errors.Is(cause, ErrOutcomeUnknown) {
		return cause
	}
	select {
	case <-m.over:
		for _, a := range batch {
			if a.look != nil {
				a.reply <- answer{err: cause}
			}
		}
		return errDeposed
	default:
	}
	m.cfg.Log.Warn("commit failed: loading what is durable", "err", cause)
	if err := m.load(); err != nil {
		return errors.Join(cause, fmt.Errorf("load the records again: %w", err))
	}
	m.endSessions(errStateLoaded)
	confirmed := m.records.Confirm()
	if confirmed != nil && !errors.Is(confirmed, ErrOutcomeUnknown) {
		return confirmed
	}
	for _, a := range batch {
		if a.look == nil {
			continue
		}
		if confirmed == nil {
			a.look()
		}
		a.reply <- answer{err: confirmed}
	}
	return nil
}

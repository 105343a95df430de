// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"slices"
)

// Member is a leg in sync, or one that is copied to. It is comparable.
type Member struct {
	Copy    int
	Stay    uint64 // changes when the leg leaves the column, and when it returns
	Copying bool   // it is not in sync yet, and is given all writes
}

// Column is what a checkpoint needs of a column that is in use.
type Column interface {
	// Members returns the legs in sync and those that are copied to.
	Members() []Member

	// Settle waits until all writes that were accepted before the call are on every member; a
	// leg that is copied to may miss them where it will be copied. After an error some may not be.
	Settle(ctx context.Context) error

	// Begin and Commit call the tracker of a member. To one that is copied to, Commit tells what
	// it lacks at the time of the call.
	Begin(ctx context.Context, m Member, token Token) error
	Commit(ctx context.Context, m Member, token Token) error
}

// ErrChanged is returned if a leg has left or joined during a checkpoint.
var ErrChanged = errors.New("the legs of the column have changed")

// Take takes a checkpoint and returns the legs that it covers. It may stop after any step;
// the next checkpoint covers what this one has left. A checkpoint must not be taken before
// the copies have been made equal after a crash, nor while another is taken. It does not fail
// because of a leg that is copied to: what such a leg was told before then counts no more, and
// the next host copies it whole.
func Take(ctx context.Context, c Column, token Token) ([]Member, error) {
	members := c.Members()
	for _, m := range members {
		if err := c.Begin(ctx, m, token); err != nil && !m.Copying {
			return nil, err
		}
	}
	if err := c.Settle(ctx); err != nil {
		return nil, err
	}
	if !slices.Equal(members, c.Members()) {
		return nil, ErrChanged
	}
	for _, copying := range []bool{true, false} { // first them, who then know what the others still list
		for _, m := range members {
			if m.Copying != copying {
				continue
			}
			if err := c.Commit(ctx, m, token); err != nil && !copying {
				return nil, err
			}
		}
	}
	return members, nil
}

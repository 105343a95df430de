// SPDX-License-Identifier: Apache-2.0

// Package agentlock keeps agents apart that would work against each other.
//
// An agent locks files for as long as it runs. The kernel unlocks them when the process
// and its last system call are over. The agent signs the files, so that another one
// that is refused can say who holds them. Which files those are, and who may share
// one, is up to the agents.
package agentlock

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Lock is a set of locked files.
type Lock []*os.File

// Release unlocks the files.
func (l Lock) Release() {
	for _, f := range l {
		f.Close()
	}
}

// patience is how long Wait waits for an agent that is about to end.
const patience = 5 * time.Second

// Wait takes a lock with try. As long as try returns the error held, it tries again for
// some seconds. What try has locked before an error is released.
func Wait(ctx context.Context, held error, try func() (Lock, error)) (Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		l, err := try()
		if err == nil {
			return l, nil
		}
		l.Release()
		if !errors.Is(err, held) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(patience / 50):
		}
	}
}

// Take opens a file as [os.OpenFile] does and locks it, with unix.LOCK_EX alone or with
// unix.LOCK_SH among others. The error is unix.EWOULDBLOCK if somebody else's lock
// forbids that.
func Take(path string, flags int, mode fs.FileMode, how int) (*os.File, error) {
	f, err := os.OpenFile(path, flags, mode)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "lock", Path: path, Err: err}
	}
	return f, nil
}

// Sign makes text all that a locked file holds.
func Sign(f *os.File, text string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(text+"\n"), 0)
	return err
}

// SPDX-License-Identifier: Apache-2.0

// Package agentlock keeps two agents from doing the same work at once.
//
// An agent locks files for as long as it runs. The kernel drops the locks when the process
// and its last system call have ended. The agent writes its name into the files, so that an
// agent that is refused can say who holds the lock. Each kind of agent decides which files
// to lock, and which of them may be shared.
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

// patience is how long Wait waits for an agent that is about to exit.
const patience = 5 * time.Second

// Wait takes a lock with try. While try returns the error held, Wait tries again, for a few
// seconds. Locks that try took before an error are released.
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

// Take opens a file as [os.OpenFile] does and locks it: exclusively with unix.LOCK_EX,
// shared with unix.LOCK_SH. It returns unix.EWOULDBLOCK if another lock is in the way.
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

// Sign replaces the contents of a locked file with text.
func Sign(f *os.File, text string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(text+"\n"), 0)
	return err
}

// SPDX-License-Identifier: Apache-2.0

package agentlock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

func TestAFileIsLockedByOneOrSharedBySome(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	for _, c := range []struct {
		first, second int
		ok            bool
	}{
		{unix.LOCK_EX, unix.LOCK_EX, false},
		{unix.LOCK_EX, unix.LOCK_SH, false},
		{unix.LOCK_SH, unix.LOCK_EX, false},
		{unix.LOCK_SH, unix.LOCK_SH, true},
	} {
		first, err := Take(path, os.O_RDWR|os.O_CREATE, 0o644, c.first)
		if err != nil {
			t.Fatal(err)
		}
		second, err := Take(path, os.O_RDWR, 0o644, c.second)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("lock %d beside %d: %v, want success %v", c.second, c.first, err, c.ok)
		}
		if err == nil {
			second.Close()
		}
		Lock{first}.Release()
		second, err = Take(path, os.O_RDWR, 0o644, c.second)
		if err != nil {
			t.Fatalf("lock %d after %d: %v", c.second, c.first, err)
		}
		second.Close()
	}
}

func TestASignReplacesALongerOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f, err := Take(path, os.O_RDWR|os.O_CREATE, 0o644, unix.LOCK_EX)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(Sign(f, "a long name"), Sign(f, "n1")); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "n1\n" {
		t.Errorf("signed %q, %v; want n1", text, err)
	}
}

func TestWaitIsPatientWithTheHolderAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held, broken := errors.New("held"), errors.New("broken")
		began := time.Now()
		dir := t.TempDir()
		open := func() Lock {
			f, err := os.CreateTemp(dir, "")
			if err != nil {
				t.Fatal(err)
			}
			return Lock{f}
		}
		try := func(until time.Duration, then error) (took []Lock, err error) {
			_, err = Wait(t.Context(), held, func() (Lock, error) {
				l := open()
				took = append(took, l)
				if time.Since(began) < until {
					return l, held
				}
				return l, then
			})
			return took, err
		}
		for _, c := range []struct {
			until      time.Duration
			then, want error
		}{{0, broken, broken}, {time.Second, nil, nil}, {time.Second, broken, broken}, {time.Hour, nil, held}} {
			began = time.Now()
			took, err := try(c.until, c.then)
			if !errors.Is(err, c.want) || time.Since(began) > min(c.until+patience/50, patience) {
				t.Errorf("held for %v, then %v: Wait = %v after %v, want %v", c.until, c.then, err, time.Since(began), c.want)
			}
			for i, l := range took {
				kept := c.want == nil && i == len(took)-1
				if closed := l[0].Close() != nil; closed == kept {
					t.Errorf("held for %v, then %v: the files of try %d are closed: %v", c.until, c.then, i, closed)
				}
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Wait(ctx, held, func() (Lock, error) { return nil, held }); !errors.Is(err, held) {
			t.Errorf("Wait with an ended context = %v, want %v", err, held)
		}
	})
}

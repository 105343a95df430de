// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"bytes"
	"context"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// equalPiece is how much is compared at a time, and equalLanes how many pieces at once.
const (
	equalPiece = 256 << 10
	equalLanes = 16
)

// Compared is what MakeEqual has done, in bytes of one head.
type Compared struct{ Read, Copied int64 }

// MakeEqual makes ranges of heads equal, bypassing the page cache: where a head differs from the first
// one, it is overwritten. Ranges are offset and end, at multiples of 4 KiB. Nothing else may use the heads.
// It can block forever.
func (t *Tree) MakeEqual(ctx context.Context, heads []Head, ranges [][2]int64) (done Compared, err error) {
	fds := make([]int, 0, len(heads))
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for _, h := range heads {
		path := filepath.Join(t.dev, h.Name)
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		if err != nil {
			return done, &Error{Op: "open", Path: path, Err: err}
		}
		fds = append(fds, fd)
		if err := t.sameHead(fd, h); err != nil {
			return done, &Error{Op: "compare", Path: path, Err: err}
		}
	}
	var read, copied atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(equalLanes)
	for _, r := range ranges {
		for at := r[0]; at < r[1]; at += equalPiece {
			n := min(r[1]-at, equalPiece)
			g.Go(func() error {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				c, err := makeEqual(fds, at, int(n))
				read.Add(n)
				copied.Add(c)
				if err != nil {
					return &Error{Op: "make equal", Path: heads[0].Name, Err: err}
				}
				return nil
			})
		}
	}
	err = g.Wait()
	for _, fd := range fds {
		if err == nil {
			err = unix.Fsync(fd)
		}
	}
	return Compared{read.Load(), copied.Load()}, err
}

// makeEqual makes one piece equal, and returns how much it has written.
func makeEqual(fds []int, at int64, n int) (copied int64, err error) {
	first, other := aligned(n), aligned(n)
	if err := readFull(fds[0], first, at); err != nil {
		return 0, err
	}
	for _, fd := range fds[1:] {
		if err := readFull(fd, other, at); err != nil {
			return copied, err
		}
		if bytes.Equal(first, other) {
			continue
		}
		if m, err := unix.Pwrite(fd, first, at); err != nil || m != n {
			return copied, shortOr(err)
		}
		copied += int64(n)
	}
	return copied, nil
}

func readFull(fd int, b []byte, at int64) error {
	if n, err := unix.Pread(fd, b, at); err != nil || n != len(b) {
		return shortOr(err)
	}
	return nil
}

func shortOr(err error) error {
	if err == nil {
		return unix.EIO
	}
	return err
}

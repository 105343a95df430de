// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// bareFrames serves unparsed frames: the machine's upper bound.
func bareFrames(f form, cpu int) (*server, error) {
	name := map[form]string{busy: "bare frames, busy", blocking: "bare frames", poller: "bare frames, Go"}[f]
	return ours(name, job{Kind: "frames", Form: f}, cpu, "frames", string(f))
}

// memoryServers are the limits, our servers and the peers, all serving memory. A peer that
// cannot keep data in its own memory serves a file on a RAM disk.
func memoryServers(ctx context.Context, _ Options, cpu int) (all []*server, missing []string, clean func(), err error) {
	file, clean, err := backing("/dev/shm")
	if err != nil {
		return nil, nil, nil, err
	}
	for _, f := range []form{busy, blocking, poller} {
		s, err := bareFrames(f, cpu)
		if err != nil {
			return nil, nil, nil, err
		}
		all = append(all, s)
	}
	s, err := ours("weft", job{Kind: "host"}, cpu, "memory")
	if err != nil {
		return nil, nil, nil, err
	}
	all = append(all, s, s.over("RAID1", "volume", 1, 2), s.over("RAID10", "volume", 2, 2))
	polled, err := spdk(s, cpu)
	if err != nil {
		missing = append(missing, "SPDK: "+err.Error())
	}
	others, absent := peers(ctx, file, false, cpu)
	return append(append(all, polled...), others...), append(missing, absent...), clean, nil
}

// fileServers are our servers and the peers, all serving a file, and a limit for
// comparison.
func fileServers(ctx context.Context, o Options, cpu int) (all []*server, missing []string, clean func(), err error) {
	file, clean, err := backing(o.Dir)
	if err != nil {
		return nil, nil, nil, err
	}
	limit, err := bareFrames(blocking, cpu)
	if err != nil {
		return nil, nil, nil, err
	}
	s, err := ours("weft", job{Kind: "host"}, cpu, "file", file)
	if err != nil {
		return nil, nil, nil, err
	}
	others, missing := peers(ctx, file, true, cpu)
	return append([]*server{limit, s}, others...), missing, clean, nil
}

// backing creates a file with all of its blocks allocated.
func backing(dir string) (file string, clean func(), err error) {
	dir, err = os.MkdirTemp(dir, "weft-bench-*")
	if err != nil {
		return "", nil, err
	}
	clean = func() { os.RemoveAll(dir) }
	file = filepath.Join(dir, "device")
	f, err := os.Create(file)
	if err != nil {
		clean()
		return "", nil, err
	}
	p := make([]byte, 1<<20)
	for i := range p {
		p[i] = byte(i * 7)
	}
	for range int(deviceSize) / len(p) {
		if _, err = f.Write(p); err != nil {
			break
		}
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		clean()
		return "", nil, fmt.Errorf("fill %s: %w", file, err)
	}
	return file, clean, nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// walk photographs what an operator sees of a drive that fails, from the first sign until all is well
// with a new one, as docs/walk.md tells it. The drive is a file, which fails by losing its content.
func (s *shoot) walk(ctx context.Context, at string) error {
	const node = "t2"
	old := filepath.Join(s.dir, "dev", node, "drive1")
	id, err := s.driveOf(ctx, node)
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return s.weftDo(ctx, "volume", "set", "db1", "--rebuild-rate", "64MiB") }, // a picture shows the copying
		func() error { return s.picture(ctx, at+"/", "walk-1-healthy", 900) },
		func() error { return os.Truncate(old, 0) },
		func() error { return s.until(ctx, "is failed", "status") },
		func() error { return s.until(ctx, "is stale", "explain", "volume", "db1") },
		func() error { return s.picture(ctx, at+"/", "walk-2-failed", 1000) },
		func() error { return s.picture(ctx, at+"/volumes/db1", "walk-3-volume", 1300) },
		func() error { return s.picture(ctx, at+"/drives", "walk-4-drives", 1300) },
		func() error { return s.weftDo(ctx, "drive", "evict", id) },
		func() error { return s.until(ctx, "to copy leg", "explain", "volume", "db1") },
		func() error { return s.picture(ctx, at+"/volumes/db1", "walk-5-rebuilding", 1300) },
		func() error { return s.weftDo(ctx, "volume", "set", "db1", "--rebuild-rate", "off") },
		func() error { return s.until(ctx, "nothing is wrong", "status") },
		func() error { return os.Truncate(old, 8<<30) },                     // the new drive is empty, in the old one's slot
		func() error { return s.untilDone(ctx, "drive", "add", node, old) }, // its target sees it within seconds
		func() error { return s.until(ctx, "6, all ready", "status") },
		func() error { return s.picture(ctx, at+"/", "walk-6-replaced", 900) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// picture takes a picture with the light theme.
func (s *shoot) picture(ctx context.Context, address, name string, height int) error {
	file := filepath.Join(s.out, name+".png")
	fmt.Println(file)
	return s.one(ctx, address, file, light, height)
}

// driveOf returns the drive of a node.
func (s *shoot) driveOf(ctx context.Context, node string) (string, error) {
	var list struct {
		Drives []struct{ ID string }
	}
	if err := s.read(ctx, &list, "drive", "list", "--node", node); err != nil {
		return "", err
	}
	if len(list.Drives) != 1 {
		return "", fmt.Errorf("node %s has %d drives, want one", node, len(list.Drives))
	}
	return list.Drives[0].ID, nil
}

// until waits until a command prints a text.
func (s *shoot) until(ctx context.Context, text string, args ...string) error {
	return retry(ctx, func() error {
		said, err := s.says(ctx, args...)
		if err == nil && !strings.Contains(said, text) {
			err = fmt.Errorf("weft %s does not say %q:\n%s", strings.Join(args, " "), text, said)
		}
		return err
	})
}

// untilDone repeats a command until it succeeds.
func (s *shoot) untilDone(ctx context.Context, args ...string) error {
	return retry(ctx, func() error { return s.weftDo(ctx, args...) })
}

// retry calls f until it succeeds, for three minutes at most.
func retry(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

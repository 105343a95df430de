// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"path/filepath"
	"strings"

	"weft.dev/weft/proto/block"
)

// RemoveAll removes whatever dead processes left under o.RunDir, for all names; names of
// living processes are left alone. It is for a process that starts and will not resume the
// devices of its predecessor.
func RemoveAll(ctx context.Context, o Options) error {
	return removeThose(ctx, o, func(Options) bool { return true })
}

// RemoveDead is RemoveAll for a process that may resume devices: those that can be, and are used, stay.
// One that nobody uses would wait for nothing, and meanwhile it can hold up others: the kernel makes no
// loop device while it waits for another one's answer.
func RemoveDead(ctx context.Context, o Options) error {
	return removeThose(ctx, o, func(o Options) bool {
		r := readRecord(o)
		return r.Resume == "" || !systemOf(o).inUse(r.Disk)
	})
}

func removeThose(ctx context.Context, o Options, these func(Options) bool) error {
	o.Name = "any"
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	locks, err := filepath.Glob(filepath.Join(o.RunDir, "*.lock"))
	if err != nil {
		return err
	}
	var errs []error
	for _, lock := range locks {
		o.Name = block.VolumeName(strings.TrimSuffix(filepath.Base(lock), ".lock"))
		if !these(o) {
			continue
		}
		if err := Remove(ctx, o); err != nil && !errors.Is(err, ErrExported) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

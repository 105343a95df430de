// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"path/filepath"
	"strings"

	"weft.dev/weft/proto/block"
)

// RemoveAll takes away what dead processes have left under o.RunDir, whatever its
// name; names whose process lives are left alone. It is for a process that
// begins, and will not resume what the last one had.
func RemoveAll(ctx context.Context, o Options) error {
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
		if err := Remove(ctx, o); err != nil && !errors.Is(err, ErrExported) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

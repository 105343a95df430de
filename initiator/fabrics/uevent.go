// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"strings"

	"weft.dev/weft/proto/uevent"
)

// Watch calls changed after each kernel event about NVMe or device-mapper: namespaces and
// controllers that appear or disappear, sizes, tables. It returns nil when ctx ends. Events
// can be lost, and no event reports a controller's state, so the caller must also look from
// time to time.
func Watch(ctx context.Context, changed func()) error {
	err := uevent.Watch(ctx, func(e uevent.Event) {
		if lost := e.Action == ""; lost || concerns(e) {
			changed()
		}
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func concerns(e uevent.Event) bool {
	return strings.Contains(e.Path, "/nvme") || strings.Contains(e.Path, "/block/dm-")
}

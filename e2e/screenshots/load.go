// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
)

// pace is how often a volume gets an I/O, and how large its I/Os are.
type pace struct {
	every time.Duration
	size  int
}

// paces are what the programs that use the volumes do.
var paces = map[string]pace{"db1": {time.Millisecond, 8 << 10}, "media": {8 * time.Millisecond, 128 << 10}, "registry": {25 * time.Millisecond, 32 << 10}}

// load reads and writes the attached volumes until ctx ends: two reads for each write.
func (s *shoot) load(ctx context.Context) error {
	var list struct {
		Attachments []struct {
			VolumeName string `json:"volume_name"`
			Device     string
		}
	}
	if err := s.read(ctx, &list, "attachment", "list"); err != nil {
		return err
	}
	for _, a := range list.Attachments {
		device, cut, err := connect(ctx, a.Device)
		if err != nil {
			return fmt.Errorf("volume %s at %s: %w", a.VolumeName, a.Device, err)
		}
		context.AfterFunc(ctx, cut)
		go use(ctx, device, paces[a.VolumeName])
	}
	return nil
}

// connect opens the namespace that weft dev shows a volume as.
func connect(ctx context.Context, url string) (block.Device, func(), error) {
	at, volume, _ := strings.Cut(strings.TrimPrefix(url, "nvme-tcp://"), "/")
	volume, own, _ := strings.Cut(volume, "?host=")
	id, err := block.ParseUUID(own)
	if err != nil {
		return nil, nil, err
	}
	c, err := host.Connect(ctx, host.Config{Portals: []string{at}, Subsystem: block.NQN(volume), Host: block.HostFromID(id)})
	if err != nil {
		return nil, nil, err
	}
	n, err := c.Namespace(1, block.UUID{})
	if err != nil {
		c.Cut()
		return nil, nil, err
	}
	return n, c.Cut, nil
}

// use does I/O on a device at random places, at a pace, as many at once as that takes.
func use(ctx context.Context, device block.Device, p pace) {
	tick := time.NewTicker(p.every)
	defer tick.Stop()
	places := int64(device.Geometry().Size) / int64(p.size)
	atOnce := make(chan struct{}, 16)
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		atOnce <- struct{}{}
		go func() {
			defer func() { <-atOnce }()
			data, off := make([]byte, p.size), rand.Int64N(places)*int64(p.size)
			if n%3 == 0 {
				block.WriteAt(device, data, off) //nolint:errcheck // the volume of the next picture may be lost
			} else {
				block.ReadAt(device, data, off) //nolint:errcheck // see above
			}
		}()
	}
}

// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// maxDiscoveryEntries limits the discovery log that is read: 8 MiB.
const maxDiscoveryEntries = 8 << 10

// Discover asks the discovery controller at a portal, "address:port", for the subsystems
// that a host can connect to. It connects, asks and disconnects, until ctx ends.
func Discover(ctx context.Context, portal string, me block.Host) ([]nvmetcp.DiscoveryEntry, error) {
	return DiscoverWith(ctx, Config{Portals: []string{portal}, Host: me})
}

// DiscoverWith is Discover with the digests, timeouts and keys of a Config. An empty
// Subsystem means the well-known discovery subsystem.
func DiscoverWith(ctx context.Context, cfg Config) ([]nvmetcp.DiscoveryEntry, error) {
	cfg.KATO, cfg.discovery = -1, true
	if cfg.Subsystem == "" {
		cfg.Subsystem = nvmetcp.DiscoveryNQN
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &Controller{cfg: cfg}
	var first error
	for _, portal := range cfg.Portals {
		s, err := c.open(ctx, portal, 1)
		if err == nil {
			defer s.stop()
			return s.discover(ctx)
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// discover reads the log until its generation is the same before and after.
func (s *session) discover(ctx context.Context) ([]nvmetcp.DiscoveryEntry, error) {
	get := nvmetcp.GetLog{ID: nvmetcp.LogDiscovery, Length: nvmetcp.DiscoveryEntrySize}
	before, err := s.discoveryLog(ctx, get)
	for range 10 {
		if err != nil {
			return nil, err
		}
		if before.Records > maxDiscoveryEntries {
			return nil, fmt.Errorf("discovery log of %d entries: more than %d are not read", before.Records, maxDiscoveryEntries)
		}
		all := get
		all.Length = (before.Records + 1) * nvmetcp.DiscoveryEntrySize
		log, err := s.discoveryLog(ctx, all)
		if err != nil {
			return nil, err
		}
		after, err := s.discoveryLog(ctx, get)
		if err != nil {
			return nil, err
		}
		if after.Generation == before.Generation && uint64(len(log.Entries)) == before.Records {
			return log.Entries, nil
		}
		before = after
	}
	return nil, fmt.Errorf("discovery log of %s changes faster than it can be read", s.portal)
}

// discoveryLog reads a part of the log, in reads as large as the controller allows.
func (s *session) discoveryLog(ctx context.Context, get nvmetcp.GetLog) (nvmetcp.DiscoveryLog, error) {
	var all []byte
	piece := uint64(s.maxIO) &^ 4095
	if s.about.LPA&nvmetcp.LPAExtendedData == 0 {
		piece = get.Length // the controller knows no offsets
	}
	for left := get.Length; left > 0; left = get.Length - uint64(len(all)) {
		part := get
		part.Offset, part.Length = uint64(len(all)), min(left, piece)
		b, err := s.log(ctx, part)
		if err != nil {
			return nvmetcp.DiscoveryLog{}, err
		}
		all = append(all, b...)
	}
	return nvmetcp.ParseDiscoveryLog(all)
}

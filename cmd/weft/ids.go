// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// matchID finds the only id that begins with prefix, the form shown in tables.
func matchID(kind, prefix string, ids []string) (string, error) {
	if len(prefix) < 4 {
		return "", cli.UsageError{Err: fmt.Errorf("%s %q: type at least 4 digits of its id", kind, prefix)}
	}
	found := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return !strings.HasPrefix(id, prefix) })
	switch len(found) {
	case 0:
		return "", status.Errorf(codes.NotFound, "%s %q: not found", kind, prefix)
	case 1:
		return found[0], nil
	}
	return "", cli.UsageError{Err: fmt.Errorf("%s %q: %d ids begin with that", kind, prefix, len(found)), Hint: "type more digits: " + strings.Join(found, ", ")}
}

// portal converts a portal from a message.
func portal(p *pb.Portal) block.Portal {
	t := block.TCP
	if p.GetTransport() == pb.Transport_TRANSPORT_RDMA {
		t = block.RDMA
	}
	port := uint16(p.GetPort())
	if port == 0 {
		port = block.DefaultPort
	}
	return block.Portal{Transport: t, Address: p.GetAddress(), Port: port, Rail: p.GetRail()}
}

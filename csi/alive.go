// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// aliveTime is the longest that a working driver takes to answer a Probe: it asks the manager, and
// a silent manager is not the driver's fault.
const aliveTime = 5 * time.Second

// Alive reports whether a driver, ready or not, answers on the unix socket at this path. A liveness
// check sees the same as the CO's own calls.
func Alive(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, aliveTime)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", socket, err)
	}
	defer conn.Close()
	if _, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}); err != nil {
		return fmt.Errorf("probe the driver at %s: %w", socket, err)
	}
	return nil
}

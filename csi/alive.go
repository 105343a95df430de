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

// aliveTime is how long a driver that works takes to answer a Probe at most: it
// asks the manager, and the manager's silence is no fault of the driver.
const aliveTime = 5 * time.Second

// Alive reports whether a driver answers on the unix socket of this path, ready or
// not. It tells a liveness check what a CO's own calls would find.
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

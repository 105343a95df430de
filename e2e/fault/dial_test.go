// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"weft.dev/weft/proto/managers"
)

// dialManager connects to the managers, as programs do.
func (c *cluster) dialManager(at *machine, options ...grpc.DialOption) *managers.Conn {
	c.t.Helper()
	conn, err := managers.Connect(c.addresses, func(address string) (*grpc.ClientConn, error) {
		return c.dialOne(at, address, options...), nil
	})
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	return conn
}

func (c *cluster) dialOne(at *machine, address string, options ...grpc.DialOption) *grpc.ClientConn {
	c.t.Helper()
	host, _, _ := strings.Cut(address, ":")
	conn, err := grpc.NewClient("passthrough:///"+address, append(options,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := at.dial(ctx, host, address)
			if err != nil {
				return nil, err
			}
			conn.keepalive = true
			return conn, nil
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: userTimeout, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
	)...)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	return conn
}

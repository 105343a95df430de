// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/proto/pb"
)

// AllowStale gives commands below root, named as they are typed, the flag --stale.
func (g *Globals) AllowStale(root *cobra.Command, commands ...string) {
	for _, name := range commands {
		cmd, rest, err := root.Find(strings.Fields(name))
		if err != nil || len(rest) > 0 {
			panic("cli: there is no command " + name)
		}
		cmd.Flags().BoolVar(&g.stale, "stale", false, "let a volume manager answer that does not lead: the newest changes may be missing, and what agents report (who is online, health, progress) is not known there; how old the answer is comes on stderr")
	}
}

// staleCall returns a gRPC interceptor that lets managers answer that do not lead, and tells the
// user once how old that is.
func staleCall(out *Output) grpc.UnaryClientInterceptor {
	var once sync.Once
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		var header metadata.MD
		ctx = metadata.AppendToOutgoingContext(ctx, pb.ReadKey, pb.ReadStale)
		err := LimitCall(ctx, method, req, reply, cc, invoke, append(opts, grpc.Header(&header))...)
		if age := header.Get(pb.ReadAgeKey); err == nil && len(age) > 0 {
			once.Do(func() {
				out.Warn("stale: as of entry %s of term %s; the manager that answers does not lead, and heard the one that does %s ago",
					strings.Join(header.Get(pb.ReadIndexKey), ""), strings.Join(header.Get(pb.ReadTermKey), ""), age[0])
			})
		}
		return err
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A manager that was replaced keeps running, or runs on a copy of the store, and wants no exports:
// they stay, also across a restart of the agent. Each process logs this once.
func TestAReplacedManagersOrdersAreIgnored(t *testing.T) {
	in(t, Kernel, func(t *testing.T, w *world) {
		var out bytes.Buffer
		w.log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelError}))
		w.run()
		later := want().drive(1).volume(1, 1, 1).TargetWanted
		later.Term = 5
		w.manager.set(later)
		w.until("export ready", exportsReady(1))
		before := w.exported()
		w.manager.set(&pb.TargetWanted{ClusterId: cluster.String(), Term: 4})
		for range 2 {
			r := w.until("it says why nothing is done", problemWith("is at term 4, and this agent has acted on orders of term 5"))
			if r.GetTerm() != 5 || r.GetTermClusterId() != cluster.String() {
				t.Errorf("the report is of term %d of %q", r.GetTerm(), r.GetTermClusterId())
			}
			time.Sleep(30 * time.Second)
			if diff := cmp.Diff(before, w.exported()); diff != "" {
				t.Errorf("exports changed (-before +after):\n%s", diff)
			}
			w.stop()
			w.manager.forget()
			w.run()
		}
		later = proto.CloneOf(later)
		later.Exports = nil
		w.manager.set(later)
		w.until("the later one is obeyed", func(r *pb.TargetReport) bool { return exportsReady(0)(r) && len(r.GetProblems()) == 0 })
		if n := strings.Count(out.String(), "not obeyed"); n < 2 || n > 3 {
			t.Errorf("the logs of three processes, of which the last may not have said it, say so %d times:\n%s", n, &out)
		}
	})
}

// behind is a manager that was replaced.
type behind struct{ pb.AgentsClient }

func (behind) Target(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.TargetReport, pb.TargetWanted], error) {
	return nil, authority.ErrReplaced
}

func TestAnAgentOfAReplacedManagerAsksAnotherOne(t *testing.T) {
	ctx, asked := context.WithCancel(t.Context())
	a, err := New(Config{
		Node: "t1", Manager: behind{}, Next: asked, Root: t.TempDir(),
		Portals: []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- a.converse(ctx) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it asked nobody else for a minute")
	}
}

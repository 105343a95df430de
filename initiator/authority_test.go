// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/pb"
)

// A replaced manager that keeps running, or that runs on a copy of the store, does not know
// what is attached here: the attachments stay, even over a restart of the agent. Each process
// tells the operator once.
func TestAReplacedManagersOrdersAreIgnored(t *testing.T) {
	var out bytes.Buffer
	from(t, 1, 2, func(w *world) {
		w.log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelError}))
	}, func(w *world) {
		w.change(func(all *pb.InitiatorWanted) { all.Term = 5 })
		time.Sleep(2 * time.Second)
		w.mu.Lock()
		later := proto.CloneOf(w.wanted)
		w.mu.Unlock()
		w.change(func(all *pb.InitiatorWanted) { all.Term, all.Attachments = 4, nil })
		time.Sleep(10 * time.Second)
		w.expect("under a replaced manager")
		w.stop()
		w.stop = w.start()
		time.Sleep(10 * time.Second)
		w.expect("under a replaced manager, by an agent that has its lease to find out", "suspend top", "resume top")
		r := w.lastReport()
		if r.Term != 5 || r.TermClusterId != home.String() || len(r.Problems) != 1 || !strings.Contains(r.Problems[0].Cause, "term 4") {
			t.Errorf("the report is of term %d of %q with the problems %v", r.Term, r.TermClusterId, r.Problems)
		}
		if n := strings.Count(out.String(), "not obeyed"); n != 2 {
			t.Errorf("the logs of two processes say so %d times:\n%s", n, &out)
		}
		w.change(func(all *pb.InitiatorWanted) {
			all.Term, all.Attachments = later.Term, later.Attachments
			all.Attachments[0].Detach = true
		})
		w.until(clean)
		if p := w.lastReport().Problems; len(p) != 0 {
			t.Errorf("under the later manager the problems reported are %v", p)
		}
	})
}

// answering is a manager that answers every record in the same term.
type answering struct {
	pb.AgentsClient
	term uint64
}

func (m answering) RecordStale(context.Context, *pb.RecordStaleRequest, ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	return &pb.RecordStaleResponse{Term: m.term}, nil
}

func (m answering) RecordInSync(context.Context, *pb.RecordInSyncRequest, ...grpc.CallOption) (*pb.RecordInSyncResponse, error) {
	return &pb.RecordInSyncResponse{Term: m.term}, nil
}

func TestARecordOfAReplacedManagerDoesNotCount(t *testing.T) {
	var newest authority.Note
	if err := newest.Take(authority.Order{Cluster: home, Term: 5, Generation: 1}); err != nil {
		t.Fatal(err)
	}
	for term, want := range map[uint64]error{0: authority.ErrReplaced, 4: authority.ErrReplaced, 5: nil, 6: nil} {
		m := checkedAgents{answering{term: term}, &newest, &numbers{}}
		if _, err := m.RecordStale(t.Context(), &pb.RecordStaleRequest{}); !errors.Is(err, want) {
			t.Errorf("RecordStale in term %d = %v, want %v", term, err, want)
		}
		if _, err := m.RecordInSync(t.Context(), nil); !errors.Is(err, want) {
			t.Errorf("RecordInSync in term %d = %v, want %v", term, err, want)
		}
	}
}

// counting is a manager of a term that has answered a number.
type counting struct {
	pb.AgentsClient
	term, number uint64
	asked        []*pb.RecordStaleRequest
}

func (m *counting) RecordStale(_ context.Context, r *pb.RecordStaleRequest, _ ...grpc.CallOption) (*pb.RecordStaleResponse, error) {
	m.asked = append(m.asked, r)
	if r.Term < m.term || r.Number <= m.number {
		late, err := status.New(codes.FailedPrecondition, "overtaken").WithDetails(&errdetails.ErrorInfo{Reason: pb.ReasonLateRecord,
			Metadata: map[string]string{pb.LateRecordTerm: fmt.Sprint(m.term), pb.LateRecordNumber: fmt.Sprint(m.number)}})
		return nil, errors.Join(err, late.Err())
	}
	m.number = r.Number
	return &pb.RecordStaleResponse{Term: m.term}, nil
}

// A host numbers its requests, and learns from a refusal what a manager of a later term, or one that
// has answered higher numbers, wants.
func TestRequestsOfAHostAreNumbered(t *testing.T) {
	var newest authority.Note
	if err := newest.Take(authority.Order{Cluster: home, Term: 5, Generation: 1}); err != nil {
		t.Fatal(err)
	}
	m := &counting{term: 5}
	c := checkedAgents{m, &newest, &numbers{}}
	ahead := uint64(time.Now().Add(time.Hour).UnixNano()) // a clock that was set back
	for _, step := range []struct {
		what        string
		term, above uint64
		asks        int
	}{{"the first", 5, 0, 1}, {"another", 5, 0, 1}, {"of a later term", 6, 0, 2}, {"again", 6, 0, 1}, {"after a higher number", 6, ahead, 2}, {"again", 6, ahead, 1}} {
		m.term, m.number, m.asked = step.term, max(m.number, step.above), nil
		before := m.number
		if _, err := c.RecordStale(t.Context(), &pb.RecordStaleRequest{Node: "h1"}); err != nil {
			t.Errorf("%s: RecordStale = %v", step.what, err)
		}
		last := m.asked[len(m.asked)-1]
		if len(m.asked) != step.asks || last.Number <= before || last.Term != step.term || last.Node != "h1" {
			t.Errorf("%s: asked %d times, at last number %d after %d, in term %d; want %d times, in term %d", step.what, len(m.asked), last.Number, before, last.Term, step.asks, step.term)
		}
	}
}

// behind is a manager that was replaced.
type behind struct{ pb.AgentsClient }

func (behind) Initiator(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.InitiatorReport, pb.InitiatorWanted], error) {
	return nil, authority.ErrReplaced
}

func TestAnAgentOfAReplacedManagerAsksAnotherOne(t *testing.T) {
	ctx, asked := context.WithCancel(t.Context())
	a, err := New(Config{Node: "h1", BootID: "1", Manager: behind{}, Next: asked, StateDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- a.talk(ctx) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it asked nobody else for a minute")
	}
}

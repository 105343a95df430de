// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
)

// happen causes at least n events.
func (r *rig) happen(n int) {
	r.t.Helper()
	var group sync.WaitGroup
	for worker := range 64 {
		group.Go(func() {
			for i := range n / 128 {
				name := fmt.Sprintf("pool%d-%d", worker, i)
				if _, err := r.CreatePool(r.t.Context(), &pb.CreatePoolRequest{Name: name}); err != nil {
					r.t.Error(err)
					return
				}
				if _, err := r.DeletePool(r.t.Context(), &pb.DeletePoolRequest{Name: name}); err != nil {
					r.t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
}

// heap is how much memory this process has in use.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapInuse + m.StackInuse)
}

func TestFiveThousandWatchesTakeLittleMemory(t *testing.T) {
	r := newRig(t)
	r.happen(event.Max)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	before := heap()
	var open []grpc.ServerStreamingClient[pb.Event]
	refused := 0
	for range 5000 {
		watch, err := r.WatchEvents(ctx, &pb.WatchEventsRequest{})
		if err == nil {
			_, err = watch.Recv()
		}
		if err == nil {
			open = append(open, watch) // it reads no more events
			continue
		}
		refused++
		if status.Code(err) != codes.ResourceExhausted || reason(err) != reasonTooManyWatches || !strings.Contains(err.Error(), "32 watches") {
			t.Fatalf("watch %d = %v, want RESOURCE_EXHAUSTED that says how many there may be", len(open)+refused, err)
		}
	}
	grown := heap() - before
	t.Logf("%d watches are open, %d were refused, and both ends took %d KiB more", len(open), refused, grown>>10)
	if len(open) != watchesMostOfOne || grown > 32<<20 {
		t.Errorf("%d watches of one connection are open and took %d bytes, want %d of them and little", len(open), grown, watchesMostOfOne)
	}
	cancel()
	eventually(t, "there is room for a watch again", func() bool {
		watch, err := r.WatchEvents(t.Context(), &pb.WatchEventsRequest{})
		if err == nil {
			_, err = watch.Recv()
		}
		return err == nil
	})
}

func TestAWatchGoesOnWhereItEndedOrSaysWhatIsGone(t *testing.T) {
	r := newRig(t)
	r.happen(event.Max + 1000)
	// Over several watches, each from where the last one ended, no event is lost or repeated.
	var last uint64
	for seen := 0; seen < event.Max; {
		ctx, cancel := context.WithCancel(t.Context())
		watch, err := r.WatchEvents(ctx, &pb.WatchEventsRequest{AfterSeq: last})
		if err != nil {
			t.Fatal(err)
		}
		for range min(3333, event.Max-seen) {
			e, err := watch.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if last != 0 && e.Seq != last+1 {
				t.Fatalf("after event %d comes %d", last, e.Seq)
			}
			last, seen = e.Seq, seen+1
		}
		cancel()
	}
	watch, err := r.WatchEvents(t.Context(), &pb.WatchEventsRequest{AfterSeq: 5})
	if err == nil {
		_, err = watch.Recv()
	}
	if status.Code(err) != codes.FailedPrecondition || reason(err) != cluster.ReasonEventsGone || !strings.Contains(err.Error(), "events 6 to ") {
		t.Fatalf("a watch of events that are gone = %v, want FAILED_PRECONDITION that names them", err)
	}
	first := ""
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			first = info.Metadata["first_seq"]
		}
	}
	if want := fmt.Sprint(last - event.Max + 1); first != want {
		t.Errorf("the first event that is kept is said to be %s, want %s", first, want)
	}
	// A watch of one object gets only its events.
	object := "pool here"
	if _, err := r.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "here"}); err != nil {
		t.Fatal(err)
	}
	of, err := r.WatchEvents(t.Context(), &pb.WatchEventsRequest{Object: object})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := of.Recv(); err != nil || e.Object != object {
		t.Errorf("the first event of %s = %v, %v", object, e, err)
	}
}

func TestAWatchThatNobodyReadsEnds(t *testing.T) {
	r := newRig(t)
	r.adjust = func(m *Manager) { m.watches.patience = 300 * time.Millisecond }
	r.restart()
	idle, err := r.WatchEvents(t.Context(), &pb.WatchEventsRequest{Object: "pool new"})
	if err != nil {
		t.Fatal(err)
	}
	stuck, err := r.WatchEvents(t.Context(), &pb.WatchEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	r.happen(5000) // more than an unread stream accepts
	time.Sleep(2 * time.Second)
	for err == nil {
		_, err = stuck.Recv()
	}
	if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "no event was read") {
		t.Errorf("a watch that was not read ended with %v, want ABORTED that says so", err)
	}
	// A client that has nothing to read is not slow.
	if _, err := r.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "new"}); err != nil {
		t.Fatal(err)
	}
	if e, err := idle.Recv(); err != nil || e.Object != "pool new" {
		t.Errorf("a watch that waited for an event got %v, %v", e, err)
	}
}

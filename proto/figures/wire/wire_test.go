// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/pb"
)

func figuresOf(took ...time.Duration) (f figures.Figures) {
	var t figures.Tally
	for i, d := range took {
		t.Add(figures.Op(i%2), 4096, d, i%3 == 2)
	}
	t.Take(&f)
	return f
}

func TestAMessageHasTheFigures(t *testing.T) {
	f := figuresOf(0, time.Microsecond, time.Millisecond, time.Hour, 90*time.Microsecond)
	var got figures.Figures
	if err := Add(&got, Of(&pb.ObjectFigures{VolumeId: "v"}, &f, 0)); err != nil || !reflect.DeepEqual(got, f) {
		t.Errorf("there and back: %+v, %v; want %+v", got, err, f)
	}
	for _, o := range []*pb.OperationFigures{{FirstBucket: figures.Buckets, Buckets: []uint64{1}}, {FirstBucket: 1 << 31}, {Buckets: make([]uint64, figures.Buckets+1)}} {
		if err := Add(&got, &pb.ObjectFigures{Read: o}); !errors.Is(err, ErrBuckets) {
			t.Errorf("%v: %v, want an error", o, err)
		}
	}
}

// listener is a manager that keeps what is sent, and ends a stream after a number of messages.
type listener struct {
	pb.AgentsClient
	grpc.ClientStream
	got   []*pb.FiguresReport
	opens int
	until int
}

func (l *listener) Figures(context.Context, ...grpc.CallOption) (grpc.ClientStreamingClient[pb.FiguresReport, pb.FiguresResponse], error) {
	l.opens++
	return l, nil
}

func (l *listener) Send(m *pb.FiguresReport) error {
	if l.until > 0 && len(l.got) == l.until {
		l.until = 0
		return errors.New("the manager is gone")
	}
	l.got = append(l.got, m)
	return nil
}

func (l *listener) CloseAndRecv() (*pb.FiguresResponse, error) { return nil, nil }

func TestOnlyWhatWasAddedIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listener{}
		busy, idle := figuresOf(time.Millisecond), figuresOf(time.Second)
		held := time.Second
		var counting sync.Mutex
		s := &Sender{Manager: l, Node: "h1", Read: func() []Reading {
			counting.Lock()
			defer counting.Unlock()
			return []Reading{
				{Key: 1, Object: &pb.ObjectFigures{VolumeId: "busy"}, Figures: busy.Clone()},
				{Key: 2, Object: &pb.ObjectFigures{VolumeId: "idle"}, Figures: idle.Clone(), Held: held},
			}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); s.Run(ctx) }()
		synctest.Wait()
		more := figuresOf(2*time.Millisecond, 3*time.Millisecond)
		counting.Lock()
		busy.Add(&more)
		counting.Unlock()
		time.Sleep(Every + time.Millisecond)
		counting.Lock()
		held += 500 * time.Millisecond
		counting.Unlock()
		time.Sleep(Every)
		time.Sleep(Every)
		cancel()
		<-done
		if len(l.got) != 3 {
			t.Fatalf("%d reports in three times the interval", len(l.got))
		}
		first := l.got[0]
		if len(first.Objects) != 1 || first.Objects[0].VolumeId != "busy" || first.Objects[0].Read.Ios != 1 || first.Nanoseconds != uint64(Every) || first.More {
			t.Errorf("after two I/Os: %v", first)
		}
		if second := l.got[1]; len(second.Objects) != 1 || second.Objects[0].VolumeId != "idle" || second.Objects[0].HeldNanoseconds != uint64(500*time.Millisecond) {
			t.Errorf("after some held time: %v", second)
		}
		if third := l.got[2]; len(third.Objects) != 0 || third.Nanoseconds != uint64(Every) {
			t.Errorf("after nothing: %v; want an empty report, which says that there was nothing", third)
		}
	})
}

func TestLargeReportsComeInMessages(t *testing.T) {
	s := &Sender{Read: func() (all []Reading) {
		for i := range 2*MessageMost + 1 {
			all = append(all, Reading{Key: i, Object: &pb.ObjectFigures{DriveId: "d"}, Figures: figuresOf(time.Millisecond)})
		}
		return all
	}}
	all := s.report()
	if len(all) != 3 || !all[0].More || !all[1].More || all[2].More || len(all[2].Objects) != 1 {
		t.Errorf("%d messages, want 3, and the last one with one object", len(all))
	}
}

func TestANewStreamBeginsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listener{until: 1}
		f := figuresOf(time.Millisecond)
		var counting sync.Mutex
		s := &Sender{Manager: l, Read: func() []Reading {
			counting.Lock()
			defer counting.Unlock()
			return []Reading{{Key: 1, Object: &pb.ObjectFigures{VolumeId: "v"}, Figures: f.Clone()}}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); s.Run(ctx) }()
		time.Sleep(3 * Every / 2)
		counting.Lock()
		f.Add(&f) // lost: the stream ends
		counting.Unlock()
		time.Sleep(3*Every + time.Millisecond)
		cancel()
		<-done
		if l.opens < 2 {
			t.Fatalf("%d streams, want a second one", l.opens)
		}
		for _, m := range l.got {
			if len(m.Objects) > 0 {
				t.Errorf("a report has %v, which was counted before its stream began", m.Objects)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package lists

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
)

func TestWhenACheckpointIsDue(t *testing.T) {
	start := time.Unix(100, 0)
	two, other := []checkpoint.Member{{Copy: 0}, {Copy: 1}}, []checkpoint.Member{{Copy: 0}, {Copy: 2}}
	last := Moment{start, 1000, two}
	after := func(d time.Duration, written uint64, members []checkpoint.Member) Moment {
		return Moment{start.Add(d), 1000 + written, members}
	}
	size := uint64(mostWritten)
	for name, test := range map[string]struct {
		now  Moment
		want bool
	}{
		"nothing was written":    {after(idle-1, 0, two), false},
		"nothing for long":       {after(idle, 0, two), true},
		"something was written":  {after(every-1, 1, two), false},
		"something, a while ago": {after(every, 1, two), true},
		"much was written":       {after(1, size, two), true},
		"less was written":       {after(1, size-1, two), false},
		"another leg":            {after(1, 0, other), true},
		"a single leg, whatever": {after(time.Hour, size, two[:1]), false},
	} {
		if got := test.now.due(last, time.Time{}); got != test.want {
			t.Errorf("%s: due = %v, want %v", name, got, test.want)
		}
	}
	next := start.Add(time.Second)
	if after(time.Second-1, size, two).due(last, next) || !after(time.Second, size, two).due(last, next) {
		t.Error("after a failure: want no checkpoint until it is time to try again")
	}
}

// answer is a leg that always answers the same.
type answer struct {
	err   error
	asked *int
}

func (a answer) Checkpoint(context.Context, bool, uint64) error { *a.asked++; return a.err }

func (a answer) CheckpointBehind(context.Context, bool, uint64, nvmetcp.Behind) error {
	*a.asked++
	return a.err
}

func (a answer) Written(context.Context) (nvmetcp.WrittenLog, error) {
	*a.asked++
	return nvmetcp.WrittenLog{}, a.err
}

func TestWhoeverKeepsTheListIsAsked(t *testing.T) {
	lost := errors.New("connection lost")
	for name, test := range map[string]struct {
		first, second error
		want          error
		asked         [2]int // by two calls
	}{
		"the target itself":                    {nil, nil, nil, [2]int{2, 0}},
		"what answers beside it":               {nvmetcp.InvalidOpcode | nvmetcp.DNR, nil, nil, [2]int{1, 2}},
		"nobody, since none listens beside it": {nvmetcp.InvalidOpcode, syscall.ECONNREFUSED, block.ErrUnsupported, [2]int{2, 2}},
		"nobody yet":                           {nvmetcp.InvalidOpcode, lost, lost, [2]int{2, 2}},
		"the target, which has no answer":      {lost, nil, lost, [2]int{2, 0}},
	} {
		var asked [2]int
		leg := Either(answer{test.first, &asked[0]}, answer{test.second, &asked[1]})
		for range 2 {
			if err := leg.Checkpoint(t.Context(), false, 1); !errors.Is(err, test.want) {
				t.Errorf("%s: %v, want %v", name, err, test.want)
			}
		}
		if asked != test.asked {
			t.Errorf("%s: the two were asked %v times, want %v", name, asked, test.asked)
		}
		if _, err := Of(t.Context(), leg); !errors.Is(err, test.want) {
			t.Errorf("%s: for the list: %v, want %v", name, err, test.want)
		}
	}
}

// Where nobody listens there is no list: that is said at once, and again whenever it is asked. One portal that is
// silent may come back.
func TestARefusedConnectionIsAnAnswer(t *testing.T) {
	for name, test := range map[string]struct {
		silent string
		after  time.Duration
		want   error
	}{
		"both portals refuse":   {after: time.Second, want: syscall.ECONNREFUSED},
		"one of them is silent": {silent: "b:4421", after: ListTimeout, want: context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &Pool{Log: slog.New(slog.DiscardHandler), Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
				if address == test.silent {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
			}}
			defer p.Close()
			l := p.Leg(Where{Subsystem: "nqn.2026-11.dev.weft:x", Host: block.HostFromID(block.UUID{1}), Portals: []block.Portal{
				{Transport: block.TCP, Address: "a", Port: 4420}, {Transport: block.TCP, Address: "b", Port: 4420},
			}})
			for range 2 {
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), ListTimeout)
				_, err := l.Written(ctx)
				cancel()
				if took := time.Since(began); !errors.Is(err, test.want) || took > test.after {
					t.Errorf("%s: %v after %v, want %v after %v at most", name, err, took, test.want, test.after)
				}
			}
		})
	}
}

// Whoever asks waits for the attempt to connect. When the pool is closed the attempt ends, instead of going
// on for as long as it may take, and nothing connects any more.
func TestAClosedPoolConnectsNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dials := 0
		p := &Pool{Log: slog.New(slog.DiscardHandler), Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			dials++
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		leg := p.Leg(Where{
			Portals: []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}}, Subsystem: "nqn.2026-11.dev.weft:a", Host: block.HostFromID(block.UUID{1}),
		})
		began, answered := time.Now(), make(chan error)
		go func() {
			_, err := leg.Written(t.Context())
			answered <- err
		}()
		time.Sleep(time.Second)
		p.Close()
		err := <-answered
		if waited := time.Since(began); err == nil || waited > 2*time.Second || dials == 0 {
			t.Errorf("after %v and %d attempts: %v", waited, dials, err)
		}
		before := dials
		if _, err := leg.Written(t.Context()); !errors.Is(err, block.ErrGone) || dials != before {
			t.Errorf("a closed pool connects: %v", err)
		}
	})
}

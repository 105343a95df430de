// SPDX-License-Identifier: Apache-2.0

// Package wire carries figures from agents to the manager: an agent reads its counts every two
// seconds and sends what has been added since the last time. The stream keeps the order and loses
// nothing, so the manager needs no counts of its own, and what is idle costs nothing.
package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/pb"
)

const (
	// Every is the time between two reports.
	Every = 2 * time.Second
	// MessageMost is the largest number of objects in a message.
	MessageMost = 500
)

// Reading is what an object has counted so far.
type Reading struct {
	// Key is equal in two readings only if the later one continues the counts of the earlier one.
	Key     any
	Object  *pb.ObjectFigures // with the id alone
	Figures figures.Figures
	Held    time.Duration
}

// Of returns the message of an object's figures.
func Of(object *pb.ObjectFigures, f *figures.Figures, held time.Duration) *pb.ObjectFigures {
	return &pb.ObjectFigures{
		VolumeId: object.GetVolumeId(), LegId: object.GetLegId(), DriveId: object.GetDriveId(),
		Read: operation(&f[figures.Read]), Write: operation(&f[figures.Write]), Flush: operation(&f[figures.Flush]), Discard: operation(&f[figures.Discard]), Any: operation(&f[figures.Any]),
		HeldNanoseconds: uint64(max(0, held)),
	}
}

func operation(c *figures.Count) *pb.OperationFigures {
	if c.IOs == 0 && c.Bytes == 0 && c.Errors == 0 && c.Latency.Count() == 0 {
		return nil
	}
	o := &pb.OperationFigures{Ios: c.IOs, Bytes: c.Bytes, Errors: c.Errors, TookNanoseconds: uint64(max(0, c.Took))}
	for i, n := range c.Latency {
		if n == 0 {
			continue
		}
		if o.Buckets == nil {
			o.FirstBucket = uint32(i)
		}
		for i >= int(o.FirstBucket)+len(o.Buckets) {
			o.Buckets = append(o.Buckets, 0)
		}
		o.Buckets[i-int(o.FirstBucket)] = n
	}
	return o
}

// ErrBuckets is the error of a message with buckets that do not exist.
var ErrBuckets = fmt.Errorf("figures: there are %d buckets of latencies", figures.Buckets)

// Add adds the figures in a message to f.
func Add(f *figures.Figures, m *pb.ObjectFigures) error {
	for op, o := range [figures.Ops]*pb.OperationFigures{figures.Read: m.GetRead(), figures.Write: m.GetWrite(), figures.Flush: m.GetFlush(), figures.Discard: m.GetDiscard(), figures.Any: m.GetAny()} {
		if o == nil {
			continue
		}
		c := &f[op]
		c.IOs += o.GetIos()
		c.Bytes += o.GetBytes()
		c.Errors += o.GetErrors()
		c.Took += time.Duration(o.GetTookNanoseconds())
		first, n := int(o.GetFirstBucket()), len(o.GetBuckets())
		if first > figures.Buckets || n > figures.Buckets-first {
			return ErrBuckets
		}
		if n > 0 && c.Latency == nil {
			c.Latency = make(figures.Histogram, figures.Buckets)
		}
		for i, count := range o.GetBuckets() {
			c.Latency[first+i] += count
		}
	}
	return nil
}

// Sender sends the figures of a node.
type Sender struct {
	Manager pb.AgentsClient
	Node    string
	Source  pb.FiguresSource
	Read    func() []Reading
	// Ended is called when a stream has ended. The next one is opened soon. It may be nil.
	Ended func(error)

	last map[any]Reading
	at   time.Time
}

// Run sends until ctx ends.
func (s *Sender) Run(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.session(ctx)
		if s.Ended != nil && ctx.Err() == nil {
			s.Ended(err)
		}
		if status.Code(err) == codes.Unimplemented { // a manager of an earlier version
			wait(ctx, time.Minute)
		}
		wait(ctx, Every)
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// session is one stream. It begins with what is counted from now on.
func (s *Sender) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.last = map[any]Reading{}
	for _, r := range s.Read() {
		s.last[r.Key] = r
	}
	s.at = time.Now()
	stream, err := s.Manager.Figures(ctx)
	if err != nil {
		return err
	}
	ticker := beat.NewTicker(Every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		for _, m := range s.report() {
			if err := stream.Send(m); errors.Is(err, io.EOF) {
				_, err = stream.CloseAndRecv() // it has the cause
				return err
			} else if err != nil {
				return err
			}
		}
	}
}

// report is what was added since the last one, in at least one message.
func (s *Sender) report() (all []*pb.FiguresReport) {
	readings, now := s.Read(), time.Now()
	last := s.last
	s.last = make(map[any]Reading, len(readings))
	m := &pb.FiguresReport{Node: s.Node, Source: s.Source}
	for _, r := range readings {
		s.last[r.Key] = r
		was := last[r.Key]
		d, ok := r.Figures.Since(&was.Figures)
		held := r.Held - was.Held
		if !ok || d.IOs() == 0 && held <= 0 {
			continue
		}
		if len(m.Objects) == MessageMost {
			m.More = true
			all = append(all, m)
			m = &pb.FiguresReport{Node: s.Node, Source: s.Source}
		}
		m.Objects = append(m.Objects, Of(r.Object, &d, held))
	}
	m.Nanoseconds = uint64(now.Sub(s.at))
	s.at = now
	return append(all, m)
}

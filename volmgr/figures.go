// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/live"
)

// Figures takes the figures of an agent, beside the loop. The stream ends when this manager does
// not lead any more.
func (m *Manager) Figures(stream grpc.ClientStreamingServer[pb.FiguresReport, pb.FiguresResponse]) error {
	var over <-chan struct{}
	if err := m.look(stream.Context(), func() { over = m.live.Over() }); err != nil {
		return toStatus(err)
	}
	failed := make(chan error, 1)
	go func() { failed <- m.takeFigures(stream) }()
	select {
	case err := <-failed:
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&pb.FiguresResponse{})
		}
		return err
	case <-over:
		return errDeposed
	case <-stream.Context().Done(): // the agent's certificate was revoked, or the agent is gone
		return toStatus(context.Cause(stream.Context()))
	case <-m.ended:
		return toStatus(ErrStopped)
	}
}

func (m *Manager) takeFigures(stream grpc.ClientStreamingServer[pb.FiguresReport, pb.FiguresResponse]) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := m.speaks(stream.Context(), figuresRole(r.GetSource()), block.NodeName(r.GetNode())); err != nil {
			return err
		}
		if err := m.live.Take(r); err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
	}
}

// figuresRole is the role of the agent that sends figures of a source.
func figuresRole(source pb.FiguresSource) access.Role {
	if source == pb.FiguresSource_FIGURES_SOURCE_TARGET {
		return access.Target
	}
	return access.Initiator
}

// The window of figures.
const (
	windowDefault = 10 * time.Second
	windowMost    = 5 * time.Minute
)

// GetFigures returns the I/O of the last seconds.
func (m *Manager) GetFigures(ctx context.Context, r *pb.GetFiguresRequest) (*pb.GetFiguresResponse, error) {
	window := windowDefault
	if r.Window != nil {
		window = r.Window.AsDuration()
	}
	if window <= 0 || window > windowMost {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "window", Text: fmt.Sprintf("window: %v: must be more than 0 and at most %v", window, windowMost)})
	}
	var all []*pb.Figures
	var next string
	var err error
	same := func(f *pb.Figures) *pb.Figures { return f }
	switch r.Of {
	case pb.FiguresOf_FIGURES_OF_UNSPECIFIED, pb.FiguresOf_FIGURES_OF_VOLUMES:
		list, volumes := "figures of volumes", m.figuresOf(window, m.volumeFigures)
		if r.Volume != "" {
			list, volumes = "figures of volume "+r.Volume, m.oneVolume(r.Volume, window)
		}
		all, next, err = page(ctx, m, list, r, volumes, same)
	case pb.FiguresOf_FIGURES_OF_HOSTS:
		all, next, err = page(ctx, m, "figures of hosts", r, m.figuresOf(window, m.hostFigures), same)
	case pb.FiguresOf_FIGURES_OF_DRIVES:
		all, next, err = page(ctx, m, "figures of drives", r, m.figuresOf(window, m.driveFigures), same)
	case pb.FiguresOf_FIGURES_OF_LEGS:
		all, next, err = page(ctx, m, "figures of legs of "+r.Volume, r, m.legFigures(r.Volume, window), same)
	default:
		err = toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "of", Text: fmt.Sprintf("of: %v is not known", r.Of)})
	}
	if err != nil {
		return nil, err
	}
	return &pb.GetFiguresResponse{Figures: all, NextPageToken: next}, nil
}

// figuresOf are the entries of a list of figures.
func (m *Manager) figuresOf(window time.Duration, of func(s *cluster.State, after string, window time.Duration) iter.Seq2[string, *pb.Figures]) keyed[*pb.Figures] {
	return func(s *cluster.State, after string) (iter.Seq2[string, *pb.Figures], error) {
		return of(s, after, window), nil
	}
}

func initiatorOn(node block.NodeName) live.Source {
	return live.Source{Node: string(node), Kind: pb.FiguresSource_FIGURES_SOURCE_INITIATOR}
}

// hostsOf lists the nodes to which a volume is attached.
func hostsOf(v cluster.Volume) (nodes []block.NodeName) {
	if v.Attachment != nil {
		nodes = append(nodes, v.Attachment.Node)
	}
	for _, a := range v.Shared {
		nodes = append(nodes, a.Node)
	}
	return nodes
}

func joined(nodes []block.NodeName) string {
	var names []string
	for _, n := range nodes {
		names = append(names, string(n))
	}
	return strings.Join(names, ",")
}

func (m *Manager) volumeFigures(s *cluster.State, after string, window time.Duration) iter.Seq2[string, *pb.Figures] {
	return func(yield func(string, *pb.Figures) bool) {
		for name, v := range s.VolumesAfter(after) {
			if !yield(name, m.figuresOfVolume(v, window)) {
				return
			}
		}
	}
}

// oneVolume is a list of one volume.
func (m *Manager) oneVolume(volume string, window time.Duration) keyed[*pb.Figures] {
	return func(s *cluster.State, after string) (iter.Seq2[string, *pb.Figures], error) {
		v, err := s.Volume(volume)
		if err != nil {
			return nil, err
		}
		return func(yield func(string, *pb.Figures) bool) {
			if string(v.Name) > after {
				yield(string(v.Name), m.figuresOfVolume(v, window))
			}
		}, nil
	}
}

// figuresOfVolume are those of a volume on all its hosts together.
func (m *Manager) figuresOfVolume(v cluster.Volume, window time.Duration) *pb.Figures {
	hosts := hostsOf(v)
	var w live.Window
	for _, node := range hosts {
		w.Add(m.live.Look(initiatorOn(node), live.Object{Kind: live.Volume, ID: v.ID.UUID}, window))
	}
	f := pbFigures(w)
	f.Name, f.Id, f.Node = string(v.Name), v.ID.String(), joined(hosts)
	return f
}

// hostFigures are those of the nodes whose initiator agent is known.
func (m *Manager) hostFigures(s *cluster.State, after string, window time.Duration) iter.Seq2[string, *pb.Figures] {
	return func(yield func(string, *pb.Figures) bool) {
		for name, n := range s.NodesAfter(after) {
			if !n.Initiator.Known {
				continue
			}
			f := pbFigures(m.live.All(initiatorOn(n.Name), live.Volume, window))
			f.Name, f.Node = string(n.Name), string(n.Name)
			if !yield(name, f) {
				return
			}
		}
	}
}

func (m *Manager) driveFigures(s *cluster.State, after string, window time.Duration) iter.Seq2[string, *pb.Figures] {
	return func(yield func(string, *pb.Figures) bool) {
		for id, d := range s.DrivesAfter("", after) {
			from := live.Source{Node: string(d.Node), Kind: pb.FiguresSource_FIGURES_SOURCE_TARGET}
			f := pbFigures(m.live.Look(from, live.Object{Kind: live.Drive, ID: d.ID.UUID}, window))
			f.Name, f.Id, f.Node, f.Device = d.ID.String(), d.ID.String(), string(d.Node), d.Device
			if !yield(id, f) {
				return
			}
		}
	}
}

// legFigures are those of a volume's legs, as its hosts see them.
func (m *Manager) legFigures(volume string, window time.Duration) keyed[*pb.Figures] {
	return func(s *cluster.State, after string) (iter.Seq2[string, *pb.Figures], error) {
		v, err := s.Volume(volume)
		if err != nil {
			return nil, err
		}
		return func(yield func(string, *pb.Figures) bool) {
			for _, l := range v.Legs {
				key := fmt.Sprintf("%03d.%03d %v", l.Column, l.Copy, l.ID)
				if key <= after {
					continue
				}
				var w live.Window
				for _, node := range hostsOf(v) {
					w.Add(m.live.Look(initiatorOn(node), live.Object{Kind: live.Leg, ID: l.ID.UUID}, window))
				}
				f := pbFigures(w)
				f.Name, f.Id, f.Node = fmt.Sprintf("%d.%d", l.Column, l.Copy), l.ID.String(), string(l.Node)
				if !yield(key, f) {
					return
				}
			}
		}, nil
	}
}

func pbFigures(w live.Window) *pb.Figures {
	f := &w.Figures
	return &pb.Figures{
		Nanoseconds: uint64(w.Covers), HeldNanoseconds: uint64(w.Held), All: pbRates(f.Sum()),
		Read: pbRates(f[figures.Read]), Write: pbRates(f[figures.Write]), Flush: pbRates(f[figures.Flush]), Discard: pbRates(f[figures.Discard]),
	}
}

func pbRates(c figures.Count) *pb.Rates {
	r := &pb.Rates{
		Ios: c.IOs, Bytes: c.Bytes, Errors: c.Errors,
		P50Nanoseconds: uint64(c.Latency.Quantile(0.5)), P99Nanoseconds: uint64(c.Latency.Quantile(0.99)), P999Nanoseconds: uint64(c.Latency.Quantile(0.999)),
	}
	if c.IOs > 0 {
		r.MeanNanoseconds = uint64(c.Took) / c.IOs
	}
	return r
}

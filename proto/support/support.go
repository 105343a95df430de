// SPDX-License-Identifier: Apache-2.0

// Package support is an agent's part of a support bundle. The agent holds a stream to the manager,
// which asks on it for what the agent can tell of its machine: files, sent in pieces and bounded. A
// manager of an earlier version has no such stream, and the agent does without.
package support

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// PieceMost is the largest piece of a file in a message, in bytes.
const PieceMost = 64 << 10

// collectFor is how long an agent looks around for an answer. The manager waits a little longer.
const collectFor = 15 * time.Second

// again is the time between two streams, and without the time until a manager that knows no
// support bundles is tried again.
const (
	again   = 2 * time.Second
	without = time.Minute
)

// File is a part of what an agent tells: Data, or why it is missing, or both if a part is.
type File struct {
	Name    string
	Data    []byte
	Missing string
}

// Text returns a file, or why it is missing.
func Text(name, text string, err error) File {
	f := File{Name: name, Data: []byte(text)}
	if err != nil {
		f.Missing = err.Error()
	}
	return f
}

// Agent answers the questions of managers.
type Agent struct {
	Manager pb.AgentsClient
	Node    string
	Source  pb.SupportSource
	// Collect looks around. It returns what it has when ctx ends, and nothing secret.
	Collect func(ctx context.Context) []File
	// Ranges says where a leg holds data. Nil: the agent does not know.
	Ranges func(ctx context.Context, q *pb.RangesQuestion) *pb.RangesAnswer
	// Ended is called when a stream has ended. The next one is opened soon. It may be nil.
	Ended func(error)
}

// Run answers until ctx ends.
func (a *Agent) Run(ctx context.Context) {
	for ctx.Err() == nil {
		err := a.session(ctx)
		if a.Ended != nil && ctx.Err() == nil {
			a.Ended(err)
		}
		pause := again
		if status.Code(err) == codes.Unimplemented { // a manager of an earlier version
			pause = without
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// session is one stream.
func (a *Agent) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := a.Manager.Support(ctx)
	if err != nil {
		return err
	}
	send := func(m *pb.SupportAnswer) error {
		if err := stream.Send(m); !errors.Is(err, io.EOF) {
			return err
		}
		_, err := stream.Recv() // it has the cause
		return err
	}
	if err := send(&pb.SupportAnswer{Node: a.Node, Source: a.Source, KnowsRanges: a.Ranges != nil}); err != nil {
		return err
	}
	for {
		question, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, m := range a.answer(ctx, question) {
			if err := send(m); err != nil {
				return err
			}
		}
	}
}

// answer is the answer to a question, in messages.
func (a *Agent) answer(ctx context.Context, question *pb.SupportQuestion) []*pb.SupportAnswer {
	ctx, cancel := context.WithTimeout(ctx, collectFor)
	defer cancel()
	if q := question.GetRanges(); q != nil && a.Ranges != nil {
		return []*pb.SupportAnswer{{Number: question.GetNumber(), Last: true, Ranges: a.Ranges(ctx, q)}}
	}
	return Pieces(question, a.Collect(ctx))
}

// Pieces is the answer to a question, in messages. Files beyond what was asked for are cut, and say
// so.
func Pieces(question *pb.SupportQuestion, files []File) (all []*pb.SupportAnswer) {
	left := question.GetMostBytes()
	for _, f := range files {
		data, missing := f.Data, f.Missing
		if size := uint64(len(data)); size > left {
			data = data[:left]
			missing = fmt.Sprintf("cut after %d of %d bytes", left, size)
		}
		left -= uint64(len(data))
		for first := true; first || len(data) > 0; first = false {
			piece := data[:min(len(data), PieceMost)]
			data = data[len(piece):]
			all = append(all, &pb.SupportAnswer{Number: question.GetNumber(), File: f.Name, Data: piece, Missing: missing})
			missing = ""
		}
	}
	return append(all, &pb.SupportAnswer{Number: question.GetNumber(), Last: true})
}

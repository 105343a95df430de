// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Call is an RPC from Kubernetes to the driver.
type Call struct {
	Where  string // "controller", or a node's name
	Method string // NodeStageVolume
	// Forward sends the call to the driver and returns the answer's error.
	Forward func() error
}

// calls stands between Kubernetes and each of the driver's sockets, so that a test can kill
// a process in the middle of a call. It does not parse the messages.
type calls struct {
	mu   sync.Mutex
	hook func(Call) error // nil: forward all calls
}

// OnCall sets the hook, which gets each call from now on; nil removes it. The hook's result
// is the call's error. It is called concurrently.
func (l *Lab) OnCall(hook func(Call) error) {
	l.calls.mu.Lock()
	defer l.calls.mu.Unlock()
	l.calls.hook = hook
}

func (c *calls) handle(call Call) error {
	c.mu.Lock()
	hook := c.hook
	c.mu.Unlock()
	if hook == nil {
		return call.Forward()
	}
	return hook(call)
}

// listen answers on the socket front by forwarding calls to the driver's socket.
func (c *calls) listen(l *Lab, where, driver, front string) error {
	conn, err := grpc.NewClient("unix://"+driver, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(frames{}), grpc.WaitForReady(true)))
	if err != nil {
		return err
	}
	if err := os.Remove(front); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", front)
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(frames{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		return c.forward(stream, conn, where)
	}))
	go func() { _ = server.Serve(listener) }()
	l.t.Cleanup(func() {
		server.Stop()
		conn.Close()
	})
	return nil
}

func (c *calls) forward(stream grpc.ServerStream, conn *grpc.ClientConn, where string) error {
	method, _ := grpc.MethodFromServerStream(stream)
	var request frame
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	// Copy the data: the transport owns the buffer and frees it, and a call may be
	// forwarded twice.
	request.data = mem.BufferSlice{mem.SliceBuffer(request.data.Materialize())}
	ctx := stream.Context()
	if sent, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, sent)
	}
	var answers []*frame // of the last time that the call was forwarded
	forwarded := false
	err := c.handle(Call{Where: where, Method: path.Base(method), Forward: func() (err error) {
		forwarded = true
		answers, err = ask(ctx, conn, method, &request)
		return err
	}})
	if err != nil {
		return err
	}
	if !forwarded {
		return status.Error(codes.Internal, "the test did not forward the call")
	}
	for _, a := range answers {
		if err := stream.SendMsg(a); err != nil {
			return err
		}
	}
	return nil
}

// ask forwards a call. Most have one answer; those of SnapshotMetadata have any number.
func ask(ctx context.Context, conn *grpc.ClientConn, method string, request *frame) (answers []*frame, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return nil, err
	}
	// If the call has ended already, the error is the one that it ended with.
	if err := errors.Join(stream.SendMsg(request), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	for {
		var a frame
		switch err := stream.RecvMsg(&a); {
		case errors.Is(err, io.EOF):
			return answers, nil
		case err != nil:
			return nil, err
		}
		a.data = mem.BufferSlice{mem.SliceBuffer(a.data.Materialize())}
		answers = append(answers, &a)
	}
}

// frame is an unparsed message.
type frame struct{ data mem.BufferSlice }

// frames is the codec of frame.
type frames struct{}

var _ encoding.CodecV2 = frames{}

func (frames) Name() string { return "proto" }

func (frames) Marshal(v any) (mem.BufferSlice, error) {
	data := v.(*frame).data
	data.Ref()
	return data, nil
}

func (frames) Unmarshal(data mem.BufferSlice, v any) error {
	data.Ref()
	v.(*frame).data = data
	return nil
}

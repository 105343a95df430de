// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"net"
	"path"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/labelset"
)

// This file says who asked for what: for the audit, and for attempts that are refused.

// askedKey is the key of who asks, in the context of a call.
type askedKey struct{}

// audited returns a service whose unary calls know who asks, so that their inputs are recorded with
// that. Reads make no input, and so no entry.
func audited(service *grpc.ServiceDesc) *grpc.ServiceDesc {
	out := *service
	out.Methods = nil
	for _, m := range service.Methods {
		call := m.Handler
		m.Handler = func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return call(srv, ctx, decode, func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
				handle = asking(handle, info.FullMethod)
				if interceptor == nil {
					return handle(ctx, request)
				}
				return interceptor(ctx, request, info, handle)
			})
		}
		out.Methods = append(out.Methods, m)
	}
	return &out
}

// asking is a handler whose context says who asks.
func asking(handle grpc.UnaryHandler, method string) grpc.UnaryHandler {
	return func(ctx context.Context, request any) (any, error) {
		who, _ := access.From(ctx)
		asked := &audit.Asked{Who: who.String(), From: from(ctx), Call: path.Base(method), Request: told(request.(proto.Message)), ID: labelset.Shorten(requestOf(ctx), requestIDMost)}
		return handle(context.WithValue(ctx, askedKey{}, asked), request)
	}
}

// from is the address that a call comes from.
func from(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	if host, _, err := net.SplitHostPort(p.Addr.String()); err == nil {
		return host
	}
	return p.Addr.Network()
}

// requestIDMost bounds the caller's id of a request, in bytes.
const requestIDMost = 128

// requestMost bounds what is recorded of a request, in bytes.
const requestMost = 512

// told is a request as JSON, for people. Fields of bytes are left out: secrets are in no others.
func told(request proto.Message) string {
	request = proto.Clone(request)
	m := request.ProtoReflect()
	m.Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if f.Kind() == protoreflect.BytesKind {
			m.Clear(f)
		}
		return true
	})
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(request)
	if err != nil || string(text) == "{}" {
		return ""
	}
	return labelset.Shorten(plainJSON(string(text)), requestMost)
}

// plainJSON removes the spaces that protojson adds at random, so that equal requests read alike.
func plainJSON(text string) string {
	var out []byte
	quoted, escaped := false, false
	for _, c := range []byte(text) {
		if c == ' ' && !quoted {
			continue
		}
		out = append(out, c)
		switch {
		case escaped:
			escaped = false
		case c == '\\':
			escaped = true
		case c == '"':
			quoted = !quoted
		}
	}
	return string(out)
}

// askedIn is who asks in a context; nil if nobody does.
func askedIn(ctx context.Context) *audit.Asked {
	asked, _ := ctx.Value(askedKey{}).(*audit.Asked)
	return asked
}

// Bounds of the events about refused attempts: an attacker must not fill the history.
const (
	refusedEvery = time.Minute // between two events about the same caller and call
	refusedMost  = 20          // events in refusedEvery, about all callers
)

// refusals says of which refused attempts there is to be an event.
type refusals struct {
	mu      sync.Mutex
	begin   time.Time                // of the present interval
	told    map[cluster.Refused]bool // in this interval
	waiting map[cluster.Refused]int  // attempts since the last event
}

// note counts an attempt. tell is false if there is to be no event now.
func (r *refusals) note(of cluster.Refused, now time.Time) (times int, tell bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.told == nil || now.Sub(r.begin) >= refusedEvery {
		r.begin, r.told = now, map[cluster.Refused]bool{}
	}
	if r.waiting == nil {
		r.waiting = map[cluster.Refused]int{}
	}
	if r.told[of] || len(r.told) >= refusedMost {
		if _, known := r.waiting[of]; known || len(r.waiting) < 4*refusedMost {
			r.waiting[of]++
		}
		return 0, false
	}
	times = r.waiting[of] + 1
	delete(r.waiting, of)
	r.told[of] = true
	return times, true
}

// Refused notes that a call was refused: the guard of this manager's server calls it.
func (m *Manager) Refused(ctx context.Context, who access.Identity, method string) {
	m.metrics.refused.WithLabelValues(path.Base(method)).Inc()
	of := cluster.Refused{Who: who.String(), From: from(ctx), Call: path.Base(method)}
	times, tell := m.refusals.note(of, m.cfg.Now())
	if !tell {
		return
	}
	m.cfg.Log.Warn("call refused", "who", of.Who, "from", of.From, "call", of.Call)
	of.Times = times
	select {
	case m.refused <- of:
	default: // the log has it
	}
}

// speaks is access.Speaks, and notes what is refused.
func (m *Manager) speaks(ctx context.Context, role access.Role, node block.NodeName) error {
	err := access.Speaks(ctx, role, node)
	if err != nil {
		m.refuse(ctx)
	}
	return err
}

// refuse notes that the call of a context was refused after the guard has let it through.
func (m *Manager) refuse(ctx context.Context) {
	who, _ := access.From(ctx)
	method, _ := grpc.Method(ctx)
	m.Refused(ctx, who, method)
}

// tellRefused records refused attempts until ctx ends. A manager that does not lead only logs them.
func (m *Manager) tellRefused(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case of := <-m.refused:
			if _, err := m.step(ctx, of); err != nil && ctx.Err() == nil {
				m.cfg.Log.Debug("record a refused call", "err", err)
			}
		}
	}
}

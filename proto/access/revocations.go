// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// Revoked says that certificates of an identity that were issued until a time are worthless.
type Revoked struct {
	Kind  Kind
	Name  string
	Role  Role
	Until time.Time
}

// Revocations are the certificates that a server no longer accepts. The zero value has none. Its
// methods may be called concurrently.
type Revocations struct {
	mu    sync.Mutex
	until map[Identity]time.Time // by kind, name and role
	held  []*heldStream
}

// heldStream is a stream that ends when its caller's certificate is revoked.
type heldStream struct {
	grpc.ServerStream
	ctx    context.Context
	cancel context.CancelCauseFunc
	info   AuthInfo
}

// Context implements [grpc.ServerStream].
func (h *heldStream) Context() context.Context { return h.ctx }

// SendMsg implements [grpc.ServerStream].
func (h *heldStream) SendMsg(m any) error {
	if h.ctx.Err() != nil {
		return context.Cause(h.ctx)
	}
	return h.ServerStream.SendMsg(m)
}

// RecvMsg implements [grpc.ServerStream]. A message that comes after the revocation is not handed on.
func (h *heldStream) RecvMsg(m any) error {
	err := h.ServerStream.RecvMsg(m)
	if h.ctx.Err() != nil {
		return context.Cause(h.ctx)
	}
	return err
}

// Set replaces the revocations. Streams of callers whose certificates are revoked end.
func (r *Revocations) Set(all []Revoked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until = make(map[Identity]time.Time, len(all))
	for _, one := range all {
		r.until[Identity{Kind: one.Kind, Name: one.Name, Role: one.Role}] = one.Until
	}
	for _, h := range r.held {
		if err := r.checkLocked(h.info); err != nil {
			h.cancel(err)
		}
	}
}

// checkLocked returns an error if a caller's certificate is revoked.
func (r *Revocations) checkLocked(info AuthInfo) error {
	who := info.Identity
	until, revoked := r.until[Identity{Kind: who.Kind, Name: who.Name, Role: who.Role}]
	if !revoked || info.Issued.IsZero() || info.Issued.Truncate(time.Second).After(until) {
		return nil
	}
	return denied(codes.Unauthenticated, ReasonRevoked, fmt.Sprintf("the certificate of %v was revoked", who),
		"to join again, remove its credential, and use a new token: `weft token create` prints one")
}

// check returns an error if a caller's certificate is revoked; r may be nil.
func (r *Revocations) check(info AuthInfo) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.checkLocked(info)
}

// serve is handle for a stream whose context ends when the caller's certificate is revoked; r may be
// nil.
func (r *Revocations) serve(server any, stream grpc.ServerStream, handle grpc.StreamHandler) error {
	info, ok := infoOf(stream.Context())
	if r == nil || !ok || info.Issued.IsZero() {
		return handle(server, stream)
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	h := &heldStream{stream, ctx, cancel, info}
	r.mu.Lock()
	r.held = append(r.held, h)
	err := r.checkLocked(info)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.held = slices.DeleteFunc(r.held, func(other *heldStream) bool { return other == h })
	}()
	if err != nil {
		return err
	}
	err = handle(server, h)
	if ctx.Err() != nil && stream.Context().Err() == nil {
		return context.Cause(ctx)
	}
	return err
}

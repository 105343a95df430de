// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// do sends a command that is no IO to the namespace and waits. It is not sent
// again when the connection is lost: whether it was done is then open.
func (n *Namespace) do(ctx context.Context, cmd nvmetcp.Command, data []byte) (nvmetcp.Completion, error) {
	s := n.controller.session.Load()
	if s == nil || !n.present() {
		return nvmetcp.Completion{}, fmt.Errorf("%s, %v: %w", nvmetcp.CommandName(&cmd, false), n, errLost)
	}
	q := s.io[s.turn.Add(1)%uint32(len(s.io))]
	if cmd.DataDirection() == nvmetcp.ToController && len(data) <= q.capsule {
		cmd.SetSGL(nvmetcp.InCapsule(uint32(len(data))))
	} else {
		cmd.SetSGL(nvmetcp.Transport(uint32(len(data))))
	}
	result, err := q.do(ctx, cmd, data)
	if err != nil {
		err = fmt.Errorf("%s, %v: %w", nvmetcp.CommandName(&cmd, false), n, err)
	}
	return result, err
}

// Compare reports whether p is what the namespace holds at off; both are multiples
// of its block size, and p fits one command. A difference is
// [nvmetcp.CompareFailure]. After another error p must be left alone.
func (n *Namespace) Compare(ctx context.Context, p []byte, off int64) error {
	a := n.about.Load()
	io := block.IO{Op: block.OpWrite, Off: off, Len: int64(len(p)), Data: p}
	if err := a.Geometry.CheckIO(&io); err != nil || io.Len > a.maxIO {
		return fmt.Errorf("compare %d bytes at %d, %v: %w", len(p), off, n, block.ErrRange)
	}
	if !a.canCompare {
		return fmt.Errorf("compare, %v: %w", n, block.ErrUnsupported)
	}
	var cmd nvmetcp.Command
	cmd.SetOpcode(nvmetcp.IOCompare)
	cmd.SetNSID(a.NSID)
	cmd.SetSLBA(uint64(off) >> a.shift)
	cmd.SetBlocks(uint32(io.Len >> a.shift))
	_, err := n.do(ctx, cmd, p)
	return err
}

// Register adds, replaces or removes the host's reservation key.
func (n *Namespace) Register(ctx context.Context, r nvmetcp.ReservationRegister) error {
	cmd, data := r.Command(n.about.Load().NSID)
	_, err := n.do(ctx, cmd, data)
	return err
}

// Acquire takes a reservation, or preempts another host's.
func (n *Namespace) Acquire(ctx context.Context, r nvmetcp.ReservationAcquire) error {
	cmd, data := r.Command(n.about.Load().NSID)
	_, err := n.do(ctx, cmd, data)
	return err
}

// Release gives a reservation back, or clears all.
func (n *Namespace) Release(ctx context.Context, r nvmetcp.ReservationRelease) error {
	cmd, data := r.Command(n.about.Load().NSID)
	_, err := n.do(ctx, cmd, data)
	return err
}

// Reservations tells who is registered and who holds the reservation. The host
// identifies itself with 128 bits, so the report is the extended one.
func (n *Namespace) Reservations(ctx context.Context) (nvmetcp.ReservationStatus, error) {
	for size := uint64(4 << 10); ; size = 4 << 20 { // enough for all of 65535
		data := make([]byte, size)
		cmd := nvmetcp.ReservationReport{NSID: n.about.Load().NSID, Length: size, Extended: true}.Command()
		if _, err := n.do(ctx, cmd, data); err != nil {
			return nvmetcp.ReservationStatus{}, err
		}
		status, total, err := nvmetcp.ParseReservationStatus(data, true)
		if err != nil || len(status.Registrants) == total || size == 4<<20 {
			return status, err
		}
	}
}

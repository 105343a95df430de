// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// do sends a command other than an IO to the namespace and waits. If the connection is lost
// the command is not sent again, and whether it was executed is unknown.
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

// Compare checks that the namespace holds p at off. Both off and len(p) are multiples of
// the block size, and p fits one command. If the contents differ the error is
// [nvmetcp.CompareFailure]; after any other error p must not be touched.
func (n *Namespace) Compare(ctx context.Context, p []byte, off int64) error {
	a := n.state.Load()
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
	cmd, data := r.Command(n.state.Load().NSID)
	_, err := n.do(ctx, cmd, data)
	return err
}

// Acquire acquires a reservation, or preempts another host's.
func (n *Namespace) Acquire(ctx context.Context, r nvmetcp.ReservationAcquire) error {
	cmd, data := r.Command(n.state.Load().NSID)
	_, err := n.do(ctx, cmd, data)
	return err
}

// Release releases the host's reservation, or clears all.
func (n *Namespace) Release(ctx context.Context, r nvmetcp.ReservationRelease) error {
	cmd, data := r.Command(n.state.Load().NSID)
	_, err := n.do(ctx, cmd, data)
	return err
}

// Reservations returns the registered hosts and the holder of the reservation. It asks for
// the extended report, since the host identifies itself with 128 bits.
func (n *Namespace) Reservations(ctx context.Context) (nvmetcp.ReservationStatus, error) {
	for size := uint64(4 << 10); ; size = 4 << 20 { // enough for all 65535
		data := make([]byte, size)
		cmd := nvmetcp.ReservationReport{NSID: n.state.Load().NSID, Length: size, Extended: true}.Command()
		if _, err := n.do(ctx, cmd, data); err != nil {
			return nvmetcp.ReservationStatus{}, err
		}
		status, total, err := nvmetcp.ParseReservationStatus(data, true)
		if err != nil || len(status.Registrants) == total || size == 4<<20 {
			return status, err
		}
	}
}

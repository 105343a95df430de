// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// mostWords limits the log of written regions that a host reads.
const mostWords = 1 << 20

// logPiece is how much of a log is read by one command.
const logPiece = 128 << 10

// adminCommand sends a command about the namespace on the admin queue and waits. If ctx ends
// first, the connection stays.
func (n *Namespace) adminCommand(ctx context.Context, cmd nvmetcp.Command, data []byte) error {
	s := n.controller.session.Load()
	if s == nil || !n.present() {
		return fmt.Errorf("%s, %v: %w", nvmetcp.CommandName(&cmd, true), n, errLost)
	}
	if _, err := s.admin.do(ctx, cmd, data); err != nil {
		return fmt.Errorf("%s, %v: %w", nvmetcp.CommandName(&cmd, true), n, err)
	}
	return nil
}

// Checkpoint begins or commits a checkpoint of the controller's list of written regions. A
// controller that keeps no list answers with an error that is [block.ErrUnsupported].
func (n *Namespace) Checkpoint(ctx context.Context, commit bool, token uint64) error {
	k := nvmetcp.Checkpoint{NSID: n.state.Load().NSID, Commit: commit, Token: token}
	return n.adminCommand(ctx, k.Command(), nil)
}

// CheckpointBehind is Checkpoint for a namespace that is copied to, with what it lacks. A controller
// of an earlier version answers with an error that is [block.ErrUnsupported].
func (n *Namespace) CheckpointBehind(ctx context.Context, commit bool, token uint64, behind nvmetcp.Behind) error {
	k := nvmetcp.Checkpoint{NSID: n.state.Load().NSID, Commit: commit, Token: token, Behind: &behind}
	return n.adminCommand(ctx, k.Command(), behind.Append(nil))
}

// Written returns the controller's list of written regions. Nobody may take a checkpoint
// meanwhile.
func (n *Namespace) Written(ctx context.Context) (nvmetcp.WrittenLog, error) {
	header, err := n.writtenPiece(ctx, 0, nvmetcp.WrittenHeaderSize)
	if err != nil {
		return nvmetcp.WrittenLog{}, err
	}
	log, err := nvmetcp.ParseWrittenLog(header)
	if err != nil {
		return nvmetcp.WrittenLog{}, err
	}
	if log.Words > mostWords || log.BehindLen > nvmetcp.MostBehindLen {
		return nvmetcp.WrittenLog{}, fmt.Errorf("log of written regions of %v: %d words and %d bytes, at most %d and %d are read: %w",
			n, log.Words, log.BehindLen, mostWords, nvmetcp.MostBehindLen, block.ErrRange)
	}
	all := header
	for size := log.Size(); len(all) < size; {
		piece, err := n.writtenPiece(ctx, len(all), min(logPiece, int(n.state.Load().maxIO), size-len(all)))
		if err != nil {
			return nvmetcp.WrittenLog{}, err
		}
		all = append(all, piece...)
	}
	if log, err = nvmetcp.ParseWrittenLog(all); err != nil {
		return nvmetcp.WrittenLog{}, err
	}
	return log, n.unchanged(ctx, log)
}

// unchanged returns an error if the log is no longer what its header said: its pieces may
// then be of two checkpoints.
func (n *Namespace) unchanged(ctx context.Context, log nvmetcp.WrittenLog) error {
	header, err := n.writtenPiece(ctx, 0, nvmetcp.WrittenHeaderSize)
	if err != nil {
		return err
	}
	now, err := nvmetcp.ParseWrittenLog(header)
	if err == nil && (now.Committed != log.Committed || now.Begun != log.Begun || now.Words != log.Words || now.Region != log.Region) {
		err = fmt.Errorf("log of written regions of %v: a checkpoint was taken while it was read", n)
	}
	return err
}

func (n *Namespace) writtenPiece(ctx context.Context, offset, length int) ([]byte, error) {
	data := make([]byte, length)
	g := nvmetcp.GetLog{ID: nvmetcp.LogWritten, NSID: n.state.Load().NSID, Offset: uint64(offset), Length: uint64(length)}
	return data, n.adminCommand(ctx, g.Command(), data)
}

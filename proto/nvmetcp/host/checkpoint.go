// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
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
	piece := min(logPiece, int(n.state.Load().maxIO))
	log, err := ReadWritten(n.state.Load().NSID, piece, func(cmd nvmetcp.Command, data []byte) error { return n.adminCommand(ctx, cmd, data) })
	if err != nil {
		err = fmt.Errorf("log of written regions of %v: %w", n, err)
	}
	return log, err
}

// ReadWritten reads the list of written regions of a namespace in pieces of at most so many bytes. Do
// sends an admin command that returns data. Nobody may take a checkpoint meanwhile.
func ReadWritten(nsid uint32, most int, do func(cmd nvmetcp.Command, data []byte) error) (log nvmetcp.WrittenLog, err error) {
	piece := func(offset, length int) ([]byte, error) {
		data := make([]byte, length)
		g := nvmetcp.GetLog{ID: nvmetcp.LogWritten, NSID: nsid, Offset: uint64(offset), Length: uint64(length)}
		return data, do(g.Command(), data)
	}
	header := func() (log nvmetcp.WrittenLog, err error) {
		b, err := piece(0, nvmetcp.WrittenHeaderSize)
		if err != nil {
			return log, err
		}
		return nvmetcp.ParseWrittenLog(b)
	}
	first, err := header()
	if err != nil {
		return log, err
	}
	if first.Words > mostWords || first.BehindLen > nvmetcp.MostBehindLen {
		return log, fmt.Errorf("%d words and %d bytes, at most %d and %d are read: %w", first.Words, first.BehindLen, mostWords, nvmetcp.MostBehindLen, block.ErrRange)
	}
	var all []byte
	for size := first.Size(); len(all) < size; {
		b, err := piece(len(all), min(most, size-len(all)))
		if err != nil {
			return log, err
		}
		all = append(all, b...)
	}
	if log, err = nvmetcp.ParseWrittenLog(all); err != nil {
		return log, err
	}
	// If the log is no longer what its header said, its pieces may be of two checkpoints.
	now, err := header()
	if err == nil && (now.Committed != log.Committed || now.Begun != log.Begun || now.Words != log.Words || now.Region != log.Region) {
		err = errors.New("a checkpoint was taken while it was read")
	}
	return log, err
}

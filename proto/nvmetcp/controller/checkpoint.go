// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// Tracker may be implemented by the Device of a namespace. It lists which regions are
// written, for a host that mirrors the namespace. The methods return block.ErrUnsupported
// if it does not, and must not block.
type Tracker interface {
	// Checkpoint begins or commits a checkpoint.
	Checkpoint(k nvmetcp.Checkpoint) error

	// Written returns the list.
	Written() (nvmetcp.WrittenLog, error)
}

// tracker returns what lists the writes to a namespace that hosts may write.
func (a *association) tracker(nsid uint32) (Tracker, nvmetcp.Status) {
	ns := a.sub.namespace(nsid)
	if ns == nil {
		return nil, nvmetcp.InvalidNamespace | dnr
	}
	t, ok := ns.cfg.Device.(Tracker)
	if !ok || ns.cfg.ReadOnly {
		return nil, nvmetcp.InvalidOpcode | dnr
	}
	return t, nvmetcp.Success
}

// checkpointBehind answers an AdminBehind command.
func (r *request) checkpointBehind() {
	k := nvmetcp.ParseCheckpoint(&r.cmd)
	behind, err := nvmetcp.ParseBehind(r.data[:r.want])
	if err != nil {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	k.Behind = &behind
	r.finish(r.association().checkpoint(k))
}

// checkpoint begins or commits a checkpoint.
func (a *association) checkpoint(k nvmetcp.Checkpoint) nvmetcp.Status {
	t, status := a.tracker(k.NSID)
	if status != nvmetcp.Success {
		return status
	}
	if k.Token == 0 {
		return nvmetcp.InvalidField | dnr
	}
	return trackerStatus(t.Checkpoint(k))
}

func trackerStatus(err error) nvmetcp.Status {
	switch {
	case err == nil:
		return nvmetcp.Success
	case errors.Is(err, block.ErrUnsupported):
		return nvmetcp.InvalidOpcode | dnr
	}
	return nvmetcp.CommandSequenceError | dnr
}

// writtenLog returns the list of written regions.
func (a *association) writtenLog(nsid uint32) ([]byte, nvmetcp.Status) {
	t, status := a.tracker(nsid)
	if status != nvmetcp.Success {
		return nil, nvmetcp.InvalidLogPage | dnr
	}
	log, err := t.Written()
	if err != nil {
		return nil, nvmetcp.InvalidLogPage | dnr
	}
	return log.Append(nil), nvmetcp.Success
}

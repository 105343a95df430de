// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"time"

	"weft.dev/weft/proto/nvmetcp"
)

// version is the version reported by VS and Identify.
const version nvmetcp.Version = 0x00020000

func (a *association) capabilities() nvmetcp.Capabilities {
	return nvmetcp.Capabilities{
		MaxQueueEntries: uint32(a.sub.t.cfg.QueueDepth), ContiguousQueues: true, Timeout: 15 * time.Second, CommandSets: 1,
	}
}

// propertyGet reads a controller register (Base, 6.6).
func (r *request) propertyGet(a *association) {
	access := nvmetcp.ParseProperty(&r.cmd)
	if access.Size != access.Property.Size() {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch access.Property {
	case nvmetcp.PropertyCAP:
		r.result = a.capabilities().Encode()
	case nvmetcp.PropertyVS:
		r.result = uint64(version)
	case nvmetcp.PropertyCC:
		r.result = uint64(a.cc)
	case nvmetcp.PropertyCSTS:
		r.result = uint64(a.csts.Encode())
	default:
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	r.finish(nvmetcp.Success)
}

// propertySet writes a controller register (Base, 6.7); only CC can be written.
func (r *request) propertySet(a *association) {
	access := nvmetcp.ParseProperty(&r.cmd)
	if access.Property != nvmetcp.PropertyCC || access.Size != 4 {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	a.configure(uint32(access.Value))
	r.finish(nvmetcp.Success)
}

// The values of CC.SHN and CSTS.SHST.
const (
	shutdownNone     = 0
	shutdownComplete = 2
)

// configure applies a new value of CC (Base, 3.1.3.5 and 3.5).
func (a *association) configure(value uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was, want := nvmetcp.ParseConfiguration(a.cc), nvmetcp.ParseConfiguration(value)
	a.cc = value
	if want.Enable && !was.Enable {
		if err := acceptable(want, a.sub.discovery); err != nil {
			a.csts.Fatal = true
			a.sub.t.log.Warn("controller cannot be enabled", "subsystem", a.sub.cfg.NQN, "cntlid", a.id, "reason", err)
		} else {
			a.csts = nvmetcp.ControllerStatus{Ready: true}
		}
	}
	if !want.Enable && was.Enable {
		a.csts = nvmetcp.ControllerStatus{}
		a.resetLocked()
	}
	if want.Shutdown != shutdownNone && was.Shutdown == shutdownNone {
		a.csts.Shutdown = shutdownComplete
		a.resetLocked()
	}
	a.enabled.Store(want.Enable && a.csts.Ready && a.csts.Shutdown == shutdownNone)
}

func acceptable(c nvmetcp.Configuration, discovery bool) error {
	switch {
	case c.PageSize != 0:
		return errors.New("the memory page size is not 4 KiB")
	case c.Arbitration != 0:
		return errors.New("the arbitration is not round robin")
	case c.CommandSet != 0:
		return errors.New("the command set is not NVM")
	case !discovery && (c.SubmissionEntrySize != 6 || c.CompletionEntrySize != 4):
		return errors.New("the queue entries are not of 64 and 16 bytes")
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/target/backend"
)

// ourTarget is proto/nvmetcp/controller, in this process.
type ourTarget struct{}

func (ourTarget) ours() bool { return true }

// ourSubsystem is a target with one subsystem.
type ourSubsystem struct {
	identity
	devices map[uint32]*backend.File

	proofs    atomic.Int64 // how many times a host has authenticated to a queue
	target    *controller.Target
	subsystem *controller.Subsystem
	ports     []*controller.Port
}

func (ourTarget) serve(t *testing.T, s spec) served {
	t.Helper()
	o := &ourSubsystem{identity: newIdentity(t, s), devices: map[uint32]*backend.File{}}
	t.Cleanup(o.stop)
	o.start(s.queues)
	return o
}

func (o *ourSubsystem) start(queues int) {
	o.t.Helper()
	log := slog.New(slog.NewTextHandler(o.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: o.count}))
	var err error
	o.target, err = controller.New(controller.Config{Log: log, MaxIOQueues: queues})
	must(o.t, err)
	o.subsystem, err = o.target.AddSubsystem(controller.SubsystemConfig{
		NQN: o.name, Serial: "WEFT0001", Hosts: o.hosts(), AllowAnyHost: o.spec.allow == nil,
		// As our agent sets it: without it, a write that an old connection left in the
		// device may land after its retry on the new connection. A host with two paths has
		// two controllers.
		PerHost: map[bool]int{true: 1}[o.spec.ports < 2],
	})
	must(o.t, err)
	for nsid := range o.sizes {
		o.enable(nsid)
	}
	linked := []*controller.Subsystem{o.subsystem}
	for _, nqn := range o.more {
		s, err := o.target.AddSubsystem(controller.SubsystemConfig{NQN: nqn, Serial: "WEFT0002", AllowAnyHost: true})
		must(o.t, err)
		linked = append(linked, s)
	}
	o.ports = nil
	for i, tcp := range o.tcp {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", tcp))
		must(o.t, err)
		p, err := o.target.Serve(l, controller.PortConfig{ID: uint16(i + 1), Link: linked})
		must(o.t, err)
		o.ports = append(o.ports, p)
	}
}

// count counts messages in the target's log.
func (o *ourSubsystem) count(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.MessageKey && a.Value.String() == "host authenticated" {
		o.proofs.Add(1)
	}
	return a
}

func (o *ourSubsystem) hosts() []controller.Host {
	a := o.spec.allow
	if a == nil {
		return nil
	}
	h := controller.Host{NQN: a.host.NQN, HostKey: a.hostKey, ControllerKey: a.controllerKey, Groups: []dhchap.Group{a.group}}
	if a.hash != 0 {
		h.Hashes = []dhchap.Hash{a.hash}
	}
	return []controller.Host{h}
}

func (o *ourSubsystem) stop() {
	o.t.Helper()
	if o.target == nil {
		return
	}
	if err := o.target.Close(soon(o.t)); err != nil {
		o.t.Error(err)
	}
	for _, d := range o.devices {
		d.Close()
	}
	clear(o.devices)
	o.target = nil
}

func (o *ourSubsystem) enable(nsid uint32) {
	o.t.Helper()
	d, err := backend.Open(image(o.t, o.dir, nsid, o.sizes[nsid]), backend.Options{})
	must(o.t, err)
	o.devices[nsid] = d
	must(o.t, o.subsystem.AddNamespace(controller.NamespaceConfig{NSID: nsid, UUID: o.uuids[nsid], Device: d}))
}

func (o *ourSubsystem) add(nsid uint32, size int64) {
	o.t.Helper()
	o.sizes[nsid], o.uuids[nsid] = size, block.UUIDFromRandom(newID(nsid))
	o.enable(nsid)
}

func (o *ourSubsystem) remove(nsid uint32) {
	o.t.Helper()
	must(o.t, o.subsystem.RemoveNamespace(soon(o.t), nsid))
	must(o.t, o.devices[nsid].Close())
	delete(o.devices, nsid)
	delete(o.sizes, nsid)
	removeImage(o.t, o.dir, nsid)
}

func (o *ourSubsystem) resize(nsid uint32, size int64) {
	o.t.Helper()
	o.sizes[nsid] = size
	image(o.t, o.dir, nsid, size)
	must(o.t, o.devices[nsid].Refresh())
	must(o.t, o.subsystem.ResizeNamespace(nsid))
}

func (o *ourSubsystem) ana(port int, state anaState) {
	o.t.Helper()
	states := map[anaState]nvmetcp.ANAState{
		optimized: nvmetcp.ANAStateOptimized, nonOptimized: nvmetcp.ANAStateNonOptimized, inaccessible: nvmetcp.ANAStateInaccessible,
	}
	must(o.t, o.ports[port].SetANA(1, states[state]))
}

func (o *ourSubsystem) link(port int) {
	o.t.Helper()
	must(o.t, o.ports[port].Link(o.subsystem))
}

func (o *ourSubsystem) unlink(port int) { o.ports[port].Unlink(o.subsystem) }

func (o *ourSubsystem) allow(a access) {
	o.t.Helper()
	o.spec.allow = &a
	must(o.t, o.subsystem.SetHosts(o.hosts(), false))
}

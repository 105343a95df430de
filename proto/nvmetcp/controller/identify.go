// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"math/bits"
	"slices"

	"weft.dev/weft/proto/nvmetcp"
)

// identify answers an Identify command (Base, 5.17).
func (r *request) identify() {
	i := nvmetcp.ParseIdentify(&r.cmd)
	a := r.association()
	if a.sub.discovery && i.CNS != nvmetcp.CNSController {
		r.finish(nvmetcp.InvalidField | dnr)
		return
	}
	switch i.CNS {
	case nvmetcp.CNSNamespaceOfSet, nvmetcp.CNSControllerOfSet, nvmetcp.CNSActiveOfSet:
		if i.CommandSet != nvmetcp.NVMCommandSet {
			r.finish(nvmetcp.InvalidField | dnr)
			return
		}
	}
	b, status := a.identify(i)
	if status != nvmetcp.Success {
		r.finish(status)
		return
	}
	r.respond(b)
}

func (a *association) identify(i nvmetcp.Identify) ([]byte, nvmetcp.Status) {
	ns := a.sub.namespace(i.NSID)
	switch i.CNS {
	case nvmetcp.CNSController:
		c := a.describe()
		return c.Append(nil), nvmetcp.Success
	case nvmetcp.CNSControllerOfSet:
		return a.nvmController().Append(nil), nvmetcp.Success
	case nvmetcp.CNSActiveNamespaces, nvmetcp.CNSActiveOfSet, nvmetcp.CNSAllocatedNamespaces:
		return a.namespaceList(i.NSID)
	case nvmetcp.CNSControllers:
		return nvmetcp.AppendControllerList(nil, a.sub.controllerIDs(i.ControllerID)), nvmetcp.Success
	case nvmetcp.CNSCommandSets:
		return nvmetcp.AppendCommandSets(nil, []uint64{1}), nvmetcp.Success
	case nvmetcp.CNSNamespace, nvmetcp.CNSAllocatedNamespace:
		return a.identifyNamespace(i, ns)
	}
	return a.describeNamespace(i, ns)
}

// describeNamespace answers a request about an existing namespace.
func (a *association) describeNamespace(i nvmetcp.Identify, ns *namespace) ([]byte, nvmetcp.Status) {
	switch i.CNS {
	case nvmetcp.CNSDescriptors, nvmetcp.CNSNamespaceOfSet, nvmetcp.CNSIndependentNamespace, nvmetcp.CNSNamespaceControllers:
	default:
		return nil, nvmetcp.InvalidField | dnr
	}
	if ns == nil {
		return nil, nvmetcp.InvalidNamespace | dnr
	}
	switch i.CNS {
	case nvmetcp.CNSDescriptors:
		d := nvmetcp.Descriptors{UUID: ns.cfg.UUID, NGUID: ns.cfg.NGUID, HasSet: true}
		return d.Append(nil), nvmetcp.Success
	case nvmetcp.CNSNamespaceOfSet:
		return nil, nvmetcp.Success // nothing to report: no metadata, no protection information
	case nvmetcp.CNSIndependentNamespace:
		return ns.independent().Append(nil), nvmetcp.Success
	}
	return nvmetcp.AppendControllerList(nil, a.sub.controllerIDs(i.ControllerID)), nvmetcp.Success
}

// identifyNamespace answers for one namespace (Base, 5.17.2.1): zeroes for a valid NSID
// without a namespace, and for AllNamespaces what they have in common.
func (a *association) identifyNamespace(i nvmetcp.Identify, ns *namespace) ([]byte, nvmetcp.Status) {
	switch {
	case ns != nil:
		n := ns.describe()
		return n.Append(nil), nvmetcp.Success
	case i.NSID == nvmetcp.AllNamespaces:
		common := nvmetcp.Namespace{Shared: true, Formats: []nvmetcp.LBAFormat{{BlockShift: 12}}}
		return common.Append(nil), nvmetcp.Success
	case i.NSID == 0:
		return nil, nvmetcp.InvalidNamespace | dnr
	}
	return nil, nvmetcp.Success
}

func (a *association) namespaceList(after uint32) ([]byte, nvmetcp.Status) {
	if after >= 0xfffffffe {
		return nil, nvmetcp.InvalidNamespace | dnr
	}
	var ids []uint32
	for _, n := range a.sub.namespaces() {
		if n.cfg.NSID > after {
			ids = append(ids, n.cfg.NSID)
		}
	}
	return nvmetcp.AppendNamespaceList(nil, ids), nvmetcp.Success
}

// describe is the Identify Controller data structure.
func (a *association) describe() nvmetcp.Controller {
	t, s := a.sub.t, a.sub
	c := nvmetcp.Controller{
		Serial: s.cfg.Serial, Model: s.cfg.Model, Firmware: s.cfg.Firmware, ControllerID: a.id, Version: version,
		MDTS:   uint8(bits.TrailingZeros64(uint64(t.cfg.MDTS / pageSize))),
		Type:   nvmetcp.ControllerIO,
		OAES:   s.supportedEvents(),
		CTRATT: nvmetcp.CTRATT128BitHostID | nvmetcp.CTRATTTrafficKeepAlive,
		LPA:    nvmetcp.LPAEffects | nvmetcp.LPAExtendedData,

		AbortLimit: 3, AERLimit: maxEventRequests - 1, FRMW: 1<<1 | 1, KeepAliveGranularity: 1,
		MaxCommands: uint16(min(t.cfg.QueueDepth, 0xffff)),
		SGLS:        nvmetcp.SGLSSupported | nvmetcp.SGLSOffset | nvmetcp.SGLSTransport,
		Subsystem:   string(s.cfg.NQN),
		IOCapsule:   uint32(nvmetcp.CommandSize+t.cfg.InCapsule) / 16, IOResponse: nvmetcp.CompletionSize / 16,
		MSDBD: 1, OFCS: nvmetcp.OFCSDisconnect, SQES: 6<<4 | 6, CQES: 4<<4 | 4,
	}
	if s.discovery {
		c.Type, c.IOCapsule, c.IOResponse, c.OFCS = nvmetcp.ControllerDiscovery, 0, 0, 0
		return c
	}
	c.CMIC = nvmetcp.CMICPorts | nvmetcp.CMICControllers | nvmetcp.CMICANA
	c.ANATT, c.ANACAP, c.ANAGroupMax, c.ANAGroups = 10, 1<<5-1, maxANAGroups, maxANAGroups
	c.Namespaces, c.MaxNamespaces = a.largestNSID(), maxNamespaces
	c.ONCS = nvmetcp.ONCSCompare | nvmetcp.ONCSDatasetManagement | nvmetcp.ONCSWriteZeroes | nvmetcp.ONCSReservations
	c.OACS = nvmetcp.OACSGetLBAStatus
	c.VWC = nvmetcp.VWCPresent | 2<<1 // Flush takes one namespace
	c.CRDT = crdt()
	c.PerHost, c.Replacer = uint16(min(s.cfg.PerHost, 0xffff)), s.cfg.Replace != nil
	return c
}

// largestNSID is NN. It is at least maxNamespaces, so that hosts expect more to be added.
func (a *association) largestNSID() uint32 {
	largest := uint32(maxNamespaces)
	for _, n := range a.sub.namespaces() {
		largest = max(largest, n.cfg.NSID)
	}
	return largest
}

// nvmController allows Write Zeroes up to the largest size that the command can name.
// Without this, hosts apply MDTS.
func (a *association) nvmController() nvmetcp.NVMController {
	return nvmetcp.NVMController{WZSL: 13} // 32 MiB: 65536 blocks of 512 bytes
}

// reservationTypes is RESCAP: all types, and keys as of 1.3. Nothing survives a restart.
const reservationTypes = 0xff &^ nvmetcp.RESCAPPersist

func (n *namespace) describe() nvmetcp.Namespace {
	s := n.shape.Load()
	d := nvmetcp.Namespace{
		Size: s.blocks, Capacity: s.blocks, Utilization: s.blocks, Formats: []nvmetcp.LBAFormat{{BlockShift: uint8(s.shift)}},
		Shared: true, ReservationCapabilities: reservationTypes,
		ANAGroup: n.group.Load(), WriteProtected: n.cfg.ReadOnly, NGUID: n.cfg.NGUID,
	}
	d.DeallocateByWriteZeroes = s.DiscardUnit > 0
	if s.DiscardUnit > s.BlockSize {
		unit := uint16(min(max(s.DiscardUnit>>s.shift, 1), 65536) - 1)
		d.Features |= nvmetcp.NSFeatOptimal
		d.DeallocateGranularity, d.DeallocateAlignment = unit, unit
	}
	return d
}

func (n *namespace) independent() nvmetcp.IndependentNamespace {
	return nvmetcp.IndependentNamespace{
		Shared: true, ReservationCapabilities: reservationTypes, ANAGroup: n.group.Load(), WriteProtected: n.cfg.ReadOnly, Ready: true,
	}
}

// controllerIDs lists the controller ids from first on.
func (s *Subsystem) controllerIDs(first uint16) (ids []uint16) {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	for id := range s.associations {
		if id >= first {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// groups lists the ANA groups that have namespaces, in order, and their namespaces.
func (s *Subsystem) groups() (ids []uint32, members map[uint32][]uint32) {
	members = map[uint32][]uint32{}
	for _, n := range s.namespaces() {
		g := n.group.Load()
		if members[g] == nil {
			ids = append(ids, g)
		}
		members[g] = append(members[g], n.cfg.NSID)
	}
	slices.Sort(ids)
	return ids, members
}

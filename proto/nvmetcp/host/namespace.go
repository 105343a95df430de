// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// NamespaceInfo is what a controller says of a namespace.
type NamespaceInfo struct {
	NSID     uint32
	UUID     block.UUID // zero if it has none
	NGUID    [16]byte   // zero if it has none
	Geometry block.Geometry
	ReadOnly bool
	ANAGroup uint32
	ANAState nvmetcp.ANAState // optimized if the controller does not say
	Err      error            // why it cannot be used: its blocks are of a kind that Weft has no use for

	shift      uint8 // blocks of 1<<shift bytes
	maxIO      int64 // bytes of one read or write
	maxZeroes  int64 // bytes of one Write Zeroes; 0: there is no such command
	canUnmap   bool  // Write Zeroes may deallocate and zeroes are read after
	canDiscard bool
	canCompare bool
}

// maxBlocks is how many blocks one command can cover (NLB), maxDiscard how many a
// range of Dataset Management.
const (
	maxBlocks  = 1 << 16
	maxDiscard = 1<<32 - 1
)

// maxNamespaces bounds what is kept of a controller that finds no end.
const maxNamespaces = 8 << 10

// scan asks the controller for its namespaces and how they are reached.
func (s *session) scan(ctx context.Context) ([]NamespaceInfo, error) {
	var all []NamespaceInfo
	after, seen := uint32(0), 0
	for {
		ids, err := identified(ctx, s, nvmetcp.Identify{CNS: nvmetcp.CNSActiveNamespaces, NSID: after}, nvmetcp.ParseNamespaceList)
		if err != nil {
			return nil, err
		}
		if seen += len(ids); seen > maxNamespaces {
			return nil, fmt.Errorf("list namespaces: there are more than %d", maxNamespaces)
		}
		for _, id := range ids {
			if id <= after {
				return nil, fmt.Errorf("list namespaces: %d comes after %d", id, after)
			}
			info, err := s.look(ctx, id)
			switch {
			case errors.Is(err, nvmetcp.InvalidNamespace): // it has just gone
			case err != nil:
				return nil, fmt.Errorf("namespace %d: %w", id, err)
			default:
				all = append(all, info)
			}
			after = id
		}
		if len(ids) < nvmetcp.MaxNamespaceList {
			break
		}
	}
	if s.about.CMIC&nvmetcp.CMICANA != 0 {
		return all, s.lookANA(ctx, all)
	}
	return all, nil
}

// look asks for one namespace.
func (s *session) look(ctx context.Context, id uint32) (NamespaceInfo, error) {
	i := NamespaceInfo{NSID: id, ANAState: nvmetcp.ANAStateOptimized}
	ns, err := identified(ctx, s, nvmetcp.Identify{CNS: nvmetcp.CNSNamespace, NSID: id}, nvmetcp.ParseNamespace)
	if err != nil {
		return i, err
	}
	d, err := identified(ctx, s, nvmetcp.Identify{CNS: nvmetcp.CNSDescriptors, NSID: id}, nvmetcp.ParseDescriptors)
	if err != nil {
		return i, err
	}
	i.UUID, i.NGUID, i.ANAGroup, i.ReadOnly = d.UUID, d.NGUID, ns.ANAGroup, ns.WriteProtected
	if i.NGUID == [16]byte{} {
		i.NGUID = ns.NGUID
	}
	size, err := ns.BlockSize()
	if err == nil && size != 512 && size != 4096 {
		err = fmt.Errorf("namespace has blocks of %v: 512 or 4096 are supported", size)
	}
	if err == nil && ns.Size > 1<<63/uint64(size)-1 {
		err = fmt.Errorf("namespace has %d blocks of %v", ns.Size, size)
	}
	if err != nil {
		i.Err = err
		return i, nil
	}
	s.measure(&i, &ns, size)
	return i, nil
}

// measure fills in geometry and limits.
func (s *session) measure(i *NamespaceInfo, ns *nvmetcp.Namespace, size block.Size) {
	b := int64(size)
	i.shift = ns.Formats[ns.FormatIndex].BlockShift
	i.maxIO = min(s.maxIO, maxBlocks*b) &^ (b - 1)
	oncs := s.about.ONCS
	i.Geometry = block.Geometry{Size: block.Size(ns.Size) * size, BlockSize: size, VolatileCache: s.about.VWC&nvmetcp.VWCPresent != 0}
	if oncs&nvmetcp.ONCSDatasetManagement != 0 {
		i.canDiscard = true
		i.Geometry.DiscardUnit = size
		if ns.Features&nvmetcp.NSFeatOptimal != 0 {
			i.Geometry.DiscardUnit = size * (block.Size(ns.DeallocateGranularity) + 1)
		}
	}
	if oncs&nvmetcp.ONCSWriteZeroes != 0 {
		i.maxZeroes = maxBlocks * b
		if n := s.nvm.WZSL; n > 0 && n < 32 {
			i.maxZeroes = min(i.maxZeroes, int64(1)<<(12+s.caps.MinPageSize)<<n)
		}
		i.canUnmap = ns.DeallocateByWriteZeroes && ns.DeallocatedReads == nvmetcp.DeallocatedReadsZeroes
	}
	i.canCompare = oncs&nvmetcp.ONCSCompare != 0
}

// lookANA fills in how the namespaces' groups are reached.
func (s *session) lookANA(ctx context.Context, all []NamespaceInfo) error {
	// Room for every group and namespace; a controller cannot ask for more than this.
	n := uint64(16+32*uint64(s.about.ANAGroups)+4*uint64(len(all))+3) &^ 3
	b, err := s.log(ctx, nvmetcp.GetLog{ID: nvmetcp.LogANA, NSID: nvmetcp.AllNamespaces, Specific: nvmetcp.ANAGroupsOnly, Length: min(n, 1<<20)})
	if err != nil {
		return err
	}
	log, err := nvmetcp.ParseANALog(b)
	if err != nil {
		return err
	}
	for i := range all {
		for _, g := range log.Groups {
			if g.ID == all[i].ANAGroup {
				all[i].ANAState = g.State
			}
		}
	}
	return nil
}

// Namespaces is what the controller last said that there is.
func (c *Controller) Namespaces() []NamespaceInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.found)
}

// Namespace returns the namespace with an NSID and a UUID. A zero NSID or UUID
// matches any. The Namespace stays the one with that UUID, whatever NSID it has
// after a reconnect.
func (c *Controller) Namespace(nsid uint32, uuid block.UUID) (*Namespace, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.found {
		f := &c.found[i]
		if nsid != 0 && f.NSID != nsid || !uuid.IsZero() && f.UUID != uuid {
			continue
		}
		if f.Err != nil {
			return nil, fmt.Errorf("namespace %d of %s: %w", f.NSID, c.cfg.Subsystem, f.Err)
		}
		for _, n := range c.spaces {
			if now := n.about.Load(); n.is(f) && now.present {
				return n, nil
			}
		}
		n := &Namespace{controller: c}
		n.about.Store(&aspect{NamespaceInfo: *f, present: true})
		c.spaces = append(c.spaces, n)
		return n, nil
	}
	return nil, fmt.Errorf("namespace %d with UUID %v of %s: %w", nsid, uuid, c.cfg.Subsystem, block.ErrGone)
}

// Namespace is a namespace of a controller, as a [block.Device]: IOs are split as
// the controller needs it, and wait while there is no connection.
type Namespace struct {
	controller *Controller
	about      atomic.Pointer[aspect]
	plain      atomic.Bool // it has refused Write Zeroes: zeroes are written as data
}

// aspect is how a Namespace is at a time.
type aspect struct {
	NamespaceInfo
	present bool  // the session has it
	gone    error // why IO fails: it will not come back, or another one is in its place
	shrunk  bool  // for good: its user would read and write beyond its end
}

// is reports whether f is the same namespace, perhaps resized.
func (n *Namespace) is(f *NamespaceInfo) bool {
	now := n.about.Load()
	if now.UUID.IsZero() && now.NGUID == [16]byte{} {
		return f.NSID == now.NSID && f.UUID.IsZero() && f.NGUID == now.NGUID
	}
	return f.UUID == now.UUID && f.NGUID == now.NGUID
}

func (n *Namespace) present() bool { return n.about.Load().present }
func (n *Namespace) gone() error   { return n.about.Load().gone }

// matchLocked compares the Namespaces that are in use with what was found. c.mu is
// held.
func (c *Controller) matchLocked(found []NamespaceInfo, reconnect bool) {
	c.found = found
	for _, n := range c.spaces {
		n.match(found, reconnect)
	}
}

// match finds the namespace among those that there are. If it is not there, a
// reconnect leaves open whether it comes: a target that starts may add its
// namespaces one by one. While connected, it was removed.
func (n *Namespace) match(found []NamespaceInfo, reconnect bool) {
	old := n.about.Load()
	if old.shrunk {
		return
	}
	now := aspect{NamespaceInfo: old.NamespaceInfo, gone: old.gone}
	if !reconnect && now.gone == nil {
		now.gone = fmt.Errorf("%v was removed: %w", n, block.ErrGone)
	}
	for i := range found {
		f := &found[i]
		if n.is(f) {
			now = n.become(old, f)
			break
		}
		if f.NSID == old.NSID {
			now.gone = fmt.Errorf("%v has another one in its place: %w", n, block.ErrGone)
		}
	}
	n.about.Store(&now)
}

// become is how the namespace is now that it was seen as f.
func (n *Namespace) become(old *aspect, f *NamespaceInfo) aspect {
	now := aspect{NamespaceInfo: *f, present: true}
	switch {
	case f.Err != nil:
		now.present, now.gone = false, fmt.Errorf("%v: %w: %w", n, f.Err, block.ErrGone)
	case f.shift != old.shift:
		now.present, now.gone = false, fmt.Errorf("%v has blocks of %v, and had %v: %w", n, f.Geometry.BlockSize, old.Geometry.BlockSize, block.ErrGone)
	case f.Geometry.Size < old.Geometry.Size:
		now = aspect{NamespaceInfo: old.NamespaceInfo, shrunk: true}
		now.Err = fmt.Errorf("%v has shrunk from %v to %v", n, old.Geometry.Size, f.Geometry.Size)
		now.gone = fmt.Errorf("%w: %w", now.Err, block.ErrGone)
	}
	return now
}

// Info is what the controller last said of the namespace.
func (n *Namespace) Info() NamespaceInfo { return n.about.Load().NamespaceInfo }

// Geometry is that of the namespace as it was last seen; its size can grow. When a
// namespace has become smaller, what its user has of it may be lost: the Namespace
// keeps the size that it had, Info().Err says so, and IO fails with
// [block.ErrGone], whatever size the namespace has later. Controller.Namespace
// then makes another one, of the smaller size.
func (n *Namespace) Geometry() block.Geometry { return n.about.Load().Geometry }

// UUID and NGUID identify the namespace; zero if it has none.
func (n *Namespace) UUID() block.UUID { return n.about.Load().UUID }

// NGUID is as UUID.
func (n *Namespace) NGUID() [16]byte { return n.about.Load().NGUID }

func (n *Namespace) String() string {
	return fmt.Sprintf("namespace %d of %s", n.about.Load().NSID, n.controller.cfg.Subsystem)
}

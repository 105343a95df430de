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

// NamespaceInfo is what a controller reports of a namespace.
type NamespaceInfo struct {
	NSID     uint32
	UUID     block.UUID // zero if it has none
	NGUID    [16]byte   // zero if it has none
	Geometry block.Geometry
	ReadOnly bool
	ANAGroup uint32
	ANAState nvmetcp.ANAState // optimized if the controller does not report ANA
	Err      error            // why it cannot be used: Weft does not support its block format

	shift      uint8 // blocks of 1<<shift bytes
	maxIO      int64 // bytes of one read or write
	maxZeroes  int64 // bytes of one Write Zeroes; 0: not supported
	canUnmap   bool  // Write Zeroes may deallocate, and the blocks then read as zeroes
	canDiscard bool
	canCompare bool
}

// maxBlocks is the most blocks of one command (NLB), maxDiscard the most of one range of
// Dataset Management.
const (
	maxBlocks  = 1 << 16
	maxDiscard = 1<<32 - 1
)

// maxNamespaces limits what is kept of a controller whose list never ends.
const maxNamespaces = 8 << 10

// scan reads the controller's namespaces and their ANA states.
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
			case errors.Is(err, nvmetcp.InvalidNamespace): // it has just been removed
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

// look reads one namespace.
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

// lookANA fills in the ANA states of the namespaces' groups.
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

// Namespaces returns the namespaces that the controller last reported.
func (c *Controller) Namespaces() []NamespaceInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.found)
}

// Namespace returns the namespace with an NSID and a UUID; a zero NSID or UUID matches any.
// The Namespace keeps its UUID, whatever NSID that has after a reconnect.
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
		for _, n := range c.namespaces {
			if now := n.state.Load(); n.is(f) && now.present {
				return n, nil
			}
		}
		n := &Namespace{controller: c}
		n.state.Store(&namespaceState{NamespaceInfo: *f, present: true})
		c.namespaces = append(c.namespaces, n)
		return n, nil
	}
	return nil, fmt.Errorf("namespace %d with UUID %v of %s: %w", nsid, uuid, c.cfg.Subsystem, block.ErrGone)
}

// Namespace is a namespace of a controller, as a [block.Device]. It splits IOs to the
// controller's limits and holds them while there is no connection.
type Namespace struct {
	controller *Controller
	state      atomic.Pointer[namespaceState]
	plain      atomic.Bool // it has refused Write Zeroes: send zeroes as data
}

// namespaceState is the state of a Namespace at one time.
type namespaceState struct {
	NamespaceInfo
	present bool  // the session has it
	gone    error // why IO fails: it was removed or replaced
	shrunk  bool  // permanent: its user would read and write beyond the end
}

// is reports whether f is the same namespace, possibly resized.
func (n *Namespace) is(f *NamespaceInfo) bool {
	now := n.state.Load()
	if now.UUID.IsZero() && now.NGUID == [16]byte{} {
		return f.NSID == now.NSID && f.UUID.IsZero() && f.NGUID == now.NGUID
	}
	return f.UUID == now.UUID && f.NGUID == now.NGUID
}

func (n *Namespace) present() bool { return n.state.Load().present }
func (n *Namespace) gone() error   { return n.state.Load().gone }

// matchLocked compares the Namespaces in use with the reported ones. c.mu is held.
func (c *Controller) matchLocked(found []NamespaceInfo, reconnect bool) {
	c.found = found
	for _, n := range c.namespaces {
		n.match(found, reconnect)
	}
}

// match looks for the namespace among the reported ones. If it is missing after a reconnect
// it may still appear, since a starting target may add its namespaces one by one. If it is
// missing otherwise, it was removed.
func (n *Namespace) match(found []NamespaceInfo, reconnect bool) {
	old := n.state.Load()
	if old.shrunk {
		return
	}
	now := namespaceState{NamespaceInfo: old.NamespaceInfo, gone: old.gone}
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
	n.state.Store(&now)
}

// become is the namespace's state after it was reported as f.
func (n *Namespace) become(old *namespaceState, f *NamespaceInfo) namespaceState {
	now := namespaceState{NamespaceInfo: *f, present: true}
	switch {
	case f.Err != nil:
		now.present, now.gone = false, fmt.Errorf("%v: %w: %w", n, f.Err, block.ErrGone)
	case f.shift != old.shift:
		now.present, now.gone = false, fmt.Errorf("%v has blocks of %v, and had %v: %w", n, f.Geometry.BlockSize, old.Geometry.BlockSize, block.ErrGone)
	case f.Geometry.Size < old.Geometry.Size:
		now = namespaceState{NamespaceInfo: old.NamespaceInfo, shrunk: true}
		now.Err = fmt.Errorf("%v has shrunk from %v to %v", n, old.Geometry.Size, f.Geometry.Size)
		now.gone = fmt.Errorf("%w: %w", now.Err, block.ErrGone)
	}
	return now
}

// Info is what the controller last reported of the namespace.
func (n *Namespace) Info() NamespaceInfo { return n.state.Load().NamespaceInfo }

// Geometry is the last reported geometry; its size can grow. If a namespace shrinks, its
// user's data may be lost. The Namespace then keeps its old size, Info().Err says so, and
// IO fails with [block.ErrGone], whatever size the namespace has later.
// Controller.Namespace then returns a new Namespace of the smaller size.
func (n *Namespace) Geometry() block.Geometry { return n.state.Load().Geometry }

// UUID identifies the namespace; zero if it has none.
func (n *Namespace) UUID() block.UUID { return n.state.Load().UUID }

// NGUID identifies the namespace; zero if it has none.
func (n *Namespace) NGUID() [16]byte { return n.state.Load().NGUID }

func (n *Namespace) String() string {
	return fmt.Sprintf("namespace %d of %s", n.state.Load().NSID, n.controller.cfg.Subsystem)
}

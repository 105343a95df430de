// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Host is a host that may connect to a subsystem.
type Host struct {
	NQN block.NQN
	// HostKey is the DH-HMAC-CHAP secret that the host must prove to know. Zero means that
	// the host need not authenticate.
	HostKey dhchap.Key
	// ControllerKey is the secret with which the controller proves its identity, if the
	// host asks for it.
	ControllerKey dhchap.Key
	// Hashes and Groups are those that authentication may use, the preferred ones first.
	// Hosts that support none of them are refused. Empty: all (see dhchap.Config).
	Hashes []dhchap.Hash
	Groups []dhchap.Group
}

// SubsystemConfig describes a subsystem.
type SubsystemConfig struct {
	NQN      block.NQN
	Serial   string // up to 20 printable ASCII characters
	Model    string // up to 40; empty: "Weft"
	Firmware string // up to 8; empty: "1"

	// Controllers get ids from CntlidMin to CntlidMax; 0, 0 means 1 to 65519. Two targets
	// that serve one NQN must have disjoint ranges.
	CntlidMin, CntlidMax uint16

	Hosts        []Host // who may connect; empty: nobody
	AllowAnyHost bool   // any host may connect, without authentication

	Unlisted bool // discovery does not list it: its hosts know of it

	// PerHost is the number of controllers that a host may have, each through another port;
	// 0: any number. When a host connects a new admin queue, it replaces the host's
	// controllers of the same port, and the oldest ones beyond the number: they are killed,
	// and the host gets its answer only when their commands have left the Devices. A write
	// delayed on an old connection can then not land after its retry on the new one. With
	// more than one, the host itself must not retry a write on another path before that.
	PerHost int

	// Replace is for a subsystem that speaks for another target, which serves the same hosts: it ends
	// the host's controllers there, and returns when their commands have left the devices and the host
	// can connect to the part that serves the subsystem from then on. Nil: there is no such target. It is
	// called while the host waits for nvmetcp.AdminReplace, and should return soon after ctx ends.
	Replace func(ctx context.Context, by block.ServedBy) error
}

// NamespaceConfig describes a namespace.
type NamespaceConfig struct {
	NSID     uint32 // 1 to 0xfffffffe
	UUID     block.UUID
	NGUID    [16]byte // zero: none
	Device   block.Device
	ANAGroup uint32 // 0 means 1
	ReadOnly bool
}

// ControllerInfo describes one association with a host.
type ControllerInfo struct {
	ID      uint16
	Host    block.Host
	Port    uint16    // id of the port that the host connected to
	Address string    // of the host
	Since   time.Time // when it connected
	Queues  int       // I/O queues that are connected
}

// Errors of a Subsystem's methods; they come wrapped.
var (
	ErrExists  = errors.New("exists already")
	ErrUnknown = errors.New("no such namespace")
)

// Subsystem is what a host connects to: namespaces, and the hosts that may use them. All
// methods may be called from any goroutine.
type Subsystem struct {
	t         *Target
	cfg       SubsystemConfig // Hosts and AllowAnyHost are in admission
	discovery bool
	counters  counters

	table atomic.Pointer[map[uint32]*namespace] // replaced as a whole

	// Guarded by t.mu.
	closed       bool
	hosts        map[block.NQN]Host
	allowAny     bool
	associations map[uint16]*association // including dead ones whose commands are still in Devices
	nextID       uint16
	leaving      map[uint32]*namespace // removed, but perhaps not drained
}

func newSubsystem(t *Target, c SubsystemConfig) (*Subsystem, error) {
	if c.Model == "" {
		c.Model = "Weft"
	}
	if c.Firmware == "" {
		c.Firmware = "1"
	}
	if c.CntlidMin == 0 && c.CntlidMax == 0 {
		c.CntlidMin, c.CntlidMax = 1, maxCntlid
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	s := &Subsystem{t: t, cfg: c, associations: map[uint16]*association{}, nextID: c.CntlidMin, leaving: map[uint32]*namespace{}}
	s.table.Store(&map[uint32]*namespace{})
	hosts, err := hostMap(c.Hosts, c.AllowAnyHost)
	s.hosts, s.allowAny = hosts, c.AllowAnyHost
	return s, err
}

const maxCntlid = 65519 // higher ones have special meanings (Base, 3.1.1)

func (c SubsystemConfig) check() error {
	if _, err := block.ParseNQN(string(c.NQN)); err != nil {
		return err
	}
	for _, f := range []struct {
		name, text string
		max        int
	}{{"serial", c.Serial, 20}, {"model", c.Model, 40}, {"firmware", c.Firmware, 8}} {
		if len(f.text) > f.max || slices.ContainsFunc([]byte(f.text), func(b byte) bool { return b < 0x20 || b > 0x7e }) {
			return fmt.Errorf("%s %q: must be at most %d printable ASCII characters", f.name, f.text, f.max)
		}
	}
	if c.CntlidMin == 0 || c.CntlidMin > c.CntlidMax || c.CntlidMax > maxCntlid {
		return fmt.Errorf("controller ids %d to %d: must be within 1 to %d", c.CntlidMin, c.CntlidMax, maxCntlid)
	}
	return nil
}

func hostMap(hosts []Host, allowAny bool) (map[block.NQN]Host, error) {
	if allowAny && len(hosts) > 0 {
		return nil, errors.New("either hosts are named or any may connect")
	}
	m := map[block.NQN]Host{}
	for _, h := range hosts {
		if _, err := block.ParseNQN(string(h.NQN)); err != nil {
			return nil, fmt.Errorf("host: %w", err)
		}
		if h.HostKey.IsZero() && !h.ControllerKey.IsZero() {
			return nil, fmt.Errorf("host %s: a controller key without a host key", h.NQN)
		}
		m[h.NQN] = h
	}
	return m, nil
}

// NQN is the subsystem's name.
func (s *Subsystem) NQN() block.NQN { return s.cfg.NQN }

// admitsLocked reports whether a host may connect.
func (s *Subsystem) admitsLocked(n block.NQN) bool {
	_, ok := s.hosts[n]
	return ok || s.allowAny || s.discovery
}

// SetHosts replaces the hosts that may connect. It kills the controllers of hosts that no
// longer may, without waiting for them: see Close and RemoveNamespace. New keys apply from
// the host's next authentication.
func (s *Subsystem) SetHosts(hosts []Host, allowAny bool) error {
	m, err := hostMap(hosts, allowAny)
	if err != nil {
		return fmt.Errorf("set hosts of %s: %w", s.cfg.NQN, err)
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.hosts, s.allowAny = m, allowAny
	for _, a := range s.associations {
		if !s.admitsLocked(a.host.NQN) {
			a.kill(errors.New("the host may no longer connect"))
		}
	}
	s.t.discoveryChangedLocked()
	return nil
}

// namespace returns the namespace with an id, or nil.
func (s *Subsystem) namespace(nsid uint32) *namespace { return (*s.table.Load())[nsid] }

// namespaces lists the namespaces in order of their ids.
func (s *Subsystem) namespaces() []*namespace {
	return slices.SortedFunc(maps.Values(*s.table.Load()), func(a, b *namespace) int {
		if a.cfg.NSID < b.cfg.NSID {
			return -1
		}
		return 1
	})
}

// changeLocked replaces the table by a changed copy.
func (s *Subsystem) changeLocked(change func(map[uint32]*namespace)) {
	m := maps.Clone(*s.table.Load())
	change(m)
	s.table.Store(&m)
}

// AddNamespace adds a namespace and notifies hosts. The error is ErrExists if the NSID is
// taken, which includes a removed namespace with commands in its Device.
func (s *Subsystem) AddNamespace(c NamespaceConfig) error {
	n, err := newNamespace(c)
	if err != nil {
		return fmt.Errorf("add to %s: %w", s.cfg.NQN, err)
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	switch {
	case s.closed:
		return fmt.Errorf("add namespace %d to %s: %w", c.NSID, s.cfg.NQN, ErrClosed)
	case s.namespace(c.NSID) != nil || s.leaving[c.NSID] != nil:
		return fmt.Errorf("add namespace %d to %s: %w", c.NSID, s.cfg.NQN, ErrExists)
	case len(*s.table.Load()) >= maxNamespaces:
		return fmt.Errorf("add namespace %d to %s: it has %d already", c.NSID, s.cfg.NQN, maxNamespaces)
	}
	s.changeLocked(func(m map[uint32]*namespace) { m[c.NSID] = n })
	s.namespaceChangedLocked(c.NSID)
	return nil
}

// maxNamespaces is NN and MNAN of Identify.
const maxNamespaces = 1024

// RemoveNamespace removes a namespace and returns when no command that came through it is
// in its Device. It waits only for the Device, not for hosts. If ctx ends first, the
// namespace is removed but not drained: call again. The error is ErrUnknown if there is no
// such namespace.
func (s *Subsystem) RemoveNamespace(ctx context.Context, nsid uint32) error {
	n := s.withdraw(nsid)
	if n == nil {
		return fmt.Errorf("remove namespace %d of %s: %w", nsid, s.cfg.NQN, ErrUnknown)
	}
	if err := n.inflight.drain(ctx); err != nil {
		return fmt.Errorf("remove namespace %d of %s: commands are still in its device: %w", nsid, s.cfg.NQN, err)
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	if s.leaving[nsid] == n {
		delete(s.leaving, nsid)
	}
	return nil
}

// withdraw removes a namespace from the table, or returns one removed before.
func (s *Subsystem) withdraw(nsid uint32) *namespace {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	n := s.namespace(nsid)
	if n == nil {
		return s.leaving[nsid]
	}
	s.leaving[nsid] = n
	s.changeLocked(func(m map[uint32]*namespace) { delete(m, nsid) })
	n.gone.Store(true)
	s.namespaceChangedLocked(nsid)
	return n
}

// ResizeNamespace reads the Device's geometry again and notifies the hosts. It refuses a
// changed block size.
func (s *Subsystem) ResizeNamespace(nsid uint32) error {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	n := s.namespace(nsid)
	if n == nil {
		return fmt.Errorf("resize namespace %d of %s: %w", nsid, s.cfg.NQN, ErrUnknown)
	}
	if now, was := n.cfg.Device.Geometry().BlockSize, n.shape.Load().BlockSize; now != was {
		return fmt.Errorf("resize namespace %d of %s: blocks were %v and are %v", nsid, s.cfg.NQN, was, now)
	}
	if err := n.measure(); err != nil {
		return fmt.Errorf("resize of %s: %w", s.cfg.NQN, err)
	}
	s.namespaceChangedLocked(nsid)
	return nil
}

// SetANAGroup moves a namespace to another group and notifies hosts.
func (s *Subsystem) SetANAGroup(nsid, group uint32) error {
	if group == 0 || group > maxANAGroups {
		return fmt.Errorf("ANA group %d: must be 1 to %d", group, maxANAGroups)
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	n := s.namespace(nsid)
	if n == nil {
		return fmt.Errorf("set ANA group of namespace %d of %s: %w", nsid, s.cfg.NQN, ErrUnknown)
	}
	if n.group.Swap(group) != group {
		for _, a := range s.associations {
			a.notify(eventANA)
		}
		s.t.anaChanges.Add(1)
	}
	return nil
}

// Controllers lists the associations, including dead ones whose commands are still in a
// Device.
func (s *Subsystem) Controllers() []ControllerInfo {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	var all []ControllerInfo
	for _, a := range s.associations {
		all = append(all, a.info())
	}
	slices.SortFunc(all, func(a, b ControllerInfo) int { return int(a.ID) - int(b.ID) })
	return all
}

// Close removes the subsystem, kills its connections, and returns when every command that
// came through it has left its Devices. After that, no host's write can reach the medium.
// If ctx ends first, the error wraps ctx's: nobody can connect any more, but commands may
// be left; Close may be called again. The name stays taken until Close has succeeded.
func (s *Subsystem) Close(ctx context.Context) error {
	s.shut()
	if err := s.drain(ctx); err != nil {
		return fmt.Errorf("close subsystem %s: commands are still in its devices: %w", s.cfg.NQN, err)
	}
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	if s.t.subsystems[s.cfg.NQN] == s {
		delete(s.t.subsystems, s.cfg.NQN)
	}
	return nil
}

// shut refuses new hosts and kills the connected ones.
func (s *Subsystem) shut() {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.closed = true
	for p := range s.t.ports {
		delete(p.linked, s)
	}
	for _, a := range s.associations {
		a.kill(errors.New("the subsystem is closed"))
	}
	for _, n := range s.namespaces() {
		n.gone.Store(true)
	}
	s.t.discoveryChangedLocked()
}

// drain returns when all commands that are in a Device now have left it.
func (s *Subsystem) drain(ctx context.Context) error {
	s.t.mu.Lock()
	all := s.namespaces()
	all = slices.AppendSeq(all, maps.Values(s.leaving))
	s.t.mu.Unlock()
	for _, n := range all {
		if err := n.inflight.drain(ctx); err != nil {
			return fmt.Errorf("namespace %d: %w", n.cfg.NSID, err)
		}
	}
	return nil
}

// namespaceChangedLocked notifies the hosts.
func (s *Subsystem) namespaceChangedLocked(nsid uint32) {
	for _, a := range s.associations {
		a.namespaceChanged(nsid)
	}
}

// newIDLocked returns a free controller id, the longest unused first.
func (s *Subsystem) newIDLocked() (uint16, bool) {
	for range int(s.cfg.CntlidMax-s.cfg.CntlidMin) + 1 {
		id := s.nextID
		if s.nextID++; s.nextID > s.cfg.CntlidMax {
			s.nextID = s.cfg.CntlidMin
		}
		if s.associations[id] == nil {
			return id, true
		}
	}
	return 0, false
}

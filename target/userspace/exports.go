// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/nvmet/memfs"
)

// ReadOnly ends the path of a device whose namespace is read-only.
const ReadOnly = ".ro"

// Exports is a target in user space that serves the content of nvmet's configfs tree. A host has
// one controller of a subsystem at a time, so a write delayed on an old connection cannot land
// after its retry on a new one, unless SetPaths allows it more.
type Exports struct {
	*memfs.FS
	target  *controller.Target
	server  *server
	refused *refusals
}

// NewExports serves the devices that device finds by path. listen opens a portal; nil means TCP.
func NewExports(log *slog.Logger, listen func(block.Portal) (net.Listener, error), device func(path string) (block.Device, error)) (*Exports, error) {
	refused := &refusals{}
	target, err := controller.New(controller.Config{Log: log, Unproven: refused.add})
	if err != nil {
		return nil, err
	}
	if listen == nil {
		listen = Listen
	}
	s := &server{
		target: target, log: log, listen: listen, device: device,
		subsystems: map[string]*controller.Subsystem{}, ports: map[uint16]*openPort{}, spaces: map[spaceKey]*space{},
		inherited: map[block.Portal]*inherited{}, settled: make(chan struct{}),
	}
	return &Exports{FS: memfs.New(s), target: target, server: s, refused: refused}, nil
}

// refusals counts the connections whose hosts did not prove their identity.
type refusals struct {
	mu    sync.Mutex
	count uint64
	last  controller.Unproven
}

func (r *refusals) add(u controller.Unproven) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count, r.last = r.count+1, u
}

// Refusals tells of the connections whose hosts had to prove their identity and did not, since the
// start; nil if there was none.
func (e *Exports) Refusals() *pb.Refusals {
	e.refused.mu.Lock()
	defer e.refused.mu.Unlock()
	last := e.refused.last
	if e.refused.count == 0 {
		return nil
	}
	return &pb.Refusals{
		Count: e.refused.count, Nqn: string(last.Subsystem), HostNqn: string(last.Host), Address: last.Address, Reason: last.Err.Error(),
	}
}

// SetPaths says how many controllers a host may have of subsystems that are added from now on;
// those that it does not name allow one. Configfs has no attribute for it: the kernel's target
// allows any number.
func (e *Exports) SetPaths(paths map[block.NQN]int) {
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	e.server.paths = paths
}

// SetReplace says that the subsystems that are added from now on speak for another target, and how a
// subsystem's controllers there are ended: see controller.SubsystemConfig.Replace.
func (e *Exports) SetReplace(replace func(ctx context.Context, n block.NQN, by block.ServedBy) error) {
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	e.server.replace = replace
}

// Close ends all exports, and returns when no command is left in any device.
func (e *Exports) Close(ctx context.Context) error {
	e.server.mu.Lock()
	e.server.forsakeLocked()
	e.server.mu.Unlock()
	return e.target.Close(ctx)
}

// Listen listens at a portal of TCP.
func Listen(p block.Portal) (net.Listener, error) {
	return net.Listen("tcp", p.HostPort())
}

// server implements memfs.Server: it does with the target what the kernel would do.
type server struct {
	target *controller.Target
	log    *slog.Logger
	listen func(block.Portal) (net.Listener, error)
	device func(path string) (block.Device, error)

	mu         sync.Mutex
	subsystems map[string]*controller.Subsystem
	ports      map[uint16]*openPort
	spaces     map[spaceKey]*space
	paths      map[block.NQN]int
	replace    func(ctx context.Context, n block.NQN, by block.ServedBy) error // nil: no other target serves the same
	inherited  map[block.Portal]*inherited                                     // not used yet
	passed     []Controller                                                    // not served yet
	settled    chan struct{}                                                   // closed when they accept connections
}

type spaceKey struct {
	nqn  string
	nsid uint32
}

// space is a namespace as its hosts know it.
type space struct {
	device block.Device
	size   block.Size
}

// openPort listens while subsystems are linked to it.
type openPort struct {
	port     *controller.Port
	portal   block.Portal
	listener net.Listener
	links    map[string]bool
}

func (s *server) AddSubsystem(c memfs.Subsystem) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var replace func(context.Context, block.ServedBy) error
	if by := s.replace; by != nil {
		replace = func(ctx context.Context, part block.ServedBy) error { return by(ctx, c.NQN, part) }
	}
	added, err := s.target.AddSubsystem(controller.SubsystemConfig{
		Replace: replace,
		NQN:     c.NQN, Serial: c.Serial, Model: c.Model, CntlidMin: c.CntlidMin, CntlidMax: c.CntlidMax, PerHost: max(1, s.paths[c.NQN]),
		// Hosts with an agent know their subsystems, and must not connect to legs by another way.
		// Others ask at the port for discovery.
		Unlisted: true,
	})
	if err != nil {
		return err
	}
	s.subsystems[string(c.NQN)] = added
	return nil
}

func (s *server) subsystem(nqn string) (*controller.Subsystem, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.subsystems[nqn]; found != nil {
		return found, nil
	}
	return nil, unix.ENOENT
}

func (s *server) SetHosts(nqn string, hosts []memfs.Host, anyHost bool) error {
	if unfenced && len(hosts) == 0 {
		return nil
	}
	subsystem, err := s.subsystem(nqn)
	if err != nil {
		return err
	}
	var allowed []controller.Host
	for _, h := range hosts {
		allowed = append(allowed, controller.Host{
			NQN: h.NQN, HostKey: h.HostKey, ControllerKey: h.ControllerKey, Hashes: proofHashes, Groups: proofGroups,
		})
	}
	return subsystem.SetHosts(allowed, anyHost)
}

// Weft's keys are random and as long as the hash, so nobody finds one by trying, and no key of a
// session is agreed on: a Diffie-Hellman group would only make connecting slower. Linux offers the
// null group always, and prefers it as a target.
var (
	proofHashes = []dhchap.Hash{dhchap.SHA256}
	proofGroups = []dhchap.Group{dhchap.Null}
)

func (s *server) AddNamespace(nqn string, ns memfs.Namespace) (retErr error) {
	subsystem, err := s.subsystem(nqn)
	if err != nil {
		return err
	}
	device, err := s.device(ns.Device)
	if err != nil {
		return fmt.Errorf("%s: %w", ns.Device, err)
	}
	readOnly := strings.HasSuffix(ns.Device, ReadOnly)
	if e, ok := device.(writer); ok && !readOnly {
		e.opened()
		defer func() {
			if retErr != nil {
				e.closed()
			}
		}()
	}
	size := device.Geometry().Size // before the namespace reads it: at worst hosts are told once too often
	err = subsystem.AddNamespace(controller.NamespaceConfig{
		NSID: ns.NSID, UUID: ns.UUID, NGUID: ns.NGUID, Device: device, ReadOnly: readOnly,
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spaces[spaceKey{nqn, ns.NSID}] = &space{device, size}
	return nil
}

// ResizeNamespace tells the hosts if the namespace's device has a new size.
func (s *server) ResizeNamespace(nqn string, nsid uint32) error {
	subsystem, err := s.subsystem(nqn)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.spaces[spaceKey{nqn, nsid}]
	if known == nil {
		return unix.ENOENT
	}
	size := known.device.Geometry().Size
	if size == known.size {
		return nil
	}
	if err := subsystem.ResizeNamespace(nsid); err != nil {
		return err
	}
	known.size = size
	return nil
}

// RemoveNamespace, like RemoveSubsystem, waits as long as the device takes: a drain that is given
// up would be no fence.
func (s *server) RemoveNamespace(nqn string, nsid uint32) error {
	if unfenced {
		return nil
	}
	subsystem, err := s.subsystem(nqn)
	if err != nil {
		return err
	}
	if err := subsystem.RemoveNamespace(context.Background(), nsid); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removedLocked(spaceKey{nqn, nsid})
	return nil
}

// removedLocked forgets a namespace that no host can write to any more.
func (s *server) removedLocked(k spaceKey) {
	if known := s.spaces[k]; known != nil {
		if e, ok := known.device.(writer); ok {
			e.closed()
		}
	}
	delete(s.spaces, k)
}

func (s *server) RemoveSubsystem(nqn string) error {
	if unfenced {
		return nil
	}
	subsystem, err := s.subsystem(nqn)
	if err != nil {
		return err
	}
	if err := subsystem.Close(context.Background()); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.subsystems, nqn)
	for k := range s.spaces {
		if k.nqn == nqn {
			s.removedLocked(k)
		}
	}
	return nil
}

// Link opens the port for its first subsystem, and links that before the first host is admitted.
func (s *server) Link(p memfs.Port, nqn string) error {
	subsystem, err := s.subsystem(nqn)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	open := s.ports[p.ID]
	if open == nil {
		return s.openPort(p, nqn, subsystem)
	}
	if err := open.port.Link(subsystem); err != nil {
		return err
	}
	open.links[nqn] = true
	return nil
}

func (s *server) openPort(p memfs.Port, nqn string, subsystem *controller.Subsystem) error {
	if p.Portal.Transport != block.TCP {
		return fmt.Errorf("portal %s: only TCP is served in user space", p.Portal)
	}
	l, err := s.listenLocked(p.Portal)
	if err != nil {
		return err
	}
	port, err := s.target.Serve(l, controller.PortConfig{ID: p.ID, Link: []*controller.Subsystem{subsystem}})
	if err != nil {
		return errors.Join(err, l.Close())
	}
	s.ports[p.ID] = &openPort{port, p.Portal, l, map[string]bool{nqn: true}}
	return nil
}

func (s *server) Unlink(id uint16, nqn string) error {
	if unfenced {
		return nil
	}
	open, err := s.unlink(id, nqn)
	if open == nil {
		return err
	}
	return open.Close()
}

// unlink returns the port if nothing is linked to it any more. It is closed without the lock: that waits for those who
// are connecting, and they for what a drive has not answered.
func (s *server) unlink(id uint16, nqn string) (unused *controller.Port, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	open := s.ports[id]
	if open == nil || !open.links[nqn] {
		return nil, unix.ENOENT
	}
	if subsystem := s.subsystems[nqn]; subsystem != nil {
		open.port.Unlink(subsystem)
	}
	delete(open.links, nqn)
	if len(open.links) > 0 {
		return nil, nil
	}
	delete(s.ports, id)
	return open.port, nil
}

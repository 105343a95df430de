// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/discovery"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
)

// A process of the agent can hand over to its next one, which may be of another version. Hosts keep
// their legs, and where both processes know how, their connections:
//
//	this process                                     the next one
//	---------------------------------------------------------------------------------
//	                       Draft  ───────────────▶  Prepare
//	                                                 waits, ready for everything else
//	listens to the manager no more, gives no order
//	accepts no connections: the kernel queues them
//	reads no commands: they stay in the sockets
//	answers those that it has read; I/O leaves the drives
//	releases drives and locks
//	                       Estate  ───────────────▶  Inherit
//	                                                 locks, opens the drives
//	                                                 exports what was wanted last
//	                                                 reads commands, accepts connections
//	                                                 talks to the manager
//
// The next process holds the locks of drives and node before it does anything, and these are released
// after the last write. So never do two serve one drive, and no write of the old one comes late. What
// is wanted is taken when nothing acts on it, nor reports, any more: the next process cannot fall back
// behind something that the manager was told, such as a fence. What comes later is recorded on labels
// that it reads, or reaches it as soon as it talks to the manager. Whatever ends early, the rest is that
// of an ordinary start.

// ErrHandOver is the cause with which the context of Run ends if the next process takes over.
var ErrHandOver = errors.New("the next process takes over")

const (
	// handOverFor bounds each wait before the next process may begin: for orders that are being carried
	// out, and for I/O. Drives that hang for longer stay locked until this process has ended.
	handOverFor = time.Second
	// takeOverFor is the longest that hosts wait for all of the exports: less than they wait for a leg.
	takeOverFor = time.Second
	// retakeEvery is how often a drive that the previous process has not released yet is tried.
	retakeEvery = 20 * time.Millisecond
)

// Estate is what an agent leaves to the next process of its node. It has keys of exports.
type Estate struct {
	told        *pb.TargetHandover
	listeners   userspace.Sockets
	controllers []userspace.Controller
}

// handsOver reports whether a context has ended because the next process takes over.
func handsOver(ctx context.Context) bool { return errors.Is(context.Cause(ctx), ErrHandOver) }

// leave notes what the next process takes over, when nothing acts for the manager any more, and stops
// accepting connections.
func (a *Agent) leave(drives *openDrives, found *discovery.Controller) {
	e := Estate{told: &pb.TargetHandover{}}
	if wanted := a.currentWanted(); wanted != nil {
		e.told.Wanted = proto.CloneOf(wanted)
		e.told.Wanted.MayStop = false
	}
	e.told.Devices, _, _ = drives.list()
	if a.kernel.keep != nil {
		if err := a.kernel.keep(&e); err != nil {
			a.log.Warn("not all portals stay open for the next process: hosts may be refused meanwhile", "err", err)
		}
	}
	if e.listeners == nil {
		e.listeners = userspace.Sockets{}
	}
	maps.Copy(e.listeners, found.Leave())
	a.mu.Lock()
	defer a.mu.Unlock()
	a.estate = e
}

// Estate returns what is left to the next process, after Run has ended with ErrHandOver. The caller
// closes it.
func (a *Agent) Estate() Estate {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.estate
	if e.told == nil {
		e.told = &pb.TargetHandover{}
	}
	if a.kernel.losses != nil { // the last of them may have come when the drives were released
		e.told.Losses = map[string]uint32{}
		for id, incarnation := range a.kernel.losses() {
			e.told.Losses[id.String()] = incarnation
		}
	}
	return e
}

// Inherit takes over what the previous process has left, before Run.
func (a *Agent) Inherit(e Estate) error {
	a.asked, e.listeners = a.config.discovery(nil, nil).Split(e.listeners)
	if a.kernel.adopt == nil {
		_ = e.Close() // nobody would serve there
		e.listeners, e.controllers = nil, nil
	} else if err := a.kernel.adopt(e); err != nil {
		return errors.Join(fmt.Errorf("take over from the previous process: %w", err), e.Close(), Estate{listeners: a.takeDiscovery()}.Close())
	}
	a.estate, a.wanted, a.letIn = Estate{told: e.told}, e.told.GetWanted(), a.kernel.settle
	a.settled = make(chan struct{})
	if a.wanted == nil { // the manager has not spoken yet
		a.settle()
	}
	return nil
}

// discovery is where the agent answers discovery.
func (c Config) discovery(inherited userspace.Sockets, log *slog.Logger) discovery.Config {
	return discovery.Config{Port: c.Discovery, Portals: c.Portals, Listen: c.Listen, Inherited: inherited, Log: log}
}

// takeDiscovery returns the sockets at which the previous process answered discovery, once.
func (a *Agent) takeDiscovery() userspace.Sockets {
	defer func() { a.asked = nil }()
	return a.asked
}

// held are the paths of the drives that the previous process had open.
func (e Estate) held() (paths []string) {
	for _, d := range e.told.GetDevices() {
		if d.GetDriveId() != "" && d.GetUnread() == "" {
			paths = append(paths, d.GetPath())
		}
	}
	return paths
}

// losses are the incarnations that the previous process could note nowhere.
func (e Estate) losses() (map[block.DriveID]uint32, error) {
	all := map[block.DriveID]uint32{}
	for text, incarnation := range e.told.GetLosses() {
		id, err := block.ParseDriveID(text)
		if err != nil {
			return nil, err
		}
		all[id] = incarnation
	}
	return all, nil
}

// inherited lists the devices that the previous process knew.
func (a *Agent) inherited() []*pb.Device {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.estate.told.GetDevices()
}

// takeDrives opens the drives that the previous process had, without looking at all devices first. Those
// that it has not released yet are tried again.
func (a *Agent) takeDrives(ctx context.Context, drives *openDrives) {
	devices := a.inherited()
	if len(devices) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, takeOverFor)
	defer cancel()
	for {
		err := drives.use(ctx, devices)
		poke(a.wake)
		if err == nil || !sleep(ctx, retakeEvery) {
			return
		}
	}
}

// awaitExports waits until the exports of the previous process are there again, and reports whether they
// are late: it waits for takeOverFor at most.
func (a *Agent) awaitExports(ctx context.Context) (late bool) {
	timer := time.NewTimer(takeOverFor)
	defer timer.Stop()
	select {
	case <-a.settled:
		return false
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// awaitSettled waits until the exports of the previous process are there again, and lets hosts in.
func (a *Agent) awaitSettled(ctx context.Context) {
	began := time.Now()
	if a.awaitExports(ctx) {
		a.settle()
		poke(a.wake) // to report
	}
	if a.letIn != nil && ctx.Err() == nil {
		a.log.Info("took over from the previous process", "after", time.Since(began).Round(time.Millisecond))
	}
}

// settle lets hosts in, and then the manager.
func (a *Agent) settle() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.isSettled() {
		return
	}
	if a.letIn != nil {
		a.letIn()
	}
	close(a.settled)
}

func (a *Agent) isSettled() bool {
	select {
	case <-a.settled:
		return true
	default:
		return false
	}
}

// settleIf settles if all that is wanted is exported.
func (a *Agent) settleIf(p plan) {
	if !slices.ContainsFunc(p.problems, func(x problem) bool { return x.doing == exporting }) {
		a.settle()
	}
}

// Pack returns an estate as it is sent to another process: a message, and the sockets that go with it,
// which the caller closes. Earlier versions do not know of connections.
func (e Estate) Pack(connections bool) (message []byte, sockets []*os.File, retErr error) {
	defer func() {
		if retErr != nil {
			CloseAll(sockets)
		}
	}()
	told := proto.CloneOf(e.told)
	portals := slices.SortedFunc(maps.Keys(e.listeners), func(a, b block.Portal) int { return cmp.Compare(a.String(), b.String()) })
	for _, portal := range portals {
		f, err := fileOf(e.listeners[portal])
		if err != nil {
			return nil, sockets, fmt.Errorf("portal %s: %w", portal, err)
		}
		sockets, told.Portals = append(sockets, f), append(told.Portals, portalMessage(portal))
	}
	for _, c := range e.controllers {
		if !connections {
			break
		}
		for _, q := range c.Queues {
			f, err := fileOf(q.Conn)
			if err != nil {
				return nil, sockets, fmt.Errorf("connection of %s: %w", c.Host.NQN, err)
			}
			sockets = append(sockets, f)
		}
		told.Controllers = append(told.Controllers, c.Message())
	}
	message, err := proto.Marshal(told)
	return message, sockets, err
}

// fileOf duplicates the descriptor of a socket.
func fileOf(socket any) (*os.File, error) {
	s, ok := socket.(interface{ File() (*os.File, error) })
	if !ok {
		return nil, fmt.Errorf("%T: %w", socket, errors.ErrUnsupported)
	}
	return s.File()
}

// CloseAll closes files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// Unpack is the inverse of Pack. It closes the sockets that it is given.
func Unpack(message []byte, sockets []*os.File) (e Estate, retErr error) {
	defer CloseAll(sockets)
	e = Estate{told: &pb.TargetHandover{}, listeners: userspace.Sockets{}}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, e.Close())
		}
	}()
	if err := proto.Unmarshal(message, e.told); err != nil {
		return e, err
	}
	portals, controllers := e.told.GetPortals(), e.told.GetControllers()
	e.told.Portals, e.told.Controllers = nil, nil
	want := len(portals)
	for _, c := range controllers {
		want += len(c.GetQueues())
	}
	if want != len(sockets) {
		return e, fmt.Errorf("%d sockets came for %d portals and %d connections", len(sockets), len(portals), want-len(portals))
	}
	for i, p := range portals {
		l, err := net.FileListener(sockets[i])
		if err != nil {
			return e, err
		}
		e.listeners[portalOf(p)] = l
	}
	rest := sockets[len(portals):]
	for _, m := range controllers {
		c, err := userspace.ControllerOf(m, portalOf(m.GetPortal()), rest[:len(m.GetQueues())])
		if err != nil {
			return e, err
		}
		e.controllers, rest = append(e.controllers, c), rest[len(m.GetQueues()):]
	}
	return e, nil
}

func portalOf(p *pb.Portal) block.Portal {
	return block.Portal{Transport: block.TCP, Address: p.GetAddress(), Port: uint16(p.GetPort()), Rail: p.GetRail()}
}

// Close closes the sockets.
func (e Estate) Close() error {
	var errs []error
	for _, l := range e.listeners {
		errs = append(errs, l.Close())
	}
	for _, c := range e.controllers {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// ---- before: what the next process prepares ----

// prepareFor is how long the next process waits for drives before it is ready. Those that do not answer
// are left for later.
const prepareFor = 5 * time.Second

// Draft returns what the estate would be now, for the next process to prepare for. It has keys of exports.
func (a *Agent) Draft() ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return proto.Marshal(&pb.TargetHandover{Wanted: a.wanted, Devices: a.report.GetDevices()})
}

// Serves reports whether hosts wait for the process while it hands over what a draft names: in user space all do,
// and beside the kernel those whose exports are not the kernel's.
func (a *Agent) Serves(draft []byte) bool {
	told := &pb.TargetHandover{}
	if err := proto.Unmarshal(draft, told); err != nil || a.kernel.process == nil {
		return true
	}
	return slices.ContainsFunc(told.GetWanted().GetExports(), (*pb.WantedExport).GetProcess)
}

// Prepare reads what the draft of an estate names, while the previous process serves it, and plans what
// it would do. It changes nothing, and keeps nothing: Run does all of that again. It fails if a drive's
// label is of a later version: the previous process goes on then, and no host has noticed. A program is
// also slow at what it does for the first time, and hosts need not wait for that. Without a draft there is
// nothing to prepare.
func (a *Agent) Prepare(ctx context.Context, draft []byte) error {
	told := &pb.TargetHandover{}
	if err := proto.Unmarshal(draft, told); err != nil {
		return fmt.Errorf("prepare to take over: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, prepareFor)
	defer cancel()
	drives, err := a.readLabels(ctx, Estate{told: told}.held())
	if err != nil {
		return fmt.Errorf("prepare to take over: %w", err)
	}
	s := seen{devices: told.GetDevices(), drives: drives, mapped: map[block.LegID]dm.State{}, exports: &nvmet.Config{}}
	makePlan(s, parseWanted(told.GetWanted()), a.config.legDir(), a.config.Portals)
	return nil
}

// readLabels reads the labels of drives until ctx ends. Those that cannot be read are left out, unless
// that is because this program is too old.
func (a *Agent) readLabels(ctx context.Context, paths []string) (map[block.DriveID]driveSeen, error) {
	type reading struct {
		path  string
		label *drive.Label
		err   error
	}
	read := make(chan reading, len(paths))
	for _, path := range paths {
		go func() { // of its own: a drive may hang
			label, err := labelAt(filepath.Join(a.config.Root, path))
			read <- reading{path, label, err}
		}()
	}
	drives := map[block.DriveID]driveSeen{}
	for range paths {
		var r reading
		select {
		case <-ctx.Done():
			return drives, nil
		case r = <-read:
		}
		switch {
		case errors.Is(r.err, drive.ErrNewer):
			return nil, fmt.Errorf("%s: %w", r.path, r.err)
		case r.err != nil:
			a.log.Warn("cannot read a drive of the previous process", "device", r.path, "err", r.err)
		default:
			drives[r.label.Drive] = driveSeen{device: r.path, label: r.label}
		}
	}
	return drives, nil
}

func labelAt(path string) (*drive.Label, error) {
	m, err := drive.OpenDevice(path, drive.ReadOnly)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return drive.ReadLabel(m, m.Size())
}

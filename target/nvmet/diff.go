// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// Op is the kind of a file operation.
type Op string

// The operations that configfs knows.
const (
	Mkdir   Op = "mkdir"
	Rmdir   Op = "rmdir"
	Write   Op = "write"
	Symlink Op = "symlink"
	Unlink  Op = "unlink"
)

// Step is one file operation below the root of nvmet.
type Step struct {
	Op   Op
	Path string // relative to the root
	Arg  string // Write: the value; Symlink: the link's target, relative to the root
	// Secret is the value of a Write that nobody may see, in place of Arg.
	Secret block.Secret

	Object string // the object that the step is part of: its later steps depend on this one
	Needs  string // another object that must be complete first
	Alone  bool   // no later step of its object depends on this one
}

func (s Step) String() string {
	switch s.Op {
	case Write:
		if !s.Secret.IsZero() {
			return fmt.Sprintf("write a key to %s", s.Path)
		}
		return fmt.Sprintf("write %q to %s", s.Arg, s.Path)
	case Symlink:
		return fmt.Sprintf("symlink %s to %s", s.Path, s.Arg)
	}
	return fmt.Sprintf("%s %s", s.Op, s.Path)
}

// Conflict is a wanted part that cannot be made because of a foreign object.
type Conflict struct {
	Object string
	Cause  string
}

// Conflicts returns the parts of want that Diff leaves out as long as foreign objects prevent them.
func Conflicts(got, want Config) []Conflict {
	var out []Conflict
	for _, p := range want.Ports {
		if id, ok := got.foreignListener(p.Portal); ok {
			out = append(out, Conflict{"portal " + p.Portal.String(), fmt.Sprintf("nvmet port %d, not made by Weft, listens there", id)})
		}
	}
	exporters := got.devices()
	for _, s := range want.Subsystems {
		for _, ns := range s.Namespaces {
			for _, other := range exporters[ns.Device] {
				if !other.Ours() {
					out = append(out, Conflict{"export " + string(s.NQN), fmt.Sprintf("device %s is exported by %s, not made by Weft", ns.Device, other)})
				}
			}
		}
	}
	return out
}

// Diff returns the steps from got to want, as far as they can be known from got: a step that must
// wait for another one's effect appears in a later Diff. It touches no foreign object. want must
// pass Check.
func Diff(got, want Config) []Step {
	d := differ{got: got.sorted(), want: want.sorted()}
	d.removeSubsystems()
	d.removePorts()
	for _, s := range d.want.Subsystems {
		d.subsystem(s)
	}
	for _, p := range d.want.Ports {
		d.port(p)
	}
	return d.steps
}

type differ struct {
	got, want Config
	steps     []Step
	taken     []uint16                // port ids given out in this Diff
	deferred  map[block.NQN]bool      // wanted subsystems that are not complete after these steps
	hosts     map[block.NQN]hostState // what these steps do to host directories
	keyed     map[block.NQN]bool      // hosts whose keys were looked at
}

type hostState int

const (
	hostMade hostState = iota + 1
	hostRemoved
)

func (d *differ) add(object string, op Op, path, arg string) {
	d.steps = append(d.steps, Step{Op: op, Path: path, Arg: arg, Object: object})
}

func (d *differ) removeSubsystems() {
	d.deferred = map[block.NQN]bool{}
	d.hosts, d.keyed = map[block.NQN]hostState{}, map[block.NQN]bool{}
	var doomed []Subsystem
	for _, have := range d.got.Subsystems {
		want, wanted := d.want.Subsystem(have.NQN)
		if !have.NQN.Ours() || wanted && !have.mustBeRemade(want) {
			continue
		}
		d.deferred[have.NQN] = true
		doomed = append(doomed, have)
	}
	// All are cut off before the first is drained, since a drain can take its time.
	for _, s := range doomed {
		d.cutOff(s)
	}
	for _, s := range doomed {
		d.drain(s)
	}
}

// mustBeRemade reports whether s differs from want in a way that cannot be changed while hosts may
// know of s. Attributes are only written right after the mkdir: nvmet refuses them once the
// subsystem has been discovered (EINVAL). A host that is wrongly allowed may have controllers,
// which only removing the subsystem ends.
func (s Subsystem) mustBeRemade(want Subsystem) bool {
	if s.Serial != want.Serial || s.Model != want.Model || s.AllowAnyHost ||
		s.CntlidMin != want.CntlidMin || s.CntlidMax != want.CntlidMax {
		return true
	}
	return slices.ContainsFunc(s.AllowedHosts, func(l Link) bool { return !slices.Contains(want.AllowedHosts, l) })
}

// cutOff closes all ways into a subsystem: first no host may come back, then the connected ones are
// disconnected.
func (d *differ) cutOff(s Subsystem) {
	object := subsystemPath(s.NQN)
	for _, l := range s.AllowedHosts {
		d.add(object, Unlink, path.Join(object, "allowed_hosts", l.Name), "")
	}
	for _, p := range d.got.Ports { // foreign ports too: the subsystem is ours
		for _, l := range p.Subsystems {
			if l.To == s.NQN {
				d.add(object, Unlink, path.Join(portPath(p.ID), "subsystems", l.Name), "")
			}
		}
	}
}

// drain waits for all I/O that came through s, then removes s. The directory goes last: as long as
// it exists, the work is not done.
func (d *differ) drain(s Subsystem) {
	object := subsystemPath(s.NQN)
	for _, ns := range s.Namespaces {
		if ns.Enabled {
			d.add(object, Write, path.Join(namespacePath(s.NQN, ns), "enable"), "0")
		}
	}
	for _, ns := range s.Namespaces {
		d.add(object, Rmdir, namespacePath(s.NQN, ns), "")
	}
	for _, h := range d.got.Hosts {
		if d.leftOver(h, s) && d.hosts[h] == 0 {
			d.hosts[h] = hostRemoved
			d.add(object, Rmdir, hostPath(h), "")
		}
	}
	d.add(object, Rmdir, object, "")
}

// leftOver reports whether the host h was made for the doomed subsystem s and is no longer used. If
// its link is already gone (after an interruption), h is recognized by its short form in the name
// of s; foreign hosts are left alone.
func (d *differ) leftOver(h block.NQN, s Subsystem) bool {
	linked := slices.ContainsFunc(s.AllowedHosts, func(l Link) bool { return l.To == h })
	_, _, short, _, err := block.ParseSubsystemNQN(s.NQN)
	named := err == nil && (strings.HasPrefix(string(h), "nqn.2014-08.org.nvmexpress:uuid:"+short) || h == block.ProvenHost(s.NQN).NQN)
	if !linked && !named {
		return false
	}
	for _, other := range d.got.Subsystems {
		if other.allows(h) && !d.deferred[other.NQN] {
			return false
		}
		// The last of several doomed subsystems removes the host.
		if other.allows(h) && other.NQN > s.NQN {
			return false
		}
	}
	return !slices.ContainsFunc(d.want.Subsystems, func(w Subsystem) bool { return w.allows(h) && !d.deferred[w.NQN] })
}

func (s Subsystem) allows(h block.NQN) bool {
	return slices.ContainsFunc(s.AllowedHosts, func(l Link) bool { return l.To == h })
}

// removePorts removes our ports and links that are not wanted. A port to which others have linked
// their subsystems is left to them.
func (d *differ) removePorts() {
	for _, have := range d.got.Ports {
		if !have.Ours() {
			continue
		}
		want, wanted := d.wantedAt(have)
		object := portPath(have.ID)
		foreign := false
		for _, l := range have.Subsystems {
			if !l.To.Ours() {
				foreign = true
				continue
			}
			if d.deferred[l.To] || wanted && want.links(l.To) {
				continue // removed already, or wanted
			}
			d.add(object, Unlink, path.Join(object, "subsystems", l.Name), "")
		}
		if !wanted && !foreign {
			d.add(object, Rmdir, object, "")
		}
	}
}

// wantedAt finds the wanted port at the place of have; if several of ours are there, only the first
// one counts.
func (d *differ) wantedAt(have Port) (Port, bool) {
	for _, want := range d.want.Ports {
		if p, ok := d.portFor(want); ok && p.ID == have.ID {
			return want, true
		}
	}
	return Port{}, false
}

func (d *differ) portFor(want Port) (Port, bool) {
	for _, p := range d.got.Ports {
		if p.Ours() && listens(p.Portal) == listens(want.Portal) {
			return p, true
		}
	}
	return Port{}, false
}

func (d *differ) subsystem(want Subsystem) {
	if d.deferred[want.NQN] {
		return // its predecessor is being removed
	}
	object := subsystemPath(want.NQN)
	have, ok := d.got.Subsystem(want.NQN)
	if !ok {
		// The subsystem comes before its host, so that a host's directory never exists without
		// something that tells its owner.
		d.add(object, Mkdir, object, "")
		d.add(object, Write, path.Join(object, "attr_serial"), want.Serial)
		d.add(object, Write, path.Join(object, "attr_model"), want.Model)
		if want.CntlidMin != DefaultCntlidMin || want.CntlidMax != DefaultCntlidMax {
			d.cntlid(object, want)
		}
	}
	for _, ns := range have.Namespaces {
		if !slices.ContainsFunc(want.Namespaces, ns.same) {
			d.removeNamespace(want.NQN, ns)
		}
	}
	for _, ns := range want.Namespaces {
		d.namespace(have, want.NQN, ns)
	}
	for _, l := range want.AllowedHosts {
		d.allow(have, want.NQN, l)
	}
}

// cntlid writes the range in an order that keeps min below max at every step.
func (d *differ) cntlid(object string, want Subsystem) {
	d.add(object, Write, path.Join(object, "attr_cntlid_max"), strconv.Itoa(int(want.CntlidMax)))
	d.add(object, Write, path.Join(object, "attr_cntlid_min"), strconv.Itoa(int(want.CntlidMin)))
}

// same reports whether a and b have the same identity; a may still be disabled.
func (a Namespace) same(b Namespace) bool {
	a.Enabled = b.Enabled
	return a == b
}

func (d *differ) removeNamespace(n block.NQN, ns Namespace) {
	object, dir := subsystemPath(n), namespacePath(n, ns)
	if ns.Enabled {
		d.add(object, Write, path.Join(dir, "enable"), "0")
	}
	d.add(object, Rmdir, dir, "")
}

func (d *differ) namespace(have Subsystem, n block.NQN, want Namespace) {
	for _, ns := range have.Namespaces {
		if ns.same(want) {
			if !ns.Enabled {
				d.add(subsystemPath(n), Write, path.Join(namespacePath(n, want), "enable"), "1")
			}
			return
		}
	}
	if d.inUse(have, n, want) {
		d.deferred[n] = true
		return
	}
	object, dir := subsystemPath(n), namespacePath(n, want)
	d.add(object, Mkdir, dir, "")
	d.add(object, Write, path.Join(dir, "device_path"), want.Device)
	d.add(object, Write, path.Join(dir, "device_uuid"), want.UUID.String())
	d.add(object, Write, path.Join(dir, "device_nguid"), want.NGUID.String())
	d.add(object, Write, path.Join(dir, "enable"), "1")
}

// inUse reports whether the number or the device of want is in use, even if only until this Diff's
// steps are done: otherwise nvmet would export one device twice, even with no host in common.
func (d *differ) inUse(have Subsystem, of block.NQN, want Namespace) bool {
	if slices.ContainsFunc(have.Namespaces, func(ns Namespace) bool { return ns.NSID == want.NSID }) {
		return true
	}
	return slices.ContainsFunc(d.got.devices()[want.Device], func(n block.NQN) bool { return !Shares(n, of) })
}

func (d *differ) allow(have Subsystem, n block.NQN, l Link) {
	linked := slices.Contains(have.AllowedHosts, l)
	if !linked && !slices.Contains(d.got.Hosts, l.To) && d.hosts[l.To] == 0 {
		d.hosts[l.To] = hostMade
		d.add(hostPath(l.To), Mkdir, hostPath(l.To), "")
	}
	d.keys(l.To)
	if linked {
		return
	}
	object := subsystemPath(n)
	d.steps = append(d.steps, Step{
		Op: Symlink, Path: path.Join(object, "allowed_hosts", l.Name), Arg: hostPath(l.To),
		Object: object, Needs: hostPath(l.To),
	})
}

// keys gives a host its keys. The link to the host is made after them: without a key, nvmet demands
// no proof.
func (d *differ) keys(h block.NQN) {
	want, ok := d.want.Keys[h]
	if !ok || d.keyed[h] {
		return
	}
	d.keyed[h] = true
	have := d.got.Keys[h]
	write := func(file string, have, want block.Secret) {
		if have != want {
			d.steps = append(d.steps, Step{Op: Write, Path: path.Join(hostPath(h), file), Secret: want, Object: hostPath(h)})
		}
	}
	write("dhchap_ctrl_key", have.Controller, want.Controller)
	write("dhchap_key", have.Host, want.Host)
}

func (d *differ) port(want Port) {
	if _, ok := d.got.foreignListener(want.Portal); ok {
		return
	}
	have, ok := d.portFor(want)
	if !ok {
		id, free := d.freePort(want.ID)
		if !free {
			return
		}
		have = Port{ID: id}
		d.makePort(id, want.Portal)
	}
	// The link comes last: a host that connects before a subsystem is complete is refused for good,
	// and from 6.10 on gives up its controller.
	for _, l := range want.Subsystems {
		if d.deferred[l.To] && !have.links(l.To) || slices.Contains(have.Subsystems, l) {
			continue
		}
		d.steps = append(d.steps, Step{
			Op: Symlink, Path: path.Join(portPath(have.ID), "subsystems", l.Name), Arg: subsystemPath(l.To),
			Object: subsystemPath(l.To), Needs: portPath(have.ID), Alone: true, // other portals may do if this one does not
		})
	}
}

func (d *differ) makePort(id uint16, p block.Portal) {
	object := portPath(id)
	family := "ipv4"
	if strings.Contains(p.Address, ":") {
		family = "ipv6"
	}
	d.add(object, Mkdir, object, "")
	d.add(object, Write, path.Join(object, "addr_trtype"), string(p.Transport))
	d.add(object, Write, path.Join(object, "addr_adrfam"), family)
	d.add(object, Write, path.Join(object, "addr_traddr"), p.Address)
	d.add(object, Write, path.Join(object, "addr_trsvcid"), strconv.Itoa(int(p.Port)))
}

func (d *differ) freePort(wish uint16) (uint16, bool) {
	free := func(id uint16) bool {
		used := slices.ContainsFunc(d.got.Ports, func(p Port) bool { return p.ID == id })
		return !used && !slices.Contains(d.taken, id)
	}
	for id := max(wish, FirstPortID); id <= LastPortID; id++ {
		if free(id) {
			d.taken = append(d.taken, id)
			return id, true
		}
	}
	return 0, false
}

// foreignListener finds a foreign port that listens on p; a port without subsystems does not
// listen.
func (c Config) foreignListener(p block.Portal) (uint16, bool) {
	for _, other := range c.Ports {
		if !other.Ours() && len(other.Subsystems) > 0 && overlap(other.Portal, p) {
			return other.ID, true
		}
	}
	return 0, false
}

func overlap(a, b block.Portal) bool {
	anywhere := func(p block.Portal) bool { return p.Address == "0.0.0.0" || p.Address == "::" }
	return a.Transport == b.Transport && a.Port == b.Port &&
		(a.Address == b.Address || anywhere(a) || anywhere(b))
}

// Revalidate makes nvmet read the size of an enabled namespace's device, and tell the hosts if it
// has changed (since 5.8; before, a host sees the size when it asks). Diff never has this step: the
// size that nvmet has in mind cannot be read.
func Revalidate(n block.NQN, ns Namespace) Step {
	return Step{Op: Write, Path: path.Join(namespacePath(n, ns), "revalidate_size"), Arg: "1", Object: subsystemPath(n)}
}

func subsystemPath(n block.NQN) string { return "subsystems/" + string(n) }
func hostPath(n block.NQN) string      { return "hosts/" + string(n) }
func portPath(id uint16) string        { return "ports/" + strconv.Itoa(int(id)) }

func namespacePath(n block.NQN, ns Namespace) string {
	name := ns.Alias
	if name == "" {
		name = strconv.FormatUint(uint64(ns.NSID), 10)
	}
	return subsystemPath(n) + "/namespaces/" + name
}

// SPDX-License-Identifier: Apache-2.0

// Package nvmet drives the Linux kernel's NVMe-oF target through configfs.
//
// The exports are a plain value, [Config]. [Tree.Read] returns the actual one, the caller supplies
// the wanted one, [Diff] computes the steps between the two, and [Tree.Do] carries out one step:
//
//	got, _ := tree.Read(ctx)
//	for _, step := range nvmet.Diff(got, want) {
//		err := tree.Do(ctx, step)
//	}
//
// Each step is one file operation, and the process may crash after any of them: a new Read and Diff
// continue from there. Some changes take more than one round, because Diff offers a step only once
// its precondition has been observed. When no step is left, the tree is as wanted.
//
// Diff unlinks before it drains (measured on 5.15 to 7.2): removing an allowed_hosts link
// disconnects nobody, unlinking a subsystem from its ports kills its connections without waiting
// for their I/O, and only enable=0 waits. If enable=0 came first, it could wait for a host that
// never answers. Once a subsystem's directory is gone, no I/O that came through it can still write.
//
// nvmet accepts much that cannot work: names that it truncates, namespace ids that mean the same,
// one device exported twice. [Config.Check] and [Conflicts] refuse these. Objects that Weft did not
// make are never changed: subsystems whose name is not one of ours, and ports outside [FirstPortID]
// to [LastPortID]. A foreign port that listens on one of our portals is not used; it is reported as
// a conflict.
//
// The package loads no modules, mounts nothing, and starts a goroutine only for the time of one
// system call, since many of them can block for tens of seconds.
package nvmet

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Model is the attr_model of our subsystems.
const Model = "Weft"

// nvmet's default range of cntlid.
const (
	DefaultCntlidMin = 1
	DefaultCntlidMax = 65519
)

// The range of port ids that Weft uses: a port has no name, so its number tells its owner.
const (
	FirstPortID uint16 = 0x5700
	LastPortID  uint16 = 0x57ff
)

// Config is everything that nvmet exports, or should export.
type Config struct {
	Subsystems []Subsystem
	Ports      []Port
	Hosts      []block.NQN // hosts/*; not used in a wanted Config
	// Keys are those of hosts that have to prove their identity. A host of a wanted Config that is
	// not listed proves nothing.
	Keys map[block.NQN]Keys
}

// Keys is hosts/<nqn>/dhchap_key and dhchap_ctrl_key. The kernel asks for them in every subsystem
// that allows the host.
type Keys struct {
	Host, Controller block.Secret // in the text form of DH-HMAC-CHAP: DHHC-1:01:...:
}

// KeysOf returns the keys of an export in the form that the kernel reads.
func KeysOf(k block.Keys) (Keys, error) {
	host, controller, err := dhchap.NewKeys(k.Host.Reveal(), k.Controller.Reveal())
	if err != nil {
		return Keys{}, err
	}
	return Keys{block.NewSecret([]byte(host.Representation())), block.NewSecret([]byte(controller.Representation()))}, nil
}

// Subsystem is subsystems/<nqn>.
type Subsystem struct {
	NQN          block.NQN
	Serial       string // attr_serial
	Model        string // attr_model
	CntlidMin    uint16 // attr_cntlid_min
	CntlidMax    uint16 // attr_cntlid_max
	AllowAnyHost bool   // attr_allow_any_host
	AllowedHosts []Link // allowed_hosts/*, to hosts
	Namespaces   []Namespace
}

// Namespace is subsystems/<nqn>/namespaces/<nsid>.
type Namespace struct {
	NSID    uint32
	Alias   string     // the directory's name where it is not NSID in plain decimal, such as 0x2
	Device  string     // device_path
	UUID    block.UUID // device_uuid
	NGUID   block.UUID // device_nguid
	Enabled bool       // enable
}

// Port is ports/<id>.
type Port struct {
	ID         uint16 // 0 in a wanted Config: any
	Portal     block.Portal
	Subsystems []Link // subsystems/*, to subsystems
}

// Link is a symlink to a subsystem or a host. Our links are named after their targets; foreign ones
// may have any name.
type Link struct {
	Name string
	To   block.NQN
}

// LinkTo is a link as Weft names it.
func LinkTo(n block.NQN) Link { return Link{Name: string(n), To: n} }

// Ours reports whether p was made by Weft.
func (p Port) Ours() bool { return p.ID >= FirstPortID && p.ID <= LastPortID }

// Subsystem finds a subsystem by its name.
func (c Config) Subsystem(n block.NQN) (Subsystem, bool) {
	i := slices.IndexFunc(c.Subsystems, func(s Subsystem) bool { return s.NQN == n })
	if i < 0 {
		return Subsystem{}, false
	}
	return c.Subsystems[i], true
}

// Shares reports whether two subsystems may export one device: they belong to the same epoch of the
// same volume, for different hosts. The manager shares a volume between hosts only when that is
// right.
func Shares(a, b block.NQN) bool {
	volume, epoch, host, _, err := block.ParseSubsystemNQN(a)
	if err != nil {
		return false
	}
	v, e, h, _, err := block.ParseSubsystemNQN(b)
	return err == nil && v == volume && e == epoch && h != host
}

// Linked reports whether any port offers the subsystem n.
func (c Config) Linked(n block.NQN) bool {
	return slices.ContainsFunc(c.Ports, func(p Port) bool { return p.links(n) })
}

func (p Port) links(n block.NQN) bool {
	return slices.ContainsFunc(p.Subsystems, func(l Link) bool { return l.To == n })
}

// Check says what is wrong with a wanted Config, including what nvmet itself would accept.
func (c Config) Check() error {
	seen := map[block.NQN]bool{}
	devices := map[string]block.NQN{}
	for _, s := range c.Subsystems {
		if seen[s.NQN] {
			return fmt.Errorf("subsystem %s: listed twice", s.NQN)
		}
		seen[s.NQN] = true
		if err := s.check(); err != nil {
			return fmt.Errorf("subsystem %s: %w", s.NQN, err)
		}
		for _, ns := range s.Namespaces {
			if other, ok := devices[ns.Device]; ok && !Shares(other, s.NQN) {
				return fmt.Errorf("subsystem %s: namespace %d: device %s is also wanted in %s", s.NQN, ns.NSID, ns.Device, other)
			}
			devices[ns.Device] = s.NQN
		}
	}
	return c.checkPorts(seen)
}

func (s Subsystem) check() error {
	if _, err := block.ParseNQN(string(s.NQN)); err != nil {
		return err
	}
	switch {
	case !s.NQN.Ours():
		return fmt.Errorf("not a name that Weft gives")
	case s.Serial == "" || len(s.Serial) > 20 || !printable(s.Serial):
		return fmt.Errorf("serial %q: must be 1 to 20 printable characters", s.Serial)
	case s.Model == "" || len(s.Model) > 40 || !printable(s.Model):
		return fmt.Errorf("model %q: must be 1 to 40 printable characters", s.Model)
	case s.CntlidMin < 1 || s.CntlidMax > DefaultCntlidMax || s.CntlidMin >= s.CntlidMax:
		return fmt.Errorf("cntlid %d to %d: must be a range within %d to %d", s.CntlidMin, s.CntlidMax, DefaultCntlidMin, DefaultCntlidMax)
	case s.AllowAnyHost:
		return fmt.Errorf("allow_any_host: must be off")
	}
	if err := s.checkHosts(); err != nil {
		return err
	}
	return s.checkNamespaces()
}

func (s Subsystem) checkHosts() error {
	for _, h := range s.AllowedHosts {
		if _, err := block.ParseNQN(string(h.To)); err != nil {
			return fmt.Errorf("host: %w", err)
		}
		if h != LinkTo(h.To) {
			return fmt.Errorf("host %s: link named %q", h.To, h.Name)
		}
	}
	return nil
}

func (s Subsystem) checkNamespaces() error {
	seen := map[uint32]bool{}
	for _, ns := range s.Namespaces {
		switch {
		case ns.NSID == 0 || ns.NSID == 0xffffffff:
			return fmt.Errorf("namespace %d: must be 1 to 4294967294", ns.NSID)
		case seen[ns.NSID]:
			return fmt.Errorf("namespace %d: listed twice", ns.NSID)
		case !strings.HasPrefix(ns.Device, "/") || !printable(ns.Device):
			return fmt.Errorf("namespace %d: device %q: must be an absolute path", ns.NSID, ns.Device)
		case ns.UUID.IsZero() || ns.NGUID.IsZero():
			return fmt.Errorf("namespace %d: uuid and nguid must be given", ns.NSID)
		case !ns.Enabled:
			return fmt.Errorf("namespace %d: must be enabled", ns.NSID)
		}
		seen[ns.NSID] = true
	}
	if len(s.Namespaces) > 1024 {
		return fmt.Errorf("%d namespaces: at most 1024", len(s.Namespaces))
	}
	return nil
}

func (c Config) checkPorts(known map[block.NQN]bool) error {
	seen := map[block.Portal]bool{}
	for _, p := range c.Ports {
		where := listens(p.Portal)
		if p.ID != 0 && !p.Ours() {
			return fmt.Errorf("portal %s: port id %d is not one of ours", p.Portal, p.ID)
		}
		if seen[where] {
			return fmt.Errorf("portal %s: listed twice", p.Portal)
		}
		seen[where] = true
		for _, l := range p.Subsystems {
			if !known[l.To] || l != LinkTo(l.To) {
				return fmt.Errorf("portal %s: subsystem %s: not in the list", p.Portal, l.To)
			}
		}
	}
	return nil
}

// listens returns the part of a portal that the kernel knows.
func listens(p block.Portal) block.Portal {
	p.Rail = ""
	return p
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e })
}

// sorted puts a Config into Read's order.
func (c Config) sorted() Config {
	byLink := func(a, b Link) int { return cmp.Compare(a.Name, b.Name) }
	out := Config{Subsystems: slices.Clone(c.Subsystems), Ports: slices.Clone(c.Ports), Hosts: slices.Sorted(slices.Values(c.Hosts)), Keys: c.Keys}
	for i := range out.Subsystems {
		s := &out.Subsystems[i]
		s.AllowedHosts = slices.SortedFunc(slices.Values(s.AllowedHosts), byLink)
		s.Namespaces = slices.SortedFunc(slices.Values(s.Namespaces), func(a, b Namespace) int { return cmp.Compare(a.NSID, b.NSID) })
	}
	for i := range out.Ports {
		out.Ports[i].Subsystems = slices.SortedFunc(slices.Values(out.Ports[i].Subsystems), byLink)
	}
	slices.SortFunc(out.Subsystems, func(a, b Subsystem) int { return cmp.Compare(a.NQN, b.NQN) })
	slices.SortFunc(out.Ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Portal.String(), b.Portal.String()))
	})
	return out
}

// devices returns, for each exported device, the subsystems that export it.
func (c Config) devices() map[string][]block.NQN {
	out := map[string][]block.NQN{}
	for _, s := range c.Subsystems {
		for _, ns := range s.Namespaces {
			if ns.Device != "" && !slices.Contains(out[ns.Device], s.NQN) {
				out[ns.Device] = append(out[ns.Device], s.NQN)
			}
		}
	}
	return out
}

// hostsInUse returns every host that an allowed_hosts link points to.
func (c Config) hostsInUse() map[block.NQN]bool {
	out := map[block.NQN]bool{}
	for _, s := range c.Subsystems {
		for _, l := range s.AllowedHosts {
			out[l.To] = true
		}
	}
	return out
}

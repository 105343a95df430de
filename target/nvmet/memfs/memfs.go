// SPDX-License-Identifier: Apache-2.0

// Package memfs imitates nvmet's configfs directory in memory: the same names and the same
// refusals, with a [Server] in place of the kernel's target.
//
//	nvmet.Diff ── steps ──> nvmet.Tree ──> memfs.FS ──> Server
//	                              (nvmet.Files)         NVMe/TCP in user space,
//	                                                    or nothing, in tests
//
// So the user-space target is configured by the same steps as the kernel's, in the same order: that
// order is the fence. The suite of package nvmet runs on both this and a kernel's configfs, which
// keeps the imitation true.
package memfs

import (
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Root is the path at which the tree appears to be.
const Root = "/config/nvmet"

// FS behaves like nvmet's configfs on 5.15 to 7.2, as far as nvmet.Tree uses it: a mkdir makes
// attribute files, a rmdir can be refused, attributes are checked. It implements nvmet.Files for
// nvmet.OpenOn. Its methods may be called concurrently; one that waits for the Server delays no
// other.
type FS struct {
	server Server
	// WithoutKeys: hosts have no keys, as in a kernel without NVME_TARGET_AUTH. Set it before the
	// first use.
	WithoutKeys bool

	mu         sync.Mutex
	subsystems map[string]*subsystem
	ports      map[string]*port
	hosts      map[string]map[string]string // attributes
}

type subsystem struct {
	attrs      map[string]string
	allowed    map[string]string // link name to host
	namespaces map[string]map[string]string
	added      bool // the server knows of it
	leaving    bool // the server is removing it
}

type port struct {
	attrs map[string]string
	links map[string]string // link name to subsystem
}

// New returns an nvmet without exports.
func New(s Server) *FS {
	return &FS{server: s, subsystems: map[string]*subsystem{}, ports: map[string]*port{}, hosts: map[string]map[string]string{}}
}

// serveLocked calls the server without the lock, since the call may take its time.
func (f *FS) serveLocked(do func() error) error {
	f.mu.Unlock()
	defer f.mu.Lock()
	return do()
}

func parts(where string) []string {
	rest, _ := strings.CutPrefix(where, Root+"/")
	return strings.Split(rest, "/")
}

// Mkdir makes a directory with the files that the kernel puts into it.
func (f *FS) Mkdir(where string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := parts(where)
	switch {
	case len(p) == 2 && p[0] == "subsystems":
		return f.mkSubsystem(p[1])
	case len(p) == 2 && p[0] == "ports":
		return f.mkPort(p[1])
	case len(p) == 2 && p[0] == "hosts":
		if f.hosts[p[1]] != nil {
			return unix.EEXIST
		}
		f.hosts[p[1]] = map[string]string{}
		if !f.WithoutKeys {
			f.hosts[p[1]] = map[string]string{"dhchap_key": "", "dhchap_ctrl_key": ""}
		}
		return nil
	case len(p) == 4 && p[2] == "namespaces":
		return f.mkNamespace(p[1], p[3])
	}
	return unix.EPERM
}

func (f *FS) mkSubsystem(name string) error {
	if f.subsystems[name] != nil {
		return unix.EEXIST
	}
	if name == "nqn.2014-08.org.nvmexpress.discovery" {
		return unix.EINVAL
	}
	f.subsystems[name] = &subsystem{
		attrs: map[string]string{
			"attr_serial": "0123456789abcdef0123", "attr_model": "Linux", "attr_allow_any_host": "0",
			"attr_cntlid_min": "1", "attr_cntlid_max": "65519",
		},
		allowed: map[string]string{}, namespaces: map[string]map[string]string{},
	}
	return nil
}

func (f *FS) mkPort(name string) error {
	if _, err := strconv.ParseUint(name, 0, 16); err != nil {
		return unix.EINVAL
	}
	if f.ports[name] != nil {
		return unix.EEXIST
	}
	f.ports[name] = &port{
		attrs: map[string]string{"addr_trtype": "", "addr_adrfam": "", "addr_traddr": "", "addr_trsvcid": ""},
		links: map[string]string{},
	}
	return nil
}

func (f *FS) mkNamespace(subsystem, name string) error {
	s := f.subsystems[subsystem]
	if s == nil || s.leaving {
		return unix.ENOENT
	}
	if n, err := strconv.ParseUint(name, 0, 32); err != nil || n == 0 || n == 0xffffffff {
		return unix.EINVAL
	}
	if s.namespaces[name] != nil {
		return unix.EEXIST
	}
	s.namespaces[name] = map[string]string{
		"device_path": "(null)", "device_uuid": "5f0d7b1a-0000-4000-8000-0000000000ff",
		"device_nguid": block.UUID{}.String(), "enable": "0",
	}
	return nil
}

// Rmdir removes a directory and its attributes.
func (f *FS) Rmdir(where string) error {
	p := parts(where)
	if len(p) == 4 && p[2] == "namespaces" {
		return f.rmNamespace(p[1], p[3])
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case len(p) != 2:
		return unix.EPERM
	case p[0] == "subsystems":
		return f.rmSubsystem(p[1])
	case p[0] == "hosts":
		return f.rmHost(p[1])
	case p[0] == "ports":
		return f.rmPort(p[1])
	}
	return unix.EPERM
}

func (f *FS) rmNamespace(subsystem, name string) error {
	if err := f.disable(subsystem, name); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.subsystems[subsystem].namespaces, name)
	return nil
}

func (f *FS) rmSubsystem(name string) error {
	s := f.subsystems[name]
	if s == nil {
		return unix.ENOENT
	}
	for _, p := range f.ports {
		for _, to := range p.links {
			if to == name {
				return unix.EBUSY
			}
		}
	}
	if len(s.allowed)+len(s.namespaces) > 0 {
		return unix.ENOTEMPTY
	}
	if s.added {
		s.leaving = true
		err := f.serveLocked(func() error { return f.server.RemoveSubsystem(name) })
		if s.leaving = false; err != nil {
			return err
		}
	}
	delete(f.subsystems, name)
	return nil
}

func (f *FS) rmHost(name string) error {
	if f.hosts[name] == nil {
		return unix.ENOENT
	}
	for _, s := range f.subsystems {
		for _, to := range s.allowed {
			if to == name {
				return unix.EBUSY
			}
		}
	}
	delete(f.hosts, name)
	return nil
}

func (f *FS) rmPort(name string) error {
	p := f.ports[name]
	if p == nil {
		return unix.ENOENT
	}
	if len(p.links) > 0 {
		return unix.ENOTEMPTY
	}
	delete(f.ports, name)
	return nil
}

// disable waits for the drain; like the kernel, it shows enable=0 before the drain has ended.
func (f *FS) disable(subsystem, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.subsystems[subsystem]
	if s == nil || s.namespaces[name] == nil {
		return unix.ENOENT
	}
	if s.namespaces[name]["enable"] == "0" {
		return nil
	}
	s.namespaces[name]["enable"] = "0"
	err := f.serveLocked(func() error { return f.server.RemoveNamespace(subsystem, nsid(name)) })
	if err != nil {
		s.namespaces[name]["enable"] = "1" // the drain may not have ended
	}
	return err
}

func nsid(name string) uint32 {
	n, _ := strconv.ParseUint(name, 0, 32)
	return uint32(n)
}

// WriteSecret is Write: nobody else sees this tree.
func (f *FS) WriteSecret(where, value string) error { return f.Write(where, value) }

// Write checks and stores an attribute.
func (f *FS) Write(where, value string) error {
	p := parts(where)
	if len(p) == 5 && p[4] == "enable" && value == "0" {
		return f.disable(p[1], p[3])
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(p) == 5 && p[4] == "revalidate_size" {
		return f.revalidateLocked(p, value)
	}
	attrs, err := f.attrs(p)
	if err != nil {
		return err
	}
	name := path.Base(where)
	if _, ok := attrs[name]; !ok {
		return unix.ENOENT
	}
	if err := f.check(p, attrs, name, value); err != nil {
		return err
	}
	if name == "enable" {
		if err := f.enableLocked(p[1], p[3], attrs); err != nil {
			return err
		}
	}
	attrs[name] = value
	if p[0] == "hosts" {
		return f.keyedLocked(p[1])
	}
	if s := f.subsystems[p[1]]; name == "attr_allow_any_host" && s.added {
		return f.allowLocked(p[1], s)
	}
	return nil
}

// keyedLocked tells the server of a host's new keys.
func (f *FS) keyedLocked(host string) error {
	for _, name := range slices.Sorted(maps.Keys(f.subsystems)) {
		s := f.subsystems[name]
		if s == nil || !slices.Contains(slices.Collect(maps.Values(s.allowed)), host) {
			continue
		}
		if err := f.allowLocked(name, s); err != nil {
			return err
		}
	}
	return nil
}

// revalidateLocked makes the server read a device's size again.
func (f *FS) revalidateLocked(p []string, value string) error {
	attrs, err := f.attrs(p)
	if err != nil {
		return err
	}
	if value != "1" || attrs["enable"] != "1" {
		return unix.EINVAL
	}
	return f.serveLocked(func() error { return f.server.ResizeNamespace(p[1], nsid(p[3])) })
}

// enableLocked adds a namespace to the server.
func (f *FS) enableLocked(subsystem, name string, attrs map[string]string) error {
	if attrs["enable"] == "1" {
		return nil
	}
	if err := f.addLocked(subsystem); err != nil {
		return err
	}
	uuid, _ := block.ParseUUID(attrs["device_uuid"]) // checked when it was written
	nguid, _ := block.ParseUUID(attrs["device_nguid"])
	ns := Namespace{NSID: nsid(name), Device: attrs["device_path"], UUID: uuid, NGUID: nguid}
	return f.serveLocked(func() error { return f.server.AddNamespace(subsystem, ns) })
}

// addLocked adds a subsystem to the server, once any part of it is to be served: its attributes are
// fixed from then on.
func (f *FS) addLocked(name string) error {
	s := f.subsystems[name]
	if s.leaving {
		return unix.ENOENT
	}
	if s.added {
		return nil
	}
	info := Subsystem{
		NQN: block.NQN(name), Serial: s.attrs["attr_serial"], Model: s.attrs["attr_model"],
		CntlidMin: uint16(number(s.attrs["attr_cntlid_min"])), CntlidMax: uint16(number(s.attrs["attr_cntlid_max"])),
	}
	if err := f.serveLocked(func() error { return f.server.AddSubsystem(info) }); err != nil {
		return err
	}
	s.added = true
	return f.allowLocked(name, s)
}

func (f *FS) allowLocked(name string, s *subsystem) error {
	if !s.added {
		return nil
	}
	var hosts []Host
	for _, host := range slices.Sorted(maps.Values(s.allowed)) {
		// The keys were checked when they were written. Without one for the host, nvmet demands nothing.
		own := Host{NQN: block.NQN(host)}
		own.HostKey, _ = dhchap.ParseKey(f.hosts[host]["dhchap_key"])
		if !own.HostKey.IsZero() {
			own.ControllerKey, _ = dhchap.ParseKey(f.hosts[host]["dhchap_ctrl_key"])
		}
		hosts = append(hosts, own)
	}
	anyHost := s.attrs["attr_allow_any_host"] == "1"
	return f.serveLocked(func() error { return f.server.SetHosts(name, hosts, anyHost) })
}

func (f *FS) attrs(p []string) (map[string]string, error) {
	switch {
	case len(p) == 3 && p[0] == "subsystems" && f.subsystems[p[1]] != nil:
		return f.subsystems[p[1]].attrs, nil
	case len(p) == 3 && p[0] == "ports" && f.ports[p[1]] != nil:
		return f.ports[p[1]].attrs, nil
	case len(p) == 3 && p[0] == "hosts" && f.hosts[p[1]] != nil:
		return f.hosts[p[1]], nil
	case len(p) == 5 && f.subsystems[p[1]] != nil && f.subsystems[p[1]].namespaces[p[3]] != nil:
		return f.subsystems[p[1]].namespaces[p[3]], nil
	}
	return nil, unix.ENOENT
}

// check applies nvmet's rules to a value, and returns it in nvmet's form.
//
// Branches: one for each attribute.
func (f *FS) check(p []string, attrs map[string]string, name, value string) error {
	bad := false
	switch name {
	case "attr_serial":
		bad = value == "" || len(value) > 20 || f.subsystems[p[1]].added
	case "attr_model":
		bad = value == "" || len(value) > 40 || f.subsystems[p[1]].added
	case "attr_cntlid_min":
		bad = number(value) == 0 || number(value) >= number(attrs["attr_cntlid_max"]) || f.subsystems[p[1]].added
	case "attr_cntlid_max":
		bad = number(value) == 0 || number(value) <= number(attrs["attr_cntlid_min"]) || f.subsystems[p[1]].added
	case "attr_allow_any_host":
		bad = value == "1" && len(f.subsystems[p[1]].allowed) > 0
	case "enable":
		return f.checkEnable(attrs, value)
	case "device_path", "device_uuid", "device_nguid":
		if attrs["enable"] == "1" {
			return unix.EBUSY
		}
		_, err := block.ParseUUID(value)
		bad = value == "" || name != "device_path" && err != nil
	case "dhchap_key", "dhchap_ctrl_key":
		_, err := dhchap.ParseKey(value)
		bad = err != nil
	default: // a port's attribute
		if len(f.ports[p[1]].links) > 0 {
			return unix.EACCES
		}
		bad = name == "addr_trtype" && !slices.Contains([]string{"tcp", "rdma", "loop", "fc"}, value) ||
			name == "addr_adrfam" && !slices.Contains([]string{"ipv4", "ipv6", "ib", "fc", "loop"}, value)
	}
	if bad {
		return unix.EINVAL
	}
	return nil
}

func (f *FS) checkEnable(attrs map[string]string, value string) error {
	if value != "1" {
		return unix.EINVAL
	}
	if attrs["device_path"] == "(null)" {
		return unix.EINVAL
	}
	return nil
}

func number(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

// Symlink links a host or a subsystem.
func (f *FS) Symlink(to, where string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	target, p := parts(to), parts(where)
	if len(target) != 2 || !f.exists(target) {
		return unix.ENOENT
	}
	if len(p) != 4 {
		return unix.EPERM
	}
	if s := f.subsystems[p[1]]; p[0] == "subsystems" && p[2] == "allowed_hosts" && s != nil {
		if target[0] != "hosts" || s.attrs["attr_allow_any_host"] == "1" {
			return unix.EINVAL
		}
		if err := addLink(s.allowed, p[3], target[1]); err != nil {
			return err
		}
		return f.allowLocked(p[1], s)
	}
	if port := f.ports[p[1]]; p[0] == "ports" && p[2] == "subsystems" && port != nil {
		return f.linkPort(p[1], p[3], target)
	}
	return unix.EPERM
}

func (f *FS) exists(p []string) bool {
	return p[0] == "hosts" && f.hosts[p[1]] != nil || p[0] == "subsystems" && f.subsystems[p[1]] != nil ||
		p[0] == "ports" && f.ports[p[1]] != nil
}

func addLink(links map[string]string, name, to string) error {
	for n, other := range links {
		if n == name || other == to {
			return unix.EEXIST
		}
	}
	links[name] = to
	return nil
}

func (f *FS) linkPort(id, name string, target []string) error {
	port := f.ports[id]
	if target[0] != "subsystems" || port.attrs["addr_trtype"] == "" || port.attrs["addr_adrfam"] == "" {
		return unix.EINVAL
	}
	if len(port.links) == 0 {
		for _, other := range f.ports {
			if len(other.links) > 0 && other.attrs["addr_traddr"] == port.attrs["addr_traddr"] &&
				other.attrs["addr_trsvcid"] == port.attrs["addr_trsvcid"] {
				return unix.EADDRINUSE
			}
		}
	}
	if err := f.addLocked(target[1]); err != nil {
		return err
	}
	if err := addLink(port.links, name, target[1]); err != nil {
		return err
	}
	info := Port{ID: uint16(number(id)), Portal: block.Portal{
		Transport: block.Transport(port.attrs["addr_trtype"]), Address: port.attrs["addr_traddr"],
		Port: uint16(number(port.attrs["addr_trsvcid"])),
	}}
	err := f.serveLocked(func() error { return f.server.Link(info, target[1]) })
	if err != nil {
		delete(port.links, name)
	}
	return err
}

// Unlink removes a link.
func (f *FS) Unlink(where string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	links, name := f.links(where)
	to, ok := links[name]
	if !ok {
		return unix.ENOENT
	}
	p := parts(where)
	if p[0] == "ports" {
		err := f.serveLocked(func() error { return f.server.Unlink(uint16(number(p[1])), to) })
		if err == nil {
			delete(links, name)
		}
		return err
	}
	delete(links, name)
	return f.allowLocked(p[1], f.subsystems[p[1]])
}

// links finds the links directory that where is, or is in.
func (f *FS) links(where string) (links map[string]string, name string) {
	p := append(parts(where), "")
	if len(p) < 4 {
		return nil, ""
	}
	if s := f.subsystems[p[1]]; p[0] == "subsystems" && p[2] == "allowed_hosts" && s != nil {
		return s.allowed, p[3]
	}
	if port := f.ports[p[1]]; p[0] == "ports" && p[2] == "subsystems" && port != nil {
		return port.links, p[3]
	}
	return nil, ""
}

// Readlink returns a relative path, as configfs does.
func (f *FS) Readlink(where string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	links, name := f.links(where)
	to, ok := links[name]
	if !ok {
		return "", unix.ENOENT
	}
	kind := "hosts"
	if strings.HasPrefix(where, Root+"/ports/") {
		kind = "subsystems"
	}
	return "../../../../nvmet/" + kind + "/" + to, nil
}

// ReadDir lists links and the directories made by Mkdir.
func (f *FS) ReadDir(where string) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := parts(where)
	switch {
	case where == Root+"/subsystems":
		return names(f.subsystems), nil
	case where == Root+"/ports":
		return names(f.ports), nil
	case where == Root+"/hosts":
		return names(f.hosts), nil
	case len(p) == 3 && p[2] == "namespaces" && f.subsystems[p[1]] != nil:
		return names(f.subsystems[p[1]].namespaces), nil
	}
	if links, _ := f.links(where); links != nil {
		return names(links), nil
	}
	return nil, unix.ENOENT
}

func names[V any](m map[string]V) []string {
	var out []string
	for n := range m {
		out = append(out, n)
	}
	return out
}

// Read returns an attribute with its newline.
func (f *FS) Read(where string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	attrs, err := f.attrs(parts(where))
	if err != nil {
		return "", err
	}
	v, ok := attrs[path.Base(where)]
	if !ok {
		return "", unix.ENOENT
	}
	return v + "\n", nil
}

// SPDX-License-Identifier: Apache-2.0

// Package nvmettest is a likeness of nvmet's configfs for tests: of package
// nvmet, whose suite runs over it and over a kernel alike, which keeps it
// honest, and of those who use nvmet.
package nvmettest

import (
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// Root is where the tree seems to be.
const Root = "/config/nvmet"

// FS behaves as nvmet's configfs does on 5.15 to 7.2, as far as nvmet.Tree goes:
// a mkdir makes attribute files, a rmdir refuses, attributes are checked. It is
// the nvmet.Files of nvmet.OpenOn.
type FS struct {
	// Exists says whether enable=1 can open a device.
	Exists func(device string) bool
	// Drain is called by an enable=0, or a rmdir, of an enabled namespace, and
	// holds it up for as long as it likes. Both are set before the first use.
	Drain func(subsystem string)

	mu         sync.Mutex
	subsystems map[string]*subsystem
	ports      map[string]*port
	hosts      map[string]bool
}

type subsystem struct {
	attrs      map[string]string
	allowed    map[string]string // link name to host
	namespaces map[string]map[string]string
}

type port struct {
	attrs map[string]string
	links map[string]string // link name to subsystem
}

// New is an nvmet that exports nothing, and can export the given devices.
func New(devices ...string) *FS {
	return &FS{
		Exists:     func(device string) bool { return slices.Contains(devices, device) },
		Drain:      func(string) {},
		subsystems: map[string]*subsystem{}, ports: map[string]*port{}, hosts: map[string]bool{},
	}
}

func parts(where string) []string {
	rest, _ := strings.CutPrefix(where, Root+"/")
	return strings.Split(rest, "/")
}

// Mkdir makes a directory, and in it what the kernel puts there.
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
		if f.hosts[p[1]] {
			return unix.EEXIST
		}
		f.hosts[p[1]] = true
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
	if s == nil {
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

// Rmdir removes a directory, with the attributes in it.
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
	delete(f.subsystems, name)
	return nil
}

func (f *FS) rmHost(name string) error {
	if !f.hosts[name] {
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

// disable waits for the drain, and as the kernel says enable=0 before it is over.
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
	f.mu.Unlock()
	f.Drain(subsystem)
	f.mu.Lock()
	return nil
}

// Write checks and stores an attribute.
func (f *FS) Write(where, value string) error {
	p := parts(where)
	if len(p) == 5 && p[4] == "enable" && value == "0" {
		return f.disable(p[1], p[3])
	}
	f.mu.Lock()
	defer f.mu.Unlock()
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
	attrs[name] = value
	return nil
}

func (f *FS) attrs(p []string) (map[string]string, error) {
	switch {
	case len(p) == 3 && p[0] == "subsystems" && f.subsystems[p[1]] != nil:
		return f.subsystems[p[1]].attrs, nil
	case len(p) == 3 && p[0] == "ports" && f.ports[p[1]] != nil:
		return f.ports[p[1]].attrs, nil
	case len(p) == 5 && f.subsystems[p[1]] != nil && f.subsystems[p[1]].namespaces[p[3]] != nil:
		return f.subsystems[p[1]].namespaces[p[3]], nil
	}
	return nil, unix.ENOENT
}

func (f *FS) check(p []string, attrs map[string]string, name, value string) error {
	bad := false
	switch name {
	case "attr_serial":
		bad = value == "" || len(value) > 20
	case "attr_model":
		bad = value == "" || len(value) > 40
	case "attr_cntlid_min":
		bad = number(value) == 0 || number(value) >= number(attrs["attr_cntlid_max"])
	case "attr_cntlid_max":
		bad = number(value) == 0 || number(value) <= number(attrs["attr_cntlid_min"])
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
	default: // of a port
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
	if !f.Exists(attrs["device_path"]) {
		return unix.ENOENT
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
		return addLink(s.allowed, p[3], target[1])
	}
	if port := f.ports[p[1]]; p[0] == "ports" && p[2] == "subsystems" && port != nil {
		return f.linkPort(port, p[3], target)
	}
	return unix.EPERM
}

func (f *FS) exists(p []string) bool {
	return p[0] == "hosts" && f.hosts[p[1]] || p[0] == "subsystems" && f.subsystems[p[1]] != nil ||
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

func (f *FS) linkPort(port *port, name string, target []string) error {
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
	return addLink(port.links, name, target[1])
}

// Unlink removes a link.
func (f *FS) Unlink(where string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	links, name := f.links(where)
	if _, ok := links[name]; !ok {
		return unix.ENOENT
	}
	delete(links, name)
	return nil
}

// links finds the directory of links that where is in, or is.
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

// Readlink gives a relative path, as configfs does.
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

// ReadDir lists links, and directories that were made.
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

// Read gives an attribute with its newline.
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

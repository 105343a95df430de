// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
)

// The states of a controller that matter here; the kernel has more.
const (
	Live       = "live"
	Resetting  = "resetting"
	Connecting = "connecting"
)

// Controller is one connection to a subsystem: /sys/class/nvme/<Name>/.
type Controller struct {
	Name      string          // nvme3
	State     string          // state: new, live, resetting, connecting, deleting, "deleting (no IO)", dead
	Transport block.Transport // transport
	Address   Address         // address
	NQN       block.NQN       // subsysnqn
	HostNQN   block.NQN       // hostnqn
	HostID    string          // hostid
	Instance  int             // the number in Name
	FailsFast bool            // fast_io_fail_tmo is set; see SetFailFast
}

// Going reports whether c is being removed, and so no longer usable.
func (c Controller) Going() bool {
	return strings.HasPrefix(c.State, "deleting") || c.State == "dead"
}

// Portal is the portal that c is connected to.
func (c Controller) Portal() block.Portal {
	port, _ := strconv.ParseUint(c.Address.Trsvcid, 10, 16)
	return block.Portal{Transport: c.Transport, Address: c.Address.Traddr, Port: uint16(port)}
}

// Address is where a controller is, as its uevent file says.
type Address struct {
	Traddr     string
	Trsvcid    string
	HostTraddr string
	HostIface  string
}

// ParseAddress finds the address in a controller's uevent file (nvme_class_uevent in
// drivers/nvme/host/core.c). The address file says the same, and the source address of a live connection:
// for that Linux looks at the socket, and 6.1 panics in kernel_getsockname if the socket goes meanwhile.
func ParseAddress(text string) Address {
	var a Address
	fields := map[string]*string{
		"NVME_TRADDR": &a.Traddr, "NVME_TRSVCID": &a.Trsvcid, "NVME_HOST_TRADDR": &a.HostTraddr, "NVME_HOST_IFACE": &a.HostIface,
	}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if field := fields[key]; field != nil && value != "none" {
			*field = value
		}
	}
	return a
}

// At reports whether a is at p, whichever way the IP address is written.
func (a Address) At(p block.Portal) bool {
	if a.Trsvcid != strconv.Itoa(int(p.Port)) {
		return false
	}
	if a.Traddr == p.Address {
		return true
	}
	x, err1 := netip.ParseAddr(a.Traddr)
	y, err2 := netip.ParseAddr(p.Address)
	return err1 == nil && err2 == nil && x == y
}

// Subsystem is /sys/class/nvme-subsystem/<Name>/.
type Subsystem struct {
	Name        string    // nvme-subsys0
	NQN         block.NQN // subsysnqn
	Controllers []string  // the nvme<C> links
	Heads       []string  // the nvme<S>n<I> directories
}

// Head is a namespace as one block device: /sys/block/<Name>/.
type Head struct {
	Name string     // nvme0n1
	NSID uint32     // nsid
	UUID block.UUID // uuid; the NGUID if the target set no UUID
	WWID string     // wwid
	Dev  string     // dev: major:minor
	Size block.Size // size; 0 when the namespace is gone and somebody still has it open
}

// Path is a head through one controller: /sys/block/<Name>/, which has no device node.
type Path struct {
	Name       string // nvme0c1n1
	Controller string // nvme1
	ANAState   string // ana_state
}

// Controllers lists all NVMe controllers of the machine, fabrics or not.
func (t *Tree) Controllers() ([]Controller, error) {
	names, err := t.list("class/nvme")
	if err != nil {
		return nil, err
	}
	var all []Controller
	for _, name := range names {
		c, err := t.controller(name)
		if vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

func (t *Tree) controller(name string) (Controller, error) {
	c := Controller{Name: name}
	n, err := strconv.Atoi(strings.TrimPrefix(name, "nvme"))
	if err != nil {
		return c, &Error{Op: "read", Path: t.path("class/nvme/" + name), Err: fs.ErrNotExist}
	}
	c.Instance = n
	dir := "class/nvme/" + name + "/"
	nqn, err := t.read(dir + "subsysnqn")
	if err != nil {
		return c, err
	}
	state, err := t.read(dir + "state")
	if err != nil {
		return c, err
	}
	c.NQN, c.State = block.NQN(nqn), state
	// A PCI controller has none of these.
	transport, _ := t.read(dir + "transport")
	address, _ := t.read(dir + "uevent")
	hostNQN, _ := t.read(dir + "hostnqn")
	c.HostID, _ = t.read(dir + "hostid")
	if c.Transport = block.Transport(transport); c.Transport == block.RDMA {
		after, _ := t.read(dir + "fast_io_fail_tmo")
		c.FailsFast = after == "0"
	}
	c.HostNQN, c.Address = block.NQN(hostNQN), ParseAddress(address)
	return c, nil
}

// Subsystems lists what /sys/class/nvme-subsystem has.
func (t *Tree) Subsystems() ([]Subsystem, error) {
	names, err := t.list("class/nvme-subsystem")
	if err != nil {
		return nil, err
	}
	var all []Subsystem
	for _, name := range names {
		s, err := t.subsystem(name)
		if vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func (t *Tree) subsystem(name string) (Subsystem, error) {
	dir := "class/nvme-subsystem/" + name
	nqn, err := t.read(dir + "/subsysnqn")
	if err != nil {
		return Subsystem{}, err
	}
	s := Subsystem{Name: name, NQN: block.NQN(nqn)}
	children, err := t.list(dir)
	if err != nil {
		return Subsystem{}, err
	}
	for _, child := range children {
		k, ok := parseName(child)
		switch {
		case ok && k.head():
			s.Heads = append(s.Heads, child)
		case ok && k.controller():
			s.Controllers = append(s.Controllers, child)
		}
	}
	return s, nil
}

// head reads a head; fs.ErrNotExist when it is hidden or gone.
func (t *Tree) head(name string) (Head, error) {
	h := Head{Name: name}
	dir := "block/" + name + "/"
	if hidden, err := t.read(dir + "hidden"); err == nil && hidden != "0" {
		return h, &Error{Op: "read", Path: t.path(dir), Err: fs.ErrNotExist}
	}
	nsid, err := t.number(dir + "nsid")
	if err != nil {
		return h, err
	}
	sectors, err := t.number(dir + "size")
	if err != nil {
		return h, err
	}
	if h.Dev, err = t.read(dir + "dev"); err != nil {
		return h, err
	}
	h.NSID, h.Size = uint32(nsid), block.Size(sectors)*block.SectorSize
	h.WWID, _ = t.read(dir + "wwid")
	if text, err := t.read(dir + "uuid"); err == nil {
		h.UUID, _ = block.ParseUUID(text)
	}
	return h, nil
}

// Paths lists the paths of a head.
func (t *Tree) Paths(h Head) ([]Path, error) {
	want, ok := parseName(h.Name)
	if !ok {
		return nil, &Error{Op: "list paths of", Path: h.Name, Err: fs.ErrInvalid}
	}
	names, err := t.list("block")
	if err != nil {
		return nil, err
	}
	var all []Path
	for _, name := range names {
		k, ok := parseName(name)
		if !ok || !k.path() || k.subsystem != want.subsystem || k.namespace != want.namespace {
			continue
		}
		state, _ := t.read("block/" + name + "/ana_state")
		all = append(all, Path{Name: name, Controller: "nvme" + strconv.Itoa(k.control), ANAState: state})
	}
	return all, nil
}

// SetWriteThrough tells the block layer whether a head has no volatile cache and needs no
// flushes. Use it only for legs whose drives have none: nvmet announces a cache in any case.
func (t *Tree) SetWriteThrough(h Head, through bool) error {
	name, want := "block/"+h.Name+"/queue/write_cache", "write back"
	if through {
		want = "write through"
	}
	if now, err := t.read(name); err != nil || now == want {
		return err
	}
	return t.write(name, want)
}

// SetIOTimeout limits the time of a command on a path; after that the kernel resets the
// connection. A path that is made again has lost the setting.
func (t *Tree) SetIOTimeout(p Path, d time.Duration) error {
	name := "block/" + p.Name + "/queue/io_timeout"
	want := strconv.FormatInt(d.Milliseconds(), 10)
	if now, err := t.read(name); err != nil || now == want {
		return err
	}
	return t.write(name, want)
}

// RetryMost makes the kernel repeat a command as often as it can, 255 times and not 5, when a target
// answers that it may be repeated, as one without space does. This is for all NVMe controllers of the
// machine.
func (t *Tree) RetryMost() error {
	const name, most = "module/nvme_core/parameters/max_retries", "255" // a byte
	if now, err := t.read(name); err != nil || now == most {
		return err
	}
	return t.write(name, most)
}

func (t *Tree) number(name string) (uint64, error) {
	text, err := t.read(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, &Error{Op: "parse", Path: t.path(name), Err: err}
	}
	return n, nil
}

// list names what is in a directory; none if the directory is not there.
func (t *Tree) list(name string) ([]string, error) {
	entries, err := os.ReadDir(t.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, &Error{Op: "list", Path: filepath.Clean(t.path(name)), Err: errno(err)}
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

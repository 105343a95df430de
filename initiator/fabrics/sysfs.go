// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"io/fs"
	"net/netip"
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

// Head is a namespace as one block device: /sys/block/<Name>/.
type Head struct {
	Name string     // nvme0n1
	NSID uint32     // nsid
	UUID block.UUID // uuid; the NGUID if the target set no UUID
	Dev  string     // dev: major:minor
	Size block.Size // size; 0 when the namespace is gone and somebody still has it open
}

// Path is a head through one controller: /sys/block/<Name>/, which has no device node.
type Path struct {
	Name       string // nvme0c1n1
	Controller string // nvme1
}

// Controllers lists the NVMe controllers of the machine, fabrics or not, that belong to certain subsystems; all if
// of is nil.
func (t *Tree) Controllers(of func(block.NQN) bool) ([]Controller, error) {
	there, err := t.entries("class/nvme")
	if err != nil {
		return nil, err
	}
	t.controllers.keep(there)
	var all []Controller
	for _, e := range there {
		c, err := t.controllers.of(e, t.controller)
		if err == nil && of != nil && !of(c.NQN) {
			continue
		}
		if err == nil {
			err = t.stateOf(&c)
		}
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

// controller reads what does not change of a controller, and reports whether all of it was there.
func (t *Tree) controller(name string) (c Controller, all bool, err error) {
	c.Name = name
	n, err := strconv.Atoi(strings.TrimPrefix(name, "nvme"))
	if err != nil {
		return c, false, &Error{Op: "read", Path: t.path("class/nvme/" + name), Err: fs.ErrNotExist}
	}
	c.Instance = n
	dir := "class/nvme/" + name + "/"
	nqn, err := t.read(dir + "subsysnqn")
	if err != nil {
		return c, false, err
	}
	// A PCI controller has only the first of these, and no address.
	transport, _ := t.read(dir + "transport")
	address, _ := t.read(dir + "uevent")
	hostNQN, _ := t.read(dir + "hostnqn")
	c.HostID, _ = t.read(dir + "hostid")
	c.NQN, c.HostNQN, c.Transport, c.Address = block.NQN(nqn), block.NQN(hostNQN), block.Transport(transport), ParseAddress(address)
	// Before it has a subsystem, 6.1 says "(efault)" for the NQN of a new controller.
	whole := strings.HasPrefix(nqn, "nqn.") && (transport == "pcie" || hostNQN != "" && c.HostID != "" && transport != "" && c.Address != (Address{}))
	return c, whole, nil
}

func (t *Tree) controllerNow(name string) (Controller, error) {
	c, _, err := t.controller(name)
	if err == nil {
		err = t.stateOf(&c)
	}
	return c, err
}

// stateOf reads what changes.
func (t *Tree) stateOf(c *Controller) (err error) {
	dir := "class/nvme/" + c.Name + "/"
	if c.State, err = t.read(dir + "state"); err != nil {
		return err
	}
	if c.Transport == block.RDMA {
		after, _ := t.read(dir + "fast_io_fail_tmo")
		c.FailsFast = after == "0"
	}
	return nil
}

// head reads what does not change of a head; fs.ErrNotExist when it is hidden or gone.
func (t *Tree) head(name string) (h Head, all bool, err error) {
	h.Name = name
	dir := "block/" + name + "/"
	if hidden, err := t.read(dir + "hidden"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return h, false, err
	} else if err == nil && hidden != "0" {
		return h, false, &Error{Op: "read", Path: t.path(dir), Err: fs.ErrNotExist}
	}
	nsid, err := t.number(dir + "nsid")
	if err != nil {
		return h, false, err
	}
	if h.Dev, err = t.read(dir + "dev"); err != nil { // the last file that appears
		return h, false, err
	}
	h.NSID = uint32(nsid)
	text, err := t.read(dir + "uuid")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return h, false, err
	}
	h.UUID, _ = block.ParseUUID(text)
	return h, true, nil
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

// SpreadPaths makes the kernel use all paths to the namespaces of a subsystem in turns, unless somebody chose how
// already. By default it uses the one that is near to a processor (drivers/nvme/host/multipath.c, iopolicy).
func (t *Tree) SpreadPaths(n block.NQN) error {
	all, err := t.known(n)
	if err != nil {
		return err
	}
	for _, e := range all {
		name := subsystems + e.name + "/iopolicy"
		now, err := t.read(name)
		if err != nil {
			return err
		}
		if now != "numa" {
			continue
		}
		if err := t.write(name, "round-robin"); err != nil {
			return err
		}
	}
	return nil
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

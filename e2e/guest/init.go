// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/u-root/u-root/pkg/kmodule"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Init is process 1 of a guest. It never returns: it ends by resetting the machine.
func Init() {
	if err := mountAll(earlyMounts()); err != nil {
		fmt.Println("weft-init:", err)
	}
	if wantsUserland() {
		fmt.Println("weft-init: enter the userland:", enterUserland())
		reset()
	}
	_ = os.Setenv("PATH", "/tools/bin:/bin:/sbin")
	_ = os.Setenv("HOME", "/root")
	_ = os.Setenv("TMPDIR", "/tmp")
	server := exec.Command("/proc/self/exe", "serve")
	server.Stdout, server.Stderr = os.Stdout, os.Stderr
	if err := server.Start(); err != nil {
		fmt.Println("weft-init: start the server:", err)
		reset()
	}
	reapUntil(server.Process.Pid)
	fmt.Println("weft-init: the server has ended")
	reset()
}

// reapUntil waits for all children, including orphans that it inherited, until pid ends.
func reapUntil(pid int) {
	for {
		got, err := unix.Wait4(-1, nil, 0, nil)
		if got == pid || (err != nil && !errors.Is(err, unix.EINTR)) {
			return
		}
	}
}

// reset ends the machine. QEMU runs with -no-reboot, so a reset makes it exit; this needs
// no ACPI.
func reset() {
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	select {}
}

// ServePort loads the drivers of the control port and serves it.
func ServePort() error {
	probe, err := kmodule.NewProber(kmodule.ProbeOpts{})
	if err != nil {
		return err
	}
	for _, m := range []string{"virtio_pci", "virtio_console", "virtio_blk"} {
		if err := probe.Probe(m, ""); err != nil {
			return fmt.Errorf("load module %s: %w", m, err)
		}
	}
	port, err := openPort(portLimit)
	if err != nil {
		return err
	}
	defer port.Close()
	if err := mountDisks(probe); err != nil {
		return err
	}
	s := &Server{Reset: reset, Setup: func(c Setup) error { return configure(probe, c) }}
	return s.Serve(port, release())
}

func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

const portLimit = 10 * time.Second

// openPort waits for the control port. The host sends the port's name only after the driver
// is bound.
func openPort(limit time.Duration) (*os.File, error) {
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if read(name) == PortName {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(name)), os.O_RDWR, 0)
			}
		}
	}
	return nil, fmt.Errorf("no virtio port %s within %s", PortName, limit)
}

type mount struct {
	source, target, fstype string
	flags                  uintptr
}

func earlyMounts() []mount {
	return []mount{
		{"proc", "/proc", "proc", 0},
		{"sys", "/sys", "sysfs", 0},
		{"dev", "/dev", "devtmpfs", 0},
		{"pts", "/dev/pts", "devpts", 0},
		{"shm", "/dev/shm", "tmpfs", 0},
		{"run", "/run", "tmpfs", 0},
		{"tmp", "/tmp", "tmpfs", 0},
		{"debug", "/sys/kernel/debug", "debugfs", 0},
	}
}

func mountAll(mounts []mount) error {
	var errs error
	for _, m := range mounts {
		errs = errors.Join(errs, m.do())
	}
	return errs
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.fstype, m.flags, ""); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
	}
	return nil
}

// mountDisks mounts the disks with known serial numbers.
func mountDisks(probe *kmodule.Prober) error {
	disks := map[string]mount{
		ToolsSerial: {target: "/tools", fstype: "ext4", flags: unix.MS_RDONLY},
		StateSerial: {target: "/var/lib/weft", fstype: "ext4"},
	}
	found, err := filepath.Glob("/sys/block/vd*/serial")
	if err != nil || len(found) == 0 {
		return err
	}
	// crc32c comes first. ext4 has no module dependency on it, but asks the kernel for it,
	// and the kernel would then start modprobe. Newer kernels (7.3) have no such module.
	const crc32c = "crc32c_generic"
	for _, m := range []string{crc32c, "ext4"} {
		if err := probe.Probe(m, ""); err != nil && m != crc32c {
			return fmt.Errorf("load module %s: %w", m, err)
		}
	}
	for _, serial := range found {
		m, ok := disks[read(serial)]
		if !ok {
			continue
		}
		m.source = "/dev/" + filepath.Base(filepath.Dir(serial))
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

// configure applies the test's setup to the machine.
func configure(probe *kmodule.Prober, c Setup) error {
	if err := setClock(c.Time); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(c.Hostname)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	for _, m := range c.Modules {
		name, params, _ := strings.Cut(m, " ")
		if err := probe.Probe(name, params); err != nil {
			return fmt.Errorf("load module %s: %w", m, err)
		}
	}
	if _, err := os.Stat("/sys/kernel/config"); err == nil {
		if err := (mount{"config", "/sys/kernel/config", "configfs", 0}).do(); err != nil {
			return err
		}
	}
	return configureNets(c.Nets)
}

func configureNets(nets []Net) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find interface lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	if len(nets) == 0 {
		return nil
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	for _, n := range nets {
		if err := n.configure(links); err != nil {
			return err
		}
	}
	return nil
}

func (n Net) configure(links []netlink.Link) error {
	link, err := n.find(links)
	if err != nil {
		return err
	}
	if link.Attrs().Name != n.Name {
		if err := netlink.LinkSetName(link, n.Name); err != nil {
			return fmt.Errorf("name interface %s: %w", n.Name, err)
		}
	}
	addr, err := netlink.ParseAddr(n.CIDR)
	if err != nil {
		return fmt.Errorf("address of %s: %w", n.Name, err)
	}
	if err := netlink.LinkSetMTU(link, n.MTU); err != nil {
		return fmt.Errorf("set mtu %d of %s: %w", n.MTU, n.Name, err)
	}
	if err := netlink.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("add %s to %s: %w", n.CIDR, n.Name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", n.Name, err)
	}
	if n.RoCE == "" {
		return nil
	}
	if err := netlink.RdmaLinkAdd(n.RoCE, "rxe", n.Name); err != nil {
		return fmt.Errorf("make RDMA device %s over %s: %w", n.RoCE, n.Name, err)
	}
	return nil
}

func (n Net) find(links []netlink.Link) (netlink.Link, error) {
	mac, err := net.ParseMAC(n.MAC)
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if l.Attrs().HardwareAddr.String() == mac.String() {
			return l, nil
		}
	}
	return nil, fmt.Errorf("no interface has address %s", n.MAC)
}

// read returns a kernel file's text without the newline, or "" if there is none.
func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

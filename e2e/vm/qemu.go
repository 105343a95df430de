// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/e2e/guest"
)

const qemuProgram = "qemu-system-x86_64"

// kvmWorks reports whether hardware virtualization works. An accessible /dev/kvm is not
// enough: guests hang if the processor has neither vmx nor svm.
func kvmWorks() bool {
	if os.Getenv("WEFT_KVM") == "0" {
		return false
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return false
	}
	flags := " " + strings.ReplaceAll(string(info), "\n", " ") + " "
	if !strings.Contains(flags, " vmx ") && !strings.Contains(flags, " svm ") {
		return false
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

func acceleration(kvm bool) string {
	if kvm {
		return "KVM"
	}
	return "TCG (no hardware virtualisation)"
}

// plugs describes QEMU's connections to the test: inherited descriptors in a test, none in
// the command line that a person can run again.
type plugs struct {
	control, qmp string
	net          func(i int) string
}

func inheritedPlugs() plugs {
	return plugs{
		control: "socket,id=control,fd=3",
		qmp:     "socket,id=qmp,fd=4",
		net:     func(i int) string { return fmt.Sprintf("stream,id=net%d,addr.type=fd,addr.str=%d", i, 5+i) },
	}
}

func loosePlugs() plugs {
	return plugs{
		control: "null,id=control",
		qmp:     "null,id=qmp",
		net:     func(i int) string { return fmt.Sprintf("hubport,id=net%d,hubid=%d", i, i) },
	}
}

// qemuArgs describes the machine to QEMU: no default devices, one serial line for the
// console, PCI for the rest. There is room for a second processor in each: QEMU 7.2 leaves the
// memory barriers of a guest out that can only have one (tcg_gen_mb in tcg/tcg-op.c), though devices
// run in another thread. The guest then misses that an emulated drive waits for its doorbell, and the
// drive stops for good.
func (m *Machine) qemuArgs(p plugs) []string {
	accel, cpu := "tcg,thread=multi", "max"
	if m.cluster.kvm {
		accel, cpu = "kvm", "host"
	}
	image := m.cluster.image
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "pc,hpet=off,vmport=off,graphics=off", "-accel", accel, "-cpu", cpu,
		"-m", fmt.Sprint(m.options.memory), "-smp", fmt.Sprintf("%d,maxcpus=%d", m.options.cpus, max(2, m.options.cpus)),
		"-name", m.name,
		"-kernel", image.Kernel.Image, "-initrd", image.Initrd,
		"-append", strings.Join(slices.Concat(kernelArgs(m.cluster.tsc), m.options.kernel), " "),
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-chardev", p.qmp, "-mon", "chardev=qmp,mode=control",
		"-chardev", p.control, "-device", "virtio-serial-pci",
		"-device", "virtserialport,chardev=control,name=" + guest.PortName,
		"-blockdev", "driver=raw,node-name=tools,read-only=on,file.driver=file,file.locking=off,file.filename=" + image.Tools,
		"-device", "virtio-blk-pci,drive=tools,serial=" + guest.ToolsSerial,
	}
	for i, n := range m.nics {
		args = append(args, "-netdev", p.net(i),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=net%d,mac=%s,host_mtu=%d,romfile=", i, n.mac, n.net.mtu))
	}
	if len(m.forwards) > 0 {
		user := "user,id=forward,restrict=on,net=" + forwardNet
		for port, at := range m.forwards {
			user += fmt.Sprintf(",hostfwd=tcp:%s-:%d", at, port)
		}
		args = append(args, "-netdev", user, "-device", "virtio-net-pci,netdev=forward,mac="+forwardMAC+",romfile=")
	}
	for _, d := range m.drives {
		args = append(args, "-blockdev", d.fileNode(), "-blockdev", d.node(), "-device", d.device())
	}
	return args
}

// kernelArgs shorten the boot, end a broken kernel at once, and keep time right when the
// guest's processors wait for ours. tsc is the frequency of the time stamp counter in kHz,
// or 0 if the guest measures it.
func kernelArgs(tsc uint64) []string {
	args := []string{
		"console=ttyS0", "loglevel=5", "panic=-1", "oops=panic", "reboot=t",
		"nokaslr", "mitigations=off", "random.trust_cpu=on", "no_timer_check", "tsc=reliable",
		"nowatchdog", "cryptomgr.notests", "audit=0", "apparmor=0", "i8042.noaux", "i8042.nokbd", "net.ifnames=0",
	}
	if tsc != 0 {
		args = append(args, fmt.Sprintf("tsc_early_khz=%d", tsc))
	}
	return args
}

// socketPair makes two connected stream sockets: ours, and one for QEMU to inherit.
func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	for _, fd := range fds {
		// Room for a burst of frames. The kernel uses less if its limit is lower.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<20)
	}
	return os.NewFile(uintptr(fds[0]), "test end"), os.NewFile(uintptr(fds[1]), "qemu end"), nil
}

// SPDX-License-Identifier: Apache-2.0

package vm

// MachineOption changes a machine.
type MachineOption func(*machineOptions)

type machineOptions struct {
	memory  int // MiB
	cpus    int
	drives  []driveOption
	nets    []*Network
	modules []string
	kernel  []string // further words of the kernel's command line
	state   string   // size of the state disk, "" for none
	kmsg    bool
	forward []int // TCP ports of the guest that this machine can reach
}

type driveOption struct {
	nvme   bool
	size   string
	serial string
}

// Memory sets the machine's memory in MiB (default 384).
func Memory(mib int) MachineOption { return func(o *machineOptions) { o.memory = mib } }

// CPUs sets the number of processors (default 1).
func CPUs(n int) MachineOption { return func(o *machineOptions) { o.cpus = n } }

// NVMe adds an NVMe drive of a size such as "2GiB". Its file is sparse and
// survives kills and boots.
func NVMe(size, serial string) MachineOption {
	return func(o *machineOptions) {
		o.drives = append(o.drives, driveOption{nvme: true, size: size, serial: serial})
	}
}

// VirtioDisk adds a virtio disk; its serial is in /sys/block/vd?/serial.
func VirtioDisk(size, serial string) MachineOption {
	return func(o *machineOptions) {
		o.drives = append(o.drives, driveOption{size: size, serial: serial})
	}
}

// StateDisk keeps /var/lib/weft on a small disk, so that what agents write there
// survives boots. The rest of the root is fresh at each boot.
func StateDisk() MachineOption { return StateDiskOf("128MiB") }

// StateDiskOf is StateDisk with a size. Its file is sparse.
func StateDiskOf(size string) MachineOption { return func(o *machineOptions) { o.state = size } }

// On puts the machine on a further network.
func On(n *Network) MachineOption {
	return func(o *machineOptions) { o.nets = append(o.nets, n) }
}

// Forward makes a TCP port of the guest reachable from this machine, on a
// loopback address that Machine.Forwarded tells. It does not go through the
// cluster's network, so cutting that does not cut this.
func Forward(port int) MachineOption {
	return func(o *machineOptions) { o.forward = append(o.forward, port) }
}

// NoNetwork takes the machine off the cluster's network.
func NoNetwork() MachineOption { return func(o *machineOptions) { o.nets = nil } }

// Modules loads kernel modules at boot, each "name" or "name parameter=value ...". Others are loaded with m.Run(ctx,
// "modprobe", ...), and by the kernel itself when something needs them.
func Modules(names ...string) MachineOption {
	return func(o *machineOptions) { o.modules = append(o.modules, names...) }
}

// KernelArgs adds words to the kernel's command line.
func KernelArgs(args ...string) MachineOption {
	return func(o *machineOptions) { o.kernel = append(o.kernel, args...) }
}

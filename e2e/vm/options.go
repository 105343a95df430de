// SPDX-License-Identifier: Apache-2.0

package vm

// MachineOption is an option of a machine.
type MachineOption func(*machineOptions)

type machineOptions struct {
	memory  int // MiB
	cpus    int
	drives  []driveOption
	nets    []*Network
	roce    []*Network // those with an RDMA device
	modules []string
	kernel  []string // further words of the kernel's command line
	state   string   // size of the state disk, "" for none
	kmsg    bool
	forward []int // TCP ports of the guest that this machine can reach

	userland bool // boots Debian instead of our own init
}

type driveOption struct {
	nvme     bool
	volatile bool
	size     string
	serial   string
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

// VolatileNVMe is NVMe with a drive whose write cache is lost, in part, when the machine is killed.
func VolatileNVMe(size, serial string) MachineOption {
	return func(o *machineOptions) {
		o.drives = append(o.drives, driveOption{nvme: true, volatile: true, size: size, serial: serial})
	}
}

// VirtioDisk adds a virtio disk; its serial is in /sys/block/vd?/serial.
func VirtioDisk(size, serial string) MachineOption {
	return func(o *machineOptions) {
		o.drives = append(o.drives, driveOption{size: size, serial: serial})
	}
}

// StateDisk keeps /var/lib/weft on a small disk, so that the agents' state survives boots.
// The rest of the root file system is new at each boot.
func StateDisk() MachineOption { return StateDiskOf("128MiB") }

// StateDiskOf is StateDisk with a size. Its file is sparse.
func StateDiskOf(size string) MachineOption { return func(o *machineOptions) { o.state = size } }

// On connects the machine to another network.
func On(n *Network) MachineOption {
	return func(o *machineOptions) { o.nets = append(o.nets, n) }
}

// RoCE connects the machine to another network, and makes an RDMA device in software over it
// (rdma_rxe), as "rdma link add roce1 type rxe netdev eth1" would: roce1 over eth1.
func RoCE(n *Network) MachineOption {
	return func(o *machineOptions) {
		o.nets, o.roce = append(o.nets, n), append(o.roce, n)
		o.modules = append(o.modules, "rdma_rxe")
	}
}

// Forward makes a TCP port of the guest reachable from this machine, at the loopback
// address that Machine.Forwarded returns. The connection bypasses the cluster's network, so
// that cutting the network does not cut it.
func Forward(port int) MachineOption {
	return func(o *machineOptions) { o.forward = append(o.forward, port) }
}

// NoNetwork disconnects the machine from the cluster's network.
func NoNetwork() MachineOption { return func(o *machineOptions) { o.nets = nil } }

// Modules loads kernel modules at boot, each given as "name" or "name parameter=value ...".
// Load others later with m.Run(ctx, "modprobe", ...); the kernel also loads those it needs.
func Modules(names ...string) MachineOption {
	return func(o *machineOptions) { o.modules = append(o.modules, names...) }
}

// KernelArgs adds words to the kernel's command line.
func KernelArgs(args ...string) MachineOption {
	return func(o *machineOptions) { o.kernel = append(o.kernel, args...) }
}

// Userland boots Debian 12 with systemd from a disk of the machine's own, which it keeps over boots.
// Its network is not configured. Modules, RoCE, Forward and StateDisk have no effect. It needs root
// and mmdebstrap.
func Userland() MachineOption { return func(o *machineOptions) { o.userland = true } }
